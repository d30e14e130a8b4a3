"""Entmax attention for short rows: a whole row of scores lives on the chip, is solved there, and never leaves it.

Forward: one program for a block of queries of one head. It makes their scores with all keys, solves them in registers,
and writes the output and two numbers a row, the maximum and the height above the threshold there, from which the
backward rebuilds the weights. Backward: one program for a key head, over all its queries in a fixed order:
deterministic, every score made once.

Softmax may be over the highest scores of a row alone. Three numbers more a row then say which these are.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.kernels.operators import operator
from longspan.kernels.places import bounds_of_places, with_places
from longspan.kernels.solver import heights, kind_of, powers_of, row_maximum, weights_and_gains
from longspan.kernels.tiles import (
    SIZES,
    contiguous,
    distances,
    end_of,
    ids_of,
    like_tokens,
    load_tile,
    padded,
    room_for_output,
    row_scores,
    scores_of,
    slope_of,
    small_ids,
    store_tile,
)

_SIZES = [
    *SIZES,
    "s_b",
    "s_h",
    "s_t",
    "ds_b",
    "ds_h",
    "ds_t",
    "places",
]  # strides of scales come with every length anew


@triton.jit(do_not_specialize=_SIZES)
def _forward(Q, K, V, O, Maximum, Height, Edges, Slopes, Scales, Lengths, Documents, a, r, scale,
             q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d, s_b, s_h, s_t,
             H, GROUP, TQ, TK, D, DV, places,
             KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, SCALES: tl.constexpr,
             LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr, PLACES: tl.constexpr, PRECISION: tl.constexpr,
             M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """One program for a block of rows of one head. One axis, whose limit is far, rows fastest."""
    blocks = tl.cdiv(TQ, M)
    pair = tl.program_id(0) // blocks
    batch, head = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    first = tl.program_id(0) % blocks * M
    rows, keys = first + tl.arange(0, M), tl.arange(0, N)
    end = end_of(Lengths, batch, TK, LENGTHS)
    limit = end if LENGTHS or not CAUSAL else None
    slope = slope_of(Slopes, head, SLOPES)
    q = load_tile(Q + batch * q_b + head * q_h, first, q_t, q_d, TQ, D, M, BLOCK_D)
    k = load_tile(K + batch * k_b + head // GROUP * k_h, 0, k_t, k_d, TK, D, N, BLOCK_D)
    if SCALES:
        own = tl.load(Scales + batch * s_b + head * s_h + rows * s_t, mask=rows < TQ, other=0.0)
        q = (q * own[:, None]).to(q.dtype)
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    unit = 1.0 if KIND == 0 else a
    positions = rows + TK - TQ
    if DOCUMENTS:
        Documents += batch * TK
    fellows = ids_of(Documents, positions, TK, DOCUMENTS)
    z = row_scores(product, keys, positions, fellows, unit * scale, unit * slope, limit, Documents, TK,
                   CAUSAL, SLOPES, DOCUMENTS)  # fmt: skip
    place = (batch * H + head) * TQ + rows
    if PLACES:
        low, high, part = bounds_of_places(z, places, N)
        z = with_places(z, low[:, None], high[:, None], part[:, None])
        tl.store(Edges + place * 3, low, mask=rows < TQ)
        tl.store(Edges + place * 3 + 1, high, mask=rows < TQ)
        tl.store(Edges + place * 3 + 2, part, mask=rows < TQ)
    maximum = row_maximum(z)
    height = heights(z - maximum[:, None], r, KIND, PRECISION)
    p, _ = weights_and_gains(z, maximum[:, None], height[:, None], r, KIND, PRECISION)
    v = load_tile(V + batch * v_b + head // GROUP * v_h, 0, v_t, v_d, TK, DV, N, BLOCK_DV)
    out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    store_tile(O + batch * o_b + head * o_h, out, first, o_t, o_d, TQ, DV, M, BLOCK_DV)
    tl.store(Maximum + place, maximum, mask=rows < TQ)
    tl.store(Height + place, height, mask=rows < TQ)


@triton.jit(do_not_specialize=_SIZES)
def _backward(Q, K, V, dO, dQ, dK, dV, Maximum, Height, Edges, Slopes, dSlopes, Scales, dScales, Lengths, Documents,
              a, r, scale,
              q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
              dq_b, dq_h, dq_t, dq_d, dk_b, dk_h, dk_t, dk_d, dv_b, dv_h, dv_t, dv_d, s_b, s_h, s_t, ds_b, ds_h, ds_t,
              H, GROUP, TQ, TK, D, DV,
              KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, SCALES: tl.constexpr,
              LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr, PLACES: tl.constexpr, PRECISION: tl.constexpr,
              M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """All gradients of one key head: its keys and values stay, the queries that see them pass by in a fixed order.

    Scores lie here with keys down and queries across, as the products for the keys and values want them.
    """
    kv_heads = H // GROUP
    batch, kv_head = (tl.program_id(0) // kv_heads).to(tl.int64), (tl.program_id(0) % kv_heads).to(tl.int64)
    keys = tl.arange(0, N)
    end = end_of(Lengths, batch, TK, LENGTHS)
    limit = end if LENGTHS or not CAUSAL else None
    k = load_tile(K + batch * k_b + kv_head * k_h, 0, k_t, k_d, TK, D, N, BLOCK_D)
    v = load_tile(V + batch * v_b + kv_head * v_h, 0, v_t, v_d, TK, DV, N, BLOCK_DV)
    unit = 1.0 if KIND == 0 else a
    if DOCUMENTS:
        Documents += batch * TK
    theirs = ids_of(Documents, keys, TK, DOCUMENTS)
    d_k = tl.zeros([N, BLOCK_D], tl.float32)
    d_v = tl.zeros([N, BLOCK_DV], tl.float32)
    for index in range(GROUP):
        head = kv_head * GROUP + index
        slope = slope_of(Slopes, head, SLOPES)
        d_slope = tl.zeros([M], tl.float32)
        for start in range(0, TQ, M):
            rows = start + tl.arange(0, M)
            q = load_tile(Q + batch * q_b + head * q_h, start, q_t, q_d, TQ, D, M, BLOCK_D)
            d_o = load_tile(dO + batch * o_b + head * o_h, start, o_t, o_d, TQ, DV, M, BLOCK_DV)
            place = (batch * H + head) * TQ + rows
            maximum = tl.load(Maximum + place, mask=rows < TQ, other=1e30)
            height = tl.load(Height + place, mask=rows < TQ, other=0.0)
            scaled = q
            if SCALES:
                own = tl.load(Scales + batch * s_b + head * s_h + rows * s_t, mask=rows < TQ, other=0.0)
                scaled = (q * own[:, None]).to(q.dtype)
            product = tl.dot(k, tl.trans(scaled), input_precision=PRECISION)
            positions = rows + TK - TQ
            fellows = ids_of(Documents, positions, TK, DOCUMENTS)
            z = scores_of(product, keys[:, None], positions[None, :], unit * scale, unit * slope, limit,
                          theirs[:, None], fellows[None, :], CAUSAL, SLOPES, DOCUMENTS)  # fmt: skip
            if PLACES:
                low = tl.load(Edges + place * 3, mask=rows < TQ, other=0.0)
                high = tl.load(Edges + place * 3 + 1, mask=rows < TQ, other=0.0)
                part = tl.load(Edges + place * 3 + 2, mask=rows < TQ, other=0.0)
                z = with_places(z, low[None, :], high[None, :], part[None, :])
            p, gain = weights_and_gains(z, maximum[None, :], height[None, :], r, KIND, PRECISION)
            d_p = tl.dot(v, tl.trans(d_o), input_precision=PRECISION)
            mean = tl.sum(gain * d_p, 0) / tl.maximum(tl.sum(gain, 0), 1e-37)
            d_s = gain * (d_p - mean[None, :])
            if SLOPES:
                d_slope -= tl.sum(d_s * distances(keys[:, None], positions[None, :]), 0)
            d_v += tl.dot(p.to(d_o.dtype), d_o, input_precision=PRECISION)
            d_s = d_s.to(q.dtype)
            d_k += tl.dot(d_s, scaled, input_precision=PRECISION)
            d_q = tl.dot(tl.trans(d_s), k, input_precision=PRECISION) * scale
            if SCALES:  # what the gradient of a scaled query is to its scale, it is to the scale by the query
                d_own = tl.sum(q * d_q, 1)
                tl.store(dScales + batch * ds_b + head * ds_h + rows * ds_t, d_own, mask=rows < TQ)
                d_q *= own[:, None]
            store_tile(dQ + batch * dq_b + head * dq_h, d_q, start, dq_t, dq_d, TQ, D, M, BLOCK_D)
        if SLOPES:
            tl.store(dSlopes + batch * H + head, tl.sum(d_slope, 0))
    store_tile(dK + batch * dk_b + kv_head * dk_h, d_k * scale, 0, dk_t, dk_d, TK, D, N, BLOCK_D)
    store_tile(dV + batch * dv_b + kv_head * dv_h, d_v, 0, dv_t, dv_d, TK, DV, N, BLOCK_DV)


def _outputs(q: Tensor, v: Tensor, places: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for the output, the maxima, the heights and the bounds of the places."""
    out = room_for_output(q, v)
    maximum, height = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    return out, maximum, height, maximum.new_empty(*q.shape[:3], 3 if places else 0)


