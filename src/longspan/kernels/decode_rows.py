"""The second stage of decoding: a row's threshold, its survivors, and their values.

A row is served by SHARES programs. Each finds the threshold by itself, as what it takes is latency and not work, and
then sums its share of the survivors' values; the one that comes last adds up what the others left, in a fixed order.
Most rows have a few dozen survivors, which are one share: their output is written with no sum at all.

What a row is solved from is held in registers: the highest score of each of its first CHUNK pages, and the scores of
the first AT_ONCE pages that can hold a survivor. Only what exceeds that is read again in every round.

Up to alpha 2 a row is known by its maximum and the height of its threshold below it, above by its edge, the smallest
survivor, and the edge's weight, as in training: see `edges.py`.
"""

import os

import triton
import triton.language as tl

from longspan.kernels.decode import DECODE_SIZES, beginning, ending, pages_of
from longspan.kernels.edges import below_all, next_trial, parts_at, trial_of, weights_of_row
from longspan.kernels.solver import curved_fall, gains, inside, joined_norm, secant_step
from longspan.kernels.tiles import append

if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def _sums_of_three(x, y, z):
        return tl.sum(x, 0), tl.sum(y, 0), tl.sum(z, 0)

    @triton.jit
    def _joined(x, y, z, low, high):
        return tl.sum(x, 0), tl.sum(y, 0), tl.sum(z, 0), tl.max(low, 0), tl.min(high, 0)

else:

    @triton.jit
    def _added(x, y, z, other_x, other_y, other_z):
        return x + other_x, y + other_y, z + other_z

    @triton.jit
    def _sums_of_three(x, y, z):
        """Three sums with one meeting of all threads; the interpreter would add element by element."""
        return tl.reduce((x, y, z), 0, _added)

    @triton.jit
    def _both(x, y, z, low, high, other_x, other_y, other_z, other_low, other_high):
        return x + other_x, y + other_y, z + other_z, tl.maximum(low, other_low), tl.minimum(high, other_high)

    @triton.jit
    def _joined(x, y, z, low, high):
        """Three sums, a maximum and a minimum, likewise."""
        return tl.reduce((x, y, z, low, high), 0, _both)


@triton.jit
def _heights_above(z, top, height, r, KIND: tl.constexpr):
    u = tl.maximum(z - top + height, 0.0)
    return gains(u, r, KIND), u


@triton.jit
def _sums(z, top, height, r, KIND: tl.constexpr):
    """The sums of u^r, u^(r-1) and 1 over the scores above the threshold."""
    gain, u = _heights_above(z, top, height, r, KIND)
    return _sums_of_three(gain * u, gain, tl.where(u > 0, 1.0, 0.0))


@triton.jit
def _tops(Tops, block, stop, CHUNK: tl.constexpr):
    """The highest scores of a block of pages, and which pages these are."""
    pages = block + tl.arange(0, CHUNK)
    places = Tops + pages[:, None] * 4 + tl.arange(0, 4)[None, :]
    return tl.max(tl.load(places, mask=(pages < stop)[:, None], other=float("-inf")), 1), pages


@triton.jit
def _norm_of_tops(held, Tops, first, stop, top, height, r, KIND: tl.constexpr, CHUNK: tl.constexpr):
    """The norm of the highest scores of the pages above the threshold, its slope, and how many pages these are; the
    first CHUNK are held."""
    mass, gain_mass, alive = _sums(held, top, height, r, KIND)
    for block in range(first + CHUNK, stop, CHUNK):
        z, _pages = _tops(Tops, block, stop, CHUNK)
        more_mass, more_gain, more_alive = _sums(z, top, height, r, KIND)
        mass += more_mass
        gain_mass += more_gain
        alive += more_alive
    norm, steepness = joined_norm(mass * 0.0, mass * 0.0, mass, gain_mass, r, KIND)
    return norm, steepness, alive


