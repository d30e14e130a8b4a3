"""Entmax attention for a few new tokens over a long cache, split over the keys so that one sequence fills a GPU.

A *page* is 64 keys. All query heads that share a key head, and all their new tokens, are the rows of one tile: a page
of keys is read once for all of them. Two stages, and a third where it may be needed:

1. *Score* (here): every page once; the highest score of every row in each quarter of the page goes to memory, and the
   scores themselves where they can still be a survivor's. Pages that provably hold none are not read.
2. *Row* (`decode_rows.py`), a few programs a row: the row's threshold from what stage 1 left in the L2 cache, the
   list of its survivors, and their values.
3. *Value* (`decode_values.py`): the values of rows with more survivors than a list holds, page by page for all rows of
   a tile. Short caches fit the list whole and are done after stage 2.

Scores are kept as ``z = a * score``, for softmax as they are. `reach` is how far below the row's maximum a weight can
lie and not be 0: 1, and for softmax where exp underflows. Nothing here asks the host: lengths are read on the device,
and programs share out the pages that there are, not those there is room for.
"""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longspan.kernels.tiles import append, end_of, load_tile, scores_of

# Arguments a kernel is not compiled anew for, however they divide.
DECODE_SIZES = ["HK", "GROUP", "TQ", "TK", "ROWS", "NP", "NB", "SPLITS"]


if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def _put(base, offsets, values, wanted):
        tl.store(base + offsets, values, mask=wanted)

