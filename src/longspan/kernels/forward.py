"""Entmax attention for long rows, forward: one dense look at the scores, everything else on the tiles that survive it.

One program for a block of queries of one head, in three stages, the last in a kernel of its own.

1. *Survey*, every visible tile once, from the diagonal back. For each row it keeps the maximum so far and a height: the
   threshold lies at most that far below the maximum. A tile with nothing above any row's threshold is dead, costs one
   product and one maximum, and is never looked at again: thresholds only rise. A live tile goes on a list and raises
   the thresholds.
2. *Solve*, over the list, as often as it takes: sums at the current height, a step.
3. *Output*, over the list; its sums give one more step, which costs nothing.

How a threshold rises before the whole row is seen: with r = 1/(alpha-1), the norm ||[z - t]_+||_r is convex in t and
the threshold is where it is 1. Any minorant of it has its root below. The survey carries a tangent of the norm over
the tiles so far, a line; a new tile's sums are added under the norm, and the tangent of the result is the next line.
Newton's method on the norm is exact for ties, where on the sum it would take many steps.
"""

import triton
import triton.language as tl

from longspan.kernels.solver import gains, inside, joined_norm, last_fall
from longspan.kernels.tiles import SIZES, load_tile, scores_of


@triton.jit
def key_tiles(first_position, last_position, end, Ranges, TK,
              M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
              MASK_ALL: tl.constexpr):  # fmt: skip
    """Of a block of queries: its first key tile, the first that needs a mask, and the end."""
    start, stop = 0, tl.cdiv(end, N)
    if CAUSAL:
        stop = tl.minimum(stop, tl.cdiv(tl.maximum(last_position + 1, 0), N))
    if DOCUMENTS:
        start, stop = tl.load(Ranges), tl.minimum(stop, tl.load(Ranges + 1))
    whole = TK // N
    if CAUSAL:
        whole = tl.minimum(whole, tl.maximum(first_position + 1, 0) // N)
    if MASK_ALL:
        whole = start
    return start, tl.maximum(tl.minimum(whole, stop), start), tl.maximum(stop, start)


@triton.jit
def _survey_tile(product, tile, positions, valid, maximum, height, line, slope_of_line, count, List,
                 a, r, scale, slope, end, Documents, TK,
                 KIND: tl.constexpr, CONVEX: tl.constexpr, STEPS: tl.constexpr, CAUSAL: tl.constexpr,
                 SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr, MASKED: tl.constexpr, N: tl.constexpr):  # fmt: skip
    keys = tile * N + tl.arange(0, N)
    if SLOPES or MASKED:
        z = scores_of(product, keys[None, :], positions[:, None], a * scale, a * slope, end, Documents, TK,
                      CAUSAL, SLOPES, DOCUMENTS, MASKED)  # fmt: skip
        top = tl.max(z, 1)
    else:
        z = product
        top = tl.max(product, 1) * (a * scale)
    # A hair more than the height, so that rounding kills no survivor.
    if tl.max(tl.where(valid, top - maximum + height * 1.00001, -1.0), 0) > 0:
        tl.store(List + count, tile.to(tl.int16))
        count += 1
        risen = tl.maximum(maximum, top)
        lower = tl.minimum(height + (risen - maximum), 1.0)
        line = tl.maximum(line - slope_of_line * ((risen - maximum) - (lower - height)), 0.0)
        maximum, height = risen, lower
        if CONVEX:
            unit = 1.0 if SLOPES or MASKED else a * scale
            for step in tl.static_range(STEPS):
                u = tl.maximum(z * unit + (height - maximum)[:, None], 0.0)
                gain = gains(u, r, KIND)
                norm, steepness = joined_norm(line, slope_of_line, tl.sum(gain * u, 1), tl.sum(gain, 1), a, r, KIND)
                fall = tl.maximum((norm - 1.0) / steepness, 0.0)
                height -= fall
                if step < STEPS - 1:
                    line = tl.maximum(line - slope_of_line * fall, 0.0)
            line, slope_of_line = tl.minimum(norm, 1.0), steepness
    return maximum, height, line, slope_of_line, count


@triton.jit
def _sums(q, K, k_t, k_d, begin, count, List, positions, maximum, height, mass, gain_mass, support,
          a, r, scale, slope, end, Documents, TK, D,
          KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr,
          PRECISION: tl.constexpr, MASKED: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Sums over the tiles `begin` to `count` of the list at this height."""
    for index in range(begin, count):
        tile = tl.load(List + index).to(tl.int32)
        k = load_tile(K, tile * N, k_t, k_d, TK, D, N, BLOCK_D, WHOLE=not MASKED)
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        keys = tile * N + tl.arange(0, N)
        z = scores_of(product, keys[None, :], positions[:, None], a * scale, a * slope, end, Documents, TK,
                      CAUSAL, SLOPES, DOCUMENTS, MASKED)  # fmt: skip
        u = tl.maximum(z + (height - maximum)[:, None], 0.0)
        gain = gains(u, r, KIND)
        mass += tl.sum(gain * u, 1)
        gain_mass += tl.sum(gain, 1)
        if KIND == 1:
            support += tl.sum(tl.where(u > 0, 1.0, 0.0), 1)
    return mass, gain_mass, support


@triton.jit(do_not_specialize=SIZES)
def survey_kernel(Q, K, Maximum, Height, List, Counts, Slopes, Lengths, Documents, Ranges, KeyNorms,
                  a, r, scale, tolerance, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, H, GROUP, TQ, TK, D, NQ, NK,
                  KIND: tl.constexpr, CONVEX: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr,
                  LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr, MASK_ALL: tl.constexpr, PRECISION: tl.constexpr,
                  M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """The maximum and height of every row, and the list of live tiles."""
    # Long rows first; neighbours share their keys.
    pair, block = tl.program_id(0) // NQ, NQ - 1 - tl.program_id(0) % NQ
    batch, head = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    first = block * M
    rows = first + tl.arange(0, M)
    positions, valid = rows + TK - TQ, rows < TQ
    K += batch * k_b + head // GROUP * k_h
    if DOCUMENTS:
        Documents += batch * TK
        Ranges += (batch * NQ + block) * 2
    end = tl.minimum(tl.load(Lengths + batch).to(tl.int32), TK) if LENGTHS else TK
    slope = tl.load(Slopes + head).to(tl.float32) if SLOPES else 0.0
    place = pair.to(tl.int64) * NQ + block
    List += place * NK
    q = load_tile(Q + batch * q_b + head * q_h, first, q_t, q_d, TQ, D, M, BLOCK_D)
    start, whole, stop = key_tiles(first + TK - TQ, tl.minimum(first + M, TQ) - 1 + TK - TQ, end, Ranges, TK,
                                   M, N, CAUSAL, DOCUMENTS, MASK_ALL)  # fmt: skip

    maximum = tl.full([M], -1e30, tl.float32)
    height = tl.full([M], 1.0, tl.float32)
    line = tl.zeros([M], tl.float32)
    slope_of_line = tl.zeros([M], tl.float32)
    count = 0
    for index in range(stop - whole):
        tile = stop - 1 - index
        k = load_tile(K, tile * N, k_t, k_d, TK, D, N, BLOCK_D)
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        maximum, height, line, slope_of_line, count = _survey_tile(
            product, tile, positions, valid, maximum, height, line, slope_of_line, count, List,
            a, r, scale, slope, end, Documents, TK, KIND, CONVEX, 4, CAUSAL, SLOPES, DOCUMENTS, True, N)  # fmt: skip
    masked = count
    if SLOPES and CAUSAL and not MASK_ALL:
        # scale |q| |k| - slope distance is under the threshold beyond this distance, for every row.
        norm = tl.load(KeyNorms + pair // H * (H // GROUP) + pair % H // GROUP)
        reach = tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)) * norm
        excess = tl.where(valid, reach * (a * scale * 1.001) - maximum + height, -float("inf"))
        window = tl.minimum(tl.maximum(tl.max(excess, 0) / tl.maximum(a * slope, 1e-30), -1e9), 1e9)
        start = tl.maximum(start, ((first + TK - TQ).to(tl.float32) - window).to(tl.int32) // N)
        start = tl.minimum(start, whole)
    for index in range(whole - start):
        tile = whole - 1 - index
        k = load_tile(K, tile * N, k_t, k_d, TK, D, N, BLOCK_D, WHOLE=True)
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        maximum, height, line, slope_of_line, count = _survey_tile(
            product, tile, positions, valid, maximum, height, line, slope_of_line, count, List,
            a, r, scale, slope, end, Documents, TK, KIND, CONVEX, 1, CAUSAL, SLOPES, DOCUMENTS, False, N)  # fmt: skip
    tl.debug_barrier()  # the list is read by threads that did not write it

    # The root lies between these heights; the norms there serve the secant.
    low, low_norm = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    high, high_norm = height, tl.zeros([M], tl.float32)
    if CONVEX:
        # The line lies below the norm; by how much, on rows of noise and of structure alike.
        height -= tl.minimum(0.2 / tl.maximum(slope_of_line, 1e-20), 0.5 * height)
    going = count > 0
    rounds = 0
    while going:
        mass = tl.zeros([M], tl.float32)
        gain_mass = tl.zeros([M], tl.float32)
        support = tl.zeros([M], tl.float32)
        mass, gain_mass, support = _sums(
            q, K, k_t, k_d, 0, masked, List, positions, maximum, height, mass, gain_mass, support,
            a, r, scale, slope, end, Documents, TK, D,
            KIND, CAUSAL, SLOPES, DOCUMENTS, PRECISION, True, N, BLOCK_D)  # fmt: skip
        mass, gain_mass, support = _sums(
            q, K, k_t, k_d, masked, count, List, positions, maximum, height, mass, gain_mass, support,
            a, r, scale, slope, end, Documents, TK, D,
            KIND, CAUSAL, SLOPES, DOCUMENTS, PRECISION, False, N, BLOCK_D)  # fmt: skip
        sees = valid & (maximum > -1e30)
        excess = tl.max(tl.where(sees, tl.abs(mass - 1.0), 0.0), 0)
        rounds += 1
        going = (excess > tolerance) & (rounds < 32)
        above = mass >= 1.0
        if CONVEX:
            low, high = tl.where(above, low, height), tl.where(above, height, high)
            if going:
                # Newton's method on the logarithm of the sum, which is nearly straight.
                fall = mass * tl.log(tl.maximum(mass, 1e-20)) * a / tl.maximum(gain_mass, 1e-20)
                height = inside(height - fall, low, high)
            else:
                height = inside(height - last_fall(mass, gain_mass, support, a, KIND), low, high)
        else:
            # The norm's secant, the old end's distance halved where it stays (Illinois).
            norm, _ = joined_norm(low * 0.0, low * 0.0, mass, gain_mass, a, r, KIND)
            low_norm = tl.where(above, tl.where(height < high, (low_norm + 1.0) * 0.5, low_norm), norm)
            high_norm = tl.where(above, norm, tl.where(high_norm > 0, (high_norm + 1.0) * 0.5, high_norm))
            low, high = tl.where(above, low, height), tl.where(above, height, high)
            if going:
                share = (1.0 - low_norm) / tl.maximum(high_norm - low_norm, 1e-20)
                height = low + (high - low) * tl.minimum(tl.maximum(share, 0.02), 0.98)

    sees = maximum > -1e30
    line_place = pair.to(tl.int64) * TQ + rows
    tl.store(Maximum + line_place, tl.where(sees, maximum, 0.0), mask=valid)
    tl.store(Height + line_place, tl.where(sees, height, 0.0), mask=valid)
    tl.store(Counts + place * 2, masked)
    tl.store(Counts + place * 2 + 1, count)
