"""The norms between two sublayers in one launch: what one wrote is normed and added, and the sum normed for the next.

    h = x + rms(y) * after      where there is a y; h = x otherwise
    z = rms(h) * before         where there is a `before`

A small model's step is launches: taken apart, a norm's backward is three, its input's gradient and two stages of a sum
for its weights. Here the backward of both norms is one, in which a fixed number of programs add up the weights'
gradients over their rows in a fixed order, and a short launch that sums over the programs: deterministic.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.kernels.operators import operator
from longspan.kernels.tiles import contiguous, padded

EPSILON = torch.finfo(torch.float32).eps  # torch's, where none is given
_COUNTS = ["ROWS", "TIME"]  # not compiled anew for, however they divide


@triton.jit
def _load_rows(base, rows, columns, there, TIME, batch_stride, time_stride):
    """Rows in float32, zero beyond the end."""
    starts = (rows // TIME).to(tl.int64) * batch_stride + (rows % TIME).to(tl.int64) * time_stride
    return tl.load(base + starts[:, None] + columns[None, :], mask=there, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(base, values, rows, columns, there, D):
    places = base + rows.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(places, values.to(base.dtype.element_ty), mask=there)


@triton.jit
def _inverse_rms(values, epsilon, D):
    return tl.rsqrt(tl.sum(values * values, 1) / D + epsilon)


@triton.jit
def _through_norm(gradient, unit, inverse, D):
    """From the gradient of the values over their RMS, `unit`, to that of the values."""
    return inverse[:, None] * (gradient - unit * (tl.sum(gradient * unit, 1) / D)[:, None])


@triton.jit(do_not_specialize=_COUNTS)
def forward_kernel(Residual, Update, After, Before, Hidden, Normed, Inverse, epsilon,
                   x_b, x_t, y_b, y_t, ROWS, TIME, D,
                   AFTER: tl.constexpr, BEFORE: tl.constexpr, KEEP: tl.constexpr,
                   M: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program for M rows of x (Residual) and y (Update): h (Hidden) if KEEP, z (Normed), and their inverse RMS."""
    rows, columns = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, BLOCK)
    there = (rows[:, None] < ROWS) & (columns[None, :] < D)
    h = _load_rows(Residual, rows, columns, there, TIME, x_b, x_t)
    if AFTER:
        y = _load_rows(Update, rows, columns, there, TIME, y_b, y_t)
        after = tl.load(After + columns, mask=columns < D, other=0.0)
        inverse = _inverse_rms(y, epsilon, D)
        tl.store(Inverse + rows, inverse, mask=rows < ROWS)
        h += y * inverse[:, None] * after[None, :]
    if KEEP:
        _store_rows(Hidden, h, rows, columns, there, D)
    if BEFORE:
        before = tl.load(Before + columns, mask=columns < D, other=0.0)
        inverse = _inverse_rms(h, epsilon, D)
        tl.store(Inverse + (ROWS if AFTER else 0) + rows, inverse, mask=rows < ROWS)
        _store_rows(Normed, h * inverse[:, None] * before[None, :], rows, columns, there, D)


