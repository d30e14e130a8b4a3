"""The solver with the keys of the next tile on their way while a tile is summed: see `kernels/solve.py`."""

import triton.language as tl

from longspan.kernels.hopper.words import arrived, async_copy, copy_rows, gl, jit, warpgroup_mma, warpgroup_mma_wait
from longspan.kernels.solve import first_height, next_height, sums_at
from longspan.kernels.tiles import (
    SIZES,
    ids_of,
    keys_of,
    live_tiles_of,
    of_other_launch,
    place_in_grid,
    row_scores,
    surveyed,
)


@jit
def _copy_tile(Keys, K, List, index, count, k_t, TK, D,
               N: tl.constexpr, BLOCK_D: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    first = tl.load(List + index, mask=index < count, other=0).to(tl.int32) * N
    copy_rows(Keys.index(index % DEPTH), K, first, k_t, tl.where(index < count, TK - first, 0), D, N, BLOCK_D)
    async_copy.commit_group()


@jit
def _sums(begin, stop, count, List, Queries, Keys, K, k_t, positions, own, maximum, height,
          mass, gain_mass, support, a, r, scale, slope, end, Documents, TK, D, KIND: tl.constexpr, CAUSAL: tl.constexpr,
          SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr, MASKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
          BLOCK_D: tl.constexpr, DEPTH: tl.constexpr, SCORES: tl.constexpr):  # fmt: skip
    """Sums over the tiles `begin` to `stop` of the `count` on the list at this height."""
    for index in range(begin, stop):
        arrived(DEPTH - 2)
        zeros = gl.zeros([M, N], tl.float32, SCORES)
        product = warpgroup_mma(Queries, Keys.index(index % DEPTH).permute((1, 0)), zeros, use_acc=False, is_async=True)
        _copy_tile(Keys, K, List, index + DEPTH - 1, count, k_t, TK, D, N, BLOCK_D, DEPTH)
        keys = gl.arange(0, N, gl.SliceLayout(0, SCORES))
        if SLOPES or MASKED:
            keys += tl.load(List + index).to(tl.int32) * N
        product = warpgroup_mma_wait(0, [product])
        z = row_scores(product, keys, positions, own, a * scale, a * slope, end, Documents, TK,
                       CAUSAL, SLOPES, DOCUMENTS, MASKED)  # fmt: skip
        mass, gain_mass, support = sums_at(z, maximum, height, mass, gain_mass, support, r, KIND)
    return mass, gain_mass, support


@jit(do_not_specialize=SIZES)
def solve_kernel(Q, K, Maximum, Height, Hint, List, Counts, Over, Slopes, Lengths, Documents,
                 a, r, scale, tail, tolerance, aim, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, H, GROUP, TQ, TK, D, NQ, NK,
                 KIND: tl.constexpr, TAIL: tl.constexpr, COLLECTED: tl.constexpr,
                 CAUSAL: tl.constexpr, SLOPES: tl.constexpr, SPLIT: tl.constexpr, LENGTHS: tl.constexpr,
                 DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
                 M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr,
                 DEPTH: tl.constexpr):  # fmt: skip
    """`kernels.solve.solve_kernel` in half precision, by whole tiles. DEPTH: the tiles of keys that have room."""
    WARPS: tl.constexpr = gl.num_warps()
    SCORES: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 16])
    ROWS: tl.constexpr = gl.SliceLayout(1, SCORES)
    SHARED: tl.constexpr = gl.NVMMASharedLayout.get_default_for([N, BLOCK_D], K.dtype.element_ty)
    pair, block, batch, head, first = place_in_grid(H, NQ, M)
    if SPLIT:  # noqa: SIM102, the compiler would take both sides of an `and`
        if of_other_launch(Slopes, head, SLOPES):
            return
    place = pair.to(tl.int64) * NQ + block
    if COLLECTED:  # noqa: SIM102, likewise
        if tl.load(Over + place) == 0:
            return
    rows = first + gl.arange(0, M, ROWS)
    positions, valid = rows + TK - TQ, rows < TQ
    K, end, slope = keys_of(K, Lengths, Slopes, batch, head, GROUP, TK, k_b, k_h, LENGTHS, SLOPES)
    if DOCUMENTS:
        Documents += batch * TK
    limit = end if LENGTHS or not CAUSAL else None
    own = ids_of(Documents, positions, TK, DOCUMENTS)
    List, masked, count = live_tiles_of(List, Counts, pair, block, NQ, NK)
    Queries = gl.allocate_shared_memory(Q.dtype.element_ty, [M, BLOCK_D], SHARED)
    Keys = gl.allocate_shared_memory(K.dtype.element_ty, [DEPTH, N, BLOCK_D], SHARED)
    copy_rows(Queries, Q + batch * q_b + head * q_h, first, q_t, TQ - first, D, M, BLOCK_D)
    line_place, maximum, height = surveyed(Maximum, Height, pair, rows, TQ)
    hint = tl.load(Hint + line_place, mask=valid, other=1.0)
    low, high = height * 0.0, height  # the root lies between these heights
    height = first_height(height, hint, valid, r, tail, KIND, TAIL)
    going = count > 0
    rounds = 0
    while going:
        for index in tl.static_range(DEPTH - 1):
            _copy_tile(Keys, K, List, index, count, k_t, TK, D, N, BLOCK_D, DEPTH)
        mass, gain_mass, support = height * 0.0, height * 0.0, height * 0.0
        mass, gain_mass, support = _sums(
            0, masked, count, List, Queries, Keys, K, k_t, positions, own, maximum, height,
            mass, gain_mass, support, a, r, scale, slope, limit, Documents, TK, D,
            KIND, CAUSAL, SLOPES, DOCUMENTS, True, M, N, BLOCK_D, DEPTH, SCORES)  # fmt: skip
        mass, gain_mass, support = _sums(
            masked, count, count, List, Queries, Keys, K, k_t, positions, own, maximum, height,
            mass, gain_mass, support, a, r, scale, slope, limit, Documents, TK, D,
            KIND, CAUSAL, SLOPES, DOCUMENTS, False, M, N, BLOCK_D, DEPTH, SCORES)  # fmt: skip
        arrived(0)  # what was asked for beyond the end
        height, low, high, farthest = next_height(mass, gain_mass, support, height, low, high, r, aim, KIND)
        rounds += 1
        going = (farthest > tolerance) & (rounds < 32)
    tl.store(Height + line_place, height, mask=valid)
