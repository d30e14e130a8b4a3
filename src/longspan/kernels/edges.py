"""Entmax attention for long rows, alpha > 2: weights measured from the smallest survivor of a row, its *edge*.

There a weight has an infinite slope where it leaves 0, and a threshold measured from the maximum has no digits for
small weights; docs/solver.md says why. So a row is known by the score of its edge and by that score's own weight, from
which all others follow, exact in the differences of scores. The gain of the edge is kept beside them.

Most edges are found from copies, see `candidates.py`. The kernel here is for blocks of queries with more candidates
than fit: by passes over their live tiles, of which each row takes what it needs.

- *The edge.* A score survives if the weights of those above it, were it the threshold, sum to less than 1. A pass tries
  one number between the lowest and the highest score that are still in question, half way in the order of all floats,
  and finds the next score on the side that stays in question. So there are at most 32 of them, whatever the scores are.
- *Its weight.* The sum of all weights is convex in it: Newton's method falls from 1.
"""

import triton
import triton.language as tl

from longspan.kernels.solver import gains, quick_power, weights_and_gains
from longspan.kernels.tiles import (
    SIZES,
    block_of_queries,
    ids_of,
    keys_of,
    listed_scores,
    live_tiles_of,
    load_tile,
    surveyed,
)


@triton.jit
def power(x, exponent):
    """``x ^ exponent`` for x > 0."""
    return tl.exp2(exponent * tl.log2(tl.maximum(x, 1e-37)))


@triton.jit
def edge_of_row(weight, EdgeGain, places, valid, a, KIND: tl.constexpr):
    """The height of a row's edge above the threshold and its gain, alpha > 2; below nobody asks."""
    if KIND == 1 or KIND < -2:
        return quick_power(weight, a), tl.load(EdgeGain + places, mask=valid, other=1.0)
    return weight, weight


@triton.jit
def weights_from_edge(z, edge, weight, height, gain_there, r, KIND: tl.constexpr):
    """p, and the gain ``p ^ (2 - alpha)`` of each weight in its own score, both 0 beneath the threshold.

    `height` is ``weight ^ a``. Ties of the edge take its weight and its gain as they are given, because the height may
    be less than float32 has. All but `z` are shaped to lie along its rows.
    """
    gap = z - edge
    u = tl.maximum(gap + height, 0.0)
    gain = tl.minimum(gains(u, r, KIND), 1e30)
    return tl.where(gap == 0, weight, gain * u), tl.where(gap == 0, gain_there, gain)


@triton.jit
def lighter(weight, mass, others, ties, a):
    """The edge's weight one step of Newton's method on, and by how much the sum exceeded 1.

    From the sum `mass` of all weights, that of the gains of all `others` and the number of ties at the edge.
    """
    excess = tl.maximum(mass - 1.0, 0.0)
    slope = others * power(weight, a - 1.0) + ties
    # An edge that all but dies has less weight than the sum can tell.
    return tl.maximum(weight - excess / tl.maximum(slope, 1.0), 1e-37), excess


@triton.jit
def gain_of_edge(weight, others, ties, a, most):
    """The gain of the edge as gradients take it. It grows without bound as the weight falls, and is cut here.

    With a gain g far above the sum s of the others' it takes a gradient like theirs: g times a difference that is small
    like s/g. A cut at `most` times s changes gradients by one in that, and the difference has as many times the
    rounding of float32 or, where it has two floats (see `query_kernel`), that squared.
    """
    own = tl.exp2(tl.minimum((1.0 - a) * tl.log2(weight), 99.0))
    others = tl.minimum(tl.maximum(others + (ties - 1.0) * own, 1.0), 1e30)
    return tl.minimum(own, most * others)


@triton.jit
def weights_of_row(z, top, height, a, r, KIND: tl.constexpr):
    """p of the scores of a row, or of rows along which the rest is shaped, from what rows are known by: `top` and
    `height` are the maximum and the threshold's distance from it, above alpha 2 the edge and its weight."""
    if KIND == 1 or KIND < -2:
        survivors = tl.where(z >= top, z, float("-inf"))
        p, _gains = weights_from_edge(survivors, top, height, power(height, a), 0.0, r, KIND)
        return p
    p, _gains = weights_and_gains(z, top, height, r, KIND, "tf32")
    return p


@triton.jit
def parts_at(z, edge, weight, height, r, KIND: tl.constexpr):
    """Of every score for this edge: its weight, its gain if it does not tie, whether it ties; itself if it is below,
    -inf if not; itself if it is above, inf if not."""
    survivors = tl.where(z >= edge, z, float("-inf"))
    p, gain = weights_from_edge(survivors, edge, weight, height, 0.0, r, KIND)
    ties = tl.where(z == edge, 1.0, 0.0)
    return p, gain, ties, tl.where(z < edge, z, float("-inf")), tl.where(z > edge, z, float("inf"))


@triton.jit
def below_all(maximum, height):
    """A number that no survivor lies below, where the height of the threshold is at most `height`."""
    return maximum - height * 1.00001 - tl.abs(maximum) * 1e-6


@triton.jit
def trial_of(weight, lowest, highest, a):
    """The weight and the height to look at the scores with: none for an edge that is still a guess."""
    found = lowest > highest
    return tl.where(found, weight, 0.0), tl.where(found, power(weight, a), 0.0)


