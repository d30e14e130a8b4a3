"""A look at every tile before the survey's, in whole numbers of 8 bits: half of its bytes, twice as many products.

Queries and keys are rounded to multiples of a step, ``q = s i + e`` and ``k = t j + f`` with i and j of 8 bits. The
products of i and j are exact, and with the lengths of what rounding took,

    |q . k - s t (i . j)| <= |e| |k| + (|q| + |e|) |f|.

So the highest product of a tile bounds a row's scores there from above, and its maximum from below. A tile in which no
row has a score within 1 of its maximum holds no survivor, whatever alpha is: the survey is spared it, and looks at the
others as ever. A step is a row's own for queries, and that of a tile for keys, so that a maximum over keys is one of
whole numbers.

It does not pay where every tile is alive. A block of queries whose nearest tiles all are is not looked at further.
"""

import triton
import triton.language as tl

from longspan.kernels.tiles import SIZES, append, block_of_queries, key_tiles, keys_of, load_tile

AT_ONCE = 32  # tiles: the bits of a number
NEAREST = 4  # tiles that tell whether it pays


@triton.jit
def _lengths(x):
    return tl.sqrt(tl.sum(x * x, 1))


@triton.jit
def _rounded(x, step):
    """x in steps, and what is lost."""
    whole = tl.floor(x / step + 0.5)
    return whole.to(tl.int8), x - whole * step


