"""The survey with the keys of the next tile on their way while a tile is looked at: see `kernels/survey.py`.

Triton's own pipeline asks for them last, behind the maximum of the tile and its two meetings, and waits for them first
thing in the next turn. Here they are asked for as soon as the product of this tile is under way.
"""

import triton.language as tl

from longspan.kernels.hopper.words import arrived, async_copy, copy_rows, gl, jit, warpgroup_mma, warpgroup_mma_wait
from longspan.kernels.survey import first_in_reach, store_survey, survey_tile
from longspan.kernels.tiles import SIZES, ids_of, key_tiles, keys_of, masked_tile, of_other_launch, place_in_grid
from longspan.kernels.votes import ready_to_vote


@jit
def _tile_at(index, edges, start, inner, whole):
    """Tiles that need a mask first, from the back, then the others, nearest first."""
    return tl.where(index < edges, masked_tile(edges - 1 - index, start, inner, whole), whole - 1 - (index - edges))


@jit
def _copy_tile(Keys, K, index, total, edges, start, inner, whole, k_t, TK, D,
               N: tl.constexpr, BLOCK_D: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    first = _tile_at(index, edges, start, inner, whole) * N
    left = tl.where(index < total, TK - first, 0)
    copy_rows(Keys.index(index % DEPTH), K, first, k_t, left, D, N, BLOCK_D)
    async_copy.commit_group()


@jit
def _look(begin, stop, total, edges, Queries, Keys, K, start, inner, whole, k_t, positions, own,
          maximum, height, line, slope_of_line, mass, gain_mass, fallen, count, masked, List, a, r, scale, slope, limit,
          Documents, TK, D, KIND: tl.constexpr, GUESS: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr,
          DOCUMENTS: tl.constexpr, MASKED: tl.constexpr, ABOVE_0: tl.constexpr, VOTES: tl.constexpr, M: tl.constexpr,
          N: tl.constexpr, BLOCK_D: tl.constexpr, DEPTH: tl.constexpr, SCORES: tl.constexpr):  # fmt: skip
    """The tiles `begin` to `stop` of `total`, in the order of `_tile_at`."""
    for index in range(begin, stop):
        arrived(DEPTH - 2)
        zeros = gl.zeros([M, N], tl.float32, SCORES)
        product = warpgroup_mma(Queries, Keys.index(index % DEPTH).permute((1, 0)), zeros, use_acc=False, is_async=True)
        _copy_tile(Keys, K, index + DEPTH - 1, total, edges, start, inner, whole, k_t, TK, D, N, BLOCK_D, DEPTH)
        product = warpgroup_mma_wait(0, [product])
        tile = _tile_at(index, edges, start, inner, whole)
        keys = tile * N + gl.arange(0, N, gl.SliceLayout(0, SCORES))
        maximum, height, line, slope_of_line, mass, gain_mass, fallen, count = survey_tile(
            product, tile, keys, positions, own, maximum, height, line, slope_of_line, mass, gain_mass, fallen, count,
            masked, List, a, r, scale, slope, limit, Documents, TK,
            KIND, GUESS, CAUSAL, SLOPES, DOCUMENTS, MASKED, ABOVE_0, VOTES)  # fmt: skip
    return maximum, height, line, slope_of_line, mass, gain_mass, fallen, count


@jit(do_not_specialize=SIZES)
def survey_kernel(Q, K, Maximum, Height, Bound, Hint, List, Counts, Slopes, Lengths, Documents, Ranges, KeyNorms,
                  a, r, scale, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, H, GROUP, TQ, TK, D, NQ, NK,
                  KIND: tl.constexpr, GUESS: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr,
                  SPLIT: tl.constexpr, LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr, MASK_ALL: tl.constexpr,
                  PRECISION: tl.constexpr, VOTES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                  BLOCK_D: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """`kernels.survey.survey_kernel` in half precision. DEPTH: the tiles of keys that have room."""
    if VOTES:
        ready_to_vote()
    WARPS: tl.constexpr = gl.num_warps()
    SCORES: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 16])
    ROWS: tl.constexpr = gl.SliceLayout(1, SCORES)
    SHARED: tl.constexpr = gl.NVMMASharedLayout.get_default_for([N, BLOCK_D], K.dtype.element_ty)
    pair, block, batch, head, first = place_in_grid(H, NQ, M)
    if SPLIT:  # noqa: SIM102, the compiler would take both sides of an `and`
        if of_other_launch(Slopes, head, SLOPES):
            return
    rows = first + gl.arange(0, M, ROWS)
    positions, valid = rows + TK - TQ, rows < TQ
    K, end, slope = keys_of(K, Lengths, Slopes, batch, head, GROUP, TK, k_b, k_h, LENGTHS, SLOPES)
    if DOCUMENTS:
        Documents += batch * TK
        Ranges += (batch * NQ + block) * 3
    own = ids_of(Documents, positions, TK, DOCUMENTS)
    limit = end if LENGTHS or not CAUSAL else None
    place = pair.to(tl.int64) * NQ + block
    List += place * NK
    start, inner, whole, stop = key_tiles(first + TK - TQ, tl.minimum(first + M, TQ) - 1 + TK - TQ, end, Ranges, TK,
                                          N, CAUSAL, DOCUMENTS, MASK_ALL)  # fmt: skip
    edges = inner - start + stop - whole
    total = edges + whole - inner

    Queries = gl.allocate_shared_memory(Q.dtype.element_ty, [M, BLOCK_D], SHARED)
    Keys = gl.allocate_shared_memory(K.dtype.element_ty, [DEPTH, N, BLOCK_D], SHARED)
    copy_rows(Queries, Q + batch * q_b + head * q_h, first, q_t, TQ - first, D, M, BLOCK_D)
    for index in tl.static_range(DEPTH - 1):
        _copy_tile(Keys, K, index, total, edges, start, inner, whole, k_t, TK, D, N, BLOCK_D, DEPTH)

    maximum = tl.where(valid, -1e30, 1e30)  # beyond the end nothing is ever above
    line = gl.zeros([M], tl.float32, ROWS)
    height, slope_of_line, mass, gain_mass, fallen = line + 1.0, line, line, line, line
    count = 0
    maximum, height, line, slope_of_line, mass, gain_mass, fallen, count = _look(
        0, edges, total, edges, Queries, Keys, K, start, inner, whole, k_t, positions, own,
        maximum, height, line, slope_of_line, mass, gain_mass, fallen, count, 0, List, a, r, scale, slope, limit,
        Documents, TK, D, KIND, GUESS, CAUSAL, SLOPES, DOCUMENTS, True, False, VOTES, M, N, BLOCK_D,
        DEPTH, SCORES)  # fmt: skip
    masked = count
    if SLOPES and CAUSAL and not MASK_ALL:
        arrived(DEPTH - 2)
        COPIES: tl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [WARPS, 1], [1, 0])
        q = Queries.load(COPIES).to(tl.float32)
        norm = tl.load(KeyNorms + pair // H * (H // GROUP) + pair % H // GROUP)
        reach = gl.convert_layout(tl.sqrt(tl.sum(q * q, 1)), ROWS) * norm
        inner = first_in_reach(reach, maximum, height, a, scale, slope, valid, first + TK - TQ, inner, whole, N)
        total = edges + whole - inner
    # Once no threshold is negative, neither is a score that matters.
    near = tl.minimum(edges + 1, total)
    maximum, height, line, slope_of_line, mass, gain_mass, fallen, count = _look(
        edges, near, total, edges, Queries, Keys, K, start, inner, whole, k_t, positions, own,
        maximum, height, line, slope_of_line, mass, gain_mass, fallen, count, masked, List, a, r, scale, slope, limit,
        Documents, TK, D, KIND, GUESS, CAUSAL, SLOPES, DOCUMENTS, False, False, VOTES, M, N, BLOCK_D,
        DEPTH, SCORES)  # fmt: skip
    quick = tl.where(tl.min(maximum - height, 0) >= 0, total, near)
    maximum, height, line, slope_of_line, mass, gain_mass, fallen, count = _look(
        near, quick, total, edges, Queries, Keys, K, start, inner, whole, k_t, positions, own,
        maximum, height, line, slope_of_line, mass, gain_mass, fallen, count, masked, List, a, r, scale, slope, limit,
        Documents, TK, D, KIND, GUESS, CAUSAL, SLOPES, DOCUMENTS, False, True, VOTES, M, N, BLOCK_D,
        DEPTH, SCORES)  # fmt: skip
    maximum, height, line, slope_of_line, mass, gain_mass, fallen, count = _look(
        quick, total, total, edges, Queries, Keys, K, start, inner, whole, k_t, positions, own,
        maximum, height, line, slope_of_line, mass, gain_mass, fallen, count, masked, List, a, r, scale, slope, limit,
        Documents, TK, D, KIND, GUESS, CAUSAL, SLOPES, DOCUMENTS, False, False, VOTES, M, N, BLOCK_D,
        DEPTH, SCORES)  # fmt: skip

    store_survey(Maximum, Height, Bound, Hint, Counts, pair, place, rows, TQ, maximum, height, slope_of_line, mass,
                 gain_mass, fallen, masked, count, GUESS)  # fmt: skip
