"""The public attention functions: they check their arguments, choose an implementation and say which."""

import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from longspan.functional.chunked import RowStats, chunked_attention, empty_stats
from longspan.functional.entmax import HAS_TRITON, entmax, threshold
from longspan.functional.reference import dense_attention, dense_scores
from longspan.functional.scores import Rules, tracked
from longspan.functional.threshold import Alpha, alpha_of_kernels, alpha_range
from longspan.kernels.pages import MANY_KEYS, MOST_QUERIES

IMPLEMENTATIONS = ("reference", "chunked", "triton")

# Looked up once: inside a compiled function the environment cannot be read.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_MOST_TOKENS = 1 << 20

# Above this many scores "auto" gives up the square of them for blocks: 16 MiB of float32, from where on a CPU is faster
# by blocks, and on a GPU 1 GiB.
_DENSE_SCORES = {"cpu": 1 << 22, "cuda": 1 << 28}


class AttentionStats(NamedTuple):
    """What happened in every query row, each (batch, heads, query_time), detached; and which implementation ran.

    A row that sees nothing has tau = inf and zeros elsewhere. tau is in units of ``(alpha-1) * score``.
    `block_sparsity`, (batch, heads), is the share of a head's visible tiles in which nothing survives; None where the
    implementation does not work by tiles.
    """

    tau: Tensor
    support: Tensor
    entropy: Tensor
    largest: Tensor
    impl: str
    block_sparsity: Tensor | None = None


class _Options(TypedDict, total=False):
    alpha: Alpha
    slopes: Tensor | None
    scale: float | None
    scales: Tensor | None
    causal: bool
    lengths: Tensor | None
    documents: Tensor | None
    impl: str


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_stats: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_stats: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, AttentionStats]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    alpha: Alpha = 1.5,
    slopes: Tensor | None = None,
    scale: float | None = None,
    scales: Tensor | None = None,
    causal: bool = True,
    lengths: Tensor | None = None,
    documents: Tensor | None = None,
    impl: str = "auto",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, AttentionStats]:
    """Attention with alpha-entmax weights: ``entmax(scale * q k^T - slope * distance, alpha) v``.

    Args:
        q: (batch, heads, query_time, dim).
        k, v: (batch, kv_heads, key_time, dim); `kv_heads` divides `heads`. The dim of `v` may differ.
        alpha: a number >= 1 (1 is softmax), or a tensor of shape () or (heads,), differentiable.
        slopes: (heads,), ALiBi's slopes: a key at a distance loses slope * distance. 0 is no position. Differentiable.
        scale: of the products, 1/sqrt(dim) by default. It does not touch the slopes.
        scales: (batch, heads, query_time), a factor of every query's products beside `scale`. Differentiable. A query
            is multiplied by it in its own dtype, whose range float16 may leave: kernels take their inputs so.
        causal: query i stands at position ``i + key_time - query_time`` and sees the keys up to its own.
        lengths: (batch,), right padding: keys at or beyond are hidden, and queries whose position is give zeros.
        documents: (batch, key_time) integer ids: tokens of different ids do not see each other. The queries take
            the ids of their positions.
        impl: "reference" (dense), "chunked" (memory linear in the length), "triton" (a GPU's kernels, see
            `triton_cannot`) or "auto".
        return_stats: also return `AttentionStats`.

    Queries that see nothing give zeros, and zero gradients. What is hidden must be finite all the same, padding too:
    0 times NaN is NaN.
    """
    rules, alpha = _check(q, k, v, alpha, slopes, scale, causal, lengths, documents)
    name = _choose(impl, q, k, v, alpha)
    if scales is not None:
        _check_scales(q, scales)
    stats = None
    if name == "triton":
        assert isinstance(alpha, float)
        return _by_kernels(q, k, v, scales, rules, alpha, return_stats)
    q = scaled_queries(q, scales)
    if name == "chunked":
        out, stats = chunked_attention(q, k, v, rules, alpha, return_stats)
    else:
        out = dense_attention(q, k, v, rules, lambda scores: entmax(scores, _by_head(alpha)))
        if return_stats:
            stats = _dense_stats(q, k, rules, alpha)
    return (out, AttentionStats(*stats, impl=name)) if stats is not None else out


