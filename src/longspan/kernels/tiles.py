"""Tiles of queries, keys and scores: how they are read and written, and who sees whom in them."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Arguments a kernel is not compiled anew for, however they divide.
SIZES = ["H", "GROUP", "TQ", "TK", "NQ", "NK"]


def padded(width: int) -> int:
    """What a tile of that width takes: a power of two, and enough for a tensor core."""
    return max(16, triton.next_power_of_2(width))


def like_tokens(heads: Tensor) -> Tensor:
    """An empty tensor of the same shape, its memory ordered (batch, time, heads, dim), as the projections like it."""
    batch, num_heads, time, dim = heads.shape
    return heads.new_empty(batch, time, num_heads, dim).transpose(1, 2)


def room_for_output(q: Tensor, v: Tensor) -> Tensor:
    """An empty output of queries q over values v, (batch, heads, query_time, value_dim), ordered likewise."""
    return like_tokens(q[..., :1].expand(*q.shape[:3], v.shape[3]))


def one_pass(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, slopes: Tensor | None, lengths: Tensor | None,
    documents: Tensor | None,
) -> tuple[tuple[int], tuple[int, ...], dict[str, Any]]:  # fmt: skip
    """A kernel that goes over the keys once, in square tiles: its grid, its strides and sizes, and its constants."""
    batch, heads, time, dim = q.shape
    rows = 32 if q.dtype == torch.float32 or max(dim, v.shape[3]) > 128 else 64
    blocks = triton.cdiv(time, rows)
    strides = *q.stride(), *k.stride(), *v.stride(), *out.stride()
    constants = {
        "SLOPES": slopes is not None,
        "LENGTHS": lengths is not None,
        "DOCUMENTS": documents is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "M": rows,
        "N": rows,
        "BLOCK_D": padded(dim),
        "BLOCK_DV": padded(v.shape[3]),
        "num_warps": 4,
    }
    sizes = heads, heads // k.shape[1], time, k.shape[2], dim, v.shape[3], blocks
    return (blocks * batch * heads,), (*strides, *sizes), constants


def contiguous(*options: Tensor | None) -> list[Tensor | None]:
    """The small inputs as the kernels read them, without strides."""
    return [None if option is None else option.contiguous() for option in options]


def small_ids(documents: Tensor | None) -> Tensor | None:
    """Ids that fit 32 bits, equal where the given ones are; those that fit are left alone."""
    if documents is None or documents.dtype.itemsize < 4 or documents.dtype == torch.int32:
        return documents if documents is None else documents.int()
    ordered, order = documents.long().sort(dim=-1)
    ranks = torch.nn.functional.pad(ordered.diff(dim=-1) != 0, (1, 0)).cumsum(-1, dtype=torch.int32)
    return torch.empty_like(ranks).scatter_(-1, order, ranks)


@triton.jit
def load_tile(base, first, row_stride, column_stride, ROWS, COLUMNS,
              LENGTH: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr = False):  # fmt: skip
    """Rows `first` to ``first + LENGTH`` of a matrix of ROWS x COLUMNS, zero beyond it. WHOLE: no row is beyond it."""
    rows, columns = tl.arange(0, LENGTH), tl.arange(0, WIDTH)
    places = (
        base + tl.cast(first, tl.int64) * row_stride + rows[:, None] * row_stride + columns[None, :] * column_stride
    )
    if WHOLE:
        return tl.load(places, mask=columns[None, :] < COLUMNS, other=0.0)
    return tl.load(places, mask=(rows[:, None] < ROWS - first) & (columns[None, :] < COLUMNS), other=0.0)


@triton.jit
def store_tile(base, values, first, row_stride, column_stride, ROWS, COLUMNS,
               LENGTH: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    rows, columns = tl.arange(0, LENGTH), tl.arange(0, WIDTH)
    places = (
        base + tl.cast(first, tl.int64) * row_stride + rows[:, None] * row_stride + columns[None, :] * column_stride
    )
    seen = (rows[:, None] < ROWS - first) & (columns[None, :] < COLUMNS)
    tl.store(places, values.to(base.dtype.element_ty), mask=seen)


@triton.jit
def narrowed(values, DTYPE: tl.constexpr):
    """Values in the dtype of a product, the largest it has in place of those it has not."""
    if tl.float16 == DTYPE:
        values = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
    return values.to(DTYPE)


@triton.jit
def accumulated(a, b, total, PRECISION: tl.constexpr):
    """``total + a @ b``; in float32 the product is summed by itself first: a chain over all tiles rounds too often.

    Written as a difference, because the compiler folds a sum back into the chain.
    """
    if PRECISION == "ieee":
        return total - tl.dot(-a, b, input_precision=PRECISION)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def append(List, count, items, live):
    """Puts the live items on a list, in order; all threads must meet before it is read."""
    place = count + tl.cumsum(live.to(tl.int32), 0) - 1
    tl.store(List + place, items, mask=live)
    return count + tl.sum(live.to(tl.int32), 0)


@triton.jit
def place_in_grid(H, NQ, M: tl.constexpr):
    """Which block of queries this program has: long rows first, neighbours share their keys."""
    pair, block = tl.program_id(0) // NQ, NQ - 1 - tl.program_id(0) % NQ
    return pair, block, (pair // H).to(tl.int64), (pair % H).to(tl.int64), block * M


@triton.jit
def block_of_queries(H, NQ, TQ, TK, M: tl.constexpr):
    """This program's block of queries, its rows and their positions among the keys."""
    pair, block, batch, head, first = place_in_grid(H, NQ, M)
    rows = first + tl.arange(0, M)
    return pair, block, batch, head, first, rows, rows + TK - TQ


