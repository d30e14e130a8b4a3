"""Pure functions: the transformation and the attention, on any device."""

from longspan.functional.attention import AttentionStats, attention, attention_weights, which_impl
from longspan.functional.decode import PageSummary, decode
from longspan.functional.entmax import Threshold, entmax, entmax15, sparsemax, threshold

__all__ = [
    "AttentionStats",
    "PageSummary",
    "Threshold",
    "attention",
    "attention_weights",
    "decode",
    "entmax",
    "entmax15",
    "sparsemax",
    "threshold",
    "which_impl",
]
