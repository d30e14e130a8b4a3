"""Which pages of keys cannot hold a survivor, from a box around each page's keys.

In every channel i the keys of a page lie between low_i and high_i, so that no product with a query exceeds

    sum_i max(q_i low_i, q_i high_i) = q+ . high + q- . low,   q+ and q- the positive and negative parts of q,

nor, by its norm, |q| max|k|. Less what the slope takes at the least, this bounds every score of the page from above. A
page is out if that lies `reach` or more below a score that some key is known to have. Those are found by reading a few
pages whole: of every 64 pages (32 where a program has less memory) and every row, the one with the highest bound.
"""

import triton
import triton.language as tl

from longspan.kernels.decode import DECODE_SIZES, nearness, norms_of, pages_of, row_inputs, scored
from longspan.kernels.gpus import highest


@triton.jit(do_not_specialize=DECODE_SIZES)
def bound_kernel(Q, K, Low, High, Norms, Bounds, Floors, Slopes, Scales, Lengths, Starts, Table,
                 unit, scale, epsilon, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, n_b, n_h, n_p, l_b, l_h, l_p, t_b,
                 HK, GROUP, TQ, TK, ROWS, D, NP, NB,
                 SLOPES: tl.constexpr, SCALES: tl.constexpr, LENGTHS: tl.constexpr, STARTS: tl.constexpr,
                 PAGED: tl.constexpr, PRECISION: tl.constexpr, PROBES: tl.constexpr,
                 M: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Bounds of the scores of CHUNK pages, and a score that every row reaches among them.

    `epsilon` times |q| |k| covers the rounding of bounds and scores, in every product that has it.
    """
    block, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, kv_head = pair // HK, pair % HK
    rows = tl.program_id(2) * M + tl.arange(0, M)
    valid = rows < ROWS
    line = pair * ROWS + rows
    end, start, first, stop = pages_of(batch, Lengths, Starts, TK, LENGTHS, STARTS)
    pages = block * CHUNK + tl.arange(0, CHUNK)
    there = (pages >= first) & (pages < stop)
    floor = tl.full([M], float("-inf"), tl.float32)
    if (block * CHUNK < stop) & (block * CHUNK + CHUNK > first):
        q, positions, row_scale, slope = row_inputs(
            Q, Slopes, Scales, batch, kv_head, rows, valid, unit, scale, end, q_b, q_h, q_t, q_d, HK, GROUP, TQ, D,
            SLOPES, SCALES, M, BLOCK_D)  # fmt: skip
        if PAGED:
            Table += batch * t_b
            own = tl.load(Table + pages, mask=there, other=0).to(tl.int64)
            boxes = own * l_b + kv_head * l_h
            norms = own * n_b + kv_head * n_h
        else:
            boxes = batch * l_b + kv_head * l_h + pages.to(tl.int64) * l_p
            norms = batch * n_b + kv_head * n_h + pages.to(tl.int64) * n_p
        columns = tl.arange(0, BLOCK_D)
        inside = there[:, None] & (columns[None, :] < D)
        low = tl.load(Low + boxes[:, None] + columns[None, :], mask=inside, other=0.0)
        high = tl.load(High + boxes[:, None] + columns[None, :], mask=inside, other=0.0)
        toward = tl.where((row_scale < 0)[:, None], -q, q)
        bound = tl.dot(tl.maximum(toward, 0.0).to(q.dtype), tl.trans(high), input_precision=PRECISION)
        bound = tl.dot(tl.minimum(toward, 0.0).to(q.dtype), tl.trans(low), bound, input_precision=PRECISION)
        corner = norms_of(tl.maximum(tl.abs(low.to(tl.float32)), tl.abs(high.to(tl.float32))))
        size = norms_of(q)
        norm = tl.load(Norms + norms, mask=there, other=0.0)
        bound = tl.minimum(bound + epsilon * size[:, None] * corner[None, :], size[:, None] * norm[None, :] * 1.001)
        bound *= tl.abs(row_scale)[:, None]
        if SLOPES:
            bound -= nearness(pages, positions, slope)
        bound = tl.where(there[None, :], bound, float("-inf"))
        tl.store(Bounds + line[:, None] * NP + pages[None, :], bound, mask=valid[:, None] & there[None, :])

        best = tl.max(bound, 1)
        candidate = tl.max(tl.where((bound == best[:, None]) & there[None, :], pages[None, :], -1), 1)
        for probe in range(PROBES):
            page = highest(tl.where(tl.arange(0, M) == probe, candidate, -1))
            if page >= first:
                z = scored(q, K, Table, batch, kv_head, page, k_b, k_h, k_t, k_d, positions, row_scale, slope,
                           start, end, D, SLOPES, STARTS, PAGED, PRECISION, BLOCK_D)  # fmt: skip
                floor = tl.maximum(floor, tl.max(z, 0))
        largest = tl.max(tl.where(there, norm, 0.0), 0)
        floor -= epsilon * size * tl.abs(row_scale) * largest
    tl.store(Floors + line * NB + block, floor, mask=valid)