else:

    @triton.jit
    def _put(base, offsets, values, wanted):
        """Stores floats, from the threads that have them, at 32-bit offsets from one place.

        `tl.store` first hands them to threads that lie along the memory: all meet twice for it, and again for the mask.
        """
        tl.inline_asm_elementwise(
            """{
            .reg .pred %wanted;
            .reg .b64 %place;
            setp.ne.s32 %wanted, $4, 0;
            mad.wide.s32 %place, $2, 4, $1;
            @%wanted st.global.f32 [%place], $3;
            mov.b32 $0, 0;
            }""",
            "=r,l,r,f,r", [base.to(tl.int64), offsets, values, wanted.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def ending(EARLY: tl.constexpr):
    """Says that the next kernel's programs may take the places of this one's (programmatic dependent launch)."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def beginning(EARLY: tl.constexpr):
    """Waits for what the kernel before has written."""
    if EARLY:
        gdc_wait()


@triton.jit
def pages_of(batch, Lengths, Starts, TK, LENGTHS: tl.constexpr, STARTS: tl.constexpr):
    """The end of a sequence, its first key, and the pages between: the first and the one behind the last."""
    end = end_of(Lengths, batch, TK, LENGTHS)
    start = tl.maximum(tl.load(Starts + batch).to(tl.int32), 0) if STARTS else 0
    return end, start, start // 64, tl.cdiv(end, 64)


@triton.jit
def share(split, splits, first, stop):
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
    """The scores of a page with every row, (keys, rows), -inf where a key is hidden; `scale` and `slope` are per row.

    Keys come first so that each of four warps has sixteen of them: a quarter's highest score is within a warp.
    """
    base = page_base(K, Table, batch, kv_head, page, k_b, k_h, k_t, PAGED)
    k = load_tile(base, 0, k_t, k_d, end - page * 64, D, 64, BLOCK_D)
    product = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    keys = page * 64 + tl.arange(0, 64)
    z = scores_of(product, keys[:, None], positions[None, :], scale[None, :], slope[None, :], None, None, None,
                  True, SLOPES, False)  # fmt: skip
    if STARTS:
        z = tl.where(keys[:, None] >= start, z, float("-inf"))
    return z


@triton.jit
def _page_norms(Norms, Table, batch, kv_head, pages, there, n_b, n_h, n_p, PAGED: tl.constexpr):
    places = Norms + batch * n_b + kv_head * n_h + pages.to(tl.int64) * n_p
    if PAGED:
        places = Norms + tl.load(Table + pages, mask=there, other=0).to(tl.int64) * n_b + kv_head * n_h
    return tl.load(places, mask=there, other=0.0)


@triton.jit
def _own_floor(Norms, Table, batch, kv_head, positions, valid, size, start, n_b, n_h, n_p, PAGED: tl.constexpr):
    """What a row's score with its own key, at no distance, cannot lie below; infinite for a row that sees nothing."""
    sees = valid & (positions >= start)
    norm = _page_norms(Norms, Table, batch, kv_head, tl.maximum(positions, 0) // 64, sees, n_b, n_h, n_p, PAGED)
    return tl.where(sees, -size * norm, float("inf"))


@triton.jit
def _window(Norms, Table, batch, kv_head, begin, stop, positions, slope, valid, size, limit, n_b, n_h, n_p,
            PAGED: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The run of pages, within another, outside of which no row's scores exceed its limit; where empty it ends first.

    Distances grow along a cache, so that pages in the midst of the run are hardly ever out.
    """
    low, high = stop, begin
    for block in range(begin, stop, CHUNK):
        pages = block + tl.arange(0, CHUNK)
        there = pages < stop
        norms = _page_norms(Norms, Table, batch, kv_head, pages, there, n_b, n_h, n_p, PAGED)
        bound = size[:, None] * norms[None, :] - nearness(pages, positions, slope)
        alive = valid[:, None] & ((bound <= limit[:, None]) == 0)  # NaN lives
        live = there & (tl.max(alive.to(tl.int32), 0) > 0)
        low = tl.minimum(low, tl.min(tl.where(live, pages, stop), 0))
        high = tl.maximum(high, tl.max(tl.where(live, pages + 1, begin), 0))
    return low, high


@triton.jit
def _unread(Tops, line, pages, unread, NP, M: tl.constexpr, CHUNK: tl.constexpr):
    """Pages that are not read have no highest score."""
    for quarter in tl.static_range(4):
        places = Tops + (line[:, None] * NP + pages[None, :]) * 4 + quarter
        tl.store(places, tl.full([M, CHUNK], float("-inf"), tl.float32), mask=unread)


@triton.jit
def _leave_out(Tops, line, begin, stop, valid, NP, M: tl.constexpr, CHUNK: tl.constexpr):
    for block in range(begin, stop, CHUNK):
        pages = block + tl.arange(0, CHUNK)
        _unread(Tops, line, pages, valid[:, None] & (pages < stop)[None, :], NP, M, CHUNK)


@triton.jit
def _best_floor(Floors, line, valid, NB, M: tl.constexpr, CHUNK: tl.constexpr):
    # One reduction, behind the loop: inside of it, Triton's compiler (3.6, 3.7) stumbles over the result's many uses.
    highest = tl.full([M, CHUNK], float("-inf"), tl.float32)
    for block in range(0, NB, CHUNK):
        probed = block + tl.arange(0, CHUNK)
        seen = valid[:, None] & (probed < NB)[None, :]
        floors = tl.load(Floors + line[:, None] * NB + probed[None, :], mask=seen, other=float("-inf"))
        highest = tl.maximum(highest, floors)
    return tl.max(highest, 1)


@triton.jit
def _listed(Bounds, Tops, Pages, line, begin, stop, valid, limit, NP, M: tl.constexpr, CHUNK: tl.constexpr):
    """Puts the pages of a run that can hold a survivor on a list, by their bounds, and says how many they are."""
    count = begin * 0
    for block in range(begin, stop, CHUNK):
        pages = block + tl.arange(0, CHUNK)
        there = pages < stop
        seen = valid[:, None] & there[None, :]
        bound = tl.load(Bounds + line[:, None] * NP + pages[None, :], mask=seen, other=float("-inf"))
        alive = valid[:, None] & ((bound <= limit[:, None]) == 0)  # NaN lives
        live = there & (tl.max(alive.to(tl.int32), 0) > 0)
        _unread(Tops, line, pages, valid[:, None] & (there & (live == 0))[None, :], NP, M, CHUNK)
        count = append(Pages, count, pages, live)
    tl.debug_barrier()
    return count


@triton.jit(do_not_specialize=DECODE_SIZES)
def score_kernel(Q, K, Scores, Tops, Pages, Arrivals, Slopes, Scales, Lengths, Starts, Table, Norms, Bounds, Floors,
                 unit, scale, reach, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, n_b, n_h, n_p, t_b,
                 HK, GROUP, TQ, TK, ROWS, D, NP, NB, SPLITS,
                 SLOPES: tl.constexpr, SCALES: tl.constexpr, LENGTHS: tl.constexpr, STARTS: tl.constexpr,
                 PAGED: tl.constexpr, NORMS: tl.constexpr, BOXES: tl.constexpr, PRECISION: tl.constexpr,
                 EARLY: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Of a run of pages the highest score of every row and quarter, and the scores that can be survivors'.

    Programs of all key heads are in turn, so that those of windows, which end at once, leave their places to others;
    the nearest pages, where windows are, come first.
    """
    pair, split = tl.program_id(0).to(tl.int64), SPLITS - 1 - tl.program_id(1)
    batch, kv_head = pair // HK, pair % HK
    rows = tl.program_id(2) * M + tl.arange(0, M)
    valid = rows < ROWS
    line = pair * ROWS + rows  # a row among all
    if split == 0:
        # Those who finish a row or a tile together will count themselves.
        tl.store(Arrivals + line, tl.zeros([M], tl.int32), mask=valid)
        tl.store(Arrivals + tl.num_programs(0) * ROWS + tl.program_id(2) * tl.num_programs(0) + pair, 0)
    end, start, first, stop = pages_of(batch, Lengths, Starts, TK, LENGTHS, STARTS)
    begin, stop = share(split, SPLITS, first, stop)
    if begin >= stop:
        return
    q, positions, row_scale, slope = row_inputs(
        Q, Slopes, Scales, batch, kv_head, rows, valid, unit, scale, end, q_b, q_h, q_t, q_d, HK, GROUP, TQ, D,
        SLOPES, SCALES, M, BLOCK_D)  # fmt: skip
    if PAGED:
        Table += batch * t_b

    # What a row's maximum cannot lie below.
    floor = tl.full([M], float("-inf"), tl.float32)
    if BOXES:
        floor = _best_floor(Floors, line, valid, NB, M, CHUNK)
        Pages += (tl.program_id(2) * tl.num_programs(0) + pair) * NP + begin
        count = _listed(Bounds, Tops, Pages, line, begin, stop, valid, floor - reach, NP, M, CHUNK)
    elif NORMS and SLOPES:
        # Only where every row has a slope are the rows of a tile a window.
        if tl.min(tl.where(valid, tl.abs(slope), float("inf")), 0) > 0:
            size = norms_of(q) * tl.abs(row_scale) * 1.001
            floor = _own_floor(Norms, Table, batch, kv_head, positions, valid, size, start, n_b, n_h, n_p, PAGED)
            low, high = _window(Norms, Table, batch, kv_head, begin, stop, positions, slope, valid, size,
                                floor - reach, n_b, n_h, n_p, PAGED, CHUNK)  # fmt: skip
            if high - low > 3:
                # By norms alone a window is twice too wide. One page more can spare some, if there are some to spare.
                near = scored(q, K, Table, batch, kv_head, (end - 1) // 64, k_b, k_h, k_t, k_d,
                              positions, row_scale, slope, start, end, D,
                              SLOPES, STARTS, PAGED, PRECISION, BLOCK_D)  # fmt: skip
                floor = tl.maximum(floor, tl.max(near, 0))
                low, high = _window(Norms, Table, batch, kv_head, low, high, positions, slope, valid, size,
                                    floor - reach, n_b, n_h, n_p, PAGED, CHUNK)  # fmt: skip
            low = tl.minimum(low, high)
            _leave_out(Tops, line, begin, low, valid, NP, M, CHUNK)
            _leave_out(Tops, line, high, stop, valid, NP, M, CHUNK)
            begin, stop = low, high
        count = stop - begin
    else:
        count = stop - begin

    # A quarter `reach` below another has no survivor, so that none of its scores will be asked for. A hair more, and
    # not less where the maximum is so large that the hair is lost.
    highest, reach = tl.broadcast_to(floor[None, None, :], [4, 1, M]), reach * 1.001
    quarters, row = tl.arange(0, 4)[:, None, None], tl.arange(0, M)[None, None, :]
    Scores += (pair * ROWS + tl.program_id(2) * M) * NP * 64
    Tops += (pair * ROWS + tl.program_id(2) * M) * NP * 4
    score_places = row * (NP * 64) + quarters * 16 + tl.arange(0, 16)[None, :, None]
    top_places = row * (NP * 4) + quarters
    valid = tl.broadcast_to(valid[None, None, :], [4, 1, M])
    for index in range(0, count):
        page = begin + index
        if BOXES:
            page = tl.load(Pages + index)
        z = scored(q, K, Table, batch, kv_head, page, k_b, k_h, k_t, k_d, positions, row_scale, slope,
                    start, end, D, SLOPES, STARTS, PAGED, PRECISION, BLOCK_D)  # fmt: skip
        z = tl.reshape(z, [4, 16, M])
        top = tl.max(z, 1, keep_dims=True)
        highest = tl.maximum(highest, top)
        _put(Scores + page * 64, score_places, z, tl.broadcast_to(valid & (top >= highest - reach), [4, 16, M]))
        _put(Tops + page * 4, top_places, top, valid)
    ending(EARLY)
