"""Entmax attention for rows of any length as operators of torch: shapes, memory, launches and gradients."""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from longspan.kernels.backward import column_kernel, key_kernel, query_kernel
from longspan.kernels.candidates import capacity, collect_kernel, room_for, root_kernel
from longspan.kernels.edges import edge_kernel
from longspan.kernels.launches import Blocks, blocks_of, gluon_kernel, serves_hopper, tile_of
from longspan.kernels.operators import operator
from longspan.kernels.output import output_kernel
from longspan.kernels.softmax import softmax_kernel
from longspan.kernels.solve import solve_kernel
from longspan.kernels.solver import SOFTMAX, kind_of, powers_of, survey_power, tau_and_largest
from longspan.kernels.survey import survey_kernel
from longspan.kernels.tiles import contiguous, like_tokens, padded, room_for_output, small_ids


class _Outputs(NamedTuple):
    out: Tensor
    mean: Tensor  # of the values under the gains
    maximum: Tensor  # of a * score, and the height of the row's threshold below it
    height: Tensor
    support: Tensor
    entropy: Tensor
    tiles: Tensor  # the live tiles of every block of queries, and how many of them are masked and are in all
    counts: Tensor
    live: Tensor  # the same as a map, keys first: 0 is dead, 2 alive with some of it masked or beyond the end
    # Above alpha 2 `maximum` and `height` are the score and the weight of a row's edge, its smallest survivor.
    top: Tensor  # the maximum there, for statistics
    edge_gain: Tensor


def _outputs(q: Tensor, k: Tensor, v: Tensor, alpha: float, grad: bool, stats: bool) -> _Outputs:
    batch, heads, time, _ = q.shape
    block, tile = tile_of(q, v)
    rows, keys = triton.cdiv(time, block), triton.cdiv(k.shape[2], tile)
    sparse = kind_of(alpha) != SOFTMAX
    if not sparse:
        rows = keys = 0
    out = room_for_output(q, v)
    line = q.new_empty(batch, heads, time, dtype=torch.float32)
    shape = line.shape if stats else (0,)
    return _Outputs(
        out,
        torch.empty_like(out, dtype=torch.float32) if grad and sparse else line.new_empty(0),
        line,
        torch.empty_like(line),
        line.new_empty(shape),
        line.new_empty(shape),
        q.new_empty(batch, heads, rows, keys, dtype=torch.int16),
        q.new_empty(batch, heads, rows, 2, dtype=torch.int32),
        q.new_zeros((batch, heads, keys, rows) if grad or stats else (0,), dtype=torch.int8),
        line.new_empty(shape if alpha > 2 else (0,)),
        line.new_empty(line.shape if alpha > 2 else (0,)),
    )


def _constants(
    q: Tensor, v: Tensor, slopes: Tensor | None, lengths: Tensor | None, documents: Tensor | None, causal: bool
) -> dict[str, Any]:
    """What every kernel is compiled for."""
    rows, keys = tile_of(q, v)
    return {
        "CAUSAL": causal,
        "SLOPES": slopes is not None,
        "LENGTHS": lengths is not None,
        "DOCUMENTS": documents is not None,
        "MASK_ALL": lengths is not None or (not causal and (documents is not None or slopes is not None)),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "M": rows,
        "N": keys,
        "BLOCK_D": padded(q.shape[3]),
        "BLOCK_DV": padded(v.shape[3]),
    }


def _launches(slopes: Tensor | None, split: bool) -> list[dict[str, bool]]:
    """By which constants a kernel is launched: once, or once for the heads with a slope and once for those without."""
    if slopes is None or not split:
        return [{"SLOPES": slopes is not None, "SPLIT": False}]
    return [{"SLOPES": sloped, "SPLIT": True} for sloped in (True, False)]


def _may_split(alpha: float, causal: bool) -> bool:
    """Above alpha 2 a score must be the same number wherever it is made, and other kernels are not split."""
    return causal and alpha <= 2


