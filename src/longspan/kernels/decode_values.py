"""The third stage of decoding: values of rows that have more survivors than a list holds, and of softmax's."""

import triton
import triton.language as tl

from longspan.kernels.decode import DECODE_SIZES, beginning, page_base, pages_of, share
from longspan.kernels.edges import weights_of_row
from longspan.kernels.tiles import append


@triton.jit
def _finish_row(Parts, Sums, Height, Support, Entropy, O, line, DV, SPLITS,
                KIND: tl.constexpr, STATS: tl.constexpr, PARTS: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """The output of a row from all partial sums. What other programs wrote must not come from a cache of this one's."""
    columns = tl.arange(0, BLOCK_DV)
    splits = tl.arange(0, PARTS)
    there = splits < SPLITS
    place = line * SPLITS + splits
    masses = tl.load(Sums + place * 3, mask=there, other=0.0, cache_modifier=".cg")
    some = (masses > 0)[:, None] & (columns[None, :] < DV)
    parts = tl.load(Parts + place[:, None] * DV + columns[None, :], mask=some, other=0.0, cache_modifier=".cg")
    mass = tl.sum(masses, 0)
    # Dividing by the sum of the weights takes back what rounding left of it.
    weight = 1.0 / tl.where(mass > 0, mass, 1.0)
    tl.store(O + line * DV + columns, (tl.sum(parts, 0) * weight).to(O.dtype.element_ty), mask=columns < DV)
    if KIND == 0:
        tl.store(Height + line, tl.where(mass > 0, weight, 0.0))
        if STATS:
            support = tl.sum(tl.load(Sums + place * 3 + 1, mask=there, other=0.0, cache_modifier=".cg"), 0)
            entropy = tl.sum(tl.load(Sums + place * 3 + 2, mask=there, other=0.0, cache_modifier=".cg"), 0)
            tl.store(Support + line, support)
            # -sum (p/m) log (p/m) from -sum p log p
            tl.store(Entropy + line, tl.where(mass > 0, entropy * weight - tl.log(weight), 0.0))


@triton.jit
def _reached(highest, top, depth, KIND: tl.constexpr):
    """Whether the highest score of a page or a quarter survives; above alpha 2 `top` is the row's smallest survivor."""
    if KIND == 1 or KIND < -2:
        return highest >= top
    return highest - top + depth > 0


@triton.jit(do_not_specialize=DECODE_SIZES)
def value_kernel(V, Scores, Tops, Pages, Maximum, Height, Support, Entropy, Parts, Sums, Arrivals, Many, O,
                 Lengths, Starts, Table, a, r, reach, v_b, v_h, v_t, v_d, t_b, HK, TK, ROWS, DV, NP, SPLITS,
                 KIND: tl.constexpr, LENGTHS: tl.constexpr, STARTS: tl.constexpr, PAGED: tl.constexpr,
                 PRECISION: tl.constexpr, STATS: tl.constexpr,
                 M: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
                 BLOCK_DV: tl.constexpr):  # fmt: skip
    """Of a run of pages the sum of weights times values, and of the weights; the last program of a tile adds them up.

    Only of rows that the second stage left over; a tile without any is done.
    """
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, kv_head = pair // HK, pair % HK
    rows = tl.program_id(2) * M + tl.arange(0, M)
    line = pair * ROWS + rows
    _end, _start, first, stop = pages_of(batch, Lengths, Starts, TK, LENGTHS, STARTS)
    begin, stop = share(split, SPLITS, first, stop)
    beginning(EARLY)
    wanted_row = tl.load(Many + line, mask=rows < ROWS, other=0) > 0
    if tl.max(wanted_row.to(tl.int32), 0) == 0:
        return
    top = tl.load(Maximum + line, mask=wanted_row, other=0.0)
    height = tl.load(Height + line, mask=wanted_row, other=0.0)
    # Below this a weight is 0: the threshold, and for softmax where exp underflows.
    depth = height * reach
    Pages += (tl.program_id(2) * tl.num_programs(0) + pair) * NP + begin
    if PAGED:
        Table += batch * t_b
    count = begin * 0
    for block in range(begin, stop, CHUNK):
        pages = block + tl.arange(0, CHUNK)
        there = wanted_row[:, None] & (pages < stop)[None, :]
        z = tl.full([M, CHUNK], float("-inf"), tl.float32)
        for quarter in tl.static_range(4):
            places = Tops + (line[:, None] * NP + pages[None, :]) * 4 + quarter
            z = tl.maximum(z, tl.load(places, mask=there, other=float("-inf")))
        alive = _reached(z, top[:, None], depth[:, None], KIND)
        count = append(Pages, count, pages, tl.max(alive.to(tl.int32), 0) > 0)
    tl.debug_barrier()

    columns = tl.arange(0, BLOCK_DV)
    out = tl.zeros([M, BLOCK_DV], tl.float32)
    mass = tl.zeros([M], tl.float32)
    support = tl.zeros([M], tl.float32)
    entropy = tl.zeros([M], tl.float32)
    for index in range(count):
        page = tl.load(Pages + index)
        key = tl.arange(0, 64)[None, :]
        # A page is listed for all rows of the tile; scores of a quarter that cannot matter to a row were never stored.
        z = tl.load(Scores + line[:, None] * NP * 64 + page * 64 + key, mask=wanted_row[:, None], other=float("-inf"))
        for quarter in tl.static_range(4):
            highest = tl.load(Tops + (line * NP + page) * 4 + quarter, mask=wanted_row, other=float("-inf"))
            alive = _reached(highest, top, depth, KIND)[:, None]
            z = tl.where(alive | (key // 16 != quarter), z, float("-inf"))
        p = weights_of_row(z, top[:, None], height[:, None], a, r, KIND)
        wanted = tl.max(p, 0) > 0
        base = page_base(V, Table, batch, kv_head, page, v_b, v_h, v_t, PAGED)
        places = base + tl.arange(0, 64)[:, None] * v_t + columns[None, :] * v_d
        v = tl.load(places, mask=wanted[:, None] & (columns[None, :] < DV), other=0.0)
        out = tl.dot(p.to(v.dtype), v, out, input_precision=PRECISION)
        mass += tl.sum(p, 1)
        if STATS and KIND == 0:
            support += tl.sum(tl.where(p > 0, 1.0, 0.0), 1)
            entropy -= tl.sum(tl.where(p > 0, p * tl.log(tl.maximum(p, 1e-37)), 0.0), 1)
    place = line * SPLITS + split
    tl.store(Sums + place * 3, mass, mask=wanted_row)
    if STATS and KIND == 0:
        tl.store(Sums + place * 3 + 1, support, mask=wanted_row)
        tl.store(Sums + place * 3 + 2, entropy, mask=wanted_row)
    if count > 0:
        there = wanted_row[:, None] & (columns[None, :] < DV)
        tl.store(Parts + place[:, None] * DV + columns[None, :], out, mask=there)

    tl.debug_barrier()
    tile = tl.num_programs(0) * ROWS + tl.program_id(2) * tl.num_programs(0) + pair
    if tl.atomic_add(Arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
        for row in range(tl.program_id(2) * M, tl.minimum(tl.program_id(2) * M + M, ROWS)):
            if tl.load(Many + pair * ROWS + row) > 0:
                _finish_row(Parts, Sums, Height, Support, Entropy, O, pair * ROWS + row, DV, SPLITS,
                            KIND, STATS, PARTS, BLOCK_DV)  # fmt: skip
