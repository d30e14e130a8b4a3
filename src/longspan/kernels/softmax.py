"""Softmax attention for long rows, forward: the usual one pass with a running maximum, with our masks and slopes."""

import triton
import triton.language as tl

from longspan.kernels.solver import exponential
from longspan.kernels.tiles import (
    SIZES,
    accumulated,
    block_of_queries,
    end_of,
    ids_of,
    key_tiles,
    load_tile,
    masked_tile,
    of_other_launch,
    row_scores,
    slope_of,
    store_tile,
)


@triton.jit
def _tile(q, K, V, k_t, k_d, v_t, v_d, tile, positions, own, out, mass, moment, support, maximum, scale, slope, end,
          Documents, TK, D, DV, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr,
          PRECISION: tl.constexpr, STATS: tl.constexpr, MASKED: tl.constexpr,
          N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    k = load_tile(K, tile * N, k_t, k_d, TK, D, N, BLOCK_D, WHOLE=not MASKED)
    v = load_tile(V, tile * N, v_t, v_d, TK, DV, N, BLOCK_DV, WHOLE=not MASKED)
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    keys = tile * N + tl.arange(0, N)
    scores = row_scores(product, keys, positions, own, scale, slope, end, Documents, TK,
                        CAUSAL, SLOPES, DOCUMENTS, MASKED)  # fmt: skip
    risen = tl.maximum(maximum, tl.max(scores, 1))
    shrink = exponential(maximum - risen, PRECISION)
    gap = scores - risen[:, None]
    p = exponential(gap, PRECISION)
    if STATS:  # sum p log p, moved to the new maximum
        support += tl.sum(tl.where(p > 0, 1.0, 0.0), 1)
        moment = (moment + (maximum - risen) * mass) * shrink + tl.sum(p * tl.where(p > 0, gap, 0.0), 1)
    mass = mass * shrink + tl.sum(p, 1)
    out = accumulated(p.to(v.dtype), v, out * shrink[:, None], PRECISION)
    return out, mass, moment, support, risen


@triton.jit(do_not_specialize=SIZES)
def softmax_kernel(Q, K, V, O, Maximum, Height, Support, Entropy, Slopes, Lengths, Documents, Ranges, scale,
                   q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
                   H, GROUP, TQ, TK, D, DV, NQ,
                   CAUSAL: tl.constexpr, SLOPES: tl.constexpr, SPLIT: tl.constexpr, LENGTHS: tl.constexpr,
                   DOCUMENTS: tl.constexpr, MASK_ALL: tl.constexpr, PRECISION: tl.constexpr, STATS: tl.constexpr,
                   M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    pair, block, batch, head, first, rows, positions = block_of_queries(H, NQ, TQ, TK, M)
    if SPLIT:  # noqa: SIM102, the compiler would take both sides of an `and`
        if of_other_launch(Slopes, head, SLOPES):
            return
    K += batch * k_b + head // GROUP * k_h
    V += batch * v_b + head // GROUP * v_h
    if DOCUMENTS:
        Documents += batch * TK
        Ranges += (batch * NQ + block) * 3
    own = ids_of(Documents, positions, TK, DOCUMENTS)
    end = end_of(Lengths, batch, TK, LENGTHS)
    limit = end if LENGTHS or not CAUSAL else None
    slope = slope_of(Slopes, head, SLOPES)
    q = load_tile(Q + batch * q_b + head * q_h, first, q_t, q_d, TQ, D, M, BLOCK_D)
    start, inner, whole, stop = key_tiles(first + TK - TQ, tl.minimum(first + M, TQ) - 1 + TK - TQ, end, Ranges, TK,
                                          N, CAUSAL, DOCUMENTS, MASK_ALL)  # fmt: skip
    out = tl.zeros([M, BLOCK_DV], tl.float32)
    mass = tl.zeros([M], tl.float32)
    moment = tl.zeros([M], tl.float32)
    support = tl.zeros([M], tl.float32)
    maximum = tl.full([M], -1e30, tl.float32)
    for index in range(inner - start + stop - whole):
        tile = masked_tile(index, start, inner, whole)
        out, mass, moment, support, maximum = _tile(
            q, K, V, k_t, k_d, v_t, v_d, tile, positions, own, out, mass, moment, support, maximum, scale, slope, limit,
            Documents, TK, D, DV, CAUSAL, SLOPES, DOCUMENTS, PRECISION, STATS, True, N, BLOCK_D, BLOCK_DV)  # fmt: skip
    for tile in range(inner, whole):
        out, mass, moment, support, maximum = _tile(
            q, K, V, k_t, k_d, v_t, v_d, tile, positions, own, out, mass, moment, support, maximum, scale, slope, limit,
            Documents, TK, D, DV, CAUSAL, SLOPES, DOCUMENTS, PRECISION, STATS, False, N, BLOCK_D, BLOCK_DV)  # fmt: skip
    sees = mass > 0
    mass = tl.where(sees, mass, 1.0)
    # An error here is one of the whole row. In half precision CUDA 12.8's assembler crashes on a rounded division
    # where heads are of 16 dims and all tiles masked.
    height = tl.where(sees, tl.div_rn(1.0, mass) if PRECISION == "ieee" else 1.0 / mass, 0.0)
    store_tile(O + batch * o_b + head * o_h, out * height[:, None], first, o_t, o_d, TQ, DV, M, BLOCK_DV)
    place = pair.to(tl.int64) * TQ + rows
    tl.store(Maximum + place, tl.where(sees, maximum, 0.0), mask=rows < TQ)
    tl.store(Height + place, height, mask=rows < TQ)
    if STATS:
        tl.store(Support + place, support, mask=rows < TQ)
        tl.store(Entropy + place, tl.where(sees, tl.log(mass) - moment * height, 0.0), mask=rows < TQ)
