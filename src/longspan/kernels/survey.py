"""Entmax attention for long rows, forward: one dense look at the scores, everything else on the tiles that survive it.

One program for a block of queries of one head, in three stages, each a kernel.

1. *Survey*, every visible tile once, from the diagonal back. For each row it keeps the maximum so far and a height: the
   threshold lies at most that far below the maximum. A tile with nothing above any row's threshold is dead, costs one
   product and one maximum, and is never looked at again: thresholds only rise. A live tile goes on a list and raises
   the thresholds.
2. *Solve*, over the list, as often as it takes: sums at the current height, a step. Above alpha 1.5 the list is gone
   over once, to copy out the few scores above the threshold, and the rest is done on the copies: `candidates.py`.
3. *Output*, over the list; its sums give one more step, which costs nothing.

How a threshold rises before the whole row is seen: with r = 1/(alpha-1), the norm ||[z - t]_+||_r is convex in t and
the threshold is where it is 1. Any minorant of it has its root below. The survey carries a tangent of the norm over
the tiles so far, a line; a new tile's sums are added under the norm, and the tangent of the result is the next line.
Newton's method on the norm is exact for ties, where on the sum it would take many steps. The survey may work with a
whole power R >= r, without transcendental functions: its threshold is then a lower bound too, see `survey_power`.

A bound is no guess. At alpha 1.5 the survey also carries what sum u^2 and sum u should be by now, thinned out by a
model of the tail as the threshold rises, and leaves the height at which the former should be 1.
"""

import triton
import triton.language as tl

from longspan.kernels.gpus import highest
from longspan.kernels.solver import gains, joined_norm, quotient, thinned, thinned_to_1
from longspan.kernels.tiles import (
    SIZES,
    block_of_queries,
    ids_of,
    key_tiles,
    keys_of,
    load_tile,
    masked_tile,
    of_other_launch,
    row_scores,
)
from longspan.kernels.votes import any_above_0, ready_to_vote


@triton.jit
def _sums_above(z, unit, maximum, height, r, KIND: tl.constexpr):
    """The sums of u^r and u^(r-1) over the scores above the threshold."""
    u = tl.maximum(z * unit - maximum[:, None] + height[:, None], 0.0)
    gain = gains(u, r, KIND)
    return tl.sum(gain * u, 1), tl.sum(gain, 1)


@triton.jit
def _highest_above_0(z):
    """The maximum of every row, or 0 if that is less.

    As whole numbers, of which the GPU compares three at a time: the bits of floats that are not negative have the same
    order, and those of others are negative.
    """
    return tl.maximum(tl.max(z.to(tl.int32, bitcast=True), 1), 0).to(tl.float32, bitcast=True)


@triton.jit
def survey_tile(product, tile, keys, positions, own, maximum, height, line, slope_of_line, mass, gain_mass, fallen,
                 count, masked, List, a, r, scale, slope, end, Documents, TK,
                 KIND: tl.constexpr, GUESS: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr,
                 DOCUMENTS: tl.constexpr, MASKED: tl.constexpr, ABOVE_0: tl.constexpr,
                 VOTES: tl.constexpr):  # fmt: skip
    if SLOPES or MASKED:
        z = row_scores(product, keys, positions, own, a * scale, a * slope, end, Documents, TK,
                       CAUSAL, SLOPES, DOCUMENTS, MASKED)  # fmt: skip
        unit = 1.0
    else:
        z, unit = product, a * scale
    top = (_highest_above_0(z) if ABOVE_0 else tl.max(z, 1)) * unit
    # A hair more than the height, so that rounding kills no survivor.
    if any_above_0(top - maximum + height * 1.00001, VOTES):
        tl.store(List + count, tile.to(tl.int16))
        count += 1
        risen = tl.maximum(maximum, top)
        lower = tl.minimum(height + (risen - maximum), 1.0)
        rise = (risen - maximum) - (lower - height)
        line = tl.maximum(line - slope_of_line * rise, 0.0)
        reach = height + fallen
        fallen += rise
        maximum, height = risen, lower
        tile_mass, tile_gain = _sums_above(z, unit, maximum, height, r, KIND)
        norm, steepness = joined_norm(line, slope_of_line, tile_mass, tile_gain, r, KIND)
        # Two steps where one is too long to guess over: for the first keys of a row, and for the first tile without a
        # mask if that is where a row that saw few meets many alike.
        again = MASKED
        if not MASKED and count == masked + 1:
            again = highest(norm) > 4.0
        if again:
            fall = tl.maximum(quotient(norm - 1.0, steepness), 0.0)
            height -= fall
            fallen += fall
            line = tl.maximum(line - slope_of_line * fall, 0.0)
            tile_mass, tile_gain = _sums_above(z, unit, maximum, height, r, KIND)
            norm, steepness = joined_norm(line, slope_of_line, tile_mass, tile_gain, r, KIND)
        fall = tl.maximum(quotient(norm - 1.0, steepness), 0.0)
        height -= fall
        if GUESS:
            mass, gain_mass = thinned(mass, gain_mass, reach, fallen)
            mass, gain_mass, fallen = mass + tile_mass, gain_mass + tile_gain, fall
        line, slope_of_line = tl.minimum(norm, 1.0), steepness
    return maximum, height, line, slope_of_line, mass, gain_mass, fallen, count


