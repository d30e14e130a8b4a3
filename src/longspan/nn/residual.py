"""Where sublayers read the residual stream and write to it, each through a norm.

A GPU in training does it by one kernel forward and one backward, in float32, and hands on what a layer reads in the
precision of that layer's weights: the rounding that autocast would make there. Everything else is plain PyTorch.
"""

import torch
from torch import Tensor, nn

from longspan.functional.entmax import HAS_TRITON
from longspan.nn.norm import RMSNorm

WIDEST = 2048  # values of a row: the kernel holds some rows and the gradients of both weights in registers


def normed(x: Tensor, norm: RMSNorm, reader: nn.Module) -> Tensor:
    """What `reader` reads of the stream x (batch, time, dim), through a norm."""
    if not fused(x, norm):
        return norm(x)
    return _by_kernel(x, None, None, norm, reader, keep=False)[1]


def branch(x: Tensor, norm: RMSNorm, reader: nn.Module) -> tuple[Tensor, Tensor]:
    """The stream, and what `reader` reads of it. Go on with this stream: the kernel adds the gradients of the two."""
    if not fused(x, norm):
        return x, norm(x)
    return _by_kernel(x, None, None, norm, reader)


def merge(x: Tensor, y: Tensor, after: RMSNorm) -> Tensor:
    """The stream with what a sublayer wrote, y, added to it through a norm."""
    if not fused(x, after):
        return x + after(y)
    return _by_kernel(x, y, after, None, None)[0]


def merge_and_branch(x: Tensor, y: Tensor, after: RMSNorm, before: RMSNorm, reader: nn.Module) -> tuple[Tensor, Tensor]:
    """`merge`, then `branch`."""
    if not fused(x, after, before):
        return branch(merge(x, y, after), before, reader)
    return _by_kernel(x, y, after, before, reader)


def fused(x: Tensor, *norms: RMSNorm) -> bool:
    """Whether the kernel serves. It is for training: where nothing is differentiated, torch's launches cost less."""
    return (
        x.is_cuda
        and HAS_TRITON
        and torch.is_grad_enabled()
        and x.ndim == 3
        and x.dtype == torch.float32
        # A norm put in the place of one of ours is called as it is.
        and all(type(norm) is RMSNorm and norm.eps is None and norm.weight.dtype == torch.float32 for norm in norms)
        and all(norm.weight.shape[0] <= WIDEST for norm in norms)
    )


def _by_kernel(
    x: Tensor, y: Tensor | None, after: RMSNorm | None, before: RMSNorm | None, reader: nn.Module | None, *,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from longspan.kernels.norms import residual_norms

    weights = (None if norm is None else norm.weight for norm in (after, before))
    dtype = reader.weight.dtype if isinstance(reader, nn.Linear) else x.dtype
    stream, read, _ = residual_norms(x, y, *weights, keep, dtype)
    return stream, read
