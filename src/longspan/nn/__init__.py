"""Modules: the parts of every method of the paper, and the layer that composes them."""

from longspan.nn.attention import Attention
from longspan.nn.cache import KVCache
from longspan.nn.methods import METHODS, Method, build_attention, methods
from longspan.nn.normalizers import (
    NORMALIZERS,
    AdaptiveTemperature,
    Entmax,
    Normalizer,
    Softmax,
    StickBreaking,
    TopK,
)
from longspan.nn.positions import (
    NAPE,
    POSITIONS,
    ALiBi,
    LlamaScaling,
    NoPE,
    Position,
    RoPE,
    exponential_slopes,
    linear_slopes,
)
from longspan.nn.scalers import SCALERS, Adaptive, NoScale, Scalable, Scaler, SSMax

__all__ = [
    "METHODS",
    "NAPE",
    "NORMALIZERS",
    "POSITIONS",
    "SCALERS",
    "ALiBi",
    "Adaptive",
    "AdaptiveTemperature",
    "Attention",
    "Entmax",
    "KVCache",
    "LlamaScaling",
    "Method",
    "NoPE",
    "NoScale",
    "Normalizer",
    "Position",
    "RoPE",
    "SSMax",
    "Scalable",
    "Scaler",
    "Softmax",
    "StickBreaking",
    "TopK",
    "build_attention",
    "exponential_slopes",
    "linear_slopes",
    "methods",
]
