"""The words of Gluon, Triton's lower language, that kernels use; in Triton's interpreter stand-ins for them."""

import os
from typing import Any

import triton
import triton.language as tl

gl: Any
jit: Any
async_copy: Any
fence_async_shared: Any
warpgroup_mma: Any
warpgroup_mma_wait: Any

if os.environ.get("TRITON_INTERPRET") == "1":
    from longspan.kernels.hopper import stand_ins as words

    gl, jit = words.gl, triton.jit
else:
    from triton.experimental import gluon
    from triton.experimental.gluon.language.nvidia import hopper as words  # type: ignore[no-redef]

    gl, jit = gluon.language, gluon.jit

async_copy, fence_async_shared = words.async_copy, words.fence_async_shared
warpgroup_mma, warpgroup_mma_wait = words.warpgroup_mma, words.warpgroup_mma_wait


@jit
def arrived(outstanding: tl.constexpr):
    """Waits until at most so many groups of copies are under way; the others can be factors of products then."""
    async_copy.wait_group(outstanding)
    fence_async_shared()


@jit
def copy_rows(shared, base, first, row_stride, left, width, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """Asks for LENGTH rows of a matrix from row `first` on; `left` of them are there, `width` wide, zeros beyond."""
    LAYOUT: tl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, LENGTH, gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    places = base + tl.cast(first, tl.int64) * row_stride + rows * row_stride + columns
    async_copy.async_copy_global_to_shared(shared, places, mask=(rows < left) & (columns < width))


@jit
def load_rows(base, first, row_stride, left, width, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """Reads such rows into registers."""
    LAYOUT: tl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, LENGTH, gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    places = base + tl.cast(first, tl.int64) * row_stride + rows * row_stride + columns
    return tl.load(places, mask=(rows < left) & (columns < width), other=0.0)


@jit
def store_rows(base, values, first, row_stride, left, width, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """Writes such rows, from whatever layout the values have."""
    LAYOUT: tl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, LENGTH, gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    places = base + tl.cast(first, tl.int64) * row_stride + rows * row_stride + columns
    tl.store(places, gl.convert_layout(values, LAYOUT), mask=(rows < left) & (columns < width))
