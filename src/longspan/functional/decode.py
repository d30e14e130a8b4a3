"""Attention of the newest tokens of every sequence over its cache: `attention` for sequences of unequal lengths."""

import math
import os
from typing import Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from longspan.functional.attention import AttentionStats, too_wide
from longspan.functional.entmax import HAS_TRITON, entmax, threshold
from longspan.functional.scores import grouped_product
from longspan.functional.threshold import alpha_of_kernels, alpha_range
from longspan.kernels.pages import MOST_QUERIES, PAGE

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_MOST_PAIRS = (1 << 16) - 1  # of the second dim of a grid
IMPLEMENTATIONS = ("reference", "triton")


class PageSummary(NamedTuple):
    """What is known of every page of 64 keys without reading it. Pages without a key hold anything.

    norms: (batch, kv_heads, pages), at least the largest norm of the page's keys, up to rounding; float32.
    low, high: (batch, kv_heads, pages, dim), between which every channel of its keys lies, in the keys' dtype; or None.

    Of a pool: (pages, kv_heads) and (pages, kv_heads, dim).
    """

    norms: Tensor
    low: Tensor | None = None
    high: Tensor | None = None

    def first(self, keys: int) -> "PageSummary":
        """That of the pages of the first so many keys."""
        pages = -(-keys // PAGE)
        return PageSummary(*(None if part is None else part[:, :, :pages] for part in self))  # type: ignore[arg-type]


@torch.no_grad()
def extended_summary(
    summary: PageSummary | None, new: Tensor, begin: int, room: int, boxes: bool = False
) -> PageSummary:
    """The summary of a cache with room for `room` keys after the keys `new` (batch, kv_heads, time, dim) came to stand
    from place `begin` on: earlier ones are not read again. `summary` may be changed in place; `boxes` must not change.
    """
    page = torch.arange(begin, begin + new.shape[2], device=new.device) // PAGE
    size = torch.linalg.vector_norm(new, dim=-1, dtype=torch.promote_types(new.dtype, torch.float32)).float()
    norms = _with_room(None if summary is None else summary.norms, size, room, 0.0)
    norms.scatter_reduce_(2, page.expand_as(size), size, "amax")
    if not boxes:
        return PageSummary(norms)
    low = _with_room(None if summary is None else summary.low, new, room, torch.inf)
    high = _with_room(None if summary is None else summary.high, new, room, -torch.inf)
    index = page[:, None].expand_as(new)
    return PageSummary(norms, low.scatter_reduce_(2, index, new, "amin"), high.scatter_reduce_(2, index, new, "amax"))


def _with_room(part: Tensor | None, new: Tensor, room: int, empty: float) -> Tensor:
    """A part of a summary with pages for `room` keys, like `new` in all other dims."""
    shape = (*new.shape[:2], -(-room // PAGE), *new.shape[3:])
    if part is not None and part.shape == shape:
        return part
    larger = new.new_full(shape, empty)
    if part is not None:
        larger[:, :, : part.shape[2]] = part
    return larger


class CacheRules(NamedTuple):
    """Who sees whom, the bias and factors of a score, and where the keys lie; see `decode`."""

    slopes: Tensor | None
    scale: float
    scales: Tensor | None = None
    lengths: Tensor | None = None
    starts: Tensor | None = None
    table: Tensor | None = None
    summary: PageSummary | None = None


class _Options(TypedDict, total=False):
    alpha: float
    slopes: Tensor | None
    scale: float | None
    scales: Tensor | None
    lengths: Tensor | None
    starts: Tensor | None
    table: Tensor | None
    summary: PageSummary | None
    impl: str


@overload
def decode(
    q: Tensor, k: Tensor, v: Tensor, *, return_stats: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...


@overload
def decode(
    q: Tensor, k: Tensor, v: Tensor, *, return_stats: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, AttentionStats]: ...


@torch.no_grad()
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    alpha: float = 1.5,
    slopes: Tensor | None = None,
    scale: float | None = None,
    scales: Tensor | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    table: Tensor | None = None,
    summary: PageSummary | None = None,
    impl: str = "auto",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, AttentionStats]:
    """Entmax attention of the last `query_time` tokens of every sequence, causal, without gradients.

    Args:
        q: (batch, heads, query_time, dim), the newest tokens, at most 16 by the kernels.
        k, v: (batch, kv_heads, room, dim), the newest tokens among them. With a `table`, pools of pages
            (pages, kv_heads, 64, dim).
        alpha: a number >= 1; 1 is softmax.
        slopes: (heads,), ALiBi's slopes.
        scale: of the products, 1/sqrt(dim) by default.
        scales: (batch, heads, query_time), a factor of every query's products beside `scale`.
        lengths: (batch,), tokens of every sequence in the cache with the new ones, all the room by default. Query i
            stands at ``lengths - query_time + i``. What lies beyond is never looked at.
        starts: (batch,), where every sequence begins, 0 by default. What lies before is never looked at.
        table: (batch, pages), int32: which page of the pool holds the keys from ``64 * column`` on; needs `lengths`.
        summary: lets the kernels leave out pages that provably hold no survivor; the result does not depend on it.
        impl: "triton" (a GPU's kernels), "reference" (dense) or "auto".
        return_stats: also return `AttentionStats`.
    """
    scale = 1 / math.sqrt(max(1, q.shape[-1])) if scale is None else float(scale)
    where = CacheRules(slopes, scale, scales, lengths, starts, table, summary)
    _check(q, k, v, where)
    alpha = float(alpha)
    alpha_range(alpha)
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"impl must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    reason = kernels_cannot(q, v)
    if impl == "triton" and reason:
        raise ValueError(f"impl='triton' cannot serve this call: {reason}")
    if reason is None and (impl == "triton" or (impl == "auto" and q.is_cuda)):
        return _by_kernels(q, k, v, alpha, where, return_stats)
    if table is not None:
        assert lengths is not None
        pages = _pages_in_use(table, lengths, starts)
        k, v = (pool[pages].transpose(1, 2).flatten(2, 3) for pool in (k, v))
    return _dense(q, k, v, alpha, where, return_stats)


def _pages_in_use(table: Tensor, lengths: Tensor, starts: Tensor | None) -> Tensor:
    """The table with a page that there is in the place of entries that hold no token, which may be anything."""
    first = torch.arange(table.shape[1], device=table.device) * PAGE
    used = first < lengths[:, None]
    if starts is not None:
        used &= first + PAGE > starts[:, None]
    return torch.where(used, table, 0).long()


def kernels_cannot(q: Tensor, v: Tensor) -> str | None:
    """Why ``impl="triton"`` does not serve a call; None if it does."""
    if not (q.is_cuda or _INTERPRETED):
        return "it needs a GPU"
    if not HAS_TRITON:
        return "triton is not installed: pip install 'longspan[gpu]'"
    if q.dtype == torch.float64:
        return "it does not compute in float64"
    if q.dtype == torch.bfloat16 and not q.is_cuda:
        return "Triton's interpreter is wrong in bfloat16"
    if reason := too_wide(q, v):
        return reason
    if q.shape[2] > MOST_QUERIES:
        return f"it takes at most {MOST_QUERIES} queries, got {q.shape[2]}"
    if q.shape[0] * v.shape[1] > _MOST_PAIRS:
        return f"it takes at most {_MOST_PAIRS} sequences times key heads, got {q.shape[0]} times {v.shape[1]}"
    if 0 in q.shape or 0 in v.shape:
        return "there is nothing to compute"
    return None


def _check(q: Tensor, k: Tensor, v: Tensor, where: CacheRules) -> None:
    slopes, _, scales, lengths, starts, table, summary = where
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4 or tensor.dtype != q.dtype or tensor.device != q.device or not tensor.is_floating_point():
            raise ValueError(
                f"q, k and v must be floating-point tensors of 4 dims, one dtype and one device; q is {q.dtype} on "
                f"{q.device}, {name} is {tensor.dtype} on {tensor.device} of shape {tuple(tensor.shape)}"
            )
    batch, heads, queries, dim = q.shape
    if k.shape[:3] != v.shape[:3] or k.shape[3] != dim:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit each other")
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"the heads of k ({k.shape[1]}) must divide those of q ({heads})")
    pages = -(-k.shape[2] // PAGE)
    if table is not None:
        if k.shape[2] != PAGE:
            raise ValueError(f"a pool has pages of {PAGE} keys, k has {k.shape[2]}")
        if table.ndim != 2 or len(table) != batch or table.dtype != torch.int32 or table.stride(1) != 1:
            raise ValueError(f"table must be int32 ({batch}, pages), rows in one piece, got {tuple(table.shape)}")
        if lengths is None:
            raise ValueError("a table needs lengths: which of its pages are in use")
        pages = table.shape[1]
    elif len(k) != batch:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch")
    pool = (batch, k.shape[1], pages) if table is None else (k.shape[0], k.shape[1])
    if summary is not None and (summary.low is None) != (summary.high is None):
        raise ValueError("a summary has both low and high, or neither")
    shapes: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "slopes": (slopes, (heads,)),
        "scales": (scales, (batch, heads, queries)),
        "lengths": (lengths, (batch,)),
        "starts": (starts, (batch,)),
        "summary.norms": (None if summary is None else summary.norms, pool),
        "summary.low": (None if summary is None else summary.low, (*pool, dim)),
        "summary.high": (None if summary is None else summary.high, (*pool, dim)),
    }
    for name, (given, shape) in shapes.items():
        if given is not None and (tuple(given.shape) != shape or given.device != q.device):
            raise ValueError(
                f"{name} must have shape {shape} on {q.device}, got {tuple(given.shape)} on {given.device}"
            )
    for name, given in (("lengths", lengths), ("starts", starts)):
        if given is not None and (given.is_floating_point() or given.dtype == torch.bool):
            raise ValueError(f"{name} must be integers, got {given.dtype}")


def _by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: float,
    where: CacheRules,
    return_stats: bool,
) -> Tensor | tuple[Tensor, AttentionStats]:
    from longspan.kernels.decode_ops import Decoded, decode_attention
    from longspan.kernels.solver import tau_and_largest

    slopes, scale, scales, lengths, starts, table, summary = where
    alpha = alpha_of_kernels(alpha)
    scales = None if scales is None else scales.float()
    known = (None, None, None) if summary is None else summary
    made = Decoded(
        *decode_attention(q, k, v, slopes, scales, lengths, starts, table, *known, alpha, scale, return_stats)
    )
    if not return_stats:
        return made.out
    maximum, height, support, entropy = (
        rows.view(q.shape[:3]) for rows in (made.maximum, made.height, made.support, made.entropy)
    )
    # Pages beyond the keys have no highest score, and those of other sequences' room hold anything.
    end = torch.full(q.shape[:1], k.shape[2], device=q.device) if lengths is None else lengths
    start = torch.zeros_like(end) if starts is None else starts
    page = torch.arange(made.tops.shape[-2], device=q.device)
    there = (page >= start[:, None] // PAGE) & (page * PAGE < end[:, None])  # (B, pages)
    tops = made.tops.amax(4).view(*q.shape[:3], -1).masked_fill(~there[:, None, None], -torch.inf)
    if alpha == 1:
        tau, largest, alive = torch.full_like(height, -1.0), height, tops > -torch.inf
    else:
        tau, largest = tau_and_largest(alpha, maximum, height, tops.amax(-1))
        # A smallest survivor may be nearer to the threshold than float32 can tell.
        alive = tops >= maximum[..., None] if alpha > 2 else tops > tau[..., None]
    tau = torch.where(support > 0, tau, torch.inf)
    alive = (alive & (support > 0)[..., None]).sum((2, 3))
    dead = 1 - alive / (q.shape[2] * there.sum(-1)).clamp_min(1)[:, None]
    return made.out, AttentionStats(tau, support.long(), entropy, largest, "triton", dead)


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: float,
    where: CacheRules,
    return_stats: bool,
) -> Tensor | tuple[Tensor, AttentionStats]:
    scores, empty = dense_decode_scores(q, k, where)
    p = entmax(scores, alpha)
    values = v.to(scores.dtype).masked_fill(empty[:, None, :, None], 0)
    out = grouped_product(p, values).to(q.dtype)
    if not return_stats:
        return out
    tau, support = (part.squeeze(-1) for part in threshold(scores, alpha))
    return out, AttentionStats(tau, support, torch.special.entr(p).sum(-1), p.amax(-1), "reference")


def dense_decode_scores(q: Tensor, k: Tensor, where: CacheRules) -> tuple[Tensor, Tensor]:
    """The scores of every query with every key, -inf where it is hidden; and which keys hold no token (batch, room)."""
    slopes, scale, scales, lengths, starts = where[:5]
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys = torch.arange(k.shape[2], device=q.device)
    end = torch.full(q.shape[:1], k.shape[2], device=q.device)
    if lengths is not None:
        end = lengths.long().clamp_max(k.shape[2])  # the room may be more than a dtype of few bits has
    positions = end[:, None] - q.shape[2] + torch.arange(q.shape[2], device=q.device)  # (B, T)
    empty = keys >= end[:, None]
    scores = grouped_product(q.to(dtype) * scale, k.to(dtype).transpose(-1, -2))
    if scales is not None:
        scores = scores * scales.to(dtype)[..., None]
    if slopes is not None:
        distance = (positions[:, None, :, None] - keys).abs().to(dtype)
        scores = scores - slopes.to(dtype)[:, None, None] * distance
    hidden = keys > positions[..., None]  # (B, T, keys)
    if starts is not None:
        hidden = hidden | (keys < starts[:, None, None])
        empty = empty | (keys < starts[:, None])
    return scores.masked_fill(hidden[:, None], -torch.inf), empty