@triton.jit
def end_of(Lengths, batch, TK, LENGTHS: tl.constexpr):
    """The first key that padding hides."""
    return tl.minimum(tl.load(Lengths + batch).to(tl.int64), TK).to(tl.int32) if LENGTHS else TK


@triton.jit
def slope_of(Slopes, head, SLOPES: tl.constexpr):
    return tl.load(Slopes + head).to(tl.float32) if SLOPES else 0.0


@triton.jit
def of_other_launch(Slopes, head, SLOPES: tl.constexpr):
    """Whether a head is left to the other of two launches: one has the heads with a slope, one those without, whose
    kernels have a third to two thirds fewer instructions a score."""
    slope = tl.load(Slopes + head)
    return slope == 0 if SLOPES else slope != 0


@triton.jit
def group_of_other_launch(Slopes, kv_head, GROUP, SLOPES: tl.constexpr):
    """The same of the heads of a group, which share the sums of their keys: with slopes if any has one."""
    sloped = 0
    for member in range(GROUP):
        sloped += (tl.load(Slopes + kv_head * GROUP + member) != 0).to(tl.int32)
    return sloped == 0 if SLOPES else sloped != 0


@triton.jit
def keys_of(K, Lengths, Slopes, batch, head, GROUP, TK, k_b, k_h, LENGTHS: tl.constexpr, SLOPES: tl.constexpr):
    """The keys that a head reads, the first that padding hides, and the head's slope."""
    return K + batch * k_b + head // GROUP * k_h, end_of(Lengths, batch, TK, LENGTHS), slope_of(Slopes, head, SLOPES)


@triton.jit
def live_tiles_of(List, Counts, pair, block, NQ, NK):
    """The survey's list for a block of queries: how many tiles need masks, which come first, and how many there are."""
    place = pair.to(tl.int64) * NQ + block
    return List + place * NK, tl.load(Counts + place * 2), tl.load(Counts + place * 2 + 1)


@triton.jit
def surveyed(Maximum, Height, pair, rows, TQ):
    """Where the numbers of rows lie, and their maximum and height; beyond the end nothing survives."""
    places = pair.to(tl.int64) * TQ + rows
    maximum = tl.load(Maximum + places, mask=rows < TQ, other=1e30)
    return places, maximum, tl.load(Height + places, mask=rows < TQ, other=0.0)