def _position_gradients(q: Tensor, slopes: Tensor | None, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Room for the gradients of the slopes, by batch, and of the scales, in the order of a projection's memory."""
    batch, heads, time, _ = q.shape
    d_slopes = q.new_empty(batch, heads if slopes is not None else 0, dtype=torch.float32)
    d_scales = q.new_empty(batch, time if scales is not None else 0, heads, dtype=torch.float32)
    return d_slopes, d_scales.transpose(1, 2)


def _strides(scales: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if scales is None else scales.stride()


def _constants(
    q: Tensor, v: Tensor, slopes: Tensor | None, scales: Tensor | None, lengths: Tensor | None,
    documents: Tensor | None, alpha: float, causal: bool, places: int,
) -> dict[str, Any]:  # fmt: skip
    """What the kernels are compiled for, but for the sizes of their blocks."""
    return {
        "KIND": kind_of(alpha, fine=q.dtype == torch.float32),
        "CAUSAL": causal,
        "SLOPES": slopes is not None,
        "SCALES": scales is not None,
        "LENGTHS": lengths is not None,
        "DOCUMENTS": documents is not None,
        "PLACES": places > 0,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "BLOCK_D": padded(q.shape[3]),
        "BLOCK_DV": padded(v.shape[3]),
    }


def forward_blocks(keys: int) -> dict[str, int]:
    """By measurement on an H200; twice the keys take twice the warps, by the compiler's count of registers."""
    return {"N": padded(keys), "M": 64, "num_warps": 4 if keys <= 128 else 8}


def backward_blocks(keys: int, dim: int) -> dict[str, int]:
    """Likewise; heads of 32 and 64 were measured."""
    return {"N": padded(keys), "M": 16, "num_warps": 8 if keys > 128 else 4 if dim > 32 else 2}


@operator("short_attention")
def short_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, scales: Tensor | None, lengths: Tensor | None,
    documents: Tensor | None, alpha: float, scale: float, causal: bool, places: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output, the maximum and the height of every row, and the bounds of its places.

    Args:
        scales: (batch, heads, query_time) in float32, a factor of every query's products beside `scale`.
        places: how many of a row's scores, the highest, have a weight; alpha is 1 then. 0: all that entmax leaves.
    """
    slopes, lengths, documents = contiguous(slopes, lengths, small_ids(documents))
    batch, heads, time, _ = q.shape
    out, maximum, height, bounds = _outputs(q, v, places)
    blocks = forward_blocks(k.shape[2])
    _forward[(triton.cdiv(time, blocks["M"]) * batch * heads,)](
        q, k, v, out, maximum, height, bounds, slopes, scales, lengths, documents, *powers_of(alpha), scale,
        *q.stride(), *k.stride(), *v.stride(), *out.stride(), *_strides(scales),
        heads, heads // k.shape[1], time, k.shape[2], q.shape[3], v.shape[3], places,
        **blocks, **_constants(q, v, slopes, scales, lengths, documents, alpha, causal, places),
    )  # fmt: skip
    return out, maximum, height, bounds


@short_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, scales: Tensor | None, lengths: Tensor | None,
    documents: Tensor | None, alpha: float, scale: float, causal: bool, places: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _outputs(q, v, places)


@operator("short_attention_backward")
def short_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, maximum: Tensor, height: Tensor, bounds: Tensor,
    slopes: Tensor | None, scales: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    alpha: float, scale: float, causal: bool, places: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, of the slopes by batch, and of the scales."""
    slopes, lengths, documents = contiguous(slopes, lengths, small_ids(documents))
    batch, heads, time, _ = q.shape
    kv_heads, key_time = k.shape[1:3]
    d_q, d_k, d_v = like_tokens(q), like_tokens(k), like_tokens(v)
    d_slopes, d_scales = _position_gradients(q, slopes, scales)
    _backward[(batch * kv_heads,)](
        q, k, v, d_out, d_q, d_k, d_v, maximum, height, bounds, slopes, d_slopes, scales, d_scales, lengths, documents,
        *powers_of(alpha), scale,
        *q.stride(), *k.stride(), *v.stride(), *d_out.stride(), *d_q.stride(), *d_k.stride(), *d_v.stride(),
        *_strides(scales), *d_scales.stride(),
        heads, heads // kv_heads, time, key_time, q.shape[3], v.shape[3],
        **backward_blocks(key_time, max(q.shape[3], v.shape[3])),
        **_constants(q, v, slopes, scales, lengths, documents, alpha, causal, places),
    )  # fmt: skip
    return d_q, d_k, d_v, d_slopes, d_scales


@short_attention_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, maximum: Tensor, height: Tensor, bounds: Tensor,
    slopes: Tensor | None, scales: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    alpha: float, scale: float, causal: bool, places: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return like_tokens(q), like_tokens(k), like_tokens(v), *_position_gradients(q, slopes, scales)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    q, k, v, slopes, scales, lengths, documents, *ctx.rest = inputs
    ctx.set_materialize_grads(False)  # no zeros for what nobody differentiates
    ctx.save_for_backward(q, k, v, *output[1:], slopes, scales, lengths, documents)


def _gradients(ctx: Any, d_out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if d_out is None:
        return (None,) * 11
    q, k, v, maximum, height, bounds, slopes, scales, lengths, documents = ctx.saved_tensors
    d_q, d_k, d_v, by_batch, d_scales = short_attention_backward(
        q, k, v, d_out, maximum, height, bounds, slopes, scales, lengths, documents, *ctx.rest
    )
    d_slopes = None if slopes is None else by_batch.sum(0).to(slopes.dtype)
    return d_q, d_k, d_v, d_slopes, None if scales is None else d_scales, *(None,) * 6


short_attention.register_autograd(_gradients, setup_context=_keep)
