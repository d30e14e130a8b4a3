"""Attention for long rows, backward: two kernels over the live tiles, each sum in a fixed order.

From the forward come, for every row, the maximum and the height, which give back every weight, and the mean of the
values under the gains. With it the gradient of a score is ``gain * (dp - dot(d_out, mean))``.

Above alpha 2 the largest gain of a row may be a million times the others. Then the mean of dp is nearly that element's
own, and float32 has no digits of their difference. But the gradients of a row's scores sum to 0: what their sum is
instead, over that of the gains, is what the mean is off. In float32 it is kept beside the mean as a second float.
"""

import triton
import triton.language as tl

from longspan.kernels.edges import edge_of_row, weights_from_edge
from longspan.kernels.solver import weights_and_gains
from longspan.kernels.tiles import (
    SIZES,
    accumulated,
    block_of_queries,
    distances,
    end_of,
    group_of_other_launch,
    ids_of,
    key_tiles,
    load_tile,
    masked_tile,
    narrowed,
    of_other_launch,
    row_scores,
    scores_of,
    slope_of,
    store_tile,
)


@triton.jit
def _query_tiles(q, d_o, K, V, k_t, k_d, v_t, v_d, begin, count, List, start, inner, whole, positions, own,
                 maximum, height, edge_height, edge_gain, delta,
                 d_q, d_slope, gain_mass, residue, gain_keys, gain_distance,
                 a, r, scale, slope, end, Documents, TK, D, DV,
                 KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr,
                 PRECISION: tl.constexpr, REFINE: tl.constexpr, SLOPES_LEARN: tl.constexpr, MASKED: tl.constexpr,
                 N: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    # As the forward makes it, to the last digit: in the interpreter numbers have more of them than in a tensor.
    factor, unit = scale if KIND == 0 else a * scale, 1.0 if KIND == 0 else a
    for index in range(begin * (N // PART), count * (N // PART)):
        tile = index // (N // PART)
        if KIND != 0:
            tile = tl.load(List + tile).to(tl.int32)
        elif MASKED:
            tile = masked_tile(tile, start, inner, whole)
        first = tile * N + index % (N // PART) * PART
        k = load_tile(K, first, k_t, k_d, TK, D, PART, BLOCK_D, WHOLE=not MASKED)
        v = load_tile(V, first, v_t, v_d, TK, DV, PART, BLOCK_DV, WHOLE=not MASKED)
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        d_p = tl.dot(d_o, tl.trans(v), input_precision=PRECISION)
        keys = first + tl.arange(0, PART)
        z = row_scores(product, keys, positions, own, factor, unit * slope, end, Documents, TK,
                       CAUSAL, SLOPES, DOCUMENTS, MASKED)  # fmt: skip
        if KIND == 1 or KIND < -2:
            _, gain = weights_from_edge(z, maximum[:, None], height[:, None], edge_height[:, None], edge_gain[:, None],
                                        r, KIND)  # fmt: skip
        else:
            _, gain = weights_and_gains(z, maximum[:, None], height[:, None], r, KIND, PRECISION)
        d_s = gain * (d_p - delta[:, None])
        if SLOPES and SLOPES_LEARN:
            d_slope -= tl.sum(d_s * distances(keys[None, :], positions[:, None]), 1)
        d_q = accumulated(narrowed(d_s, k.dtype), k, d_q, PRECISION)
        if REFINE:
            gain_mass += tl.sum(gain, 1)
            residue += tl.sum(d_s, 1)
            gain_keys = accumulated(gain, k, gain_keys, PRECISION)
            if SLOPES and SLOPES_LEARN:
                gain_distance += tl.sum(gain * distances(keys[None, :], positions[:, None]), 1)
    return d_q, d_slope, gain_mass, residue, gain_keys, gain_distance


@triton.jit(do_not_specialize=SIZES)
def query_kernel(Q, K, V, dO, dQ, Mean, Delta, Residue, Maximum, Height, EdgeGain, List, Counts, Slopes, dSlopes,
                 Lengths, Documents, Ranges, a, r, scale,
                 q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
                 mean_b, mean_h, mean_t, mean_d, dq_b, dq_h, dq_t, dq_d, H, GROUP, TQ, TK, D, DV, NQ, NK,
                 KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, SPLIT: tl.constexpr,
                 LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr, MASK_ALL: tl.constexpr, PRECISION: tl.constexpr,
                 REFINE: tl.constexpr, SLOPES_LEARN: tl.constexpr,
                 M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr,
                 BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """The gradients of a block of queries, and for every row the mean of the incoming gradient under its gains."""
    pair, block, batch, head, first, rows, positions = block_of_queries(H, NQ, TQ, TK, M)
    if SPLIT:  # noqa: SIM102, the compiler would take both sides of an `and`
        if of_other_launch(Slopes, head, SLOPES):
            return
    K += batch * k_b + head // GROUP * k_h
    V += batch * v_b + head // GROUP * v_h
    if DOCUMENTS:
        Documents += batch * TK
        if KIND == 0:
            Ranges += (batch * NQ + block) * 3
    end = end_of(Lengths, batch, TK, LENGTHS)
    limit = end if LENGTHS or not CAUSAL else None
    slope = slope_of(Slopes, head, SLOPES)
    q = load_tile(Q + batch * q_b + head * q_h, first, q_t, q_d, TQ, D, M, BLOCK_D)
    d_o = load_tile(dO + batch * o_b + head * o_h, first, o_t, o_d, TQ, DV, M, BLOCK_DV)
    mean = load_tile(Mean + batch * mean_b + head * mean_h, first, mean_t, mean_d, TQ, DV, M, BLOCK_DV)
    delta = tl.sum(d_o.to(tl.float32) * mean.to(tl.float32), 1)
    line_place = pair.to(tl.int64) * TQ + rows
    tl.store(Delta + line_place, delta, mask=rows < TQ)
    maximum = tl.load(Maximum + line_place, mask=rows < TQ, other=1e30)  # beyond the end nothing survives
    height = tl.load(Height + line_place, mask=rows < TQ, other=0.0)
    edge_height, edge_gain = edge_of_row(height, EdgeGain, line_place, rows < TQ, a, KIND)
    own = ids_of(Documents, positions, TK, DOCUMENTS)
    start, inner, whole = 0, 0, 0
    if KIND == 0:
        start, inner, whole, stop = key_tiles(first + TK - TQ, tl.minimum(first + M, TQ) - 1 + TK - TQ, end, Ranges, TK,
                                              N, CAUSAL, DOCUMENTS, MASK_ALL)  # fmt: skip
        masked, second, last = inner - start + stop - whole, inner, whole
    else:
        place = pair.to(tl.int64) * NQ + block
        List += place * NK
        masked, last = tl.load(Counts + place * 2), tl.load(Counts + place * 2 + 1)
        second = masked
    d_q = tl.zeros([M, BLOCK_D], tl.float32)
    d_slope = tl.zeros([M], tl.float32)
    gain_mass, residue, gain_keys, gain_distance = d_slope, d_slope, d_q, d_slope
    d_q, d_slope, gain_mass, residue, gain_keys, gain_distance = _query_tiles(
        q, d_o, K, V, k_t, k_d, v_t, v_d, 0, masked, List, start, inner, whole, positions, own,
        maximum, height, edge_height, edge_gain, delta, d_q, d_slope, gain_mass, residue, gain_keys, gain_distance,
        a, r, scale, slope, limit, Documents, TK, D, DV,
        KIND, CAUSAL, SLOPES, DOCUMENTS, PRECISION, REFINE, SLOPES_LEARN, True, N, PART, BLOCK_D, BLOCK_DV)  # fmt: skip
    if not MASK_ALL:  # an empty loop would do, but it makes CUDA 12.8's assembler crash
        d_q, d_slope, gain_mass, residue, gain_keys, gain_distance = _query_tiles(
            q, d_o, K, V, k_t, k_d, v_t, v_d, second, last, List, start, inner, whole, positions, own,
            maximum, height, edge_height, edge_gain, delta, d_q, d_slope, gain_mass, residue, gain_keys, gain_distance,
            a, r, scale, slope, limit, Documents, TK, D, DV,
            KIND, CAUSAL, SLOPES, DOCUMENTS, PRECISION, REFINE, SLOPES_LEARN, False,
            N, PART, BLOCK_D, BLOCK_DV)  # fmt: skip
    if REFINE:
        residue /= tl.maximum(gain_mass, 1e-37)
        tl.store(Residue + line_place, residue, mask=rows < TQ)
        d_q -= residue[:, None] * gain_keys
        d_slope += residue * gain_distance
    store_tile(dQ + batch * dq_b + head * dq_h, d_q * scale, first, dq_t, dq_d, TQ, D, M, BLOCK_D)
    if SLOPES and SLOPES_LEARN:
        tl.store(dSlopes + pair.to(tl.int64) * NQ + block, tl.sum(d_slope, 0))


@triton.jit
def _key_tiles(k, v, Q, dO, q_t, q_d, o_t, o_d, begin, unseen, count, List, Maximum, Height, EdgeGain, Delta, Residue,
               keys, theirs, d_k, d_v,
               a, r, scale, slope, end, Documents, TQ, TK, D, DV,
               KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr,
               PRECISION: tl.constexpr, REFINE: tl.constexpr, MASKED: tl.constexpr,
               M: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    # As the forward makes it, to the last digit: in the interpreter numbers have more of them than in a tensor.
    factor, unit = scale if KIND == 0 else a * scale, 1.0 if KIND == 0 else a
    for index in range(begin * (M // PART) + unseen, count * (M // PART)):
        block = index // (M // PART)
        if KIND != 0:
            block = tl.load(List + block).to(tl.int32)
        first = block * M + index % (M // PART) * PART
        rows = first + tl.arange(0, PART)
        WHOLE: tl.constexpr = KIND != 0 and not MASKED  # softmax's last block may have rows beyond the end
        q = load_tile(Q, first, q_t, q_d, TQ, D, PART, BLOCK_D, WHOLE=WHOLE)
        d_o = load_tile(dO, first, o_t, o_d, TQ, DV, PART, BLOCK_DV, WHOLE=WHOLE)
        if WHOLE:
            maximum, height, delta = tl.load(Maximum + rows), tl.load(Height + rows), tl.load(Delta + rows)
        else:
            maximum = tl.load(Maximum + rows, mask=rows < TQ, other=1e30)
            height = tl.load(Height + rows, mask=rows < TQ, other=0.0)
            delta = tl.load(Delta + rows, mask=rows < TQ, other=0.0)
        positions = rows + TK - TQ
        own = ids_of(Documents, positions, TK, DOCUMENTS and MASKED)
        # Rows are queries, as in the other kernels, so that their numbers lie along the tile.
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        d_p = tl.dot(d_o, tl.trans(v), input_precision=PRECISION)
        z = scores_of(product, keys[None, :], positions[:, None], factor, unit * slope, end,
                      theirs[None, :], own[:, None], CAUSAL, SLOPES, DOCUMENTS, MASKED)  # fmt: skip
        if KIND == 1 or KIND < -2:
            edge_height, edge_gain = edge_of_row(height, EdgeGain, rows, rows < TQ, a, KIND)
            p, gain = weights_from_edge(z, maximum[:, None], height[:, None], edge_height[:, None], edge_gain[:, None],
                                        r, KIND)  # fmt: skip
        else:
            p, gain = weights_and_gains(z, maximum[:, None], height[:, None], r, KIND, PRECISION)
        d_v = accumulated(tl.trans(p.to(d_o.dtype)), d_o, d_v, PRECISION)
        d_p -= delta[:, None]
        if REFINE:
            d_p -= tl.load(Residue + rows, mask=rows < TQ, other=0.0)[:, None]
        d_s = narrowed(gain * d_p, q.dtype)
        d_k = accumulated(tl.trans(d_s), q, d_k, PRECISION)
    return d_k, d_v


@triton.jit(do_not_specialize=SIZES)
def key_kernel(Q, K, V, dO, dK, dV, Delta, Residue, Maximum, Height, EdgeGain, List, Counts, Slopes, Lengths, Documents,
               a, r, scale,
               q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
               dk_b, dk_h, dk_t, dk_d, dv_b, dv_h, dv_t, dv_d, H, GROUP, TQ, TK, D, DV, NQ, NK,
               KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, SPLIT: tl.constexpr,
               LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr, MASK_ALL: tl.constexpr, PRECISION: tl.constexpr,
               REFINE: tl.constexpr,
               M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr, KEYS: tl.constexpr,
               BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """The gradients of KEYS keys and values of a tile, over the blocks of queries that use the tile."""
    kv_heads = H // GROUP
    parts = NK * (N // KEYS)
    pair, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    tile, first = part // (N // KEYS), part * KEYS
    batch, kv_head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    if SPLIT:  # noqa: SIM102, the compiler would take both sides of an `and`
        if group_of_other_launch(Slopes, kv_head, GROUP, SLOPES):
            return
    keys = first + tl.arange(0, KEYS)
    if DOCUMENTS:
        Documents += batch * TK
    theirs = ids_of(Documents, keys, TK, DOCUMENTS)
    end = end_of(Lengths, batch, TK, LENGTHS)
    limit = end if LENGTHS or not CAUSAL else None
    k = load_tile(K + batch * k_b + kv_head * k_h, first, k_t, k_d, TK, D, KEYS, BLOCK_D)
    v = load_tile(V + batch * v_b + kv_head * v_h, first, v_t, v_d, TK, DV, KEYS, BLOCK_DV)
    d_k = tl.zeros([KEYS, BLOCK_D], tl.float32)
    d_v = tl.zeros([KEYS, BLOCK_DV], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        slope = slope_of(Slopes, head, SLOPES)
        place = (batch * H + head) * NK + tile
        begin, Tiles = 0, List
        if KIND == 0:
            # The first block that sees the first key, the first that sees them all without a mask, the end.
            begin = tl.maximum(tile * N - (TK - TQ), 0) // M if CAUSAL else 0
            masked = tl.cdiv(tl.maximum(tile * N + N - 1 - (TK - TQ), 0), M) if CAUSAL else 0
            masked = tl.where((tile * N + N > TK) | MASK_ALL | DOCUMENTS, NQ, tl.minimum(tl.maximum(masked, begin), NQ))
            count = NQ
        else:
            masked, count = tl.load(Counts + place * 2), tl.load(Counts + place * 2 + 1)
            Tiles = List + place * NQ
        unseen = 0
        if CAUSAL:
            # Parts of the first block that lie before the first key: where a tile is taken in halves, the second half
            # of the diagonal one has some.
            block = begin if KIND == 0 else tl.load(Tiles).to(tl.int32)  # of an empty list anything, for nothing
            unseen = tl.maximum(first - (block * M + TK - TQ), 0) // PART
            unseen = tl.minimum(unseen, tl.minimum(masked - begin, 1) * (M // PART))
        offset = (batch * H + head) * TQ
        Refined = Residue + offset if REFINE else Residue
        Gains = EdgeGain + offset if KIND == 1 or KIND < -2 else EdgeGain
        d_k, d_v = _key_tiles(
            k, v, Q + batch * q_b + head * q_h, dO + batch * o_b + head * o_h, q_t, q_d, o_t, o_d,
            begin, unseen, masked, Tiles, Maximum + offset, Height + offset, Gains, Delta + offset, Refined,
            keys, theirs, d_k, d_v, a, r, scale, slope, limit, Documents, TQ, TK, D, DV,
            KIND, CAUSAL, SLOPES, DOCUMENTS, PRECISION, REFINE, True, M, PART, BLOCK_D, BLOCK_DV)  # fmt: skip
        d_k, d_v = _key_tiles(
            k, v, Q + batch * q_b + head * q_h, dO + batch * o_b + head * o_h, q_t, q_d, o_t, o_d,
            masked, 0, count, Tiles, Maximum + offset, Height + offset, Gains, Delta + offset, Refined,
            keys, theirs, d_k, d_v, a, r, scale, slope, limit, Documents, TQ, TK, D, DV,
            KIND, CAUSAL, SLOPES, DOCUMENTS, PRECISION, REFINE, False, M, PART, BLOCK_D, BLOCK_DV)  # fmt: skip
    store_tile(dK + batch * dk_b + kv_head * dk_h, d_k * scale, first, dk_t, dk_d, TK, D, KEYS, BLOCK_D)
    store_tile(dV + batch * dv_b + kv_head * dv_h, d_v, first, dv_t, dv_d, TK, DV, KEYS, BLOCK_DV)


@triton.jit(do_not_specialize=SIZES)
def column_kernel(Live, List, Counts, NQ, CHUNK: tl.constexpr):
    """For a tile of keys, the list of the blocks of queries to which it is live; those that need a mask come first."""
    place = tl.program_id(0).to(tl.int64)
    count = 0
    for mark in tl.static_range(2, 0, -1):
        for start in range(0, NQ, CHUNK):
            blocks = start + tl.arange(0, CHUNK)
            live = (tl.load(Live + place * NQ + blocks, mask=blocks < NQ, other=0) == mark).to(tl.int32)
            tl.store(List + place * NQ + count + tl.cumsum(live, 0) - live, blocks.to(tl.int16), mask=live > 0)
            count += tl.sum(live, 0)
        tl.store(Counts + place * 2 + 2 - mark, count)
