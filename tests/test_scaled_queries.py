"""Queries times their scales: the gradient, and what a compiler is given of it."""

from typing import Any

import torch
from functorch.compile import aot_function, nop  # type: ignore[import-untyped]
from torch import Tensor, nn

from longspan.functional.attention import scaled_queries


def given(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=generator)
    scales = torch.randn(2, 5, 3, dtype=torch.float64, generator=generator).transpose(1, 2)
    return q.to(device).requires_grad_(), scales.to(device).requires_grad_()


def test_no_scales_leave_queries_as_they_are(device: torch.device) -> None:
    q = given(device)[0]
    assert scaled_queries(q, None) is q


def test_the_product_and_its_derivatives(device: torch.device) -> None:
    q, scales = given(device)
    assert torch.equal(scaled_queries(q, scales), q * scales[..., None])
    assert torch.autograd.gradcheck(scaled_queries, (q, scales))
    assert torch.autograd.gradgradcheck(scaled_queries, (q, scales))


def test_scales_keep_their_dtype(device: torch.device) -> None:
    q, scales = given(device)
    out = scaled_queries(q.half(), scales)
    assert out.dtype == torch.float16
    out.sum().backward()
    assert scales.grad is not None
    assert scales.grad.dtype == torch.float64


def test_a_compiler_is_given_no_squeezed_sum(device: torch.device) -> None:
    """Of one it pads the strides where it reads and not where it writes."""
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return nop(graph, _)

    def step(q: Tensor, x: Tensor) -> Tensor:
        return scaled_queries(q, nn.functional.softplus(x).transpose(1, 2)).square().sum()

    q, scales = given(device)
    x = scales.detach().transpose(1, 2).contiguous().requires_grad_()
    aot_function(step, fw_compiler=nop, bw_compiler=keep)(q, x).backward()
    assert x.grad is not None
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert any("sum" in name for name in names)
    assert not any("squeeze" in name and "unsqueeze" not in name for name in names)
