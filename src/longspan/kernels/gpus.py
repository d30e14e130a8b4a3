"""What GPUs differ in: the shared memory a program may have, and where its products come from."""

from functools import cache

import torch
import triton
import triton.language as tl

ROOMY = 160 << 10  # bytes: GPUs for data centres have 163 KB (A100) or 227 (H100, B200), others 99


@torch.compiler.assume_constant_result
def is_roomy(device: torch.device) -> bool:
    """Whether a program may have so much; yes where there is no GPU, in the interpreter."""
    if device.type != "cuda":
        return True
    return _shared_memory(device.index) >= ROOMY


@cache
def _shared_memory(index: int) -> int:
    """Bytes for one program; asked of the driver once, since every call of attention wants to know."""
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def _has_tensor_memory() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10


# B200 and its like put products of matrices in a memory of their own.
TENSOR_MEMORY = tl.constexpr(_has_tensor_memory())


@triton.jit
def highest(x):
    """The maximum of one number a row.

    With tensor memory Triton's compiler (3.7.1) dies of a reduction of such numbers where they come from a product, but
    not of that of a matrix with one row.
    """
    return tl.max(tl.max(x[None, :], 1), 0) if TENSOR_MEMORY else tl.max(x, 0)
