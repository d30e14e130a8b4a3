"""Entmax attention for short rows: a whole row of scores lives on the chip, is solved there, and never leaves it.

Forward: one program for a block of queries of one head. It makes their scores with all keys, solves them in registers,
and writes the output and two numbers a row, the maximum and the height above the threshold there, from which the
backward rebuilds the weights. Backward: a kernel by blocks of queries, then one by blocks of keys, which walks over the
queries in a fixed order: deterministic, no atomics.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.functional.threshold import newton_steps
from longspan.kernels.solver import heights, kind_of, row_maximum, weights_and_gains


@triton.jit
def _load(base, rows, columns, row_stride, column_stride, ROWS, COLUMNS):
    seen = (rows[:, None] < ROWS) & (columns[None, :] < COLUMNS)
    return tl.load(base + rows[:, None] * row_stride + columns[None, :] * column_stride, mask=seen, other=0.0)


@triton.jit
def _store(base, values, rows, columns, row_stride, column_stride, ROWS, COLUMNS):
    seen = (rows[:, None] < ROWS) & (columns[None, :] < COLUMNS)
    place = base + rows[:, None] * row_stride + columns[None, :] * column_stride
    tl.store(place, values.to(base.dtype.element_ty), mask=seen)


@triton.jit
def _distances(rows, keys, offset):
    return tl.abs((rows + offset)[:, None] - keys[None, :]).to(tl.float32)


@triton.jit
def _scores(q, k, rows, keys, offset, scale, slope, end, documents, first_document, TK,
            CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The scores of a block of rows with all keys, -inf where a key is hidden."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SLOPES:
        scores -= slope * _distances(rows, keys, offset)
    positions = (rows + offset)[:, None]
    seen = (keys[None, :] < end) & (positions < end)
    if CAUSAL:
        seen = seen & (keys[None, :] <= positions)
    if DOCUMENTS:
        inside = (rows + offset >= 0) & (rows + offset < TK)
        own = tl.load(documents + first_document + rows + offset, mask=inside, other=0)
        theirs = tl.load(documents + first_document + keys, mask=keys < TK, other=0)
        seen = seen & (own[:, None] == theirs[None, :]) & inside[:, None]
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _row_block(Q, K, Slopes, Lengths, Documents, scale, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, H, GROUP, TQ, TK, D,
               CAUSAL: tl.constexpr, SLOPES: tl.constexpr, LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr,
               PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """This program's batch, head and rows, the keys, and their scores. One axis, whose limit is far, rows fastest."""
    blocks = tl.cdiv(TQ, M)
    pair = tl.program_id(0) // blocks
    batch, head = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    rows, keys, d = tl.program_id(0) % blocks * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_D)
    end = tl.minimum(tl.load(Lengths + batch).to(tl.int32), TK) if LENGTHS else TK
    slope = tl.load(Slopes + head).to(tl.float32) if SLOPES else 0.0
    q = _load(Q + batch * q_b + head * q_h, rows, d, q_t, q_d, TQ, D)
    k = _load(K + batch * k_b + head // GROUP * k_h, keys, d, k_t, k_d, TK, D)
    scores = _scores(q, k, rows, keys, TK - TQ, scale, slope, end, Documents, batch * TK, TK,
                     CAUSAL, SLOPES, DOCUMENTS, PRECISION)  # fmt: skip
    return batch, head, rows, keys, k, scores


@triton.jit
def _forward(Q, K, V, O, Maximum, Height, Slopes, Lengths, Documents, a, scale,
             q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
             H, GROUP, TQ, TK, D, DV,
             KIND: tl.constexpr, STEPS: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr,
             LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
             M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    batch, head, rows, keys, _, scores = _row_block(
        Q, K, Slopes, Lengths, Documents, scale, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, H, GROUP, TQ, TK, D,
        CAUSAL, SLOPES, LENGTHS, DOCUMENTS, PRECISION, M, N, BLOCK_D)  # fmt: skip
    maximum = row_maximum(scores)
    gap = scores - maximum[:, None]
    height = heights(gap, a, KIND, STEPS)
    p, _ = weights_and_gains(gap, height, a, KIND)
    dv = tl.arange(0, BLOCK_DV)
    v = _load(V + batch * v_b + head // GROUP * v_h, keys, dv, v_t, v_d, TK, DV)
    out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    _store(O + batch * o_b + head * o_h, out, rows, dv, o_t, o_d, TQ, DV)
    place = (batch * H + head) * TQ + rows
    tl.store(Maximum + place, maximum, mask=rows < TQ)
    tl.store(Height + place, height, mask=rows < TQ)


@triton.jit
def _backward_rows(Q, K, V, dO, dQ, Maximum, Height, Mean, Slopes, dSlopes, Lengths, Documents, a, scale,
                   q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
                   dq_b, dq_h, dq_t, dq_d, H, GROUP, TQ, TK, D, DV,
                   KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr,
                   LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
                   M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """The gradient of a block of queries, and for every row the mean of the incoming gradient under its gains."""
    batch, head, rows, keys, k, scores = _row_block(
        Q, K, Slopes, Lengths, Documents, scale, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, H, GROUP, TQ, TK, D,
        CAUSAL, SLOPES, LENGTHS, DOCUMENTS, PRECISION, M, N, BLOCK_D)  # fmt: skip
    place = (batch * H + head) * TQ + rows
    maximum = tl.load(Maximum + place, mask=rows < TQ, other=0.0)
    height = tl.load(Height + place, mask=rows < TQ, other=0.0)
    _, gain = weights_and_gains(scores - maximum[:, None], height, a, KIND)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    d_o = _load(dO + batch * o_b + head * o_h, rows, dv, o_t, o_d, TQ, DV)
    v = _load(V + batch * v_b + head // GROUP * v_h, keys, dv, v_t, v_d, TK, DV)
    d_p = tl.dot(d_o, tl.trans(v), input_precision=PRECISION)
    mean = tl.sum(gain * d_p, 1) / tl.maximum(tl.sum(gain, 1), 1e-37)
    tl.store(Mean + place, mean, mask=rows < TQ)
    d_s = gain * (d_p - mean[:, None])
    if SLOPES:
        d_slope = -tl.sum(tl.sum(d_s * _distances(rows, keys, TK - TQ), 1), 0)
        tl.store(dSlopes + tl.program_id(0), d_slope)
    d_q = tl.dot(d_s.to(k.dtype), k, input_precision=PRECISION) * scale
    _store(dQ + batch * dq_b + head * dq_h, d_q, rows, d, dq_t, dq_d, TQ, D)


@triton.jit
def _backward_keys(Q, K, V, dO, dK, dV, Maximum, Height, Mean, Slopes, Lengths, Documents, a, scale,
                   q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
                   dk_b, dk_h, dk_t, dk_d, dv_b, dv_h, dv_t, dv_d, H, GROUP, TQ, TK, D, DV,
                   KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr,
                   LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
                   M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """The gradients of a block of keys and values, over the queries that see it, in a fixed order."""
    kv_heads, blocks = H // GROUP, tl.cdiv(TK, N)
    pair = tl.program_id(0) // blocks
    batch, kv_head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    first = tl.program_id(0) % blocks * N
    keys = first + tl.arange(0, N)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    end = tl.minimum(tl.load(Lengths + batch).to(tl.int32), TK) if LENGTHS else TK
    k = _load(K + batch * k_b + kv_head * k_h, keys, d, k_t, k_d, TK, D)
    v = _load(V + batch * v_b + kv_head * v_h, keys, dv, v_t, v_d, TK, DV)
    d_k = tl.zeros([N, BLOCK_D], tl.float32)
    d_v = tl.zeros([N, BLOCK_DV], tl.float32)
    # The first query that sees the block's first key, rounded down to a block.
    begin = tl.maximum(first - (TK - TQ), 0) // M * M if CAUSAL else 0
    for index in range(GROUP):
        head = kv_head * GROUP + index
        slope = tl.load(Slopes + head).to(tl.float32) if SLOPES else 0.0
        for start in range(begin, TQ, M):
            rows = start + tl.arange(0, M)
            q = _load(Q + batch * q_b + head * q_h, rows, d, q_t, q_d, TQ, D)
            d_o = _load(dO + batch * o_b + head * o_h, rows, dv, o_t, o_d, TQ, DV)
            place = (batch * H + head) * TQ + rows
            maximum = tl.load(Maximum + place, mask=rows < TQ, other=0.0)
            height = tl.load(Height + place, mask=rows < TQ, other=0.0)
            mean = tl.load(Mean + place, mask=rows < TQ, other=0.0)
            scores = _scores(q, k, rows, keys, TK - TQ, scale, slope, end, Documents, batch * TK, TK,
                             CAUSAL, SLOPES, DOCUMENTS, PRECISION)  # fmt: skip
            p, gain = weights_and_gains(scores - maximum[:, None], height, a, KIND)
            d_v += tl.dot(tl.trans(p.to(d_o.dtype)), d_o, input_precision=PRECISION)
            d_p = tl.dot(d_o, tl.trans(v), input_precision=PRECISION)
            d_s = (gain * (d_p - mean[:, None])).to(q.dtype)
            d_k += tl.dot(tl.trans(d_s), q, input_precision=PRECISION)
    _store(dK + batch * dk_b + kv_head * dk_h, d_k * scale, keys, d, dk_t, dk_d, TK, D)
    _store(dV + batch * dv_b + kv_head * dv_h, d_v, keys, dv, dv_t, dv_d, TK, DV)


def _like_tokens(heads: Tensor) -> Tensor:
    """An empty tensor of the same shape, its memory ordered (batch, time, heads, dim), as the projections like it."""
    batch, num_heads, time, dim = heads.shape
    return heads.new_empty(batch, time, num_heads, dim).transpose(1, 2)


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the output, the maxima and the heights."""
    out = _like_tokens(q[..., :1].expand(*q.shape[:3], v.shape[3]))
    maximum, height = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    return out, maximum, height


def _constants(
    q: Tensor, v: Tensor, slopes: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    alpha: float, causal: bool,
) -> dict[str, Any]:  # fmt: skip
    """What the kernels are compiled for, but for the sizes of their blocks."""
    return {
        "KIND": kind_of(alpha),
        "CAUSAL": causal,
        "SLOPES": slopes is not None,
        "LENGTHS": lengths is not None,
        "DOCUMENTS": documents is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3])),
        "BLOCK_DV": max(16, triton.next_power_of_2(v.shape[3])),
    }


def _row_blocks(q: Tensor, k: Tensor) -> dict[str, int]:
    """Blocks of whole rows: all keys, and as many rows as registers hold.

    Two warps: with more, warps share a row and repeat each other's work (twice the instructions a row on sm_90).
    """
    keys = max(16, triton.next_power_of_2(k.shape[2]))
    return {"M": 32 if keys <= 128 else 16, "N": keys, "num_warps": 2}


@torch.library.custom_op("longspan::short_attention", mutates_args=())
def short_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    alpha: float, scale: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output, and the maximum and the height of every row."""
    batch, heads, time, _ = q.shape
    out, maximum, height = _outputs(q, v)
    documents = None if documents is None else documents.contiguous()
    blocks = _row_blocks(q, k)
    _forward[(triton.cdiv(time, blocks["M"]) * batch * heads,)](
        q, k, v, out, maximum, height, slopes, lengths, documents, alpha - 1, scale,
        *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        heads, heads // k.shape[1], time, k.shape[2], q.shape[3], v.shape[3],
        STEPS=newton_steps(k.shape[2]), **blocks, **_constants(q, v, slopes, lengths, documents, alpha, causal),
    )  # fmt: skip
    return out, maximum, height


@short_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    alpha: float, scale: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _outputs(q, v)


@torch.library.custom_op("longspan::short_attention_backward", mutates_args=())
def short_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, maximum: Tensor, height: Tensor,
    slopes: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    alpha: float, scale: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, and of the slopes by batch."""
    batch, heads, time, _ = q.shape
    kv_heads = k.shape[1]
    d_q, d_k, d_v = _like_tokens(q), _like_tokens(k), _like_tokens(v)
    blocks = _row_blocks(q, k)
    row_blocks = triton.cdiv(time, blocks["M"])
    # Partial sums of the slopes' gradients, added up in torch.
    d_slopes = q.new_empty(batch, heads if slopes is not None else 0, row_blocks, dtype=torch.float32)
    mean = torch.empty_like(maximum)
    documents = None if documents is None else documents.contiguous()
    constants = _constants(q, v, slopes, lengths, documents, alpha, causal)
    sizes = heads, heads // kv_heads, time, k.shape[2], q.shape[3], v.shape[3]
    strides = *q.stride(), *k.stride(), *v.stride(), *d_out.stride()
    _backward_rows[(row_blocks * batch * heads,)](
        q, k, v, d_out, d_q, maximum, height, mean, slopes, d_slopes, lengths, documents, alpha - 1, scale,
        *strides, *d_q.stride(), *sizes, **blocks, **constants,
    )  # fmt: skip
    _backward_keys[(triton.cdiv(k.shape[2], 64) * batch * kv_heads,)](
        q, k, v, d_out, d_k, d_v, maximum, height, mean, slopes, lengths, documents, alpha - 1, scale,
        *strides, *d_k.stride(), *d_v.stride(), *sizes, M=32, N=64, num_warps=4, **constants,
    )  # fmt: skip
    return d_q, d_k, d_v, d_slopes.sum(-1)


@short_attention_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, maximum: Tensor, height: Tensor,
    slopes: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    alpha: float, scale: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_slopes = q.new_empty(q.shape[0], q.shape[1] if slopes is not None else 0, dtype=torch.float32)
    return _like_tokens(q), _like_tokens(k), _like_tokens(v), d_slopes


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, slopes, lengths, documents, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output[1:], slopes, lengths, documents)


def _gradients(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, maximum, height, slopes, lengths, documents = ctx.saved_tensors
    d_q, d_k, d_v, d_slopes = short_attention_backward(
        q, k, v, d_out, maximum, height, slopes, lengths, documents, *ctx.rest
    )
    return d_q, d_k, d_v, None if slopes is None else d_slopes.sum(0).to(slopes.dtype), *(None,) * 5


short_attention.register_autograd(_gradients, setup_context=_keep)