@triton.jit
def _order(x):
    """Integers in the order of the floats whose bits they are, or the other way round."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _half_way(low, high):
    """The float in the middle of all floats from `low` to `high`."""
    low, high = _order(low.to(tl.int32, bitcast=True)), _order(high.to(tl.int32, bitcast=True))
    return _order((low >> 1) + (high >> 1) + (low & high & 1)).to(tl.float32, bitcast=True)


@triton.jit
def next_trial(weight, lowest, highest, mass, others, ties, below, above, rounds, a):
    """What a pass has shown, by the sums over `parts_at` the edge and the scores next to it: the edge to look at next,
    its weight, the scores still in question, and whether there is anything left to find. Pass 0 was `below_all`."""
    found = lowest > highest
    survives = (mass < 1.0) & (rounds > 0)
    lowest = tl.where(found | survives, lowest, above)
    highest = tl.where(found | (survives == 0), highest, below)
    fallen, excess = lighter(weight, mass, others, ties, a)
    weight = tl.where(found, fallen, weight)
    edge = tl.where(lowest > highest, lowest, _half_way(lowest, highest))
    return edge, weight, lowest, highest, tl.where(found, excess > 1e-6, True)


@triton.jit
def _sums(q, K, k_t, k_d, begin, count, List, positions, own, edge, weight, height, mass, others, ties, below, above,
          a, r, scale, slope, end, Documents, TK, D,
          KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr,
          PRECISION: tl.constexpr, MASKED: tl.constexpr,
          N: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Sums over the tiles `begin` to `count` of the list for this edge, and the next scores below and above it."""
    for index in range(begin * (N // PART), count * (N // PART)):
        z = listed_scores(q, K, k_t, k_d, index, List, positions, own, a * scale, a * slope, end, Documents, TK, D,
                          CAUSAL, SLOPES, DOCUMENTS, PRECISION, MASKED, N, PART, BLOCK_D)  # fmt: skip
        p, gain, tie, lower, higher = parts_at(z, edge[:, None], weight[:, None], height[:, None], r, KIND)
        mass += tl.sum(p, 1)
        others += tl.sum(gain, 1)
        ties += tl.sum(tie, 1)
        below = tl.maximum(below, tl.max(lower, 1))
        above = tl.minimum(above, tl.min(higher, 1))
    return mass, others, ties, below, above


@triton.jit(do_not_specialize=SIZES)
def edge_kernel(Q, K, Maximum, Height, EdgeGain, List, Counts, Over, Slopes, Lengths, Documents,
                a, r, scale, most, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, H, GROUP, TQ, TK, D, NQ, NK,
                KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, LENGTHS: tl.constexpr,
                DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
                M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """The edges of the blocks with more candidates than could be collected, in the place of maximum and height."""
    pair, block, batch, head, first, rows, positions = block_of_queries(H, NQ, TQ, TK, M)
    valid = rows < TQ
    if tl.load(Over + pair.to(tl.int64) * NQ + block) == 0:
        return
    K, end, slope = keys_of(K, Lengths, Slopes, batch, head, GROUP, TK, k_b, k_h, LENGTHS, SLOPES)
    if DOCUMENTS:
        Documents += batch * TK
    limit = end if LENGTHS or not CAUSAL else None
    own = ids_of(Documents, positions, TK, DOCUMENTS)
    List, masked, count = live_tiles_of(List, Counts, pair, block, NQ, NK)
    q = load_tile(Q + batch * q_b + head * q_h, first, q_t, q_d, TQ, D, M, BLOCK_D)
    line_place, maximum, height = surveyed(Maximum, Height, pair, rows, TQ)

    # The scores in question; above the highest all survive. The first pass finds the lowest that the survey left.
    edge = below_all(maximum, height)
    lowest, highest = edge, maximum
    weight = tl.full([M], 1.0, tl.float32)
    others, ties = weight * 0.0, weight
    going = count > 0
    rounds = 0
    while going:
        p, height = trial_of(weight, lowest, highest, a)
        mass = tl.zeros([M], tl.float32)
        others = tl.zeros([M], tl.float32)
        ties = tl.zeros([M], tl.float32)
        below = tl.full([M], float("-inf"), tl.float32)
        above = tl.full([M], float("inf"), tl.float32)
        mass, others, ties, below, above = _sums(
            q, K, k_t, k_d, 0, masked, List, positions, own, edge, p, height, mass, others, ties, below, above,
            a, r, scale, slope, limit, Documents, TK, D,
            KIND, CAUSAL, SLOPES, DOCUMENTS, PRECISION, True, N, PART, BLOCK_D)  # fmt: skip
        mass, others, ties, below, above = _sums(
            q, K, k_t, k_d, masked, count, List, positions, own, edge, p, height, mass, others, ties, below, above,
            a, r, scale, slope, limit, Documents, TK, D,
            KIND, CAUSAL, SLOPES, DOCUMENTS, PRECISION, False, N, PART, BLOCK_D)  # fmt: skip
        edge, weight, lowest, highest, unsolved = next_trial(
            weight, lowest, highest, mass, others, ties, below, above, rounds, a)  # fmt: skip
        rounds += 1
        going = (tl.max(unsolved.to(tl.int32), 0) > 0) & (rounds < 64)
    sees = edge < float("inf")
    tl.store(Maximum + line_place, tl.where(sees, edge, 0.0), mask=valid)
    tl.store(Height + line_place, tl.where(sees, weight, 0.0), mask=valid)
    tl.store(EdgeGain + line_place, gain_of_edge(weight, others, ties, a, most), mask=valid)
