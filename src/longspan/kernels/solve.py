"""Entmax attention for long rows, the second stage of the forward: the threshold of every row, over its live tiles.

For alpha <= 1.5, and up to 2 for the rows with more candidates than `candidates.py` has room for.
"""

import triton
import triton.language as tl

from longspan.kernels.solver import curved_fall, gains, inside, joined_norm, positive
from longspan.kernels.tiles import (
    SIZES,
    block_of_queries,
    ids_of,
    keys_of,
    listed_scores,
    live_tiles_of,
    load_tile,
    of_other_launch,
    surveyed,
)


@triton.jit
def first_height(height, hint, valid, r, tail, KIND: tl.constexpr, TAIL: tl.constexpr):
    """Where to look first, from the survey's height and what it left as a hint."""
    if TAIL:
        # The survey solved sum u^2 = 1. Were the scores beyond its threshold exponentially distributed, sum u^r there
        # would be this, and fall at this rate.
        rate = 2.0 * tl.maximum(hint, 1e-20)
        expected = tl.maximum(tail * tl.exp2((2.0 - r) * tl.log2(rate)), 1.0)
        height -= tl.minimum(tl.log(expected) / rate, 0.9 * height)
    elif KIND == 4:
        height = tl.where(valid, hint, 0.0)
    else:
        # The survey's line lies below the norm. On rows of noise and of structure alike the root is about here.
        height -= tl.minimum(0.15 / tl.maximum(hint, 1e-20), 0.5 * height)
    return height


@triton.jit
def next_height(mass, gain_mass, support, height, low, high, r, aim, KIND: tl.constexpr):
    """A step from the sums at `height`, the bracket it leaves, and how far the norms were from 1."""
    norm, steepness = joined_norm(low * 0.0, low * 0.0, mass, gain_mass, r, KIND)
    farthest = tl.max(tl.where(height > 0, tl.abs(norm - 1.0), 0.0), 0)
    above = norm >= 1.0
    low, high = tl.where(above, low, height), tl.where(above, height, high)
    fall = curved_fall(mass, gain_mass, support, aim) if KIND == 4 else (norm - 1.0) / steepness
    return inside(height - fall, low, high), low, high, farthest


@triton.jit
def sums_at(z, maximum, height, mass, gain_mass, support, r, KIND: tl.constexpr):
    """Sums over rows at this height, with those of the scores `z` added."""
    u = tl.maximum(z - maximum[:, None] + height[:, None], 0.0)
    gain = gains(u, r, KIND)
    mass += tl.sum(gain * u, 1)
    gain_mass += tl.sum(gain, 1)
    if KIND == 4:
        support += tl.sum(positive(u), 1)
    return mass, gain_mass, support


@triton.jit
def _sums(q, K, k_t, k_d, begin, count, List, positions, own, maximum, height, mass, gain_mass, support,
          a, r, scale, slope, end, Documents, TK, D,
          KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr,
          PRECISION: tl.constexpr, MASKED: tl.constexpr,
          N: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Sums over the tiles `begin` to `count` of the list at this height."""
    for index in range(begin * (N // PART), count * (N // PART)):
        z = listed_scores(q, K, k_t, k_d, index, List, positions, own, a * scale, a * slope, end, Documents, TK, D,
                          CAUSAL, SLOPES, DOCUMENTS, PRECISION, MASKED, N, PART, BLOCK_D)  # fmt: skip
        mass, gain_mass, support = sums_at(z, maximum, height, mass, gain_mass, support, r, KIND)
    return mass, gain_mass, support


@triton.jit(do_not_specialize=SIZES)
def solve_kernel(Q, K, Maximum, Height, Hint, List, Counts, Over, Slopes, Lengths, Documents,
                 a, r, scale, tail, tolerance, aim, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, H, GROUP, TQ, TK, D, NQ, NK,
                 KIND: tl.constexpr, TAIL: tl.constexpr, COLLECTED: tl.constexpr,
                 CAUSAL: tl.constexpr, SLOPES: tl.constexpr, SPLIT: tl.constexpr, LENGTHS: tl.constexpr,
                 DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
                 M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """From the survey's heights to heights at which the weights sum to 1, within what the output's step can mend.

    COLLECTED: only the blocks with more candidates than could be collected.
    """
    pair, block, batch, head, first, rows, positions = block_of_queries(H, NQ, TQ, TK, M)
    if SPLIT:  # noqa: SIM102, the compiler would take both sides of an `and`
        if of_other_launch(Slopes, head, SLOPES):
            return
    valid = rows < TQ
    K, end, slope = keys_of(K, Lengths, Slopes, batch, head, GROUP, TK, k_b, k_h, LENGTHS, SLOPES)
    if DOCUMENTS:
        Documents += batch * TK
    limit = end if LENGTHS or not CAUSAL else None
    place = pair.to(tl.int64) * NQ + block
    if COLLECTED:  # noqa: SIM102, likewise
        if tl.load(Over + place) == 0:
            return
    own = ids_of(Documents, positions, TK, DOCUMENTS)
    List, masked, count = live_tiles_of(List, Counts, pair, block, NQ, NK)
    q = load_tile(Q + batch * q_b + head * q_h, first, q_t, q_d, TQ, D, M, BLOCK_D)
    line_place, maximum, height = surveyed(Maximum, Height, pair, rows, TQ)
    hint = tl.load(Hint + line_place, mask=valid, other=1.0)

    low, high = tl.zeros([M], tl.float32), height  # the root lies between these heights
    height = first_height(height, hint, valid, r, tail, KIND, TAIL)
    going = count > 0
    rounds = 0
    while going:
        mass = tl.zeros([M], tl.float32)
        gain_mass = tl.zeros([M], tl.float32)
        support = tl.zeros([M], tl.float32)
        mass, gain_mass, support = _sums(
            q, K, k_t, k_d, 0, masked, List, positions, own, maximum, height, mass, gain_mass, support,
            a, r, scale, slope, limit, Documents, TK, D,
            KIND, CAUSAL, SLOPES, DOCUMENTS, PRECISION, True, N, PART, BLOCK_D)  # fmt: skip
        mass, gain_mass, support = _sums(
            q, K, k_t, k_d, masked, count, List, positions, own, maximum, height, mass, gain_mass, support,
            a, r, scale, slope, limit, Documents, TK, D,
            KIND, CAUSAL, SLOPES, DOCUMENTS, PRECISION, False, N, PART, BLOCK_D)  # fmt: skip
        height, low, high, farthest = next_height(mass, gain_mass, support, height, low, high, r, aim, KIND)
        rounds += 1
        going = (farthest > tolerance) & (rounds < 32)
    tl.store(Height + line_place, height, mask=valid)