@triton.jit
def _least_height(held, Tops, first, stop, top, a, r,
                  KIND: tl.constexpr, CONVEX: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """A height that the row's does not exceed: that of its pages' highest scores alone, or a little more.

    The threshold of a part of a row never exceeds that of the whole. Newton's method comes from above, and ends where
    one more round would not pay for the pages it rules out: at the latest when all that are left can be held at once.
    """
    height = top * 0.0 + 1.0
    if CONVEX:
        rounds = tl.zeros([], tl.int32)
        going = rounds == 0
        while going:
            norm, steepness, alive = _norm_of_tops(held, Tops, first, stop, top, height, r, KIND, CHUNK)
            height -= tl.maximum((norm - 1.0) / steepness, 0.0)
            rounds += 1
            going = (norm > 1.05) & (alive > AT_ONCE) & (rounds < 12)
    else:
        nothing = top * 0.0
        low, low_norm, high, high_norm = nothing, nothing, height, nothing
        for _ in range(10):
            norm, _steepness, _alive = _norm_of_tops(held, Tops, first, stop, top, height, r, KIND, CHUNK)
            height, low, low_norm, high, high_norm = secant_step(norm, height, low, low_norm, high, high_norm)
        height = high
    # A hair more, so that rounding kills no survivor: an error of a sum of powers 1/a is one of a times that in height.
    return tl.minimum(height * (1.0 + 1e-5 * tl.maximum(a, 1.0)), 1.0)


@triton.jit
def _scores(Scores, Tops, Pages, index, count, maximum, depth, AT_ONCE: tl.constexpr):
    """The scores of a block of listed pages in one row, which is cheaper to sum than two dims, and their keys.

    Those of a quarter that lies `depth` below the row's maximum were perhaps never stored.
    """
    which = index + tl.arange(0, AT_ONCE)
    page = tl.load(Pages + which, mask=which < count, other=0)
    quarter = page[:, None] * 4 + tl.arange(0, 4)[None, :]
    highest = tl.load(Tops + quarter, mask=(which < count)[:, None], other=float("-inf"))
    key = quarter[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    z = tl.load(Scores + key, mask=(which < count)[:, None, None], other=float("-inf"))
    z = tl.where((highest - maximum + depth > 0)[:, :, None], z, float("-inf"))
    return tl.reshape(z, [AT_ONCE * 64]), tl.reshape(key, [AT_ONCE * 64])


@triton.jit
def _solved(held, Scores, Tops, Pages, count, top, height, depth, r, tolerance,
            KIND: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """The height of a row's threshold, from one above it; alpha <= 2."""
    nothing = top * 0.0
    low, high = nothing, height
    going = count > 0
    rounds = tl.zeros([], tl.int32)
    while going:
        mass, gain_mass, support = _sums(held, top, height, r, KIND)
        for index in range(AT_ONCE, count, AT_ONCE):
            z, _keys = _scores(Scores, Tops, Pages, index, count, top, depth, AT_ONCE)
            more_mass, more_gain, more_support = _sums(z, top, height, r, KIND)
            mass += more_mass
            gain_mass += more_gain
            support += more_support
        norm, steepness = joined_norm(nothing, nothing, mass, gain_mass, r, KIND)
        rounds += 1
        going = (tl.abs(norm - 1.0) > tolerance) & (rounds < 40)
        above = norm >= 1.0
        low, high = tl.where(above, low, height), tl.where(above, height, high)
        fall = curved_fall(mass, gain_mass, support, 1.0) if KIND == 4 else (norm - 1.0) / steepness
        height = inside(height - fall, low, high)
    return height


@triton.jit
def _edge(held, Scores, Tops, Pages, count, top, height, depth, a, r,
          KIND: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """The smallest survivor of a row and its weight, alpha > 2, from a height that the row's does not exceed."""
    edge = below_all(top, height)
    lowest, highest = edge, top
    weight = top * 0.0 + 1.0
    going = count > 0
    rounds = tl.zeros([], tl.int32)
    while going:
        p, u = trial_of(weight, lowest, highest, a)
        mass, others, ties, below, above = _joined(*parts_at(held, edge, p, u, r, KIND))
        for index in range(AT_ONCE, count, AT_ONCE):
            z, _keys = _scores(Scores, Tops, Pages, index, count, top, depth, AT_ONCE)
            more_mass, more_others, more_ties, lower, higher = _joined(*parts_at(z, edge, p, u, r, KIND))
            mass += more_mass
            others += more_others
            ties += more_ties
            below, above = tl.maximum(below, lower), tl.minimum(above, higher)
        edge, weight, lowest, highest, unsolved = next_trial(
            weight, lowest, highest, mass, others, ties, below, above, rounds, a)  # fmt: skip
        rounds += 1
        going = unsolved & (rounds < 64)
    return edge, weight


@triton.jit
def _kept(z, keys, Keys, count, top, height, a, r, split, MOST,
          KIND: tl.constexpr, STATS: tl.constexpr, SHARES: tl.constexpr, GATHER: tl.constexpr):  # fmt: skip
    """Puts the keys that survive on the row's list, in order; a program writes only what it will read.

    Also how many they are by now, and of these scores the sums of p and -p log p.
    """
    p = weights_of_row(z, top, height, a, r, KIND)
    alive = (p > 0).to(tl.int32)
    place = count + tl.cumsum(alive, 0) - 1
    own = (alive > 0) & (place < MOST) & (place // GATHER % SHARES == split)
    tl.store(Keys + place, keys, mask=own)
    entropies = p * 0.0
    if STATS:
        entropies = tl.where(p > 0, -p * tl.log(tl.maximum(p, 1e-37)), 0.0)
    support, mass, entropy = _sums_of_three(alive, p, entropies)
    return count + support, mass, entropy


@triton.jit
def _value_places(V, Table, batch, kv_head, keys, there, v_b, v_h, v_t, PAGED: tl.constexpr):
    if PAGED:
        page = tl.load(Table + keys // 64, mask=there, other=0).to(tl.int64)
        return V + page * v_b + kv_head * v_h + keys % 64 * v_t
    return V + batch * v_b + kv_head * v_h + keys.to(tl.int64) * v_t


@triton.jit(do_not_specialize=[*DECODE_SIZES, "MOST"])
def row_kernel(V, Scores, Tops, Pages, Keys, Maximum, Height, Support, Entropy, Parts, Arrivals, Many, O,
               Lengths, Starts, Table, a, r, tolerance, reach, v_b, v_h, v_t, v_d, t_b, HK, TK, ROWS, DV, NP, MOST,
               KIND: tl.constexpr, CONVEX: tl.constexpr, LENGTHS: tl.constexpr, STARTS: tl.constexpr,
               PAGED: tl.constexpr, STATS: tl.constexpr, DEFER: tl.constexpr,
               SHARES: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr, GATHER: tl.constexpr,
               EARLY: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """The maximum of a row, the height of its threshold below it (softmax: the largest weight; alpha > 2: its edge and
    the weight of that), and its output.

    DEFER: a row with more than MOST survivors is marked in `Many` and left to the third stage; so are all of softmax.
    """
    ALL_LATER: tl.constexpr = DEFER and KIND == 0
    line, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = line // ROWS
    batch, kv_head = pair // HK, pair % HK
    _end, _start, first, stop = pages_of(batch, Lengths, Starts, TK, LENGTHS, STARTS)
    Tops += line * 4 * NP
    beginning(EARLY)
    tops, pages = _tops(Tops, first, stop, CHUNK)
    top = tl.max(tops, 0)
    for block in range(first + CHUNK, stop, CHUNK):
        z, _pages = _tops(Tops, block, stop, CHUNK)
        top = tl.maximum(top, tl.max(z, 0))
    sees = top > float("-inf")
    top = tl.where(sees, top, 0.0)
    height = tl.where(sees, 1.0, 0.0)
    if KIND != 0:
        least = _least_height(tops, Tops, first, stop, top, a, r, KIND, CONVEX, CHUNK, AT_ONCE)
        height = tl.where(sees, least, 0.0)
    # Below this a weight is 0: the threshold, for softmax where exp underflows. If all is left over, none is looked at.
    depth = -1.0 if ALL_LATER else height * reach
    Pages += (line * SHARES + split) * NP
    alive_pages = append(Pages, 0, pages, tops - top + depth > 0)
    for block in range(first + CHUNK, stop, CHUNK):
        z, pages = _tops(Tops, block, stop, CHUNK)
        alive_pages = append(Pages, alive_pages, pages, z - top + depth > 0)
    tl.debug_barrier()
    Scores += line * NP * 64
    maximum = top
    held, keys = _scores(Scores, Tops, Pages, 0, alive_pages, maximum, depth, AT_ONCE)
    if not CONVEX:
        edge, weight = _edge(held, Scores, Tops, Pages, alive_pages, maximum, height, depth, a, r, KIND, AT_ONCE)
        top, height = tl.where(sees, edge, 0.0), tl.where(sees, weight, 0.0)
    elif KIND != 0:
        height = _solved(held, Scores, Tops, Pages, alive_pages, maximum, height, depth, r, tolerance,
                         KIND, AT_ONCE)  # fmt: skip
        height = tl.where(sees, height, 0.0)

    Keys += line * MOST
    count, mass, entropy = _kept(held, keys, Keys, 0, top, height, a, r, split, MOST, KIND, STATS, SHARES, GATHER)
    for index in range(AT_ONCE, alive_pages, AT_ONCE):
        z, keys = _scores(Scores, Tops, Pages, index, alive_pages, maximum, depth, AT_ONCE)
        count, more_mass, more_entropy = _kept(
            z, keys, Keys, count, top, height, a, r, split, MOST, KIND, STATS, SHARES, GATHER)  # fmt: skip
        mass += more_mass
        entropy += more_entropy
    many = count > MOST
    if ALL_LATER:
        many = count == 0
    weight = 1.0 / tl.where(mass > 0, mass, 1.0)  # dividing by the sum takes back what rounding left of it
    if split == 0:
        tl.store(Maximum + line, top)
        tl.store(Height + line, tl.where(mass > 0, weight, 0.0) if KIND == 0 and not ALL_LATER else height)
        if STATS:
            # -sum (p/m) log (p/m) from -sum p log p
            tl.store(Support + line, count.to(tl.float32))
            tl.store(Entropy + line, tl.where(mass > 0, entropy * weight - tl.log(weight), 0.0))
        if DEFER:
            tl.store(Many + line, many.to(tl.int32))
    ending(EARLY)
    if many:
        return
    tl.debug_barrier()

    columns = tl.arange(0, BLOCK_DV)
    blocks = tl.cdiv(count, GATHER)
    parts = tl.minimum(blocks, SHARES)
    if split >= tl.maximum(parts, 1):
        return
    if PAGED:
        Table += batch * t_b
    out = tl.zeros([GATHER, BLOCK_DV], tl.float32)
    for block in range(split, blocks, SHARES):
        which = block * GATHER + tl.arange(0, GATHER)
        key = tl.load(Keys + which, mask=which < count, other=0)
        z = tl.load(Scores + key, mask=which < count, other=float("-inf"))
        places = _value_places(V, Table, batch, kv_head, key, which < count, v_b, v_h, v_t, PAGED)
        v = tl.load(places[:, None] + columns[None, :] * v_d, mask=(which < count)[:, None] & (columns[None, :] < DV),
                    other=0.0)  # fmt: skip
        p = weights_of_row(z, top, height, a, r, KIND)
        out += p[:, None] * v.to(tl.float32)
    total = tl.sum(out, 0)
    last = parts <= 1
    if parts > 1:
        Parts += line * SHARES * DV
        tl.store(Parts + split * DV + columns, total, mask=columns < DV)
        tl.debug_barrier()
        last = tl.atomic_add(Arrivals + line, 1, sem="acq_rel") == parts - 1
        if last:
            each = tl.arange(0, SHARES)
            there = (each < parts)[:, None] & (columns < DV)[None, :]
            # What other programs wrote must not come from a cache of this one's.
            total = tl.sum(tl.load(Parts + each[:, None] * DV + columns[None, :], mask=there, other=0.0,
                                   cache_modifier=".cg"), 0)  # fmt: skip
    if last:
        tl.store(O + line * DV + columns, (total * weight).to(O.dtype.element_ty), mask=columns < DV)
