"""``gelu(gate) * up`` of a joint projection, whose left half is the gate: one launch forward and one backward.

A compiler that sees the two halves apart computes their gradients apart, each with its own gelu, and joins them by
testing every value for its side. Here a program reads gate, up and gradient once and writes both sides.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.kernels.operators import operator
from longspan.kernels.tiles import padded


@triton.jit
def _share(gate):
    """The share of a gate that passes, gelu's tanh form as a sigmoid, and its slope. Beyond +-10 it is 0 or 1."""
    near = tl.minimum(tl.maximum(gate, -10.0), 10.0)  # where the exponential does not overflow
    square = near * near
    odds = tl.exp(-1.5957691216057308 * near * (1.0 + 0.044715 * square))  # 2 sqrt(2/pi); of staying out
    passed = tl.where(gate > -10.0, 1.0 / (1.0 + odds), 0.0)
    return passed, passed * passed * odds * 1.5957691216057308 * (1.0 + 0.134145 * square)


@triton.jit
def _places(ROWS, WIDTH, M: tl.constexpr, BLOCK: tl.constexpr):
    """Where a program's values lie in a matrix of one side, what to add for one of both, and which of them exist."""
    rows = (tl.program_id(0) * M + tl.arange(0, M))[:, None]
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    starts = rows.to(tl.int64) * WIDTH
    return starts + columns, starts, (rows < ROWS) & (columns < WIDTH)


@triton.jit(do_not_specialize=["ROWS"])
def forward_kernel(Joint, Out, ROWS, WIDTH, M: tl.constexpr, BLOCK: tl.constexpr):
    places, starts, there = _places(ROWS, WIDTH, M, BLOCK)
    gate = tl.load(Joint + starts + places, mask=there, other=0.0).to(tl.float32)
    up = tl.load(Joint + starts + places + WIDTH, mask=there, other=0.0).to(tl.float32)
    passed, _ = _share(gate)
    tl.store(Out + places, (gate * passed * up).to(Out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["ROWS"])
def backward_kernel(dOut, Joint, dJoint, ROWS, WIDTH, M: tl.constexpr, BLOCK: tl.constexpr):
    places, starts, there = _places(ROWS, WIDTH, M, BLOCK)
    gate = tl.load(Joint + starts + places, mask=there, other=0.0).to(tl.float32)
    up = tl.load(Joint + starts + places + WIDTH, mask=there, other=0.0).to(tl.float32)
    d_out = tl.load(dOut + places, mask=there, other=0.0).to(tl.float32)
    passed, slope = _share(gate)
    d_gate, d_up = d_out * up * (passed + gate * slope), d_out * gate * passed
    tl.store(dJoint + starts + places, d_gate.to(dJoint.dtype.element_ty), mask=there)
    tl.store(dJoint + starts + places + WIDTH, d_up.to(dJoint.dtype.element_ty), mask=there)


def _launch(rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, and 16 values a thread: two wide loads of each input in half precision."""
    block = min(padded(width), 512)
    options = {"M": max(1, 2048 // block), "BLOCK": block, "num_warps": 4}
    return (triton.cdiv(rows, options["M"]), triton.cdiv(width, block)), options


@operator("gated_gelu")
def gated_gelu(joint: Tensor) -> Tensor:
    """(..., 2 width) to (..., width): the gelu, in its tanh form, of the left half times the right half."""
    joint = joint.contiguous()
    out = _output(joint)
    if out.numel():
        rows, width = out.numel() // out.shape[-1], out.shape[-1]
        grid, options = _launch(rows, width)
        forward_kernel[grid](joint, out, rows, width, **options)
    return out


@gated_gelu.register_fake
def _output(joint: Tensor) -> Tensor:
    return joint.new_empty(*joint.shape[:-1], joint.shape[-1] // 2)


@operator("gated_gelu_backward")
def gated_gelu_backward(d_out: Tensor, joint: Tensor) -> Tensor:
    """The gradient of both halves."""
    d_out, joint = d_out.contiguous(), joint.contiguous()
    d_joint = torch.empty_like(joint)
    if d_out.numel():
        rows, width = d_out.numel() // d_out.shape[-1], d_out.shape[-1]
        grid, options = _launch(rows, width)
        backward_kernel[grid](d_out, joint, d_joint, rows, width, **options)
    return d_joint


@gated_gelu_backward.register_fake
def _(d_out: Tensor, joint: Tensor) -> Tensor:
    return joint.new_empty(joint.shape)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, d_out: Tensor) -> Tensor:
    return gated_gelu_backward(d_out, *ctx.saved_tensors)


gated_gelu.register_autograd(_gradient, setup_context=_keep)
