"""Entmax attention for a few new tokens over a long cache, split over the keys so that one sequence fills a GPU.

A *page* is 64 keys. All query heads that share a key head, and all their new tokens, are the rows of one tile: a page
of keys is read once for all of them. Four kernels, each a stage:

1. *Score*: every page once; scores and the page's highest of every row go to memory. Pages that provably hold no
   survivor are not read.
2. *Solve*, a program a row: the row's threshold, over the pages that can hold a survivor.
3. *Value*: weights times values, reading only the rows of V whose weight is not 0; one partial sum a program.
4. *Sum* of the partial sums, in a fixed order.

Scores are kept as ``z = a * score``, for softmax as they are. `reach` is how far below the row's maximum a weight can
lie and not be 0: 1, and for softmax where exp underflows. Nothing here asks the host: lengths are read on the device,
and programs share out the pages that there are, not those there is room for.
"""

import triton
import triton.language as tl

from longspan.kernels.solver import curved_fall, gains, inside, joined_norm, secant_step, weights_and_gains
from longspan.kernels.tiles import end_of, load_tile, scores_of

# Arguments a kernel is not compiled anew for, however they divide.
DECODE_SIZES = ["HK", "GROUP", "TQ", "TK", "ROWS", "NP", "NB", "SPLITS"]


@triton.jit
def pages_of(batch, Lengths, Starts, TK, LENGTHS: tl.constexpr, STARTS: tl.constexpr):
    """The end of a sequence, its first key, and the pages between: the first and the one behind the last."""
    end = end_of(Lengths, batch, TK, LENGTHS)
    start = tl.maximum(tl.load(Starts + batch).to(tl.int32), 0) if STARTS else 0
    return end, start, start // 64, tl.cdiv(end, 64)


@triton.jit
def _share(split, splits, first, stop):
    """The run of pages of one of several programs."""
    each = tl.cdiv(tl.maximum(stop - first, 0), splits)
    begin = first + split * each
    return begin, tl.minimum(begin + each, stop)


@triton.jit
def page_base(Base, Table, batch, kv_head, page, stride_b, stride_h, stride_t, PAGED: tl.constexpr):
    """Where a page begins: `page` pages into a sequence, or where the table says, a pool's first dim counting pages."""
    if PAGED:
        return Base + tl.load(Table + page).to(tl.int64) * stride_b + kv_head * stride_h
    return Base + batch * stride_b + kv_head * stride_h + tl.cast(page, tl.int64) * 64 * stride_t


@triton.jit
def _append(Pages, count, pages, live):
    """Puts the live pages on a list, in order; all threads must meet before it is read."""
    place = count + tl.cumsum(live.to(tl.int32), 0) - 1
    tl.store(Pages + place, pages, mask=live)
    return count + tl.sum(live.to(tl.int32), 0)


