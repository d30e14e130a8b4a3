"""Entmax attention for long rows, the last stage of the forward: weights times values over the live tiles."""

import triton
import triton.language as tl

from longspan.kernels.edges import edge_of_row, weights_from_edge
from longspan.kernels.solver import gains, joined_norm
from longspan.kernels.tiles import (
    SIZES,
    accumulated,
    block_of_queries,
    ids_of,
    keys_of,
    live_tiles_of,
    load_tile,
    narrowed,
    of_other_launch,
    row_scores,
    store_tile,
    surveyed,
)
from longspan.kernels.votes import any_above_0, ready_to_vote


@triton.jit
def _tiles(q, K, V, k_t, k_d, v_t, v_d, begin, count, List, Live, live_t, mark, positions, own, maximum, height,
           edge_height, edge_gain, out, mean, mass, gain_mass, support, entropy,
           a, r, scale, slope, end, Documents, TK, D, DV,
           KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr,
           PRECISION: tl.constexpr, MEAN: tl.constexpr, MAP: tl.constexpr, STATS: tl.constexpr, MASKED: tl.constexpr,
           VOTES: tl.constexpr, N: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr,
           BLOCK_DV: tl.constexpr):  # fmt: skip
    for index in range(begin * (N // PART), count * (N // PART)):
        tile = tl.load(List + index // (N // PART)).to(tl.int32)
        first = tile * N + index % (N // PART) * PART
        k = load_tile(K, first, k_t, k_d, TK, D, PART, BLOCK_D, WHOLE=not MASKED)
        v = load_tile(V, first, v_t, v_d, TK, DV, PART, BLOCK_DV, WHOLE=not MASKED)
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        keys = first + tl.arange(0, PART)
        z = row_scores(product, keys, positions, own, a * scale, a * slope, end, Documents, TK,
                       CAUSAL, SLOPES, DOCUMENTS, MASKED)  # fmt: skip
        if KIND == 1 or KIND < -2:
            p, gain = weights_from_edge(z, maximum[:, None], height[:, None], edge_height[:, None], edge_gain[:, None],
                                        r, KIND)  # fmt: skip
            kept = p
        else:
            kept = tl.maximum(z - maximum[:, None] + height[:, None], 0.0)
            gain = gains(kept, r, KIND)
            p = gain * kept
        mass += tl.sum(p, 1)
        out = accumulated(p.to(v.dtype), v, out, PRECISION)
        if KIND == 1 or KIND < -2:
            gain *= (8192.0 / tl.maximum(edge_gain, 8192.0))[:, None]  # in units that every dtype has
        narrow = narrowed(gain, v.dtype)
        if KIND == 1 or KIND < -2:
            # One gain may be a thousand times the others, so the mean is that of the gains as the product rounds them.
            gain = narrow.to(tl.float32)
        tile_gain = tl.sum(gain, 1)
        gain_mass += tile_gain
        if MEAN:
            mean = accumulated(narrow, v, mean, PRECISION)
        if MAP:
            # Above alpha 2 a gain may be nothing in those units.
            live = any_above_0(tl.sum(p, 1) if KIND == 1 or KIND < -2 else tile_gain, VOTES)
            tl.store(Live + tl.cast(tile, tl.int64) * live_t, tl.cast(mark, tl.int8), mask=live)
        if STATS:
            support += tl.sum(tl.where(kept > 0, 1.0, 0.0), 1)
            entropy -= tl.sum(p * tl.log(tl.maximum(p, 1e-37)), 1)
    return out, mean, mass, gain_mass, support, entropy


@triton.jit(do_not_specialize=SIZES)
def output_kernel(Q, K, V, O, Mean, Maximum, Height, EdgeGain, Bound, Support, Entropy, List, Counts, Live,
                  Slopes, Lengths, Documents, a, r, scale, slack,
                  q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
                  H, GROUP, TQ, TK, D, DV, NQ, NK,
                  KIND: tl.constexpr, CONVEX: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr,
                  SPLIT: tl.constexpr, LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
                  MEAN: tl.constexpr, GRAD: tl.constexpr, MAP: tl.constexpr, STATS: tl.constexpr,
                  VOTES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr,
                  BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """The output of a block of queries; for the backward the mean of the values under the gains, and a map of tiles.

    The solver's last step is not looked at before it gets here. Where the scores of a row are a peak over a plateau it
    may have crossed the edge; then the row's norm is more than `slack` from 1, and the block takes a step and goes
    over its tiles once more. No height exceeds the survey's, which all live tiles are listed for.

    Without MEAN, which GRAD needs, the weights are divided by their sum in place of the last step.
    """
    if VOTES:
        ready_to_vote()
    pair, block, batch, head, first, rows, positions = block_of_queries(H, NQ, TQ, TK, M)
    if SPLIT:  # noqa: SIM102, the compiler would take both sides of an `and`
        if of_other_launch(Slopes, head, SLOPES):
            return
    valid = rows < TQ
    K, end, slope = keys_of(K, Lengths, Slopes, batch, head, GROUP, TK, k_b, k_h, LENGTHS, SLOPES)
    V += batch * v_b + head // GROUP * v_h
    if DOCUMENTS:
        Documents += batch * TK
    limit = end if LENGTHS or not CAUSAL else None
    mark = tl.where(first + M > TQ, 2, 1)  # the last block may have rows beyond the end
    Live += pair.to(tl.int64) * NK * NQ + block
    own = ids_of(Documents, positions, TK, DOCUMENTS)
    List, masked, count = live_tiles_of(List, Counts, pair, block, NQ, NK)
    q = load_tile(Q + batch * q_b + head * q_h, first, q_t, q_d, TQ, D, M, BLOCK_D)
    line_place, maximum, height = surveyed(Maximum, Height, pair, rows, TQ)
    bound = tl.load(Bound + line_place, mask=valid, other=0.0)
    edge_height, edge_gain = edge_of_row(height, EdgeGain, line_place, valid, a, KIND)
    out = tl.zeros([M, BLOCK_DV], tl.float32)
    mean, mass, gain_mass, support, entropy = out, height * 0.0, height * 0.0, height * 0.0, height * 0.0
    rounds = 0
    going = rounds == 0
    while going:
        out = tl.zeros([M, BLOCK_DV], tl.float32)
        mean = tl.zeros([M, BLOCK_DV], tl.float32)
        mass = tl.zeros([M], tl.float32)
        gain_mass = tl.zeros([M], tl.float32)
        support = tl.zeros([M], tl.float32)
        entropy = tl.zeros([M], tl.float32)
        out, mean, mass, gain_mass, support, entropy = _tiles(
            q, K, V, k_t, k_d, v_t, v_d, 0, masked, List, Live, NQ, 2, positions, own, maximum, height,
            edge_height, edge_gain, out, mean, mass, gain_mass, support, entropy,
            a, r, scale, slope, limit, Documents, TK, D, DV,
            KIND, CAUSAL, SLOPES, DOCUMENTS, PRECISION, MEAN, MAP, STATS, True,
            VOTES, N, PART, BLOCK_D, BLOCK_DV)  # fmt: skip
        out, mean, mass, gain_mass, support, entropy = _tiles(
            q, K, V, k_t, k_d, v_t, v_d, masked, count, List, Live, NQ, mark, positions, own, maximum, height,
            edge_height, edge_gain, out, mean, mass, gain_mass, support, entropy,
            a, r, scale, slope, limit, Documents, TK, D, DV,
            KIND, CAUSAL, SLOPES, DOCUMENTS, PRECISION, MEAN, MAP, STATS, False,
            VOTES, N, PART, BLOCK_D, BLOCK_DV)  # fmt: skip
        rounds += 1
        going = False
        if CONVEX:
            norm, steepness = joined_norm(mass * 0.0, mass * 0.0, mass, gain_mass, r, KIND)
            farthest = tl.max(tl.where(mass > 0, tl.abs(norm - 1.0), 0.0), 0)
            going = (farthest > slack) & (rounds < 8)
            nearer = tl.minimum(tl.maximum(height - (norm - 1.0) / steepness, 0.0), bound)
            height = tl.where(going, tl.where(mass > 0, nearer, height), height)
    sees = mass > 0
    if MEAN:
        mean = mean / tl.where(sees, gain_mass, 1.0)[:, None]
    if CONVEX and MEAN:
        # One Newton step more, on the output itself: the weights then sum to 1, and what is left of the error is second
        # order. The height only falls, so that no tile comes to life.
        excess = tl.where(sees, mass - 1.0, 0.0)
        out -= excess[:, None] * mean
        fall = tl.maximum(excess * a / tl.where(sees, gain_mass, 1.0), 0.0)
        tl.store(Height + line_place, tl.where(sees, height - fall, 0.0), mask=valid)
    else:
        out /= tl.where(sees, mass, 1.0)[:, None]
    store_tile(O + batch * o_b + head * o_h, out, first, o_t, o_d, TQ, DV, M, BLOCK_DV)
    if GRAD:
        store_tile(Mean + batch * o_b + head * o_h, mean, first, o_t, o_d, TQ, DV, M, BLOCK_DV)
    if STATS:
        tl.store(Support + line_place, support, mask=valid)
        tl.store(Entropy + line_place, entropy, mask=valid)
