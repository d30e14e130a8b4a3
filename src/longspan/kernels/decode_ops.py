"""Decoding as an operator of torch: shapes, memory and launches of the kernels in `decode.py`."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from longspan.kernels.bounds import bound_kernel
from longspan.kernels.decode import score_kernel, sum_kernel, threshold_kernel, value_kernel
from longspan.kernels.pages import EPSILON, PAGE
from longspan.kernels.solver import SOFTMAX, kind_of, powers_of
from longspan.kernels.tiles import contiguous, padded

MOST_ROWS = 64  # of one tile: heads that share a key head, times their queries
BOXES_AT_ONCE = 64
UNDERFLOW = 104.0  # exp(-104) is 0 in float32


class Launch(NamedTuple):
    """How a kernel runs: programs a processor, the warps of each, the depth of its pipeline."""

    programs: int
    warps: int
    stages: int


SCORE = Launch(8, 4, 3)
VALUE = Launch(4, 4, 2)
THRESHOLD = Launch(1, 8, 2)


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

    def splits(self, launch: Launch, device: torch.device, most: int) -> int:
        """Programs that share the keys of a head so that all of them fill the device."""
        wanted = launch.programs * _processors(device) // (self.batch * self.kv_heads * self.blocks)
        return max(1, min(wanted, self.pages, most))


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


class Decoded(NamedTuple):
    """What decoding gives; all but `out` have the rows of a key head in one dim: its heads, then their queries."""

    out: Tensor  # (batch, heads, queries, dim)
    maximum: Tensor  # (batch, kv_heads, rows), of a * score
    height: Tensor  # of the threshold below it; softmax: the largest weight
    support: Tensor
    entropy: Tensor
    tops: Tensor  # (batch, kv_heads, rows, pages), the highest a * score of every page, -inf for one that was not read


def _decoded(q: Tensor, v: Tensor, shape: Shape, stats: bool) -> Decoded:
    line = q.new_empty(shape.batch, shape.kv_heads, shape.rows, dtype=torch.float32)
    counted = line.shape if stats else (0,)
    return Decoded(
        q.new_empty(shape.batch, shape.heads, shape.queries, v.shape[3]),
        line,
        torch.empty_like(line),
        line.new_empty(counted),
        line.new_empty(counted),
        line.new_empty(*line.shape, shape.pages),
    )


@torch.library.custom_op("longspan::decode_attention", mutates_args=())
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, scales: Tensor | None, lengths: Tensor | None,
    starts: Tensor | None, table: Tensor | None, norms: Tensor | None, low: Tensor | None, high: Tensor | None,
    alpha: float, scale: float, stats: bool,
) -> list[Tensor]:  # fmt: skip
    """`Decoded`. `k` and `v` are (batch, kv_heads, time, dim), or with a `table` (batch, pages) of a pool's pages
    (pages, kv_heads, 64, dim). `norms` is (batch, kv_heads, pages), or (pages, kv_heads) of a pool; `low` and `high`,
    which need it, have a last dim more."""
    slopes, scales, lengths, starts = contiguous(slopes, scales, lengths, starts)
    shape = shape_of(q, k, table)
    made = _decoded(q, v, shape, stats)
    lines = shape.batch * shape.kv_heads * shape.rows
    scores = q.new_empty(lines, shape.pages * PAGE, dtype=torch.float32)
    lists = q.new_empty(lines, shape.pages, dtype=torch.int32)
    kind, (a, r) = kind_of(alpha), powers_of(alpha)
    unit, reach = (1.0, UNDERFLOW) if kind == SOFTMAX else (a, 1.0)
    time = shape.pages * PAGE if table is not None else k.shape[2]
    table_stride = 0 if table is None else table.stride(0)
    norm_strides: tuple[int, ...] = (0, 0, 0)
    if norms is not None:
        norm_strides = norms.stride() if table is None else (*norms.stride(), 0)
    group = shape.heads // shape.kv_heads
    sizes = shape.kv_heads, group, shape.queries, time, shape.rows, q.shape[3], shape.pages
    there = {"LENGTHS": lengths is not None, "STARTS": starts is not None}
    common: dict[str, Any] = there | {
        "PAGED": table is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "M": shape.tile,
    }
    scaled = {"SLOPES": slopes is not None, "SCALES": scales is not None, "BLOCK_D": padded(q.shape[3])}
    bounds = floors = None
    blocks = triton.cdiv(shape.pages, BOXES_AT_ONCE)
    if low is not None:
        assert high is not None
        assert norms is not None
        bounds, floors = torch.empty_like(made.tops), scores.new_empty(lines, blocks)
        if low.stride() != high.stride() or low.stride(-1) != 1:
            low, high = low.contiguous(), high.contiguous()
        box_strides = low.stride()[:3] if table is None else (*low.stride()[:2], 0)
        bound_kernel[(blocks, shape.batch * shape.kv_heads, shape.blocks)](
            q, k, low, high, norms, bounds, floors, slopes, scales, lengths, starts, table,
            unit, scale, EPSILON, *q.stride(), *k.stride(), *norm_strides, *box_strides, table_stride, *sizes, blocks,
            PROBES=min(shape.rows, shape.tile, 8), CHUNK=BOXES_AT_ONCE, num_warps=4, num_stages=2, **scaled, **common,
        )  # fmt: skip
    # The compiler shares the stages out among loads whose place hangs on another load: the list's, the table's.
    stages = SCORE.stages * (1 + (norms is not None) + (table is not None))
    splits = shape.splits(SCORE, q.device, shape.pages)
    score_kernel[(splits, shape.batch * shape.kv_heads, shape.blocks)](
        q, k, scores, made.tops, lists, slopes, scales, lengths, starts, table, norms, bounds, floors,
        unit, scale, reach, *q.stride(), *k.stride(), *norm_strides, table_stride, *sizes, blocks, splits,
        NORMS=norms is not None, BOXES=low is not None, CHUNK=64,
        num_warps=SCORE.warps, num_stages=stages, **scaled, **common,
    )  # fmt: skip
    threshold_kernel[(lines,)](
        scores, made.tops, lists, made.maximum, made.height, lengths, starts, r, 1e-4 if alpha <= 2 else 2e-6,
        shape.kv_heads, time, shape.rows, shape.pages,
        KIND=kind, CONVEX=alpha <= 2, CHUNK=min(4096, max(64, triton.next_power_of_2(shape.pages))), AT_ONCE=64,
        num_warps=THRESHOLD.warps, num_stages=THRESHOLD.stages, **there,
    )  # fmt: skip
    splits = shape.splits(VALUE, q.device, 64)
    parts = scores.new_empty(lines, splits, v.shape[3])
    sums = scores.new_empty(lines, splits, 3)
    block_dv = padded(v.shape[3])
    value_kernel[(splits, shape.batch * shape.kv_heads, shape.blocks)](
        v, scores, made.tops, lists, made.maximum, made.height, parts, sums, lengths, starts, table,
        r, reach, *v.stride(), table_stride, shape.kv_heads, time, shape.rows, v.shape[3], shape.pages, splits,
        KIND=kind, STATS=stats, CHUNK=64, BLOCK_DV=block_dv,
        num_warps=VALUE.warps * (1 + (shape.tile > 32)), num_stages=VALUE.stages, **common,
    )  # fmt: skip
    sum_kernel[(lines,)](
        parts, sums, made.height, made.support, made.entropy, made.out, *made.out.stride(),
        shape.kv_heads, group, shape.queries, shape.rows, v.shape[3], splits,
        KIND=kind, STATS=stats, CHUNK=min(64, triton.next_power_of_2(splits)), BLOCK_DV=block_dv, num_warps=4,
    )  # fmt: skip
    return list(made)


@decode_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, scales: Tensor | None, lengths: Tensor | None,
    starts: Tensor | None, table: Tensor | None, norms: Tensor | None, low: Tensor | None, high: Tensor | None,
    alpha: float, scale: float, stats: bool,
) -> list[Tensor]:  # fmt: skip
    return list(_decoded(q, v, shape_of(q, k, table), stats))