def _document_ranges(q: Tensor, k: Tensor, documents: Tensor, blocks: Blocks) -> Tensor:
    """For every block of queries three tiles of keys, (batch, blocks, 3): the run whose ids may be its own, and the
    first from which on there is one document alone, the block's, up to where a causal mask begins."""

    def bounds(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
        padding = -ids.shape[1] % size
        blocked = torch.cat([ids, ids[:, -1:].expand(-1, padding)], 1).unflatten(1, (-1, size))
        return blocked.amin(-1), blocked.amax(-1)

    positions = torch.arange(q.shape[2], device=q.device) + (k.shape[2] - q.shape[2])
    low, high = bounds(documents[:, positions.clamp_min(0)], blocks.rows)
    key_low, key_high = bounds(documents, blocks.keys)
    low, high, key_low, key_high = low[:, :, None], high[:, :, None], key_low[:, None], key_high[:, None]
    meet = (low <= key_high) & (key_low <= high)  # (B, blocks, tiles)
    alike = (low == high) & (key_low == low) & (key_high == low)
    numbers = torch.arange(1, meet.shape[2] + 1, device=q.device)
    before_mask = numbers <= (positions[:: blocks.rows, None] + 1).clamp_min(0) // blocks.keys
    stop, inner = (meet * numbers).amax(-1), (~alike & before_mask).mul(numbers).amax(-1)
    return torch.stack([torch.minimum(meet.long().argmax(-1), stop), stop, inner], -1).int()


def _largest_norms(k: Tensor) -> Tensor:
    """The largest norm of every head's keys, (batch, kv_heads)."""
    return torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).amax(-1)


def _kind(q: Tensor, alpha: float) -> int:
    return kind_of(alpha, fine=q.dtype == torch.float32)


class Stats(NamedTuple):
    """Per query row, each (batch, heads, time), and per head the share of the visible tiles without a survivor."""

    tau: Tensor
    support: Tensor
    entropy: Tensor
    largest: Tensor
    block_sparsity: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    alpha: float, scale: float, causal: bool, with_stats: bool,
) -> tuple[Tensor, Stats | None]:  # fmt: skip
    """The output and, if asked for, the statistics."""
    if scale < 0:  # a row's maximum is then that of the negated products
        q, scale = -q, -scale
    inputs = (q, k, v) if slopes is None else (q, k, v, slopes)
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    made = _Outputs(*long_attention(q, k, v, slopes, lengths, documents, alpha, scale, causal, grad, with_stats))
    return made.out, _stats(q, k, v, made, alpha, causal) if with_stats else None


@torch.no_grad()
def _stats(q: Tensor, k: Tensor, v: Tensor, made: _Outputs, alpha: float, causal: bool) -> Stats:
    sees = made.support > 0
    if kind_of(alpha) == SOFTMAX:
        tau, largest, dead = torch.full_like(made.height, -1.0), made.height, made.height.new_zeros(q.shape[:2])
    else:
        tau, largest = tau_and_largest(alpha, made.maximum, made.height, made.top)
        dead = 1 - (made.live > 0).sum((2, 3)) / max(1, _visible_tiles(q, k, v, causal))
    return Stats(torch.where(sees, tau, torch.inf), made.support.long(), made.entropy, largest, dead)