@triton.jit
def distances(keys, positions):
    """How far keys lie from positions, exact up to 2^24."""
    return tl.abs(positions.to(tl.float32) - keys.to(tl.float32))


@triton.jit
def ids_of(Documents, places, TK, WANTED: tl.constexpr):
    """The documents of tokens, of any numbers for those there are not; the places themselves where nobody asks.

    To be loaded in one dim and shaped after it: loaded as they lie across each other, the compiler moves a whole tile
    of ids through shared memory.
    """
    if WANTED:
        return tl.load(Documents + places, mask=(places >= 0) & (places < TK), other=0)
    return places


@triton.jit
def scores_of(product, keys, positions, scale, slope, end, theirs, own,
              CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr,
              MASKED: tl.constexpr = True):  # fmt: skip
    """Scores from products, -inf where a key is hidden.

    `keys` and `positions` are shaped to lie across each other, and so are their documents, `theirs` and `own`. `end`:
    the first hidden key, None if the causal mask hides all that lies beyond the keys. Not MASKED: every query of the
    tile sees every key.
    """
    scores = product * scale
    if SLOPES:
        scores -= slope * distances(keys, positions)
    if not MASKED:
        return scores
    if end is None:
        seen = keys <= positions
    else:
        seen = (keys < end) & (positions < end)
        if CAUSAL:
            seen = seen & (keys <= positions)
    if DOCUMENTS:
        seen = seen & (own == theirs)
        if not CAUSAL:
            seen = seen & (positions >= 0)  # a query before the first key has no document
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def row_scores(product, keys, positions, own, scale, slope, end, Documents, TK,
               CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr,
               MASKED: tl.constexpr = True):  # fmt: skip
    """`scores_of` a tile whose rows are queries, of documents `own`; the documents of its keys are read if needed."""
    theirs = ids_of(Documents, keys, TK, DOCUMENTS and MASKED)
    return scores_of(product, keys[None, :], positions[:, None], scale, slope, end, theirs[None, :], own[:, None],
                     CAUSAL, SLOPES, DOCUMENTS, MASKED)  # fmt: skip


@triton.jit
def listed_scores(q, K, k_t, k_d, index, List, positions, own, scale, slope, end, Documents, TK, D,
                  CAUSAL: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
                  MASKED: tl.constexpr, N: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """`row_scores` of the queries `q` with one part of the tiles on their list."""
    tile = tl.load(List + index // (N // PART)).to(tl.int32)
    first = tile * N + index % (N // PART) * PART
    k = load_tile(K, first, k_t, k_d, TK, D, PART, BLOCK_D, WHOLE=not MASKED)
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    return row_scores(product, first + tl.arange(0, PART), positions, own, scale, slope, end, Documents, TK,
                      CAUSAL, SLOPES, DOCUMENTS, MASKED)  # fmt: skip


@triton.jit
def key_tiles(first_position, last_position, end, Ranges, TK,
              N: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
              MASK_ALL: tl.constexpr):  # fmt: skip
    """Of a block of queries: its first key tile, the first that needs no mask, the first again that does, the end."""
    start, stop = 0, tl.cdiv(end, N)
    if CAUSAL:
        stop = tl.minimum(stop, tl.cdiv(tl.maximum(last_position + 1, 0), N))
    inner = start
    if DOCUMENTS:
        start, stop, inner = tl.load(Ranges), tl.minimum(stop, tl.load(Ranges + 1)), tl.load(Ranges + 2)
    whole = TK // N
    if CAUSAL:
        whole = tl.minimum(whole, tl.maximum(first_position + 1, 0) // N)
    if MASK_ALL:
        whole = start
    whole = tl.maximum(tl.minimum(whole, stop), start)
    return start, tl.minimum(tl.maximum(inner, start), whole), whole, tl.maximum(stop, start)


@triton.jit
def masked_tile(index, start, inner, whole):
    """Tiles that need a mask lie at both ends of what a block of queries sees: which one `index` is, from the left."""
    return tl.where(index < inner - start, start + index, whole + index - (inner - start))
