"""The methods of the paper by name: a method is a normaliser, a scaler and a position."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longspan.nn.attention import Attention, width_of_head
from longspan.nn.norm import RMSNorm
from longspan.nn.normalizers import AdaptiveTemperature, Entmax, Normalizer, Softmax, StickBreaking, TopK
from longspan.nn.positions import Position, position_named
from longspan.nn.scalers import Adaptive, NoScale, Scalable, Scaler, SSMax


@dataclass(frozen=True)
class Method:
    """How to build the parts of a method: a normaliser from num_heads, a scaler from dim and num_heads."""

    summary: str
    normalizer: Callable[[int], Normalizer]
    scaler: Callable[[int, int], Scaler]
    position: str = "nape"


def _softmax(num_heads: int) -> Normalizer:
    return Softmax()


def _entmax(num_heads: int) -> Normalizer:
    return Entmax(1.5)


def _unscaled(dim: int, num_heads: int) -> Scaler:
    return NoScale()


METHODS: dict[str, Method] = {
    "softmax": Method("softmax: every token keeps some weight", _softmax, _unscaled),
    "ssmax": Method("softmax, scores times s log n (Nakanishi 2025)", _softmax, SSMax),
    "assmax": Method("softmax, scores times delta + beta (log n)^gamma, read from the input", _softmax, Adaptive),
    "entmax": Method("alpha-entmax, alpha 1.5: exact zeros below a threshold", _entmax, _unscaled),
    "sentmax": Method("entmax, scores times delta + beta (log n)^gamma, learned per head", _entmax, Scalable),
    "asentmax": Method("entmax, scores times delta + beta (log n)^gamma, read from the input", _entmax, Adaptive),
    "topk": Method("softmax over the 32 largest scores", lambda num_heads: TopK(k=32), _unscaled),
    "adaptive_temperature": Method(
        "softmax sharpened where its entropy is high (Velickovic et al. 2024)",
        lambda num_heads: AdaptiveTemperature(),
        _unscaled,
    ),
    "stick_breaking": Method(
        "each token from the nearest back takes its share of what is left (Tan et al. 2025)",
        lambda num_heads: StickBreaking(),
        _unscaled,
        position="nope",
    ),
}


def methods() -> dict[str, str]:
    """The methods of the paper by name, with a line on each."""
    return {name: method.summary for name, method in METHODS.items()}


def build_attention(
    method: str,
    dim: int,
    num_heads: int,
    *,
    normalizer: Normalizer | None = None,
    scaler: Scaler | None = None,
    position: str | Position | None = None,
    head_dim: int | None = None,
    qk_norm: bool = False,
    **options: Any,
) -> Attention:
    """An `Attention` layer of a named method; a part that is given takes the place of the method's own.

    `position` is a name (nope, alibi, nape, rope) or an object. `options` go to `Attention`.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; there are {', '.join(METHODS)}")
    parts = METHODS[method]
    head_dim = width_of_head(dim, num_heads) if head_dim is None else head_dim
    position = parts.position if position is None else position
    if isinstance(position, str):
        position = position_named(position, num_heads, head_dim)
    if qk_norm:
        options |= {"query_norm": RMSNorm(head_dim), "key_norm": RMSNorm(head_dim)}
    return Attention(
        dim,
        num_heads,
        normalizer=parts.normalizer(num_heads) if normalizer is None else normalizer,
        scaler=parts.scaler(dim, num_heads) if scaler is None else scaler,
        position=position,
        head_dim=head_dim,
        **options,
    )
