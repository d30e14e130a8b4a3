"""Softmax over the k highest scores of a row, forward: for a model that is measured, at any length.

A block of queries meets the keys from its own back, and every row keeps a list of the highest scores so far and of
their keys. A tile gives its rows their highest score, then the next, until no row has one above the lowest of its list:
mostly one turn or two once the lists are full. At the end the values of the listed keys are gathered, and no score has
been made twice.

Scores that tie for the last places share them, each with the same part. Where a list has had to turn such scores away,
its block meets the keys a second time, for the values of all that tie.
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

MOST = 64  # places of a list, which lies in registers


@triton.jit
def _scores_with(q, keys, tile, positions, own, scale, slope, end, Documents, TK,
                 CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
                 N: tl.constexpr):  # fmt: skip
    """The scores of a block of queries with a tile of keys."""
    product = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    numbers = tile * N + tl.arange(0, N)
    return row_scores(product, numbers, positions, own, scale, slope, end, Documents, TK, CAUSAL, SLOPES, DOCUMENTS)


@triton.jit
def _listed(scores, tile, best, places, edge, away, N: tl.constexpr, PLACES: tl.constexpr):
    """The list of the highest scores and of their keys once a tile is in it, its lowest score, and how many like that
    one have been seen and are not in the list."""
    columns, slots = tl.arange(0, N), tl.arange(0, PLACES)
    top = tl.max(scores, 1)
    higher = top > edge
    going = highest(higher.to(tl.int32)) > 0
    while going:
        column = tl.min(tl.where(scores == top[:, None], columns[None, :], N), 1)
        slot = tl.min(tl.where(best == edge[:, None], slots[None, :], PLACES), 1)
        put = (slots[None, :] == slot[:, None]) & higher[:, None]
        best = tl.where(put, top[:, None], best)
        places = tl.where(put, (tile * N + column)[:, None], places)
        scores = tl.where((columns[None, :] == column[:, None]) & higher[:, None], float("-inf"), scores)
        risen = tl.min(best, 1)
        away = tl.where(risen > edge, 0, away + (higher & (edge > float("-inf"))).to(tl.int32))
        edge = risen
        top = tl.max(scores, 1)
        higher = top > edge
        going = highest(higher.to(tl.int32)) > 0
    away += tl.sum(((scores == edge[:, None]) & (scores > float("-inf"))).to(tl.int32), 1)
    return best, places, edge, away


@triton.jit(do_not_specialize=[*SIZES, "k"])
def topk_kernel(Q, K, V, O, Slopes, Lengths, Documents, scale,
                q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
                H, GROUP, TQ, TK, D, DV, NQ, k,
                CAUSAL: tl.constexpr, SLOPES: tl.constexpr, LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr,
                PRECISION: tl.constexpr, PLACES: tl.constexpr,
                M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    _, _, batch, head, first, _, positions = block_of_queries(H, NQ, TQ, TK, M)
    K, end, slope = keys_of(K, Lengths, Slopes, batch, head, GROUP, TK, k_b, k_h, LENGTHS, SLOPES)
    V += batch * v_b + head // GROUP * v_h
    if DOCUMENTS:
        Documents += batch * TK
    own = ids_of(Documents, positions, TK, DOCUMENTS)
    q = load_tile(Q + batch * q_b + head * q_h, first, q_t, q_d, TQ, D, M, BLOCK_D)
    _, _, _, stop = key_tiles(first + TK - TQ, tl.minimum(first + M, TQ) - 1 + TK - TQ, end, None, TK,
                              N, CAUSAL, False, True)  # fmt: skip
    slots = tl.arange(0, PLACES)
    # A place that there is not is never the lowest.
    best = tl.where(slots[None, :] < k, float("-inf"), float("inf")) + tl.zeros([M, PLACES], tl.float32)
    places = tl.zeros([M, PLACES], tl.int32)
    edge = tl.full([M], float("-inf"), tl.float32)
    away = tl.zeros([M], tl.int32)
    keys = load_tile(K, tl.maximum(stop - 1, 0) * N, k_t, k_d, TK, D, N, BLOCK_D)
    for index in range(stop):
        tile = stop - 1 - index
        scores = _scores_with(q, keys, tile, positions, own, scale, slope, end, Documents, TK,
                              CAUSAL, SLOPES, DOCUMENTS, PRECISION, N)  # fmt: skip
        # The next keys travel while the list changes; the compiler does not see to it where loops are nested.
        keys = load_tile(K, tl.maximum(tile - 1, 0) * N, k_t, k_d, TK, D, N, BLOCK_D)
        best, places, edge, away = _listed(scores, tile, best, places, edge, away, N, PLACES)
    best = tl.where(slots[None, :] < k, best, float("-inf"))
    top = tl.max(best, 1)
    sees = top > float("-inf")
    p = tl.exp(best - tl.where(sees, top, 0.0)[:, None])
    p = p / tl.where(sees, tl.sum(p, 1), 1.0)[:, None]
    tied = (best == edge[:, None]) & (away > 0)[:, None]
    shared = tl.sum(tl.where(tied, p, 0.0), 1)
    p = tl.where(tied, 0.0, p)
    out = tl.zeros([M, BLOCK_DV], tl.float32)
    dims = tl.arange(0, BLOCK_DV)
    for slot in range(k):
        weight = tl.sum(tl.where(slots[None, :] == slot, p, 0.0), 1)
        place = tl.sum(tl.where(slots[None, :] == slot, places, 0), 1)
        wanted = (weight > 0)[:, None] & (dims[None, :] < DV)
        v = tl.load(V + place.to(tl.int64)[:, None] * v_t + dims[None, :] * v_d, mask=wanted, other=0.0)
        out += weight[:, None] * v.to(tl.float32)
    if highest(away) > 0:
        total = tl.zeros([M, BLOCK_DV], tl.float32)
        number = tl.zeros([M], tl.float32)
        for index in range(stop):
            tile = stop - 1 - index
            keys = load_tile(K, tile * N, k_t, k_d, TK, D, N, BLOCK_D)
            scores = _scores_with(q, keys, tile, positions, own, scale, slope, end, Documents, TK,
                                  CAUSAL, SLOPES, DOCUMENTS, PRECISION, N)  # fmt: skip
            ties = tl.where((scores == edge[:, None]) & (away > 0)[:, None], 1.0, 0.0)
            if highest(tl.max(ties, 1)) > 0:
                v = load_tile(V, tile * N, v_t, v_d, TK, DV, N, BLOCK_DV)
                total = accumulated(ties.to(v.dtype), v, total, PRECISION)
                number += tl.sum(ties, 1)
        out += (shared / tl.maximum(number, 1.0))[:, None] * total
    store_tile(O + batch * o_b + head * o_h, out, first, o_t, o_d, TQ, DV, M, BLOCK_DV)


@operator("topk_attention")
def topk_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    places: int, scale: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Attention to the `places` highest scores of every row, at most `MOST`. Has no gradient."""
    slopes, lengths, documents = contiguous(slopes, lengths, small_ids(documents))
    out = room_for_output(q, v)
    grid, sizes, constants = one_pass(q, k, v, out, slopes, lengths, documents)
    topk_kernel[grid](
        q, k, v, out, slopes, lengths, documents, scale, *sizes, places,
        CAUSAL=causal, PLACES=triton.next_power_of_2(places),
        enable_fp_fusion=False,  # a score must be the same number when it is made again
        **constants,
    )  # fmt: skip
    return out


@topk_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, lengths: Tensor | None, documents: Tensor | None,
    places: int, scale: float, causal: bool,
) -> Tensor:  # fmt: skip
    return room_for_output(q, v)
