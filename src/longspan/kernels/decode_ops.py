"""Decoding as an operator of torch: shapes, memory and launches of the kernels in `decode.py`."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from longspan.kernels import gpus
from longspan.kernels.bounds import bound_kernel
from longspan.kernels.decode import score_kernel
from longspan.kernels.decode_rows import row_kernel
from longspan.kernels.decode_values import value_kernel
from longspan.kernels.operators import operator
from longspan.kernels.pages import EPSILON, PAGE
from longspan.kernels.solver import SOFTMAX, kind_of, powers_of
from longspan.kernels.tiles import contiguous, padded

MOST_ROWS = 64  # of one tile: heads that share a key head, times their queries
GATHERED = 1 << 13  # bytes of values at once
MOST_HELD = 1 << 14  # pages whose highest scores a program holds: a million keys
UNDERFLOW = 104.0  # exp(-104) is 0 in float32


class Launch(NamedTuple):
    """How a kernel runs: programs a processor, the warps of each, the depth of its pipeline."""

    programs: int
    warps: int
    stages: int


# Of scores: as many programs as can run at once, or if their runs of pages are too long for them to end together, more.
SCORE = Launch(4, 4, 3)
LONGEST_RUN = 64  # pages
EARLY = True  # on Hopper and after, a stage's programs may take their places while the last of the one before run
ROW = Launch(1, 8, 1)
MOST_SHARES = 8  # programs of one row
PAGES_HELD = 32  # whose scores a program of a row holds; half of them in short caches
VALUE = Launch(4, 4, 2)
# Up to so many pages a row's list holds all of its keys, and there is no third stage.
SHORT = 256
MOST_SURVIVORS = 1024  # of a row's list in longer caches


class Shape(NamedTuple):
    """Sizes of a call that several kernels share."""

    batch: int
    heads: int
    queries: int
    kv_heads: int
    pages: int  # of the longest sequence there is room for
    rows: int  # of a key head
    tile: int  # rows of a program
    blocks: int  # of rows

    @property
    def pairs(self) -> int:
        """Sequences times key heads."""
        return self.batch * self.kv_heads

    @property
    def tiles(self) -> int:
        return self.pairs * self.blocks

    @property
    def lines(self) -> int:
        """All rows."""
        return self.pairs * self.rows


def _among(programs: int, device: torch.device, parts: int) -> int:
    """Programs for each of several parts so that all of them fill the device."""
    return max(1, programs * _processors(device) // parts)


def score_splits(shape: Shape, device: torch.device) -> int:
    wanted = max(_among(SCORE.programs, device, shape.tiles), triton.cdiv(shape.pages, LONGEST_RUN))
    return min(wanted, shape.pages)


def score_rows(shape: Shape) -> int:
    """Rows of a program of the first stage, where they are columns of a product: eight are enough for it."""
    return 8 if shape.rows <= 8 else shape.tile


def row_shares(shape: Shape, device: torch.device) -> int:
    """A power of two: the last program holds all partial sums in one tile."""
    return 1 << (min(_among(ROW.programs, device, shape.lines), MOST_SHARES).bit_length() - 1)


def value_splits(shape: Shape, device: torch.device, width: int) -> int:
    """Few enough for the partial sums of a row to be added up at once, and fewer of tiles with many rows."""
    return min(_among(VALUE.programs, device, shape.tiles), shape.pages, 1024 // shape.tile, 8192 // padded(width))


def shape_of(q: Tensor, k: Tensor, table: Tensor | None) -> Shape:
    batch, heads, queries, _ = q.shape
    kv_heads = k.shape[1]
    pages = triton.cdiv(k.shape[2], PAGE) if table is None else table.shape[1]
    rows = heads // kv_heads * queries
    wide = q.shape[3] * q.element_size() > 512  # a tile beside its pages would not fit the shared memory
    tile = min(MOST_ROWS // (1 + wide), padded(rows))
    return Shape(batch, heads, queries, kv_heads, pages, rows, tile, triton.cdiv(rows, tile))


@lru_cache
def _processors(device: torch.device) -> int:
    # In the interpreter, few enough for several pages to fall to one program.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def boxes_at_once(device: torch.device) -> int:
    return 64 if gpus.is_roomy(device) else 32


def pages_held(pages: int) -> int:
    return PAGES_HELD // 2 if pages <= SHORT else PAGES_HELD


def row_warps(pages: int) -> int:
    """Enough for the highest scores of that many pages to lie in registers."""
    return ROW.warps * (1 + (pages > 4096))


class Decoded(NamedTuple):
    """What decoding gives; all but `out` have the rows of a key head in one dim: its heads, then their queries."""

    out: Tensor  # (batch, heads, queries, dim)
    maximum: Tensor  # (batch, kv_heads, rows), of a * score; above alpha 2 the smallest of a survivor
    height: Tensor  # of the threshold below it; softmax: the largest weight; above alpha 2 the weight of that survivor
    support: Tensor
    entropy: Tensor
    tops: Tensor  # (batch, kv_heads, rows, pages, 4), the highest a * score of a page's quarters, -inf if not read


def _decoded(q: Tensor, v: Tensor, shape: Shape, stats: bool) -> Decoded:
    line = q.new_empty(shape.batch, shape.kv_heads, shape.rows, dtype=torch.float32)
    counted = line.shape if stats else (0,)
    return Decoded(
        q.new_empty(shape.batch, shape.heads, shape.queries, v.shape[3]),
        line,
        torch.empty_like(line),
        line.new_empty(counted),
        line.new_empty(counted),
        line.new_empty(*line.shape, shape.pages, 4),
    )


class _Step(NamedTuple):
    """What the stages of one call share."""

    shape: Shape
    made: Decoded
    scores: Tensor  # (lines, keys)
    lists: Tensor  # of pages, a row for every program of the second stage
    arrivals: Tensor  # how many programs are done with a row; then with a tile
    lengths: Tensor | None
    starts: Tensor | None
    table: Tensor | None
    time: int
    alpha: float
    stats: bool

    @property
    def kind(self) -> int:
        return kind_of(self.alpha, fine=self.made.out.dtype == torch.float32)

    @property
    def reach(self) -> float:
        return UNDERFLOW if self.kind == SOFTMAX else 1.0

    @property
    def table_stride(self) -> int:
        return 0 if self.table is None else self.table.stride(0)

    def there(self) -> dict[str, Any]:
        given = {"LENGTHS": self.lengths, "STARTS": self.starts, "PAGED": self.table}
        return {name: tensor is not None for name, tensor in given.items()}

    def shares(self) -> int:
        return len(self.lists) // self.shape.lines


def _step_of(q: Tensor, k: Tensor, v: Tensor, cache: list[Tensor | None], alpha: float, stats: bool) -> _Step:
    lengths, starts, table = cache
    shape = shape_of(q, k, table)
    made = _decoded(q, v, shape, stats)
    lists = made.tops.new_empty(shape.lines * row_shares(shape, q.device), shape.pages, dtype=torch.int32)
    return _Step(
        shape, made, made.tops.new_empty(shape.lines, shape.pages * PAGE), lists,
        lists.new_empty(shape.lines + shape.tiles), lengths, starts, table,
        shape.pages * PAGE if table is not None else k.shape[2], alpha, stats,
    )  # fmt: skip


@lru_cache
def _has_dependent_launches(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _early(device: torch.device) -> bool:
    return EARLY and _has_dependent_launches(device)


def _launched(device: torch.device) -> dict[str, Any]:
    """For stages that follow another."""
    return {"EARLY": True, "launch_pdl": True} if _early(device) else {"EARLY": False}


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _score(
    step: _Step, q: Tensor, k: Tensor, slopes: Tensor | None, scales: Tensor | None, scale: float,
    norms: Tensor | None, low: Tensor | None, high: Tensor | None,
) -> None:  # fmt: skip
    """The first stage, with boxes after the bounds they give."""
    shape, table = step.shape, step.table
    unit = 1.0 if step.kind == SOFTMAX else step.alpha - 1
    norm_strides: tuple[int, ...] = (0, 0, 0)
    if norms is not None:
        norm_strides = norms.stride() if table is None else (*norms.stride(), 0)
    group = shape.heads // shape.kv_heads
    sizes = shape.kv_heads, group, shape.queries, step.time, shape.rows, q.shape[3], shape.pages
    options: dict[str, Any] = step.there() | {
        "SLOPES": slopes is not None, "SCALES": scales is not None, "BLOCK_D": padded(q.shape[3]),
        "PRECISION": _precision(q), "M": shape.tile,
    }  # fmt: skip
    bounds = floors = None
    at_once = boxes_at_once(q.device)
    blocks = triton.cdiv(shape.pages, at_once)
    if low is not None:
        assert high is not None
        assert norms is not None
        bounds, floors = step.scores.new_empty(shape.lines, shape.pages), step.scores.new_empty(shape.lines, blocks)
        if low.stride() != high.stride() or low.stride(-1) != 1:
            low, high = low.contiguous(), high.contiguous()
        box_strides = low.stride()[:3] if table is None else (*low.stride()[:2], 0)
        bound_kernel[(blocks, shape.pairs, shape.blocks)](
            q, k, low, high, norms, bounds, floors, slopes, scales, step.lengths, step.starts, table, unit, scale,
            EPSILON, *q.stride(), *k.stride(), *norm_strides, *box_strides, step.table_stride, *sizes, blocks,
            PROBES=min(shape.rows, shape.tile, 8), CHUNK=at_once, num_warps=4, num_stages=2, **options,
        )  # fmt: skip
    # The compiler shares the stages out among loads whose place hangs on another load: the list's, the table's.
    stages = SCORE.stages * (1 + (low is not None) + (table is not None))
    splits = score_splits(shape, q.device)
    options["M"] = score_rows(shape)
    if options["M"] <= 16:
        options["maxnreg"] = 128  # for four programs a processor; none of it spills
    score_kernel[(shape.pairs, splits, shape.blocks)](
        q, k, step.scores, step.made.tops, step.lists, step.arrivals, slopes, scales, step.lengths, step.starts, table,
        norms, bounds, floors, unit, scale, step.reach, *q.stride(), *k.stride(), *norm_strides, step.table_stride,
        *sizes, blocks, splits, NORMS=norms is not None, BOXES=low is not None, CHUNK=64,
        EARLY=_early(q.device), num_warps=SCORE.warps, num_stages=stages, **options,
    )  # fmt: skip


def _rows(step: _Step, v: Tensor, most: int, many: Tensor | None) -> None:
    """The second stage; `many` will say which rows have more than `most` survivors and are left over."""
    shape, made, alpha, width = step.shape, step.made, step.alpha, v.shape[3]
    shares = step.shares()
    row_kernel[(shape.lines, shares)](
        v, step.scores, made.tops, step.lists, step.lists.new_empty(shape.lines, most), *made[1:5],
        step.scores.new_empty(shape.lines, shares, width), step.arrivals, many, made.out,
        step.lengths, step.starts, step.table, *powers_of(alpha), 1e-4, step.reach,
        *v.stride(), step.table_stride, shape.kv_heads, step.time, shape.rows, width, shape.pages, most,
        KIND=step.kind, CONVEX=alpha <= 2, STATS=step.stats, DEFER=many is not None,
        SHARES=shares, CHUNK=min(MOST_HELD, max(64, triton.next_power_of_2(shape.pages))),
        AT_ONCE=pages_held(shape.pages), GATHER=GATHERED // (padded(width) * v.element_size()), BLOCK_DV=padded(width),
        num_warps=row_warps(shape.pages),
        **_launched(v.device), **step.there(),
    )  # fmt: skip


def _values(step: _Step, v: Tensor, many: Tensor) -> None:
    """The third stage, of the rows that are left over."""
    shape, made, width = step.shape, step.made, v.shape[3]
    splits = value_splits(shape, v.device, width)
    value_kernel[(shape.pairs, splits, shape.blocks)](
        v, step.scores, made.tops, step.lists, *made[1:5], step.scores.new_empty(shape.lines, splits, width),
        step.scores.new_empty(shape.lines, splits, 3), step.arrivals, many, made.out,
        step.lengths, step.starts, step.table, *powers_of(step.alpha), step.reach, *v.stride(), step.table_stride,
        shape.kv_heads, step.time, shape.rows, width, shape.pages, splits,
        KIND=step.kind, PRECISION=_precision(v), STATS=step.stats, M=shape.tile, CHUNK=64,
        PARTS=triton.next_power_of_2(splits), BLOCK_DV=padded(width),
        num_warps=VALUE.warps * (1 + (shape.tile > 32)), num_stages=VALUE.stages, **_launched(v.device),
        **step.there(),
    )  # fmt: skip


@operator("decode_attention")
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, scales: Tensor | None, lengths: Tensor | None,
    starts: Tensor | None, table: Tensor | None, norms: Tensor | None, low: Tensor | None, high: Tensor | None,
    alpha: float, scale: float, stats: bool,
) -> list[Tensor]:  # fmt: skip
    """`Decoded`. `k` and `v` are (batch, kv_heads, time, dim), or with a `table` (batch, pages) of a pool's pages
    (pages, kv_heads, 64, dim). `norms` is (batch, kv_heads, pages), or (pages, kv_heads) of a pool; `low` and `high`,
    which need it, have a last dim more."""
    slopes, scales, lengths, starts = contiguous(slopes, scales, lengths, starts)
    step = _step_of(q, k, v, [lengths, starts, table], alpha, stats)
    _score(step, q, k, slopes, scales, scale, norms, low, high)
    if step.shape.pages <= SHORT:
        _rows(step, v, step.shape.pages * PAGE, None)
    else:
        many = step.lists.new_empty(step.shape.lines)
        _rows(step, v, MOST_SURVIVORS, many)
        _values(step, v, many)
    return list(step.made)


@decode_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, scales: Tensor | None, lengths: Tensor | None,
    starts: Tensor | None, table: Tensor | None, norms: Tensor | None, low: Tensor | None, high: Tensor | None,
    alpha: float, scale: float, stats: bool,
) -> list[Tensor]:  # fmt: skip
    return list(_decoded(q, v, shape_of(q, k, table), stats))