def _visible_tiles(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> int:
    """How many tiles of a head are not wholly in the future."""
    (rows, keys), time, key_time = tile_of(q, v), q.shape[2], k.shape[2]
    if not causal:
        return triton.cdiv(time, rows) * triton.cdiv(key_time, keys)
    ends = (min(start + rows, time) + key_time - time for start in range(0, time, rows))
    return sum(triton.cdiv(max(end, 0), keys) for end in ends)


def _precision(alpha: float, dtype: torch.dtype, mean: bool, stats: bool) -> tuple[float, float]:
    """How far a row's norm may be from 1 before the last two steps, and what its sum should be before the last.

    Each of the two squares the error or better, and what is left should drown in the rounding of the dtype. The last
    should be a fall, so the sum before it aims above 1; without the mean there is no last.
    """
    if stats or dtype == torch.float32:
        return 1e-3, 1.00001  # a fall of 1e-6 is what the step's own rounding comes to
    coarse = dtype == torch.bfloat16
    if alpha != 1.5:
        return (0.05 if coarse else 0.02), 1.0
    above = 0.005 if coarse else 0.0005
    return (0.25 if coarse else 0.05), 1 + above if mean else 1.0


def _most_gain(dtype: torch.dtype) -> float:
    """How many times the gains of all others an edge's may be: see `gain_of_edge`."""
    return 2.0**24 if dtype == torch.float32 else 2.0**13


def _slack(dtype: torch.dtype) -> float:
    """How far a row's norm may be from 1 in the output, where it is divided by or one more step follows."""
    return {torch.bfloat16: 0.006, torch.float16: 0.001}.get(dtype, 1e-4)


@operator("long_attention")
def long_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    alpha: float, scale: float, causal: bool, grad: bool, stats: bool,
) -> list[Tensor]:  # fmt: skip
    """`_Outputs`. `grad`: keep what the backward needs. `stats`: count supports and entropies."""
    slopes, lengths, documents = contiguous(slopes, lengths, small_ids(documents))
    batch, heads, time, _ = q.shape
    blocks, made = blocks_of(q, v), _outputs(q, k, v, alpha, grad, stats)
    constants = _constants(q, v, slopes, lengths, documents, causal)
    rows, keys = triton.cdiv(time, blocks.rows), triton.cdiv(k.shape[2], blocks.keys)
    ranges = None
    if documents is not None:
        ranges = _document_ranges(q, k, documents, blocks)
    strides = *q.stride(), *k.stride(), *v.stride(), *made.out.stride()
    sizes = heads, heads // k.shape[1], time, k.shape[2], q.shape[3], v.shape[3]
    grid = (rows * batch * heads,)
    launches = _launches(slopes, _may_split(alpha, causal))
    if kind_of(alpha) == SOFTMAX:
        for heads_of in launches:
            softmax_kernel[grid](
                q, k, v, made.out, made.maximum, made.height, made.support, made.entropy,
                slopes, lengths, documents, ranges, scale, *strides, *sizes, rows,
                STATS=stats, **blocks.output.options(), **constants | heads_of,
            )  # fmt: skip
        return list(made)
    a, r = powers_of(alpha)
    mean = grad or stats or (q.dtype == torch.float32 and alpha <= 2)
    tolerance, aim = _precision(alpha, q.dtype, mean, stats)
    steep = 1.5 < alpha <= 2
    tail = math.gamma(r + 1) / 2 if steep else 0.0  # sum u^r where sum u^2 is 1 and the rate of the tail is 1
    bound, hint = torch.empty_like(made.maximum), torch.empty_like(made.maximum)
    norms = None if slopes is None else _largest_norms(k)
    survey_kind, survey_r = survey_power(alpha)
    kind, mask_all, block_dv = _kind(q, alpha), constants.pop("MASK_ALL"), constants.pop("BLOCK_DV")
    kernel, launch = survey_kernel, blocks.survey
    if blocks.hopper.survey and serves_hopper(q, k):
        kernel, launch = gluon_kernel("survey"), blocks.hopper.survey
    for heads_of in launches:
        kernel[grid](
            q, k, made.maximum, made.height, bound, hint, made.tiles, made.counts, slopes, lengths, documents, ranges,
            norms, a, survey_r, scale, *q.stride(), *k.stride(), *sizes[:5], rows, keys,
            KIND=survey_kind, GUESS=kind == 4, MASK_ALL=mask_all, VOTES=launch.votes,
            **launch.options(), **constants | heads_of,
        )  # fmt: skip
    found, edge_gain, most = None, made.edge_gain if alpha > 2 else None, _most_gain(q.dtype)
    # Where weights are roots of distances to a score, a score must be the same number wherever it is made.
    may_fuse = alpha <= 2
    if cap := capacity(alpha):
        if stats and alpha > 2:
            made.top.copy_(made.maximum)
        found = room_for(made.maximum, rows, cap)
        collect_kernel[grid](
            q, k, made.maximum, made.height, made.tiles, made.counts, *found, slopes, lengths, documents,
            a, scale, *q.stride(), *k.stride(), *sizes[:5], rows, keys,
            CAP=cap, PART=blocks.collect.part, **blocks.collect.options(may_fuse), **constants,
        )  # fmt: skip
        lines, at_once = made.maximum.numel(), 1024 // cap
        root_kernel[(triton.cdiv(lines, at_once),)](
            made.maximum, made.height, edge_gain, *found, a, r, most, lines, time, rows,
            KIND=kind_of(alpha, fine=True), CONVEX=alpha <= 2, CAP=cap, M=blocks.rows, AT_ONCE=at_once, num_warps=4,
        )  # fmt: skip
    if found is not None and alpha > 2:
        edge_kernel[grid](
            q, k, made.maximum, made.height, edge_gain, made.tiles, made.counts, found.over,
            slopes, lengths, documents, a, r, scale, most, *q.stride(), *k.stride(), *sizes[:5], rows, keys,
            KIND=kind, PART=blocks.collect.part, **blocks.collect.options(may_fuse), **constants,
        )  # fmt: skip
    else:
        kernel, launch = solve_kernel, blocks.solve
        if blocks.hopper.solve and alpha <= 2 and serves_hopper(q, k):
            kernel, launch = gluon_kernel("solve"), blocks.hopper.solve
        for heads_of in launches:
            kernel[grid](
                q, k, made.maximum, made.height, hint, made.tiles, made.counts, found and found.over,
                slopes, lengths, documents, a, r, scale, tail, tolerance, aim, *q.stride(), *k.stride(), *sizes[:5],
                rows, keys, KIND=kind, TAIL=steep, COLLECTED=found is not None,
                PART=launch.part, **launch.options(), **constants | heads_of,
            )  # fmt: skip
    kernel, launch = output_kernel, blocks.output if mean else blocks.output_alone
    instead = blocks.hopper.output if mean else blocks.hopper.output_alone
    if instead and alpha <= 2 and not stats and serves_hopper(q, k, v, made.out):
        kernel, launch = gluon_kernel("output"), instead
    for heads_of in launches:
        kernel[grid](
            q, k, v, made.out, made.mean, made.maximum, made.height, edge_gain, bound, made.support, made.entropy,
            made.tiles, made.counts, made.live, slopes, lengths, documents, a, r, scale, _slack(q.dtype),
            *strides, *sizes, rows, keys,
            KIND=kind, CONVEX=alpha <= 2, MEAN=mean, GRAD=grad, MAP=grad or stats, STATS=stats,
            VOTES=launch.votes, PART=launch.part, BLOCK_DV=block_dv, **launch.options(may_fuse), **constants | heads_of,
        )  # fmt: skip
    return list(made)


