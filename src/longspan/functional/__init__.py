"""Pure functions: the transformation and the attention, on any device."""

from longspan.functional.attention import AttentionStats, attention, attention_weights, which_impl
from longspan.functional.entmax import Threshold, entmax, entmax15, sparsemax, threshold

__all__ = [
    "AttentionStats",
    "Threshold",
    "attention",
    "attention_weights",
    "entmax",
    "entmax15",
    "sparsemax",
    "threshold",
    "which_impl",
]
