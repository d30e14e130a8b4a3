"""The gradients of queries on Hopper: see `query_kernel` in `kernels/backward.py`.

The products of scores and of their gradients are under way together, the gains are made meanwhile, and the next part of
the keys and values is on its way all the time.
"""

import triton.language as tl

from longspan.kernels.hopper.words import (
    arrived,
    async_copy,
    copy_rows,
    gl,
    jit,
    load_rows,
    store_rows,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from longspan.kernels.solver import weights_and_gains
from longspan.kernels.tiles import (
    SIZES,
    distances,
    end_of,
    ids_of,
    live_tiles_of,
    narrowed,
    of_other_launch,
    place_in_grid,
    row_scores,
    slope_of,
    surveyed,
)


@jit
def _copy_part(index, total, List, Keys, Values, K, V, k_t, v_t, TK, D, DV, N: tl.constexpr, PART: tl.constexpr,
               BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """A part of a listed tile of keys and their values."""
    tile = tl.load(List + index // (N // PART), mask=index < total, other=0).to(tl.int32)
    first = tile * N + index % (N // PART) * PART
    slot, left = index % DEPTH, tl.where(index < total, TK - first, 0)
    copy_rows(Keys.index(slot), K, first, k_t, left, D, PART, BLOCK_D)
    copy_rows(Values.index(slot), V, first, v_t, left, DV, PART, BLOCK_DV)
    async_copy.commit_group()


@jit
def _query_parts(begin, stop, total, List, Queries, Gradients, Keys, Values, K, V, k_t, v_t, positions, own,
                 maximum, height, delta, d_q, d_slope, a, r, scale, slope, end, Documents, TK, D, DV,
                 KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr,
                 SLOPES_LEARN: tl.constexpr, MASKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                 PART: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DEPTH: tl.constexpr,
                 SCORES: tl.constexpr, FACTOR: tl.constexpr):  # fmt: skip
    """The parts `begin` to `stop` of the `total` on the list."""
    for index in range(begin, stop):
        arrived(DEPTH - 2)
        slot = index % DEPTH
        zeros = gl.zeros([M, PART], tl.float32, SCORES)
        product = warpgroup_mma(Queries, Keys.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        d_p = warpgroup_mma(Gradients, Values.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        _copy_part(index + DEPTH - 1, total, List, Keys, Values, K, V, k_t, v_t, TK, D, DV,
                   N, PART, BLOCK_D, BLOCK_DV, DEPTH)  # fmt: skip
        keys = gl.arange(0, PART, gl.SliceLayout(0, SCORES))
        if SLOPES or MASKED:
            keys += tl.load(List + index // (N // PART)).to(tl.int32) * N + index % (N // PART) * PART
        product = warpgroup_mma_wait(1, [product])
        z = row_scores(product, keys, positions, own, a * scale, a * slope, end, Documents, TK,
                       CAUSAL, SLOPES, DOCUMENTS, MASKED)  # fmt: skip
        _, gain = weights_and_gains(z, maximum[:, None], height[:, None], r, KIND, "tf32")
        d_p = warpgroup_mma_wait(0, [d_p])
        d_s = gain * (d_p - delta[:, None])
        if SLOPES and SLOPES_LEARN:
            d_slope -= tl.sum(d_s * distances(keys[None, :], positions[:, None]), 1)
        d_s = gl.convert_layout(narrowed(d_s, K.dtype.element_ty), FACTOR)
        d_q = warpgroup_mma(d_s, Keys.index(slot), d_q, is_async=True)
        d_q = warpgroup_mma_wait(0, [d_q])
    return d_q, d_slope


@jit(do_not_specialize=SIZES)
def query_kernel(Q, K, V, dO, dQ, Mean, Delta, Residue, Maximum, Height, EdgeGain, List, Counts, Slopes, dSlopes,
                 Lengths, Documents, Ranges, a, r, scale,
                 q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
                 mean_b, mean_h, mean_t, mean_d, dq_b, dq_h, dq_t, dq_d, H, GROUP, TQ, TK, D, DV, NQ, NK,
                 KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, SPLIT: tl.constexpr,
                 LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr, MASK_ALL: tl.constexpr, PRECISION: tl.constexpr,
                 REFINE: tl.constexpr, SLOPES_LEARN: tl.constexpr,
                 M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr,
                 BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """`kernels.backward.query_kernel` in half precision for 1 < alpha <= 2. DEPTH: the parts of keys that have room."""
    WARPS: tl.constexpr = gl.num_warps()
    DTYPE: tl.constexpr = Q.dtype.element_ty
    SCORES: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PART, 16])
    SUMS: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_D, 16])
    FACTOR: tl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: tl.constexpr = gl.SliceLayout(1, SCORES)
    SHARED: tl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, BLOCK_D], DTYPE)
    SHARED_V: tl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, BLOCK_DV], DTYPE)
    pair, block, batch, head, first = place_in_grid(H, NQ, M)
    if SPLIT:  # noqa: SIM102, the compiler would take both sides of an `and`
        if of_other_launch(Slopes, head, SLOPES):
            return
    rows = first + gl.arange(0, M, ROWS)
    positions, valid = rows + TK - TQ, rows < TQ
    Queries = gl.allocate_shared_memory(DTYPE, [M, BLOCK_D], SHARED)
    Gradients = gl.allocate_shared_memory(DTYPE, [M, BLOCK_DV], SHARED_V)
    Keys = gl.allocate_shared_memory(DTYPE, [DEPTH, PART, BLOCK_D], SHARED)
    Values = gl.allocate_shared_memory(DTYPE, [DEPTH, PART, BLOCK_DV], SHARED_V)
    dO += batch * o_b + head * o_h
    copy_rows(Queries, Q + batch * q_b + head * q_h, first, q_t, TQ - first, D, M, BLOCK_D)
    copy_rows(Gradients, dO, first, o_t, TQ - first, DV, M, BLOCK_DV)
    K += batch * k_b + head // GROUP * k_h
    V += batch * v_b + head // GROUP * v_h
    List, masked, count = live_tiles_of(List, Counts, pair, block, NQ, NK)
    masked, count = masked * (N // PART), count * (N // PART)
    for index in tl.static_range(DEPTH - 1):
        _copy_part(index, count, List, Keys, Values, K, V, k_t, v_t, TK, D, DV,
                   N, PART, BLOCK_D, BLOCK_DV, DEPTH)  # fmt: skip
    if DOCUMENTS:
        Documents += batch * TK
    end = end_of(Lengths, batch, TK, LENGTHS)
    limit = end if LENGTHS or not CAUSAL else None
    slope = slope_of(Slopes, head, SLOPES)
    d_o = load_rows(dO, first, o_t, TQ - first, DV, M, BLOCK_DV)
    mean = load_rows(Mean + batch * mean_b + head * mean_h, first, mean_t, TQ - first, DV, M, BLOCK_DV)
    delta = gl.convert_layout(tl.sum(d_o.to(tl.float32) * mean.to(tl.float32), 1), ROWS)
    line_place, maximum, height = surveyed(Maximum, Height, pair, rows, TQ)
    tl.store(Delta + line_place, delta, mask=valid)
    own = ids_of(Documents, positions, TK, DOCUMENTS)

    d_q = gl.zeros([M, BLOCK_D], tl.float32, SUMS)
    d_slope = gl.zeros([M], tl.float32, ROWS)
    d_q, d_slope = _query_parts(
        0, masked, count, List, Queries, Gradients, Keys, Values, K, V, k_t, v_t, positions, own,
        maximum, height, delta, d_q, d_slope, a, r, scale, slope, limit, Documents, TK, D, DV,
        KIND, CAUSAL, SLOPES, DOCUMENTS, SLOPES_LEARN, True,
        M, N, PART, BLOCK_D, BLOCK_DV, DEPTH, SCORES, FACTOR)  # fmt: skip
    d_q, d_slope = _query_parts(
        masked, count, count, List, Queries, Gradients, Keys, Values, K, V, k_t, v_t, positions, own,
        maximum, height, delta, d_q, d_slope, a, r, scale, slope, limit, Documents, TK, D, DV,
        KIND, CAUSAL, SLOPES, DOCUMENTS, SLOPES_LEARN, False,
        M, N, PART, BLOCK_D, BLOCK_DV, DEPTH, SCORES, FACTOR)  # fmt: skip
    arrived(0)  # what was asked for beyond the end, before its place is used again
    store_rows(dQ + batch * dq_b + head * dq_h, (d_q * scale).to(DTYPE), first, dq_t, TQ - first, D, M, BLOCK_D)
    if SLOPES and SLOPES_LEARN:
        tl.store(dSlopes + pair.to(tl.int64) * NQ + block, tl.sum(d_slope, 0))