def _by_kernels(
    q: Tensor, k: Tensor, v: Tensor, scales: Tensor | None, rules: Rules, alpha: float, return_stats: bool
) -> Tensor | tuple[Tensor, AttentionStats]:
    alpha = alpha_of_kernels(alpha)
    # Rows that fit on the chip are solved there, without a list of tiles.
    short = on_chip(q, k, v) and alpha <= 2 and not return_stats
    if not short:
        q, scales = scaled_queries(q, scales), None
    if _is_decoding(q, k, v, rules):
        from longspan.functional.decode import decode

        own = {"slopes": rules.slopes, "scale": rules.scale, "scales": scales}
        attend_few = partial(decode, q, k, v, alpha=alpha, impl="triton", **own)
        return attend_few(return_stats=True) if return_stats else attend_few()
    masks = rules.lengths, rules.documents, alpha, rules.scale, rules.causal
    if short:
        from longspan.kernels.short import short_attention

        return short_attention(q, k, v, rules.slopes, None if scales is None else scales.float(), *masks, 0)[0]
    from longspan.kernels.ops import attend

    out, stats = attend(q, k, v, rules.slopes, *masks, return_stats)
    if stats is None:
        return out
    return out, AttentionStats(*stats[:4], impl="triton", block_sparsity=stats.block_sparsity)


def scaled_queries(q: Tensor, scales: Tensor | None) -> Tensor:
    """Queries (batch, heads, time, dim) times their scales (batch, heads, time)."""
    return q if scales is None else _ScaledQueries.apply(q, scales.to(q.dtype))


class _ScaledQueries(torch.autograd.Function):
    """The product of `scaled_queries`, whose gradient sums the last dim away.

    Autograd's own keeps the dim, sums, and squeezes it; inductor reads a squeezed sum with other strides than it was
    written with where it pads them (github.com/pytorch/pytorch/issues/179931): on a GPU compiled scalers got garbage.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, scales: Tensor) -> Tensor:
        return q * scales[..., None]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        q, scales = ctx.saved_tensors
        d_q = grad * scales[..., None] if ctx.needs_input_grad[0] else None
        return d_q, (grad * q).sum(-1) if ctx.needs_input_grad[1] else None


def _check_scales(q: Tensor, scales: Tensor) -> None:
    if scales.shape != q.shape[:3] or not scales.is_floating_point():
        raise ValueError(
            f"scales must be floating-point numbers of shape {tuple(q.shape[:3])}, one per query, "
            f"got {scales.dtype} {tuple(scales.shape)}"
        )


def on_chip(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a row's scores fit. At 256 the longest training sequences, 130 tokens, are compiled with all others."""
    from longspan.kernels import gpus

    head_dim = max(q.shape[3], v.shape[3])
    most = 256 if head_dim <= 32 else 128 if head_dim <= 64 else 0
    if q.dtype == torch.float32 and not gpus.is_roomy(q.device):
        most //= 2
    return k.shape[2] <= most