@triton.jit(do_not_specialize=_COUNTS)
def backward_kernel(dHidden, dNormed, Hidden, Update, After, Before, Inverse, dResidual, dUpdate, dWeights,
                    dh_b, dh_t, dz_b, dz_t, h_b, h_t, y_b, y_t, ROWS, TIME, D,
                    AFTER: tl.constexpr, BEFORE: tl.constexpr, ADD: tl.constexpr,
                    M: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program for every so-manieth block of M rows; it writes what they add to the weights' gradients.

    ADD: h has a gradient of its own. Not BEFORE: the gradient of x is that of h, and is not written.
    """
    columns = tl.arange(0, BLOCK)
    if AFTER:
        after = tl.load(After + columns, mask=columns < D, other=0.0)
        d_after = tl.zeros([M, BLOCK], tl.float32)
    if BEFORE:
        before = tl.load(Before + columns, mask=columns < D, other=0.0)
        d_before = tl.zeros([M, BLOCK], tl.float32)
    for first in range(tl.program_id(0) * M, ROWS, tl.num_programs(0) * M):
        rows = first + tl.arange(0, M)
        there = (rows[:, None] < ROWS) & (columns[None, :] < D)
        # All loads come before the first sum, which waits for the program's other warps, so that they wait together.
        d_h = _load_rows(dHidden, rows, columns, there, TIME, dh_b, dh_t) if ADD else tl.zeros([M, BLOCK], tl.float32)
        if BEFORE:
            d_z = _load_rows(dNormed, rows, columns, there, TIME, dz_b, dz_t)
            h = _load_rows(Hidden, rows, columns, there, TIME, h_b, h_t)
            h_inverse = tl.load(Inverse + (ROWS if AFTER else 0) + rows, mask=rows < ROWS, other=0.0)
        if AFTER:
            y = _load_rows(Update, rows, columns, there, TIME, y_b, y_t)
            y_inverse = tl.load(Inverse + rows, mask=rows < ROWS, other=0.0)
        if BEFORE:
            unit = h * h_inverse[:, None]
            d_before += d_z * unit
            d_h += _through_norm(d_z * before[None, :], unit, h_inverse, D)
            _store_rows(dResidual, d_h, rows, columns, there, D)
        if AFTER:
            unit = y * y_inverse[:, None]
            d_after += d_h * unit
            d_y = _through_norm(d_h * after[None, :], unit, y_inverse, D)
            _store_rows(dUpdate, d_y, rows, columns, there, D)
    dWeights += tl.program_id(0) * D * (2 if AFTER and BEFORE else 1)
    if AFTER:
        tl.store(dWeights + columns, tl.sum(d_after, 0), mask=columns < D)
    if BEFORE:
        tl.store(dWeights + (D if AFTER else 0) + columns, tl.sum(d_before, 0), mask=columns < D)


@triton.jit
def sums_kernel(Parts, Sums, COUNT, WIDTH, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of a few hundred rows, all in one look: torch's own takes 7 microseconds on an H200."""
    rows, columns = tl.arange(0, PARTS), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = (rows[:, None] < COUNT) & (columns[None, :] < WIDTH)
    parts = tl.load(Parts + rows[:, None] * WIDTH + columns[None, :], mask=there, other=0.0)
    tl.store(Sums + columns, tl.sum(parts, 0), mask=columns < WIDTH)


def _blocks(dim: int, values: int) -> dict[str, int]:
    """Rows of about as many values together as 8 a thread."""
    block = padded(dim)
    return {"M": max(1, values // block), "BLOCK": block, "num_warps": values // 256}


def _forward_blocks(dim: int) -> dict[str, int]:
    """Many small programs: nothing is carried from one block of rows to the next."""
    return _blocks(dim, 1024)


def _backward_blocks(dim: int) -> dict[str, int]:
    """More rows at once, for fewer turns of the loop, each of which waits for memory and for two sums."""
    return _blocks(dim, 2048)


def _programs(rows: int, at_once: int) -> int:
    """Of the backward: about two for a multiprocessor, so that few sums are left over. No rows still have a sum."""
    return max(1, min(triton.cdiv(rows, at_once), 256))


def _readable(*tensors: Tensor | None) -> list[Any]:
    """The kernels know strides of batch and time, expanded ones too, but a row's values lie side by side."""
    return [tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def _strides(values: Tensor | None) -> tuple[int, int]:
    return (0, 0) if values is None else (values.stride(0), values.stride(1))


def _outputs(
    x: Tensor, after: Tensor | None, before: Tensor | None, keep: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for h, z and the inverse RMS; of nothing for a part that is not asked for."""
    h = x.new_empty(x.shape if keep else (0,))
    z = x.new_empty(x.shape if before is not None else (0,), dtype=dtype)
    return h, z, x.new_empty((after is not None) + (before is not None), *x.shape[:2])


@operator("residual_norms")
def residual_norms(
    x: Tensor, y: Tensor | None, after: Tensor | None, before: Tensor | None, keep: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """h, z in a dtype, and the inverse RMS of the rows of y and of h, each where there is a norm.

    Args:
        x: (batch, time, dim) in float32, as the weights are. Any strides, here and of y.
        y: likewise, in any precision; None together with `after`.
        keep: whether h is wanted. It is where there is a y. Where it is x it is a copy, so that the gradients of both
            uses of x meet in the kernel and not in a launch of their own.
    """
    x, y = _readable(x, y)
    after, before = contiguous(after, before)
    batch, time, dim = x.shape
    h, z, inverse = _outputs(x, after, before, keep, dtype)
    blocks = _forward_blocks(dim)
    forward_kernel[(triton.cdiv(batch * time, blocks["M"]),)](
        x, y, after, before, h, z, inverse, EPSILON, *_strides(x), *_strides(y), batch * time, time, dim,
        AFTER=y is not None, BEFORE=before is not None, KEEP=keep, **blocks,
    )  # fmt: skip
    return h, z, inverse


@residual_norms.register_fake
def _(
    x: Tensor, y: Tensor | None, after: Tensor | None, before: Tensor | None, keep: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(x, after, before, keep, dtype)


def _gradient_outputs(inverse: Tensor, y: Tensor | None, dim: int, before: bool) -> tuple[Tensor, Tensor]:
    """Room for the gradients of x, where it is not that of h, and of y."""
    shape = (*inverse.shape[1:], dim)
    d_x = inverse.new_empty(shape if before else (0,))
    return d_x, d_x.new_empty(0) if y is None else y.new_empty(shape)


@operator("residual_norms_backward")
def residual_norms_backward(
    d_h: Tensor | None, d_z: Tensor | None, h: Tensor | None, y: Tensor | None,
    after: Tensor | None, before: Tensor | None, inverse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, of y and of the weights (one or two, dim), that of `after` first.

    Those of a part that is not there are empty, and so is that of x where there is no `before`: it is `d_h` then.
    """
    d_h, d_z, h, y = _readable(d_h, d_z, h, y)
    after, before = contiguous(after, before)
    _, batch, time = inverse.shape
    weights = [weight for weight in (after, before) if weight is not None]
    dim = weights[0].shape[0]
    d_x, d_y = _gradient_outputs(inverse, y, dim, before is not None)
    blocks = _backward_blocks(dim)
    programs = _programs(batch * time, blocks["M"])
    d_weights = inverse.new_empty(programs, len(weights), dim)
    backward_kernel[(programs,)](
        d_h, d_z, h, y, after, before, inverse, d_x, d_y, d_weights,
        *_strides(d_h), *_strides(d_z), *_strides(h), *_strides(y), batch * time, time, dim,
        AFTER=after is not None, BEFORE=before is not None, ADD=d_h is not None, **blocks,
    )  # fmt: skip
    sums = inverse.new_empty(len(weights), dim)
    sums_kernel[(triton.cdiv(sums.numel(), 16),)](
        d_weights, sums, programs, sums.numel(), PARTS=padded(programs), BLOCK=16, num_warps=8
    )
    return d_x, d_y, sums


@residual_norms_backward.register_fake
def _(
    d_h: Tensor | None, d_z: Tensor | None, h: Tensor | None, y: Tensor | None,
    after: Tensor | None, before: Tensor | None, inverse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    weights = [weight for weight in (after, before) if weight is not None]
    dim = weights[0].shape[0]
    return *_gradient_outputs(inverse, y, dim, before is not None), inverse.new_empty(len(weights), dim)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, y, after, before, ctx.keep, _ = inputs
    h, _, inverse = output
    ctx.save_for_backward(None if before is None else h if ctx.keep else x, y, after, before, inverse)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(inverse)


def _gradients(ctx: Any, d_h: Tensor | None, d_z: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    h, y, after, before, inverse = ctx.saved_tensors
    # An output that is empty may have a gradient, empty too. An output that nobody used has none.
    d_h, d_z = d_h if ctx.keep else None, d_z if before is not None else None
    if d_z is None and (d_h is None or y is None):
        return d_h, *(None,) * 5
    before = before if d_z is not None else None
    d_x, d_y, d_weights = residual_norms_backward(d_h, d_z, h, y, after, before, inverse)
    return (
        d_h if d_z is None else d_x,
        None if y is None else d_y,
        None if y is None else d_weights[0],
        None if d_z is None else d_weights[-1],
        None,
        None,
    )


residual_norms.register_autograd(_gradients, setup_context=_keep)
