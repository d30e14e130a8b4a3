"""Weights times values on Hopper: see `kernels/output.py`.

A tile is taken in halves: while the weights of one are made, the product of the other is under way, and the next tile
is on its way all the time.
"""

import triton.language as tl

from longspan.kernels.hopper.words import (
    arrived,
    async_copy,
    copy_rows,
    gl,
    jit,
    store_rows,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from longspan.kernels.solver import gains, joined_norm
from longspan.kernels.tiles import (
    SIZES,
    ids_of,
    keys_of,
    live_tiles_of,
    narrowed,
    of_other_launch,
    place_in_grid,
    row_scores,
    surveyed,
)
from longspan.kernels.votes import any_above_0, ready_to_vote


@jit
def _copy_tile(index, count, List, Keys, Values, K, V, k_t, v_t, TK, D, DV, N: tl.constexpr, PART: tl.constexpr,
               BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Both halves of a listed tile of keys and their values."""
    tile = tl.load(List + index, mask=index < count, other=0).to(tl.int32)
    for half in tl.static_range(2):
        first = tile * N + half * PART
        slot, left = index % DEPTH * 2 + half, tl.where(index < count, TK - first, 0)
        copy_rows(Keys.index(slot), K, first, k_t, left, D, PART, BLOCK_D)
        copy_rows(Values.index(slot), V, first, v_t, left, DV, PART, BLOCK_DV)
    async_copy.commit_group()


@jit
def _half(product, keys, Values, positions, own, maximum, height, out, mean, mass, a, r, scale, slope, end, Documents,
          TK, KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr,
          MEAN: tl.constexpr, MASKED: tl.constexpr, FACTOR: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """The products of one half's weights and gains with its values, under way, and the sum of the gains."""
    z = row_scores(product, keys, positions, own, a * scale, a * slope, end, Documents, TK,
                   CAUSAL, SLOPES, DOCUMENTS, MASKED)  # fmt: skip
    kept = tl.maximum(z - maximum[:, None] + height[:, None], 0.0)
    gain = gains(kept, r, KIND)
    p = gain * kept
    out = warpgroup_mma(gl.convert_layout(p.to(DTYPE), FACTOR), Values, out, is_async=True)
    if MEAN:
        mean = warpgroup_mma(gl.convert_layout(narrowed(gain, DTYPE), FACTOR), Values, mean, is_async=True)
    return out, mean, mass + tl.sum(p, 1), tl.sum(gain, 1)


@jit
def _tiles(begin, stop, count, List, Live, live_t, mark, Queries, Keys, Values, K, V, k_t, v_t,
           positions, own, maximum, height, out, mean, mass, gain_mass,
           a, r, scale, slope, end, Documents, TK, D, DV, KIND: tl.constexpr, CAUSAL: tl.constexpr,
           SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr, MEAN: tl.constexpr, MAP: tl.constexpr, MASKED: tl.constexpr,
           VOTES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr,
           BLOCK_DV: tl.constexpr, DEPTH: tl.constexpr, SCORES: tl.constexpr, FACTOR: tl.constexpr,
           DTYPE: tl.constexpr):  # fmt: skip
    """The tiles `begin` to `stop` of the `count` on the list."""
    for index in range(begin, stop):
        arrived(DEPTH - 2)
        slot = index % DEPTH * 2
        zeros = gl.zeros([M, PART], tl.float32, SCORES)
        near = warpgroup_mma(Queries, Keys.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        far = warpgroup_mma(Queries, Keys.index(slot + 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
        _copy_tile(index + DEPTH - 1, count, List, Keys, Values, K, V, k_t, v_t, TK, D, DV,
                   N, PART, BLOCK_D, BLOCK_DV, DEPTH)  # fmt: skip
        tile = tl.load(List + index).to(tl.int32)
        keys = tile * N + gl.arange(0, PART, gl.SliceLayout(0, SCORES))
        near = warpgroup_mma_wait(1, [near])
        out, mean, mass, tile_gain = _half(
            near, keys, Values.index(slot), positions, own, maximum, height, out, mean, mass,
            a, r, scale, slope, end, Documents, TK,
            KIND, CAUSAL, SLOPES, DOCUMENTS, MEAN, MASKED, FACTOR, DTYPE)  # fmt: skip
        gain_mass += tile_gain
        far = warpgroup_mma_wait(2 if MEAN else 1, [far])
        out, mean, mass, far_gain = _half(
            far, keys + PART, Values.index(slot + 1), positions, own, maximum, height, out, mean, mass,
            a, r, scale, slope, end, Documents, TK,
            KIND, CAUSAL, SLOPES, DOCUMENTS, MEAN, MASKED, FACTOR, DTYPE)  # fmt: skip
        gain_mass += far_gain
        if MAP:
            live = any_above_0(tile_gain + far_gain, VOTES)
            tl.store(Live + tl.cast(tile, tl.int64) * live_t, tl.cast(mark, tl.int8), mask=live)
        if MEAN:
            out, mean = warpgroup_mma_wait(0, [out, mean])
        else:
            out = warpgroup_mma_wait(0, [out])
    return out, mean, mass, gain_mass


@jit(do_not_specialize=SIZES)
def output_kernel(Q, K, V, O, Mean, Maximum, Height, EdgeGain, Bound, Support, Entropy, List, Counts, Live,
                  Slopes, Lengths, Documents, a, r, scale, slack,
                  q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
                  H, GROUP, TQ, TK, D, DV, NQ, NK,
                  KIND: tl.constexpr, CONVEX: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr,
                  SPLIT: tl.constexpr, LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
                  MEAN: tl.constexpr, GRAD: tl.constexpr, MAP: tl.constexpr, STATS: tl.constexpr,
                  VOTES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr,
                  BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """`kernels.output.output_kernel` in half precision for 1 < alpha <= 2, without statistics.

    PART: half of a tile. DEPTH: the tiles that have room.
    """
    if VOTES:
        ready_to_vote()
    WARPS: tl.constexpr = gl.num_warps()
    DTYPE: tl.constexpr = Q.dtype.element_ty
    SCORES: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PART, 16])
    SUMS: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_DV, 16])
    FACTOR: tl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: tl.constexpr = gl.SliceLayout(1, SCORES)
    ROWS_OF_SUMS: tl.constexpr = gl.SliceLayout(1, SUMS)
    SHARED: tl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, BLOCK_D], DTYPE)
    SHARED_V: tl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, BLOCK_DV], DTYPE)
    pair, block, batch, head, first = place_in_grid(H, NQ, M)
    if SPLIT:  # noqa: SIM102, the compiler would take both sides of an `and`
        if of_other_launch(Slopes, head, SLOPES):
            return
    rows = first + gl.arange(0, M, ROWS)
    positions, valid = rows + TK - TQ, rows < TQ
    Queries = gl.allocate_shared_memory(DTYPE, [M, BLOCK_D], SHARED)
    Keys = gl.allocate_shared_memory(DTYPE, [2 * DEPTH, PART, BLOCK_D], SHARED)
    Values = gl.allocate_shared_memory(DTYPE, [2 * DEPTH, PART, BLOCK_DV], SHARED_V)
    copy_rows(Queries, Q + batch * q_b + head * q_h, first, q_t, TQ - first, D, M, BLOCK_D)
    K, end, slope = keys_of(K, Lengths, Slopes, batch, head, GROUP, TK, k_b, k_h, LENGTHS, SLOPES)
    V += batch * v_b + head // GROUP * v_h
    if DOCUMENTS:
        Documents += batch * TK
    limit = end if LENGTHS or not CAUSAL else None
    mark = tl.where(first + M > TQ, 2, 1)  # the last block may have rows beyond the end
    Live += pair.to(tl.int64) * NK * NQ + block
    own = ids_of(Documents, positions, TK, DOCUMENTS)
    List, masked, count = live_tiles_of(List, Counts, pair, block, NQ, NK)
    line_place, maximum, height = surveyed(Maximum, Height, pair, rows, TQ)
    bound = tl.load(Bound + line_place, mask=valid, other=0.0)
    out = gl.zeros([M, BLOCK_DV], tl.float32, SUMS)
    mean, mass, gain_mass = out, height * 0.0, height * 0.0
    rounds = 0
    going = rounds == 0
    while going:
        for index in tl.static_range(DEPTH - 1):
            _copy_tile(index, count, List, Keys, Values, K, V, k_t, v_t, TK, D, DV,
                       N, PART, BLOCK_D, BLOCK_DV, DEPTH)  # fmt: skip
        out = gl.zeros([M, BLOCK_DV], tl.float32, SUMS)
        mean, mass, gain_mass = out, height * 0.0, height * 0.0
        out, mean, mass, gain_mass = _tiles(
            0, masked, count, List, Live, NQ, 2, Queries, Keys, Values, K, V, k_t, v_t,
            positions, own, maximum, height, out, mean, mass, gain_mass,
            a, r, scale, slope, limit, Documents, TK, D, DV, KIND, CAUSAL, SLOPES, DOCUMENTS, MEAN, MAP, True,
            VOTES, M, N, PART, BLOCK_D, BLOCK_DV, DEPTH, SCORES, FACTOR, DTYPE)  # fmt: skip
        out, mean, mass, gain_mass = _tiles(
            masked, count, count, List, Live, NQ, mark, Queries, Keys, Values, K, V, k_t, v_t,
            positions, own, maximum, height, out, mean, mass, gain_mass,
            a, r, scale, slope, limit, Documents, TK, D, DV, KIND, CAUSAL, SLOPES, DOCUMENTS, MEAN, MAP, False,
            VOTES, M, N, PART, BLOCK_D, BLOCK_DV, DEPTH, SCORES, FACTOR, DTYPE)  # fmt: skip
        arrived(0)  # what was asked for beyond the end, before its place is used again
        rounds += 1
        norm, steepness = joined_norm(mass * 0.0, mass * 0.0, mass, gain_mass, r, KIND)
        farthest = tl.max(tl.where(mass > 0, tl.abs(norm - 1.0), 0.0), 0)
        going = (farthest > slack) & (rounds < 8)
        nearer = tl.minimum(tl.maximum(height - (norm - 1.0) / steepness, 0.0), bound)
        height = tl.where(going, tl.where(mass > 0, nearer, height), height)
    sees = mass > 0
    if MEAN:
        # One Newton step more, on the output itself: the weights then sum to 1, and what is left of the error is second
        # order. The height only falls, so that no tile comes to life.
        total = tl.where(sees, gain_mass, 1.0)
        mean = mean / gl.convert_layout(total, ROWS_OF_SUMS)[:, None]
        excess = tl.where(sees, mass - 1.0, 0.0)
        out -= gl.convert_layout(excess, ROWS_OF_SUMS)[:, None] * mean
        fall = tl.maximum(excess * a / total, 0.0)
        tl.store(Height + line_place, tl.where(sees, height - fall, 0.0), mask=valid)
    else:
        out /= gl.convert_layout(tl.where(sees, mass, 1.0), ROWS_OF_SUMS)[:, None]
    store_rows(O + batch * o_b + head * o_h, out.to(DTYPE), first, o_t, TQ - first, DV, M, BLOCK_DV)
    if GRAD:
        store_rows(Mean + batch * o_b + head * o_h, mean, first, o_t, TQ - first, DV, M, BLOCK_DV)