def _is_decoding(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> bool:
    """Few queries and many keys: a row must be shared out among programs, where a training pass has rows enough."""
    return (
        q.shape[2] <= MOST_QUERIES
        and k.shape[2] >= MANY_KEYS
        and (rules.causal or q.shape[2] == 1)
        and rules.lengths is None
        and rules.documents is None
        and not tracked(rules, q, k, v)
    )


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    rows: Sequence[int] | Tensor | None = None,
    alpha: Alpha = 1.5,
    slopes: Tensor | None = None,
    scale: float | None = None,
    scales: Tensor | None = None,
    causal: bool = True,
    lengths: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """The attention map of the query rows `rows` (all by default), (batch, heads, len(rows), key_time).

    Only those rows are ever built. Negative rows count from the end. The other arguments are `attention`'s.
    """
    rules, alpha = _check(q, k, k, alpha, slopes, scale, causal, lengths, documents)
    if scales is not None:
        _check_scales(q, scales)
        q = scaled_queries(q, scales)
    chosen = None
    if rows is not None:
        given = torch.as_tensor(rows, device=q.device)
        chosen, time = given.long(), q.shape[2]
        whole = given.dtype != torch.bool and bool((chosen == given).all())  # a mask or a fraction is no index
        if chosen.ndim != 1 or not whole or bool(((chosen < -time) | (chosen >= time)).any()):
            raise IndexError(f"rows must be a list of query indices between {-time} and {time - 1}, got {rows}")
        chosen = chosen % max(time, 1)
    return entmax(dense_scores(q, k, rules, chosen), _by_head(alpha)).to(q.dtype)


def which_impl(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    alpha: Alpha = 1.5,
    impl: str = "auto",
    **others: object,
) -> str:
    """The name of the implementation that ``attention(q, k, v, alpha=alpha, impl=impl, ...)`` would run."""
    return _choose(impl, q, k, v, alpha if isinstance(alpha, Tensor) else float(alpha))


def triton_cannot(q: Tensor, k: Tensor, v: Tensor, alpha: Alpha) -> str | None:
    """Why ``impl="triton"`` does not serve a call; None if it does."""
    if not (q.is_cuda or _INTERPRETED):
        return "it needs a GPU"
    if not HAS_TRITON:
        return "triton is not installed: pip install 'longspan[gpu]'"
    if isinstance(alpha, Tensor):
        return "alpha must be a number: a learnt alpha has no kernel yet"
    if q.dtype == torch.float64:
        return "it does not compute in float64"
    if q.dtype == torch.bfloat16 and not q.is_cuda:
        return "Triton's interpreter is wrong in bfloat16"
    if reason := too_wide(q, v):
        return reason
    if max(q.shape[2], k.shape[2]) >= _MOST_TOKENS:
        return f"it counts tiles in 16 bits and takes fewer than {_MOST_TOKENS} tokens, got {k.shape[2]} keys"
    if 0 in q.shape or 0 in v.shape:
        return "there is nothing to compute"
    return None


def too_wide(q: Tensor, v: Tensor) -> str | None:
    """Why heads of this width are too wide for the kernels on this GPU; None if they are not."""
    width = max(q.shape[3], v.shape[3])
    if width > 256:
        return f"it takes heads of at most 256 dims, got {width}"
    if width > 128 and q.dtype == torch.float32:
        from longspan.kernels import gpus

        if not gpus.is_roomy(q.device):
            return f"heads of {width} dims in float32 do not fit the shared memory of this GPU, 128 do"
    return None


def check_rules(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    scale: float | None,
    causal: bool,
    lengths: Tensor | None,
    documents: Tensor | None,
) -> Rules:
    """The rules of a call, or an error that says which argument is wrong."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be (batch, heads, time, dim), got shape {tuple(tensor.shape)}")
        if not tensor.is_floating_point() or tensor.dtype != q.dtype or tensor.device != q.device:
            raise TypeError(
                f"q, k and v must be floating-point tensors of one dtype and device; q is {q.dtype} on {q.device}, "
                f"{name} is {tensor.dtype} on {tensor.device}"
            )
    batch, heads, _, dim = q.shape
    kv_batch, kv_heads, key_time, key_dim = k.shape
    if kv_batch != batch or key_dim != dim:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch and dim")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must agree in batch, heads and time")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"the heads of k ({kv_heads}) must divide those of q ({heads})")
    if slopes is not None and slopes.shape != (heads,):
        raise ValueError(f"slopes must have shape ({heads},), one per head, got {tuple(slopes.shape)}")
    if lengths is not None:
        if lengths.shape != (batch,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
            raise ValueError(
                f"lengths must be integers of shape ({batch},), got {lengths.dtype} {tuple(lengths.shape)}"
            )
        lengths = lengths.to(q.device)
    if documents is not None:
        if documents.shape != (batch, key_time) or documents.is_floating_point():
            raise ValueError(
                f"documents must be integer ids of shape ({batch}, {key_time}), one per key, "
                f"got {documents.dtype} {tuple(documents.shape)}"
            )
        documents = documents.to(q.device)
    if scale is None:
        scale = 1 / math.sqrt(dim) if dim else 1.0
    return Rules(float(scale), causal, None if slopes is None else slopes.to(q.device), lengths, documents)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Alpha,
    slopes: Tensor | None,
    scale: float | None,
    causal: bool,
    lengths: Tensor | None,
    documents: Tensor | None,
) -> tuple[Rules, Alpha]:
    rules = check_rules(q, k, v, slopes, scale, causal, lengths, documents)
    if isinstance(alpha, Tensor):
        if alpha.shape not in ((), (1,), (q.shape[1],)):
            raise ValueError(f"alpha must be a number or of shape () or ({q.shape[1]},), got {tuple(alpha.shape)}")
        return rules, alpha.to(q.device)
    return rules, alpha_range(alpha).low


def _choose(impl: str, q: Tensor, k: Tensor, v: Tensor, alpha: Alpha) -> str:
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"impl must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "triton" and (reason := triton_cannot(q, k, v, alpha)):
        raise ValueError(f"impl='triton' cannot serve this call: {reason}")
    if impl != "auto":
        return impl
    if q.is_cuda and triton_cannot(q, k, v, alpha) is None:
        return "triton"
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    return "reference" if scores <= _DENSE_SCORES.get(q.device.type, _DENSE_SCORES["cpu"]) else "chunked"


def _by_head(alpha: Alpha) -> Alpha:
    return alpha.reshape(-1, 1, 1) if isinstance(alpha, Tensor) else alpha


@torch.no_grad()
def _dense_stats(q: Tensor, k: Tensor, rules: Rules, alpha: Alpha) -> RowStats:
    scores = dense_scores(q, k, rules)
    if scores.shape[-1] == 0:
        return empty_stats(scores.sum(-1))
    p = entmax(scores, _by_head(alpha))
    tau, support = (part.squeeze(-1) for part in threshold(scores, _by_head(alpha)))
    return RowStats(tau, support, torch.special.entr(p).sum(-1), p.amax(-1))
