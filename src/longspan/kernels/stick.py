"""Stick-breaking attention, forward: for a model that is measured, at any length.

A block of queries meets the keys from its own back. Of every row the kernel carries the logarithm of what is left of
the stick; within a tile that is a running sum over its keys. Where nothing is left to any row of the block, the keys
before are not read.
"""

import triton
import triton.language as tl
from torch import Tensor

from longspan.kernels.gpus import highest
from longspan.kernels.operators import operator
from longspan.kernels.tiles import (
    SIZES,
    accumulated,
    block_of_queries,
    contiguous,
    ids_of,
    key_tiles,
    keys_of,
    load_tile,
    one_pass,
    room_for_output,
    row_scores,
    small_ids,
    store_tile,
)

_NOTHING = tl.constexpr(-25.0)  # the logarithm of a rest that float32 does not see beside 1


@triton.jit
def _log_shares(scores):
    """log sigmoid of scores and of their negatives; of hidden ones, -inf, -inf and 0."""
    small = tl.exp(-tl.abs(scores))
    # log(1 + x) rounds a small x away, and a row has many of them.
    beyond = tl.where(small < 1e-4, small - 0.5 * small * small, tl.log(1 + small))
    return tl.minimum(scores, 0.0) - beyond, tl.minimum(-scores, 0.0) - beyond


@triton.jit(do_not_specialize=SIZES)
def stick_kernel(Q, K, V, O, Slopes, Lengths, Documents, scale,
                 q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
                 H, GROUP, TQ, TK, D, DV, NQ,
                 SLOPES: tl.constexpr, LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
                 M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    _, _, batch, head, first, rows, positions = block_of_queries(H, NQ, TQ, TK, M)
    K, end, slope = keys_of(K, Lengths, Slopes, batch, head, GROUP, TK, k_b, k_h, LENGTHS, SLOPES)
    V += batch * v_b + head // GROUP * v_h
    if DOCUMENTS:
        Documents += batch * TK
    own = ids_of(Documents, positions, TK, DOCUMENTS)
    q = load_tile(Q + batch * q_b + head * q_h, first, q_t, q_d, TQ, D, M, BLOCK_D)
    _, _, _, stop = key_tiles(first + TK - TQ, tl.minimum(first + M, TQ) - 1 + TK - TQ, end, None, TK,
                              N, True, False, True)  # fmt: skip
    out = tl.zeros([M, BLOCK_DV], tl.float32)
    left = tl.where((rows < TQ) & (positions >= 0) & (positions < end), 0.0, float("-inf"))
    alive = 0.0  # the most that is left to any row
    for index in range(stop):
        if alive > _NOTHING:
            tile = stop - 1 - index
            k = load_tile(K, tile * N, k_t, k_d, TK, D, N, BLOCK_D)
            v = load_tile(V, tile * N, v_t, v_d, TK, DV, N, BLOCK_DV)
            keys = tile * N + tl.arange(0, N)
            product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            scores = row_scores(product, keys, positions, own, scale, slope, end, Documents, TK,
                                True, SLOPES, DOCUMENTS)  # fmt: skip
            scores = tl.where(keys[None, :] < positions[:, None], scores, float("-inf"))  # a token leaves itself out
            taken, passed = _log_shares(scores)
            nearer = tl.cumsum(passed, 1, reverse=True) - passed
            p = tl.exp(taken + (nearer + left[:, None]))
            out = accumulated(p.to(v.dtype), v, out, PRECISION)
            left += tl.sum(passed, 1)
            alive = highest(left)
    store_tile(O + batch * o_b + head * o_h, out, first, o_t, o_d, TQ, DV, M, BLOCK_DV)


@operator("stick_attention")
def stick_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    scale: float,
) -> Tensor:  # fmt: skip
    """Causal stick-breaking attention. Has no gradient."""
    slopes, lengths, documents = contiguous(slopes, lengths, small_ids(documents))
    out = room_for_output(q, v)
    grid, sizes, constants = one_pass(q, k, v, out, slopes, lengths, documents)
    stick_kernel[grid](q, k, v, out, slopes, lengths, documents, scale, *sizes, **constants)
    return out


@stick_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    scale: float,
) -> Tensor:  # fmt: skip
    return room_for_output(q, v)