@triton.jit
def _whole_tiles(q, K, k_t, k_d, begin, end, whole, positions, own, maximum, height, line, slope_of_line, mass,
                 gain_mass, fallen, count, masked, List, a, r, scale, slope, limit, Documents, TK, D,
                 KIND: tl.constexpr, GUESS: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr,
                 DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, ABOVE_0: tl.constexpr,
                 VOTES: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """The tiles `begin` to `end` before the tile `whole`, nearest first."""
    for index in range(begin, end):
        tile = whole - 1 - index
        k = load_tile(K, tile * N, k_t, k_d, TK, D, N, BLOCK_D, WHOLE=True)
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        maximum, height, line, slope_of_line, mass, gain_mass, fallen, count = survey_tile(
            product, tile, tile * N + tl.arange(0, N), positions, own, maximum, height, line, slope_of_line, mass,
            gain_mass, fallen, count, masked, List, a, r, scale, slope, limit, Documents, TK,
            KIND, GUESS, CAUSAL, SLOPES, DOCUMENTS, False, ABOVE_0, VOTES)  # fmt: skip
    return maximum, height, line, slope_of_line, mass, gain_mass, fallen, count


@triton.jit
def first_in_reach(reach, maximum, height, a, scale, slope, valid, position, inner, whole, N: tl.constexpr):
    """The first tile, not before `inner`, that may hold a survivor under a slope. `reach`: |q| |k| of every row.

    scale |q| |k| - slope distance is under the threshold beyond a distance, for every row.
    """
    room = tl.where(valid, reach * (a * scale * 1.001) - maximum + height, -float("inf"))
    window = tl.minimum(tl.maximum(highest(room) / tl.maximum(a * slope, 1e-30), -1e9), 1e9)
    window = tl.where(slope > 0, window, 1e9)
    inner = tl.maximum(inner, (position.to(tl.float32) - window).to(tl.int32) // N)
    return tl.minimum(inner, whole)


@triton.jit
def store_survey(Maximum, Height, Bound, Hint, Counts, pair, place, rows, TQ, maximum, height,
                 slope_of_line, mass, gain_mass, fallen, masked, count, GUESS: tl.constexpr):  # fmt: skip
    valid, sees = rows < TQ, maximum > -1e30
    line_place = pair.to(tl.int64) * TQ + rows
    tl.store(Maximum + line_place, tl.where(sees, maximum, 0.0), mask=valid)
    tl.store(Height + line_place, tl.where(sees, height, 0.0), mask=valid)
    tl.store(Bound + line_place, tl.where(sees, height, 0.0), mask=valid)
    hint = slope_of_line
    if GUESS:
        mass, gain_mass = thinned(mass, gain_mass, height + fallen, fallen)
        fall = tl.minimum(tl.maximum(thinned_to_1(mass, gain_mass, height), 0.0), 0.9 * height)
        hint = tl.where(sees, height - fall, 0.0)
    tl.store(Hint + line_place, hint, mask=valid)
    tl.store(Counts + place * 2, masked)
    tl.store(Counts + place * 2 + 1, count)


@triton.jit(do_not_specialize=SIZES)
def survey_kernel(Q, K, Maximum, Height, Bound, Hint, List, Counts, Slopes, Lengths, Documents, Ranges, KeyNorms,
                  a, r, scale, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, H, GROUP, TQ, TK, D, NQ, NK,
                  KIND: tl.constexpr, GUESS: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr,
                  SPLIT: tl.constexpr, LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr, MASK_ALL: tl.constexpr,
                  PRECISION: tl.constexpr, VOTES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                  BLOCK_D: tl.constexpr):  # fmt: skip
    """The maximum of every row, a height that its threshold does not lie below, and the list of live tiles.

    `Bound` keeps that height when others move on. And a hint for the solver: where the height will be (GUESS), or the
    slope of the norm in it.
    """
    if VOTES:
        ready_to_vote()
    pair, block, batch, head, first, rows, positions = block_of_queries(H, NQ, TQ, TK, M)
    if SPLIT:  # noqa: SIM102, the compiler would take both sides of an `and`
        if of_other_launch(Slopes, head, SLOPES):
            return
    valid = rows < TQ
    K, end, slope = keys_of(K, Lengths, Slopes, batch, head, GROUP, TK, k_b, k_h, LENGTHS, SLOPES)
    if DOCUMENTS:
        Documents += batch * TK
        Ranges += (batch * NQ + block) * 3
    own = ids_of(Documents, positions, TK, DOCUMENTS)
    limit = end if LENGTHS or not CAUSAL else None
    place = pair.to(tl.int64) * NQ + block
    List += place * NK
    q = load_tile(Q + batch * q_b + head * q_h, first, q_t, q_d, TQ, D, M, BLOCK_D)
    start, inner, whole, stop = key_tiles(first + TK - TQ, tl.minimum(first + M, TQ) - 1 + TK - TQ, end, Ranges, TK,
                                          N, CAUSAL, DOCUMENTS, MASK_ALL)  # fmt: skip

    maximum = tl.where(valid, -1e30, 1e30)  # beyond the end nothing is ever above
    height = tl.full([M], 1.0, tl.float32)
    line = tl.zeros([M], tl.float32)
    slope_of_line = tl.zeros([M], tl.float32)
    mass, gain_mass, fallen = line, line, line  # the sums of the guess, and how far the threshold has risen since
    count = 0
    edges = inner - start + stop - whole
    for index in range(edges):
        tile = masked_tile(edges - 1 - index, start, inner, whole)
        k = load_tile(K, tile * N, k_t, k_d, TK, D, N, BLOCK_D)
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        maximum, height, line, slope_of_line, mass, gain_mass, fallen, count = survey_tile(
            product, tile, tile * N + tl.arange(0, N), positions, own, maximum, height, line, slope_of_line, mass,
            gain_mass, fallen, count, 0, List, a, r, scale, slope, limit, Documents, TK,
            KIND, GUESS, CAUSAL, SLOPES, DOCUMENTS, True, False, VOTES)  # fmt: skip
    masked = count
    if SLOPES and CAUSAL and not MASK_ALL:
        norm = tl.load(KeyNorms + pair // H * (H // GROUP) + pair % H // GROUP)
        reach = tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)) * norm
        inner = first_in_reach(reach, maximum, height, a, scale, slope, valid, first + TK - TQ, inner, whole, N)
    # Once no threshold is negative, neither is a score that matters.
    near = tl.minimum(whole - inner, 1)
    maximum, height, line, slope_of_line, mass, gain_mass, fallen, count = _whole_tiles(
        q, K, k_t, k_d, 0, near, whole, positions, own, maximum, height, line, slope_of_line, mass, gain_mass, fallen,
        count, masked, List, a, r, scale, slope, limit, Documents, TK, D, KIND, GUESS, CAUSAL, SLOPES, DOCUMENTS,
        PRECISION, False, VOTES, N, BLOCK_D)  # fmt: skip
    quick = tl.where(highest(height - maximum) <= 0, whole - inner, near)
    maximum, height, line, slope_of_line, mass, gain_mass, fallen, count = _whole_tiles(
        q, K, k_t, k_d, near, quick, whole, positions, own, maximum, height, line, slope_of_line, mass, gain_mass,
        fallen, count, masked, List, a, r, scale, slope, limit, Documents, TK, D, KIND, GUESS, CAUSAL, SLOPES,
        DOCUMENTS, PRECISION, True, VOTES, N, BLOCK_D)  # fmt: skip
    maximum, height, line, slope_of_line, mass, gain_mass, fallen, count = _whole_tiles(
        q, K, k_t, k_d, quick, whole - inner, whole, positions, own, maximum, height, line, slope_of_line, mass,
        gain_mass, fallen, count, masked, List, a, r, scale, slope, limit, Documents, TK, D, KIND, GUESS, CAUSAL,
        SLOPES, DOCUMENTS, PRECISION, False, VOTES, N, BLOCK_D)  # fmt: skip

    store_survey(Maximum, Height, Bound, Hint, Counts, pair, place, rows, TQ, maximum, height,
                 slope_of_line, mass, gain_mass, fallen, masked, count, GUESS)  # fmt: skip