@triton.jit(do_not_specialize=SIZES)
def round_kernel(K, Rounded, Measures, k_b, k_h, k_t, k_d, H, TK, D, NK, N: tl.constexpr, BLOCK_D: tl.constexpr):
    """The keys of a tile in 8 bits, their step, and the largest length of a key and of what rounding took from one."""
    place = tl.program_id(0).to(tl.int64)
    pair, tile = place // NK, (place % NK).to(tl.int32)
    k = load_tile(K + pair // H * k_b + pair % H * k_h, tile * N, k_t, k_d, TK, D, N, BLOCK_D).to(tl.float32)
    # A key with a number that is none, or infinite, has lost everything: whatever its tile shows, it stays.
    spoilt = tl.max(tl.max(tl.where(tl.abs(k) < float("inf"), 0, 1), 1), 0) > 0
    k = tl.where(spoilt, 0.0, k)
    step = tl.maximum(tl.max(tl.max(tl.abs(k), 1), 0) / 127, 1e-30)
    rounded, lost = _rounded(k, step)
    places = place * N * BLOCK_D + tl.arange(0, N)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    tl.store(Rounded + places, rounded)
    tl.store(Measures + place * 3, step)
    tl.store(Measures + place * 3 + 1, tl.max(_lengths(k), 0))
    tl.store(Measures + place * 3 + 2, tl.where(spoilt, 1e30, tl.max(_lengths(lost), 0)))


@triton.jit
def _bounds(q, Rounded, Measures, tile, step, length, lost, N: tl.constexpr, BLOCK_D: tl.constexpr):
    """The products of a tile in 8 bits, the factor that makes scores of them, and how far these may be off."""
    places = tile * N * BLOCK_D + tl.arange(0, N)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    k = tl.load(Rounded + places)
    key_step, key_length = tl.load(Measures + tile * 3), tl.load(Measures + tile * 3 + 1)
    key_lost = tl.load(Measures + tile * 3 + 2)
    # 1e-4 of the lengths is more than the survey's own sums of products are off, and what a bound is rounded by.
    slack = lost * key_length + length * (key_lost * 1.001 + key_length * 1e-4)
    return tl.dot(q, tl.trans(k)), step * key_step, slack


@triton.jit
def _either(x, y):
    return x | y


@triton.jit
def _screened(q, Rounded, Measures, begin, end, whole, step, length, lost, floor, count, List,
              N: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """Puts the tiles `begin` to `end` before the tile `whole` that may hold a survivor on the list, nearest first."""
    alive = tl.zeros_like(floor).to(tl.int32)  # of every row, a bit for each tile that may
    for index in range(begin, end):
        product, factor, slack = _bounds(q, Rounded, Measures, whole - 1 - index, step, length, lost, N, BLOCK_D)
        top = tl.max(product, 1).to(tl.float32) * factor
        floor = tl.maximum(floor, top - slack)
        out = top + slack <= floor - 1.0  # not a number: alive
        bit = (index - begin) % AT_ONCE
        alive |= tl.where(out, 0, 1) << bit
        # All rows meet once for so many tiles.
        if (bit == AT_ONCE - 1) | (index == end - 1):
            any_row = tl.reduce(alive, 0, _either)
            bits = tl.arange(0, AT_ONCE)
            count = append(List, count, (whole - 1 - (index - bit) - bits).to(tl.int16), ((any_row >> bits) & 1) > 0)
            alive = tl.zeros_like(alive)
    return floor, count


@triton.jit(do_not_specialize=SIZES)
def screen_kernel(Q, Rounded, Measures, List, Counts, Slopes, Lengths, Ranges, a, scale,
                  q_b, q_h, q_t, q_d, H, GROUP, TQ, TK, D, NQ, NK,
                  CAUSAL: tl.constexpr, SLOPES: tl.constexpr, LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr,
                  MASK_ALL: tl.constexpr, PRECISION: tl.constexpr,
                  M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
                  NEAREST: tl.constexpr):  # fmt: skip
    """Of the tiles that need no mask, those that the survey must look at, and how many they are; -1 if that is all."""
    pair, block, batch, head, first, rows, positions = block_of_queries(H, NQ, TQ, TK, M)
    place = pair.to(tl.int64) * NQ + block
    tiles = (batch * (H // GROUP) + head // GROUP) * NK
    Rounded, end, slope = keys_of(Rounded, Lengths, Slopes, 0, head, GROUP, TK, 0, 0, LENGTHS, SLOPES)
    Rounded += tiles * N * BLOCK_D
    Measures += tiles * 3
    List += place * NK
    if DOCUMENTS:
        Ranges += (batch * NQ + block) * 3
    _start, inner, whole, stop = key_tiles(first + TK - TQ, tl.minimum(first + M, TQ) - 1 + TK - TQ, end, Ranges, TK,
                                           M, N, CAUSAL, DOCUMENTS, MASK_ALL)  # fmt: skip
    count = tl.full([], -1, tl.int32)
    # A slope ends most tiles without a look at any.
    if (slope == 0) & (whole - inner > NEAREST):
        q = load_tile(Q + batch * q_b + head * q_h, first, q_t, q_d, TQ, D, M, BLOCK_D).to(tl.float32)
        step = tl.maximum(tl.max(tl.abs(q), 1) / 127, 1e-30)
        rounded, lost = _rounded(q, step[:, None])
        unit = a * scale
        lost, step = _lengths(lost) * unit * 1.001, step * unit
        length = _lengths(q) * unit * 1.001 + lost
        floor = tl.where(rows < TQ, float("-inf"), float("inf"))
        if not DOCUMENTS:
            # The tiles on the diagonal are the survey's in any case; here they show how high a row's maximum is.
            for tile in range(whole, stop):
                product, factor, slack = _bounds(rounded, Rounded, Measures, tile, step, length, lost, N, BLOCK_D)
                keys = tile * N + tl.arange(0, N)
                seen = (keys < end)[None, :]
                if CAUSAL:
                    seen = seen & (keys[None, :] <= positions[:, None])
                top = tl.max(tl.where(seen, product, -(2**31)), 1).to(tl.float32) * factor
                floor = tl.maximum(floor, top - slack)
        floor, nearest = _screened(rounded, Rounded, Measures, 0, NEAREST, whole, step, length, lost,
                                   floor, count * 0, List, N, BLOCK_D, AT_ONCE)  # fmt: skip
        if nearest < NEAREST:
            floor, count = _screened(rounded, Rounded, Measures, NEAREST, whole - inner, whole, step, length, lost,
                                     floor, nearest, List, N, BLOCK_D, AT_ONCE)  # fmt: skip
    tl.store(Counts + place, count)