@long_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    alpha: float, scale: float, causal: bool, grad: bool, stats: bool,
) -> list[Tensor]:  # fmt: skip
    return list(_outputs(q, k, v, alpha, grad, stats))


@operator("long_attention_backward")
def long_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, mean: Tensor, maximum: Tensor, height: Tensor,
    edge_gain: Tensor, tiles: Tensor, counts: Tensor, live: Tensor,
    slopes: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    alpha: float, scale: float, causal: bool, slopes_learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v and the slopes, of these anything unless `slopes_learn`."""
    slopes, lengths, documents = contiguous(slopes, lengths, small_ids(documents))
    batch, heads, time, _ = q.shape
    kv_heads, key_time = k.shape[1:3]
    blocks = blocks_of(q, v)
    constants = _constants(q, v, slopes, lengths, documents, causal)
    rows, keys = triton.cdiv(time, blocks.rows), triton.cdiv(key_time, blocks.keys)
    d_q, d_k, d_v = like_tokens(q), like_tokens(k), like_tokens(v)
    d_slopes = maximum.new_zeros(batch, heads if slopes is not None else 0, rows)
    delta = torch.empty_like(maximum)
    residue = torch.empty_like(maximum) if q.dtype == torch.float32 else None
    a, r = powers_of(alpha)
    kind, gain, may_fuse = _kind(q, alpha), edge_gain if alpha > 2 else None, alpha <= 2
    ranges = None  # entmax has lists
    if documents is not None and kind == SOFTMAX:
        ranges = _document_ranges(q, k, documents, blocks)
    sizes = heads, heads // kv_heads, time, key_time, q.shape[3], v.shape[3], rows, keys
    strides = *q.stride(), *k.stride(), *v.stride(), *d_out.stride()
    split = _may_split(alpha, causal)
    sparse = kind != SOFTMAX and alpha <= 2
    kernel, launch = query_kernel, blocks.query
    if blocks.hopper.query and sparse and serves_hopper(q, k, v, d_out, mean):
        kernel, launch = gluon_kernel("query"), blocks.hopper.query
    for heads_of in _launches(slopes, split and not slopes_learn):
        kernel[(rows * batch * heads,)](
            q, k, v, d_out, d_q, mean, delta, residue, maximum, height, gain, tiles, counts, slopes, d_slopes,
            lengths, documents, ranges, a, r, scale, *strides, *mean.stride(), *d_q.stride(), *sizes,
            KIND=kind, REFINE=residue is not None, SLOPES_LEARN=slopes_learn, PART=launch.part,
            **launch.options(may_fuse), **constants | heads_of,
        )  # fmt: skip
    columns = column_counts = None
    if kind != SOFTMAX:
        columns = torch.empty_like(live, dtype=torch.int16)
        column_counts = counts.new_empty(batch, heads, keys, 2)
        column_kernel[(keys * batch * heads,)](
            live, columns, column_counts, rows, CHUNK=256, num_warps=1,
        )  # fmt: skip
    # Above alpha 2 a product must be the forward's to the last digit, though its factors are the other way round: the
    # interpreter's library adds small ones up in an order of their own.
    part = blocks.rows if alpha > 2 and q.dtype == torch.float32 else blocks.key.part
    kernel, launch, at_once = key_kernel, blocks.key, blocks.keys_at_once
    if blocks.hopper.key and sparse and serves_hopper(q, k, v, d_out):
        kernel, launch = gluon_kernel("key"), blocks.hopper.key
        part, at_once = launch.part, 16 * launch.warps
    for heads_of in _launches(slopes, split):
        kernel[(keys * (blocks.keys // at_once) * batch * kv_heads,)](
            q, k, v, d_out, d_k, d_v, delta, residue, maximum, height, gain, columns, column_counts,
            slopes, lengths, documents, a, r, scale, *strides, *d_k.stride(), *d_v.stride(), *sizes,
            KIND=kind, REFINE=residue is not None, PART=part, KEYS=at_once,
            **launch.options(may_fuse), **constants | heads_of,
        )  # fmt: skip
    return d_q, d_k, d_v, d_slopes.sum((0, 2))


@long_attention_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, mean: Tensor, maximum: Tensor, height: Tensor,
    edge_gain: Tensor, tiles: Tensor, counts: Tensor, live: Tensor,
    slopes: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    alpha: float, scale: float, causal: bool, slopes_learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_slopes = maximum.new_empty(q.shape[1] if slopes is not None else 0)
    return like_tokens(q), like_tokens(k), like_tokens(v), d_slopes


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)  # no zeros for what nobody differentiates, which is as large as the output
    q, k, v, slopes, lengths, documents, ctx.alpha, ctx.scale, ctx.causal, *_ = inputs
    made = _Outputs(*output)
    # Softmax's gains are its weights, so the mean under them is the output.
    mean = made.mean if kind_of(ctx.alpha) != SOFTMAX else made.out
    ctx.save_for_backward(
        q, k, v, mean, made.maximum, made.height, made.edge_gain, made.tiles, made.counts, made.live,
        slopes, lengths, documents,
    )  # fmt: skip


def _gradients(ctx: Any, d_made: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    d_out = d_made[0]
    if d_out is None:
        return (None,) * 11
    q, k, v, mean, maximum, height, edge_gain, tiles, counts, live, slopes, lengths, documents = ctx.saved_tensors
    slopes_learn: bool = ctx.needs_input_grad[3]
    d_q, d_k, d_v, d_slopes = long_attention_backward(
        q, k, v, d_out, mean, maximum, height, edge_gain, tiles, counts, live, slopes, lengths, documents,
        ctx.alpha, ctx.scale, ctx.causal, slopes_learn,
    )  # fmt: skip
    return d_q, d_k, d_v, d_slopes.to(slopes.dtype) if slopes_learn else None, *(None,) * 7


long_attention.register_autograd(_gradients, setup_context=_keep)