@triton.jit
def row_inputs(Q, Slopes, Scales, batch, kv_head, rows, valid, unit, scale, end, q_b, q_h, q_t, q_d, HK, GROUP, TQ, D,
               SLOPES: tl.constexpr, SCALES: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Of the rows of a tile: queries, positions, and for ``a * score`` the factors of products and the slopes."""
    heads, queries = kv_head * GROUP + rows // TQ, rows % TQ
    columns = tl.arange(0, BLOCK_D)
    places = Q + batch * q_b + heads[:, None] * q_h + queries[:, None] * q_t + columns[None, :] * q_d
    q = tl.load(places, mask=valid[:, None] & (columns[None, :] < D), other=0.0)
    row_scale = tl.full([M], 1.0, tl.float32) * (unit * scale)
    if SCALES:
        row_scale *= tl.load(Scales + (batch * HK * GROUP + heads) * TQ + queries, mask=valid, other=0.0)
    slope = tl.zeros([M], tl.float32)
    if SLOPES:
        slope = tl.load(Slopes + heads, mask=valid, other=0.0).to(tl.float32) * unit
    return q, end - TQ + queries, row_scale, slope


@triton.jit
def norms_of(q):
    return tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1))


@triton.jit
def nearness(pages, positions, slope):
    """The least that slopes take from any score in a page: at its near end, for a negative slope at its far end."""
    near = (positions[:, None] - (pages * 64 + 63)[None, :]).to(tl.float32) * slope[:, None]
    return tl.minimum(near, near + 63 * slope[:, None])


@triton.jit
def scored(q, K, Table, batch, kv_head, page, k_b, k_h, k_t, k_d, positions, scale, slope, start, end, D,
            SLOPES: tl.constexpr, STARTS: tl.constexpr, PAGED: tl.constexpr, PRECISION: tl.constexpr,
            BLOCK_D: tl.constexpr):  # fmt: skip
    """The scores of every row with a page, -inf where a key is hidden; `scale` and `slope` are per row."""
    base = page_base(K, Table, batch, kv_head, page, k_b, k_h, k_t, PAGED)
    k = load_tile(base, 0, k_t, k_d, end - page * 64, D, 64, BLOCK_D)
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    keys = page * 64 + tl.arange(0, 64)
    z = scores_of(product, keys[None, :], positions[:, None], scale[:, None], slope[:, None], None, None, 0,
                  True, SLOPES, False)  # fmt: skip
    if STARTS:
        z = tl.where(keys[None, :] >= start, z, float("-inf"))
    return z


@triton.jit(do_not_specialize=DECODE_SIZES)
def score_kernel(Q, K, Scores, Tops, Pages, Slopes, Scales, Lengths, Starts, Table, Norms, Bounds, Floors,
                 unit, scale, reach, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, n_b, n_h, n_p, t_b,
                 HK, GROUP, TQ, TK, ROWS, D, NP, NB, SPLITS,
                 SLOPES: tl.constexpr, SCALES: tl.constexpr, LENGTHS: tl.constexpr, STARTS: tl.constexpr,
                 PAGED: tl.constexpr, NORMS: tl.constexpr, BOXES: tl.constexpr, PRECISION: tl.constexpr,
                 M: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Scores of a run of pages, and the highest of every row and page; -inf for a page that is not read."""
    split, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, kv_head = pair // HK, pair % HK
    end, start, first, stop = pages_of(batch, Lengths, Starts, TK, LENGTHS, STARTS)
    begin, stop = _share(split, SPLITS, first, stop)
    if begin >= stop:
        return
    rows = tl.program_id(2) * M + tl.arange(0, M)
    valid = rows < ROWS
    line = pair * ROWS + rows  # a row among all
    q, positions, row_scale, slope = row_inputs(
        Q, Slopes, Scales, batch, kv_head, rows, valid, unit, scale, end, q_b, q_h, q_t, q_d, HK, GROUP, TQ, D,
        SLOPES, SCALES, M, BLOCK_D)  # fmt: skip
    Tops += line[:, None] * NP
    if PAGED:
        Table += batch * t_b

    count = stop - begin
    if NORMS or BOXES:
        # What a row's maximum cannot lie below: for boxes found before, else the highest score of the nearest page,
        # which only a distance makes worth a look.
        floor = tl.full([M], float("-inf"), tl.float32)
        if BOXES:
            for block in range(0, NB, CHUNK):
                probed = block + tl.arange(0, CHUNK)
                floors = tl.load(Floors + line[:, None] * NB + probed[None, :],
                                 mask=valid[:, None] & (probed < NB)[None, :], other=float("-inf"))  # fmt: skip
                floor = tl.maximum(floor, tl.max(floors, 1))
        elif tl.max(tl.abs(slope), 0) > 0:
            near = scored(q, K, Table, batch, kv_head, (end - 1) // 64, k_b, k_h, k_t, k_d,
                          positions, row_scale, slope, start, end, D,
                          SLOPES, STARTS, PAGED, PRECISION, BLOCK_D)  # fmt: skip
            floor = tl.max(near, 1)
        size = norms_of(q) * tl.abs(row_scale) * 1.001
        Pages += (tl.program_id(2) * tl.num_programs(1) + pair) * NP + begin
        count = begin * 0
        for block in range(begin, stop, CHUNK):
            pages = block + tl.arange(0, CHUNK)
            there = pages < stop
            if BOXES:
                bound = tl.load(Bounds + line[:, None] * NP + pages[None, :], mask=valid[:, None] & there[None, :],
                                other=float("-inf"))  # fmt: skip
            else:
                places = Norms + batch * n_b + kv_head * n_h + pages.to(tl.int64) * n_p
                if PAGED:
                    own = tl.load(Table + pages, mask=there, other=0).to(tl.int64)
                    places = Norms + own * n_b + kv_head * n_h
                bound = size[:, None] * tl.load(places, mask=there, other=0.0)[None, :]
                if SLOPES:
                    bound -= nearness(pages, positions, slope)
            alive = valid[:, None] & ((bound <= (floor - reach)[:, None]) == 0)  # NaN lives
            live = there & (tl.max(alive.to(tl.int32), 0) > 0)
            unread = valid[:, None] & (there & (live == 0))[None, :]
            tl.store(Tops + pages[None, :], tl.full([M, CHUNK], float("-inf"), tl.float32), mask=unread)
            count = _append(Pages, count, pages, live)
        tl.debug_barrier()

    for index in range(count):
        page = begin + index
        if NORMS or BOXES:
            page = tl.load(Pages + index)
        z = scored(q, K, Table, batch, kv_head, page, k_b, k_h, k_t, k_d, positions, row_scale, slope,
                    start, end, D, SLOPES, STARTS, PAGED, PRECISION, BLOCK_D)  # fmt: skip
        keys = page * 64 + tl.arange(0, 64)
        tl.store(Scores + line[:, None] * NP * 64 + keys[None, :], z, mask=valid[:, None])
        tl.store(Tops + page, tl.max(z, 1)[:, None], mask=valid[:, None])


@triton.jit
def _sums_of_tops(Tops, first, stop, top, height, r, KIND: tl.constexpr, CHUNK: tl.constexpr):
    """The sums of u^r and u^(r-1) over the highest scores of the pages."""
    mass = tl.zeros([], tl.float32)
    gain_mass = tl.zeros([], tl.float32)
    for block in range(first, stop, CHUNK):
        pages = block + tl.arange(0, CHUNK)
        z = tl.load(Tops + pages, mask=pages < stop, other=float("-inf"))
        gain, u = _gain(z, top, height, r, KIND)
        mass += tl.sum(gain * u, 0)
        gain_mass += tl.sum(gain, 0)
    return mass, gain_mass


@triton.jit
def _gain(z, top, height, r, KIND: tl.constexpr):
    u = tl.maximum(z - top + height, 0.0)
    return gains(u, r, KIND), u


@triton.jit
def _sums_of_pages(Scores, Pages, count, top, height, r, KIND: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sums of u^r, u^(r-1) and 1 over the scores above the threshold in the listed pages."""
    mass = tl.zeros([], tl.float32)
    gain_mass = tl.zeros([], tl.float32)
    support = tl.zeros([], tl.float32)
    for index in range(0, count, AT_ONCE):
        which = index + tl.arange(0, AT_ONCE)
        page = tl.load(Pages + which, mask=which < count, other=0)
        places = Scores + page[:, None] * 64 + tl.arange(0, 64)[None, :]
        z = tl.load(places, mask=(which < count)[:, None], other=float("-inf"))
        gain, u = _gain(z, top, height, r, KIND)
        mass += tl.sum(tl.sum(gain * u, 1), 0)
        gain_mass += tl.sum(tl.sum(gain, 1), 0)
        if KIND == 4:
            support += tl.sum(tl.sum(tl.where(u > 0, 1.0, 0.0), 1), 0)
    return mass, gain_mass, support


@triton.jit(do_not_specialize=DECODE_SIZES)
def threshold_kernel(Scores, Tops, Pages, Maximum, Height, Lengths, Starts, r, tolerance, HK, TK, ROWS, NP,
                     KIND: tl.constexpr, CONVEX: tl.constexpr, LENGTHS: tl.constexpr, STARTS: tl.constexpr,
                     CHUNK: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """The maximum of a row and the height of its threshold below it; for softmax, which has none, 1."""
    line = tl.program_id(0).to(tl.int64)
    _end, _start, first, stop = pages_of(line // ROWS // HK, Lengths, Starts, TK, LENGTHS, STARTS)
    Tops += line * NP
    Scores += line * NP * 64
    Pages += line * NP
    top = tl.full([], float("-inf"), tl.float32)
    for block in range(first, stop, CHUNK):
        pages = block + tl.arange(0, CHUNK)
        top = tl.maximum(top, tl.max(tl.load(Tops + pages, mask=pages < stop, other=float("-inf")), 0))
    sees = top > float("-inf")
    top = tl.where(sees, top, 0.0)
    height = tl.where(sees, 1.0, 0.0)
    if KIND != 0:
        # The threshold of a part of a row never exceeds that of the whole: the pages' highest scores bound it.
        nothing = tl.zeros([], tl.float32)
        low, low_norm, high_norm = nothing, nothing, nothing
        high = height
        for _ in range(6 if CONVEX else 10):
            mass, gain_mass = _sums_of_tops(Tops, first, stop, top, height, r, KIND, CHUNK)
            norm, steepness = joined_norm(nothing, nothing, mass, gain_mass, r, KIND)
            if CONVEX:
                height -= tl.maximum((norm - 1.0) / steepness, 0.0)
            else:
                height, low, low_norm, high, high_norm = secant_step(norm, height, low, low_norm, high, high_norm)
        # A hair more, so that rounding kills no survivor.
        height = tl.minimum((height if CONVEX else high) * 1.00001, 1.0)
        count = tl.zeros([], tl.int32)
        for block in range(first, stop, CHUNK):
            pages = block + tl.arange(0, CHUNK)
            z = tl.load(Tops + pages, mask=pages < stop, other=float("-inf"))
            count = _append(Pages, count, pages, z - top + height > 0)
        tl.debug_barrier()
        low, low_norm, high_norm = nothing, nothing, nothing
        high = height
        going = count > 0
        rounds = tl.zeros([], tl.int32)
        while going:
            mass, gain_mass, support = _sums_of_pages(Scores, Pages, count, top, height, r, KIND, AT_ONCE)
            norm, steepness = joined_norm(nothing, nothing, mass, gain_mass, r, KIND)
            rounds += 1
            going = (tl.abs(norm - 1.0) > tolerance) & (rounds < 40)
            if CONVEX:
                above = norm >= 1.0
                low, high = tl.where(above, low, height), tl.where(above, height, high)
                fall = curved_fall(mass, gain_mass, support, 1.0) if KIND == 4 else (norm - 1.0) / steepness
                height = inside(height - fall, low, high)
            else:
                between, low, low_norm, high, high_norm = secant_step(norm, height, low, low_norm, high, high_norm)
                height = tl.where(going, between, height)
        height = tl.where(sees, height, 0.0)
    tl.store(Maximum + line, top)
    tl.store(Height + line, height)


@triton.jit(do_not_specialize=DECODE_SIZES)
def value_kernel(V, Scores, Tops, Pages, Maximum, Height, Parts, Sums, Lengths, Starts, Table,
                 r, reach, v_b, v_h, v_t, v_d, t_b, HK, TK, ROWS, DV, NP, SPLITS,
                 KIND: tl.constexpr, LENGTHS: tl.constexpr, STARTS: tl.constexpr, PAGED: tl.constexpr,
                 PRECISION: tl.constexpr, STATS: tl.constexpr,
                 M: tl.constexpr, CHUNK: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """Of a run of pages: the sum of weights times values, and of the weights; for statistics two sums more."""
    split, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, kv_head = pair // HK, pair % HK
    rows = tl.program_id(2) * M + tl.arange(0, M)
    valid = rows < ROWS
    line = pair * ROWS + rows
    _end, _start, first, stop = pages_of(batch, Lengths, Starts, TK, LENGTHS, STARTS)
    begin, stop = _share(split, SPLITS, first, stop)
    top = tl.load(Maximum + line, mask=valid, other=0.0)
    height = tl.load(Height + line, mask=valid, other=0.0)
    # Below this a weight is 0: the threshold, and for softmax where exp underflows.
    depth = height * reach
    Pages += (tl.program_id(2) * tl.num_programs(1) + pair) * NP + begin
    if PAGED:
        Table += batch * t_b
    count = begin * 0
    for block in range(begin, stop, CHUNK):
        pages = block + tl.arange(0, CHUNK)
        z = tl.load(Tops + line[:, None] * NP + pages[None, :], mask=valid[:, None] & (pages < stop)[None, :],
                    other=float("-inf"))  # fmt: skip
        alive = z - top[:, None] + depth[:, None] > 0
        count = _append(Pages, count, pages, tl.max(alive.to(tl.int32), 0) > 0)
    tl.debug_barrier()

    columns = tl.arange(0, BLOCK_DV)
    out = tl.zeros([M, BLOCK_DV], tl.float32)
    mass = tl.zeros([M], tl.float32)
    support = tl.zeros([M], tl.float32)
    entropy = tl.zeros([M], tl.float32)
    for index in range(count):
        page = tl.load(Pages + index)
        keys = page * 64 + tl.arange(0, 64)
        z = tl.load(Scores + line[:, None] * NP * 64 + keys[None, :], mask=valid[:, None], other=float("-inf"))
        p, _gains = weights_and_gains(z, top[:, None], height[:, None], r, KIND)
        wanted = tl.max(p, 0) > 0
        base = page_base(V, Table, batch, kv_head, page, v_b, v_h, v_t, PAGED)
        places = base + tl.arange(0, 64)[:, None] * v_t + columns[None, :] * v_d
        v = tl.load(places, mask=wanted[:, None] & (columns[None, :] < DV), other=0.0)
        out = tl.dot(p.to(v.dtype), v, out, input_precision=PRECISION)
        mass += tl.sum(p, 1)
        if STATS:
            support += tl.sum(tl.where(p > 0, 1.0, 0.0), 1)
            entropy -= tl.sum(tl.where(p > 0, p * tl.log(tl.maximum(p, 1e-37)), 0.0), 1)
    place = line * SPLITS + split
    tl.store(Sums + place * 3, mass, mask=valid)
    if STATS:
        tl.store(Sums + place * 3 + 1, support, mask=valid)
        tl.store(Sums + place * 3 + 2, entropy, mask=valid)
    if count > 0:
        tl.store(Parts + place[:, None] * DV + columns[None, :], out, mask=valid[:, None] & (columns[None, :] < DV))


@triton.jit(do_not_specialize=DECODE_SIZES)
def sum_kernel(Parts, Sums, Height, Support, Entropy, O, o_b, o_h, o_t, o_d, HK, GROUP, TQ, ROWS, DV, SPLITS,
               KIND: tl.constexpr, STATS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """The output of a row. Dividing by the sum of the weights takes back what rounding left of it."""
    line = tl.program_id(0).to(tl.int64)
    row, pair = line % ROWS, line // ROWS
    batch, head, query = pair // HK, pair % HK * GROUP + row // TQ, row % TQ
    columns = tl.arange(0, BLOCK_DV)
    out = tl.zeros([BLOCK_DV], tl.float32)
    mass = tl.zeros([], tl.float32)
    support = tl.zeros([], tl.float32)
    entropy = tl.zeros([], tl.float32)
    for block in range(0, SPLITS, CHUNK):
        splits = block + tl.arange(0, CHUNK)
        place = line * SPLITS + splits
        masses = tl.load(Sums + place * 3, mask=splits < SPLITS, other=0.0)
        some = (masses > 0)[:, None] & (columns[None, :] < DV)
        out += tl.sum(tl.load(Parts + place[:, None] * DV + columns[None, :], mask=some, other=0.0), 0)
        mass += tl.sum(masses, 0)
        if STATS:
            support += tl.sum(tl.load(Sums + place * 3 + 1, mask=splits < SPLITS, other=0.0), 0)
            entropy += tl.sum(tl.load(Sums + place * 3 + 2, mask=splits < SPLITS, other=0.0), 0)
    sees = mass > 0
    share = 1.0 / tl.where(sees, mass, 1.0)
    places = O + batch * o_b + head * o_h + query * o_t + columns * o_d
    tl.store(places, (out * share).to(O.dtype.element_ty), mask=columns < DV)
    if KIND == 0:
        tl.store(Height + line, tl.where(sees, share, 0.0))
    if STATS:
        # -sum (p/m) log (p/m) from -sum p log p
        tl.store(Support + line, support)
        tl.store(Entropy + line, tl.where(sees, entropy * share - tl.log(share), 0.0))
