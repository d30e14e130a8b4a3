"""Attention that keeps its focus at contexts far longer than it was trained on."""

from longspan import nn
from longspan.functional import (
    AttentionStats,
    attention,
    attention_weights,
    decode,
    entmax,
    entmax15,
    sparsemax,
    threshold,
    which_impl,
)
from longspan.nn import methods

__version__ = "0.1.0"

__all__ = [
    "AttentionStats",
    "attention",
    "attention_weights",
    "decode",
    "entmax",
    "entmax15",
    "methods",
    "nn",
    "sparsemax",
    "threshold",
    "which_impl",
]
