"""Entmax attention for long rows, alpha > 1.5: the second stage of the forward with a row's candidates kept.

Beyond alpha 1.5 few scores lie above the survey's threshold, a dozen or two of 16K. So one pass over the live tiles
copies them out, without a power or a root, and the threshold is found from the copies, which a program holds in
registers, with as many steps as it takes.

*Collect* takes the highest score of each row out of a tile, then the next, until no row has any left above its
threshold: as many turns as the row with most of them has, mostly one to three. Scores that tie leave together, with
their number, so a row of nothing but ties is one entry a tile. The order is that of the tiles and then falling, the
same every time. A block with a row of more than CAP entries is left to `solve_kernel`, above alpha 2 to `edge_kernel`.

*Root* for alpha <= 2 is Newton's method on the norm, falling from the survey's height. For alpha > 2 a row is measured
from its smallest survivor instead of its maximum: `edges.py`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.kernels.edges import gain_of_edge, lighter, power, weights_from_edge
from longspan.kernels.gpus import highest
from longspan.kernels.solver import gains, joined_norm
from longspan.kernels.tiles import (
    SIZES,
    block_of_queries,
    ids_of,
    keys_of,
    live_tiles_of,
    load_tile,
    row_scores,
    surveyed,
)


def capacity(alpha: float) -> int:
    """How many candidates of a row are kept, 0 where rows are solved by rounds.

    Simulated, rows of noise of 16K scores have at most 83 candidates at alpha 1.5, 62 at 1.6, 50 at 1.75, 35 at 2 and
    16 at 3. At 1.25 there are hundreds, and at 1.5 a round or two without any root or power is enough.
    """
    if alpha <= 1.5:
        return 0
    return 128 if alpha < 1.7 else 64 if alpha <= 2 else 32


class Candidates(NamedTuple):
    """What is collected of every row, and which blocks of rows held too much."""

    scores: Tensor  # (batch, heads, time, capacity)
    copies: Tensor
    held: Tensor  # (batch, heads, time)
    over: Tensor  # (batch, heads, blocks)


def room_for(rows: Tensor, blocks: int, cap: int) -> Candidates:
    """Memory for the candidates of `rows`, a tensor with a number for every row."""
    scores = rows.new_empty(*rows.shape, cap)
    held = torch.empty_like(rows, dtype=torch.int32)
    over = held.new_empty(*rows.shape[:2], blocks)
    return Candidates(scores, torch.empty_like(scores, dtype=torch.uint8), held, over)


@triton.jit
def _above(score, maximum, height):
    """Whether a score is a candidate: a hair more than the height, so that rounding drops no survivor."""
    return score - maximum + height * 1.00001 > 0


@triton.jit
def _part_of_list(List, index, stop, N: tl.constexpr, PART: tl.constexpr):
    """The first key of part `index` of the tiles on the list, 0 at its end."""
    tile = tl.load(List + index // (N // PART), mask=index < stop, other=0).to(tl.int32)
    return tl.where(index < stop, tile * N + index % (N // PART) * PART, 0)


@triton.jit
def _collect_tiles(q, K, k_t, k_d, begin, count, List, positions, own, maximum, height, held, Scores, Copies, places,
                   a, scale, slope, end, Documents, TK, D,
                   CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr,
                   PRECISION: tl.constexpr, MASKED: tl.constexpr, CAP: tl.constexpr,
                   N: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Adds the candidates of the tiles `begin` to `count` of the list. `held`: how many each row has."""
    unit = 1.0 if SLOPES or MASKED else a * scale
    start, stop = begin * (N // PART), count * (N // PART)
    following = _part_of_list(List, start, stop, N, PART)
    k = load_tile(K, following, k_t, k_d, TK, D, PART, BLOCK_D)
    for index in range(start, stop):
        first = following
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        # The next keys travel while candidates are taken out; the compiler does not see to it where loops are nested.
        following = _part_of_list(List, index + 1, stop, N, PART)
        k = load_tile(K, following, k_t, k_d, TK, D, PART, BLOCK_D)
        if SLOPES or MASKED:
            keys = first + tl.arange(0, PART)
            product = row_scores(product, keys, positions, own, a * scale, a * slope, end, Documents, TK,
                                 CAUSAL, SLOPES, DOCUMENTS, MASKED)  # fmt: skip
        top = tl.max(product, 1)
        left = _above(top * unit, maximum, height) & (held <= CAP)
        going = highest(left.to(tl.int32)) > 0
        while going:
            taken = product >= top[:, None]
            copies = tl.sum(tl.where(taken, 1.0, 0.0), 1)
            fits = left & (held < CAP)
            tl.store(Scores + places + held, top * unit, mask=fits)
            tl.store(Copies + places + held, copies.to(tl.uint8), mask=fits)
            held += left.to(tl.int32)  # CAP + 1 says that a row had more
            product = tl.where(taken, float("-inf"), product)
            top = tl.max(product, 1)
            left = _above(top * unit, maximum, height) & (held <= CAP)
            going = highest(left.to(tl.int32)) > 0
    return held


@triton.jit(do_not_specialize=SIZES)
def collect_kernel(Q, K, Maximum, Height, List, Counts, Scores, Copies, Held, Over, Slopes, Lengths, Documents,
                   a, scale, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, H, GROUP, TQ, TK, D, NQ, NK,
                   CAUSAL: tl.constexpr, SLOPES: tl.constexpr, LENGTHS: tl.constexpr, DOCUMENTS: tl.constexpr,
                   PRECISION: tl.constexpr, CAP: tl.constexpr,
                   M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """The scores of every row above the survey's threshold, how many of each, and which blocks hold too many."""
    pair, block, batch, head, first, rows, positions = block_of_queries(H, NQ, TQ, TK, M)
    valid = rows < TQ
    K, end, slope = keys_of(K, Lengths, Slopes, batch, head, GROUP, TK, k_b, k_h, LENGTHS, SLOPES)
    if DOCUMENTS:
        Documents += batch * TK
    limit = end if LENGTHS or not CAUSAL else None
    place = pair.to(tl.int64) * NQ + block
    own = ids_of(Documents, positions, TK, DOCUMENTS)
    List, masked, count = live_tiles_of(List, Counts, pair, block, NQ, NK)
    q = load_tile(Q + batch * q_b + head * q_h, first, q_t, q_d, TQ, D, M, BLOCK_D)
    line_place, maximum, height = surveyed(Maximum, Height, pair, rows, TQ)
    held = tl.zeros([M], tl.int32)
    held = _collect_tiles(
        q, K, k_t, k_d, 0, masked, List, positions, own, maximum, height, held, Scores, Copies, line_place * CAP,
        a, scale, slope, limit, Documents, TK, D,
        CAUSAL, SLOPES, DOCUMENTS, PRECISION, True, CAP, N, PART, BLOCK_D)  # fmt: skip
    held = _collect_tiles(
        q, K, k_t, k_d, masked, count, List, positions, own, maximum, height, held, Scores, Copies, line_place * CAP,
        a, scale, slope, limit, Documents, TK, D,
        CAUSAL, SLOPES, DOCUMENTS, PRECISION, False, CAP, N, PART, BLOCK_D)  # fmt: skip
    tl.store(Held + line_place, held, mask=valid)
    tl.store(Over + place, (highest(held) > CAP).to(tl.int32))


@triton.jit
def _falling(gap, r, copies, height, KIND: tl.constexpr):
    """Heights for alpha <= 2 from candidates ``gap = z - max``: Newton's method on the norm, from above."""
    nothing = height * 0.0
    farthest = tl.max(height, 0)
    steps = 0
    while (farthest > 1e-6) & (steps < 24):
        u = tl.maximum(gap + height[:, None], 0.0)
        gain = gains(u, r, KIND) * copies
        norm, slope = joined_norm(nothing, nothing, tl.sum(gain * u, 1), tl.sum(gain, 1), r, KIND)
        excess = tl.where(height > 0, tl.maximum(norm - 1.0, 0.0), 0.0)
        height -= excess / slope
        farthest = tl.max(excess, 0)
        steps += 1
    return height


@triton.jit
def _edge(scores, r, copies, KIND: tl.constexpr):
    """The smallest survivor of candidates, alpha > 2.

    A score survives if the weights of those above it, were it the threshold, sum to less than 1. Survivors are few, so
    they are tried one after the other from the top.
    """
    chosen = tl.max(scores, 1)
    going = tl.max(chosen, 0) > float("-inf")
    while going:
        below = tl.max(tl.where(scores < chosen[:, None], scores, float("-inf")), 1)
        u = tl.where(scores > below[:, None], scores - tl.maximum(below, -1e30)[:, None], 0.0)
        survives = (tl.sum(gains(u, r, KIND) * u * copies, 1) < 1.0) & (below > float("-inf"))
        chosen = tl.where(survives, below, chosen)
        going = tl.max(survives.to(tl.int32), 0) > 0
    return chosen


@triton.jit
def _weight_of(edge, scores, a, r, copies, most, KIND: tl.constexpr):
    """The weight and the gain of a row's edge: Newton's method from one over the number of survivors."""
    scores = tl.where(scores >= edge[:, None], scores, float("-inf"))
    ties = tl.sum(tl.where(scores == edge[:, None], copies, 0.0), 1)
    weight = 1.0 / tl.maximum(tl.sum(tl.where(scores > float("-inf"), copies, 0.0), 1), 1.0)
    others = weight * 0.0
    farthest = tl.max(weight, 0)
    steps = 0
    while (farthest > 1e-6) & (steps < 24):
        height = power(weight, a)
        p, gain = weights_from_edge(scores, edge[:, None], weight[:, None], height[:, None], 0.0, r, KIND)
        others = tl.sum(gain * copies, 1)
        weight, excess = lighter(weight, tl.sum(p * copies, 1), others, ties, a)
        farthest = tl.max(excess, 0)
        steps += 1
    return weight, gain_of_edge(weight, others, ties, a, most)


@triton.jit(do_not_specialize=["ROWS", "TQ", "NQ"])
def root_kernel(Maximum, Height, EdgeGain, Scores, Copies, Held, Over, a, r, most, ROWS, TQ, NQ,
                KIND: tl.constexpr, CONVEX: tl.constexpr, CAP: tl.constexpr, M: tl.constexpr,
                AT_ONCE: tl.constexpr):  # fmt: skip
    """The height of every row, but for blocks of M rows with too many candidates.

    For alpha > 2 its maximum is replaced by the score of its edge, and the height by the edge's weight.
    """
    rows, slots = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE), tl.arange(0, CAP)
    solved = tl.load(Over + rows // TQ * NQ + rows % TQ // M, mask=rows < ROWS, other=1) == 0
    held = tl.load(Held + rows, mask=solved, other=0)
    there = slots[None, :] < held[:, None]
    places = rows[:, None] * CAP + slots[None, :]
    scores = tl.load(Scores + places, mask=there, other=float("-inf"))
    copies = tl.load(Copies + places, mask=there, other=0).to(tl.float32)
    if CONVEX:
        maximum = tl.load(Maximum + rows, mask=solved, other=0.0)
        height = tl.load(Height + rows, mask=solved, other=0.0)
        tl.store(Height + rows, _falling(scores - maximum[:, None], r, copies, height, KIND), mask=solved)
    else:
        edge = tl.where(held > 0, _edge(scores, r, copies, KIND), 0.0)
        weight, gain = _weight_of(edge, scores, a, r, copies, most, KIND)
        tl.store(Maximum + rows, edge, mask=solved)
        tl.store(Height + rows, tl.where(held > 0, weight, 0.0), mask=solved)
        tl.store(EdgeGain + rows, gain, mask=solved)
