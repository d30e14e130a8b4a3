"""A gated layer, GeGLU: a GPU in training takes one product for both projections and one kernel for what follows."""

import torch
from torch import Tensor, nn

from longspan.functional.entmax import HAS_TRITON
from longspan.nn.attention import projections


def gated(gate: nn.Linear, up: nn.Linear, x: Tensor) -> Tensor:
    """``gelu(gate(x)) * up(x)``, gelu in its tanh form."""
    if not fused(gate, up, x):
        opened, raised = projections([gate, up], x)
        return nn.functional.gelu(opened, approximate="tanh") * raised
    from longspan.kernels.gated import gated_gelu

    return gated_gelu(nn.functional.linear(x, torch.cat([gate.weight, up.weight])))


def fused(gate: nn.Linear, up: nn.Linear, x: Tensor) -> bool:
    """Whether the kernel serves. Where nothing is differentiated a compiler's own is as good."""
    return (
        x.is_cuda
        and HAS_TRITON
        and torch.is_grad_enabled()
        and x.dtype != torch.float64
        # A layer put in the place of one of ours is called as it is.
        and all(type(layer) is nn.Linear and layer.bias is None for layer in (gate, up))
    )
