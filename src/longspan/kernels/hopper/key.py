"""The gradients of keys and values on Hopper: see `key_kernel` in `kernels/backward.py`.

Here keys are the rows of the scores, so that weights and gradients of scores are factors of the products that sum them
up as they are, from registers. The products of scores and of their gradients are under way together, the gains are
made meanwhile, and the next part of the queries is on its way all the time.
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
from longspan.kernels.solver import weights_and_gains
from longspan.kernels.tiles import SIZES, end_of, group_of_other_launch, ids_of, narrowed, scores_of, slope_of


@jit
def _copy_part(index, total, Tiles, Queries, Gradients, Maxima, Heights, Deltas, Q, dO, Maximum, Height, Delta,
               q_t, o_t, TQ, D, DV, M: tl.constexpr, PART: tl.constexpr,
               BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """A part of a listed block of queries: they, the gradients of their outputs, and what is known of them."""
    LINE: tl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    block = tl.load(Tiles + index // (M // PART), mask=index < total, other=0).to(tl.int32)
    first = block * M + index % (M // PART) * PART
    slot, left = index % DEPTH, tl.where(index < total, TQ - first, 0)
    copy_rows(Queries.index(slot), Q, first, q_t, left, D, PART, BLOCK_D)
    copy_rows(Gradients.index(slot), dO, first, o_t, left, DV, PART, BLOCK_DV)
    rows = gl.arange(0, PART, LINE)
    async_copy.async_copy_global_to_shared(Maxima.index(slot), Maximum + first + rows, mask=rows < left)
    async_copy.async_copy_global_to_shared(Heights.index(slot), Height + first + rows, mask=rows < left)
    async_copy.async_copy_global_to_shared(Deltas.index(slot), Delta + first + rows, mask=rows < left)
    async_copy.commit_group()


@jit
def _key_parts(begin, stop, total, Tiles, Keys, Values, Queries, Gradients, Maxima, Heights, Deltas, Q, dO,
               Maximum, Height, Delta, q_t, o_t, keys, theirs, d_k, d_v,
               a, r, scale, slope, end, Documents, TQ, TK, D, DV,
               KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr,
               MASKED: tl.constexpr, M: tl.constexpr, PART: tl.constexpr, KEYS: tl.constexpr,
               BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DEPTH: tl.constexpr,
               SCORES: tl.constexpr, FACTOR_OF_V: tl.constexpr, FACTOR_OF_K: tl.constexpr):  # fmt: skip
    """The parts `begin` to `stop` of the `total` on the list."""
    COLUMNS: tl.constexpr = gl.SliceLayout(0, SCORES)
    for index in range(begin, stop):
        arrived(DEPTH - 2)
        slot = index % DEPTH
        zeros = gl.zeros([KEYS, PART], tl.float32, SCORES)
        product = warpgroup_mma(Keys, Queries.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        d_p = warpgroup_mma(Values, Gradients.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        _copy_part(index + DEPTH - 1, total, Tiles, Queries, Gradients, Maxima, Heights, Deltas, Q, dO,
                   Maximum, Height, Delta, q_t, o_t, TQ, D, DV, M, PART, BLOCK_D, BLOCK_DV, DEPTH)  # fmt: skip
        positions = gl.arange(0, PART, COLUMNS)
        if SLOPES or MASKED:
            block = tl.load(Tiles + index // (M // PART)).to(tl.int32)
            positions += block * M + index % (M // PART) * PART + TK - TQ
        own = ids_of(Documents, positions, TK, DOCUMENTS and MASKED)
        maximum, height = Maxima.index(slot).load(COLUMNS), Heights.index(slot).load(COLUMNS)
        product = warpgroup_mma_wait(1, [product])
        z = scores_of(product, keys[:, None], positions[None, :], a * scale, a * slope, end,
                      theirs[:, None], own[None, :], CAUSAL, SLOPES, DOCUMENTS, MASKED)  # fmt: skip
        p, gain = weights_and_gains(z, maximum[None, :], height[None, :], r, KIND, "tf32")
        p = gl.convert_layout(p.to(dO.dtype.element_ty), FACTOR_OF_V)
        d_v = warpgroup_mma(p, Gradients.index(slot), d_v, is_async=True)
        delta = Deltas.index(slot).load(COLUMNS)
        d_p = warpgroup_mma_wait(1, [d_p])
        d_s = narrowed(gain * (d_p - delta[None, :]), Q.dtype.element_ty)
        d_k = warpgroup_mma(gl.convert_layout(d_s, FACTOR_OF_K), Queries.index(slot), d_k, is_async=True)
        d_k, d_v = warpgroup_mma_wait(0, [d_k, d_v])
    return d_k, d_v


@jit(do_not_specialize=SIZES)
def key_kernel(Q, K, V, dO, dK, dV, Delta, Residue, Maximum, Height, EdgeGain, List, Counts, Slopes, Lengths, Documents,
               a, r, scale,
               q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t, o_d,
               dk_b, dk_h, dk_t, dk_d, dv_b, dv_h, dv_t, dv_d, H, GROUP, TQ, TK, D, DV, NQ, NK,
               KIND: tl.constexpr, CAUSAL: tl.constexpr, SLOPES: tl.constexpr, SPLIT: tl.constexpr,
               LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr, MASK_ALL: tl.constexpr, PRECISION: tl.constexpr,
               REFINE: tl.constexpr,
               M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr, KEYS: tl.constexpr,
               BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """`kernels.backward.key_kernel` in half precision for 1 < alpha <= 2.

    DEPTH: the parts of queries that have room.
    """
    WARPS: tl.constexpr = gl.num_warps()
    DTYPE: tl.constexpr = Q.dtype.element_ty
    SCORES: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PART, 16])
    SUMS_OF_K: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_D, 16])
    SUMS_OF_V: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_DV, 16])
    FACTOR_OF_K: tl.constexpr = gl.DotOperandLayout(0, SUMS_OF_K, 2)
    FACTOR_OF_V: tl.constexpr = gl.DotOperandLayout(0, SUMS_OF_V, 2)
    SHARED: tl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, BLOCK_D], DTYPE)
    SHARED_V: tl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, BLOCK_DV], DTYPE)
    NUMBERS: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    kv_heads = H // GROUP
    parts = NK * (N // KEYS)
    pair, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    tile, first = part // (N // KEYS), part * KEYS
    batch, kv_head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    if SPLIT:  # noqa: SIM102, the compiler would take both sides of an `and`
        if group_of_other_launch(Slopes, kv_head, GROUP, SLOPES):
            return
    keys = first + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    if DOCUMENTS:
        Documents += batch * TK
    theirs = ids_of(Documents, keys, TK, DOCUMENTS)
    end = end_of(Lengths, batch, TK, LENGTHS)
    limit = end if LENGTHS or not CAUSAL else None

    Keys = gl.allocate_shared_memory(DTYPE, [KEYS, BLOCK_D], SHARED)
    Values = gl.allocate_shared_memory(DTYPE, [KEYS, BLOCK_DV], SHARED_V)
    Queries = gl.allocate_shared_memory(DTYPE, [DEPTH, PART, BLOCK_D], SHARED)
    Gradients = gl.allocate_shared_memory(DTYPE, [DEPTH, PART, BLOCK_DV], SHARED_V)
    Maxima = gl.allocate_shared_memory(tl.float32, [DEPTH, PART], NUMBERS)
    Heights = gl.allocate_shared_memory(tl.float32, [DEPTH, PART], NUMBERS)
    Deltas = gl.allocate_shared_memory(tl.float32, [DEPTH, PART], NUMBERS)
    copy_rows(Keys, K + batch * k_b + kv_head * k_h, first, k_t, TK - first, D, KEYS, BLOCK_D)
    copy_rows(Values, V + batch * v_b + kv_head * v_h, first, v_t, TK - first, DV, KEYS, BLOCK_DV)

    d_k = gl.zeros([KEYS, BLOCK_D], tl.float32, SUMS_OF_K)
    d_v = gl.zeros([KEYS, BLOCK_DV], tl.float32, SUMS_OF_V)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        slope = slope_of(Slopes, head, SLOPES)
        place = (batch * H + head) * NK + tile
        masked, count = tl.load(Counts + place * 2) * (M // PART), tl.load(Counts + place * 2 + 1) * (M // PART)
        Tiles = List + place * NQ
        begin = 0
        if CAUSAL:
            # Parts of the first block that lie before the first key: where a tile is taken in halves, the second half
            # of the diagonal one has some.
            block = tl.load(Tiles).to(tl.int32)  # of an empty list anything, for nothing
            begin = tl.minimum(tl.maximum(first - (block * M + TK - TQ), 0), M) // PART
            begin = tl.minimum(begin, masked)
        offset = (batch * H + head) * TQ
        Queries_of, Gradients_of = Q + batch * q_b + head * q_h, dO + batch * o_b + head * o_h
        for index in tl.static_range(DEPTH - 1):
            _copy_part(begin + index, count, Tiles, Queries, Gradients, Maxima, Heights, Deltas, Queries_of,
                       Gradients_of, Maximum + offset, Height + offset, Delta + offset, q_t, o_t, TQ, D, DV,
                       M, PART, BLOCK_D, BLOCK_DV, DEPTH)  # fmt: skip
        d_k, d_v = _key_parts(
            begin, masked, count, Tiles, Keys, Values, Queries, Gradients, Maxima, Heights, Deltas,
            Queries_of, Gradients_of, Maximum + offset, Height + offset, Delta + offset, q_t, o_t,
            keys, theirs, d_k, d_v,
            a, r, scale, slope, limit, Documents, TQ, TK, D, DV, KIND, CAUSAL, SLOPES, DOCUMENTS, True,
            M, PART, KEYS, BLOCK_D, BLOCK_DV, DEPTH, SCORES, FACTOR_OF_V, FACTOR_OF_K)  # fmt: skip
        d_k, d_v = _key_parts(
            masked, count, count, Tiles, Keys, Values, Queries, Gradients, Maxima, Heights, Deltas,
            Queries_of, Gradients_of, Maximum + offset, Height + offset, Delta + offset, q_t, o_t,
            keys, theirs, d_k, d_v,
            a, r, scale, slope, limit, Documents, TQ, TK, D, DV, KIND, CAUSAL, SLOPES, DOCUMENTS, False,
            M, PART, KEYS, BLOCK_D, BLOCK_DV, DEPTH, SCORES, FACTOR_OF_V, FACTOR_OF_K)  # fmt: skip
        arrived(0)  # what was asked for beyond the end, before the next head asks for its own
    store_rows(dK + batch * dk_b + kv_head * dk_h, (d_k * scale).to(DTYPE), first, dk_t, TK - first, D, KEYS, BLOCK_D)
    store_rows(dV + batch * dv_b + kv_head * dv_h, d_v.to(DTYPE), first, dv_t, TK - first, DV, KEYS, BLOCK_DV)
