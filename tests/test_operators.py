"""Operators run on the GPU of their inputs, also where another is the current one."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import longspan

pytest.importorskip("triton")

from longspan.kernels.operators import operator


def test_an_operator_runs_on_the_device_of_its_first_input(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    asked: list[Tensor] = []

    def noted(tensor: Tensor) -> nullcontext[None]:
        asked.append(tensor)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device_of", noted)
    q, k, v = torch.randn(3, 1, 1, 300, 16, device=device)
    longspan.attention(q, k, v, impl="triton")
    longspan.attention(q[:, :, :60], k[:, :, :60], v[:, :, :60], impl="triton")
    longspan.decode(q[:, :, :1], k, v, impl="triton")
    assert len(asked) == 3
    assert all(tensor.shape[:2] == (1, 1) for tensor in asked)


def test_the_schema_is_that_of_the_function() -> None:
    @operator("a_test_of_operators")
    def scaled(more: Tensor | None, x: Tensor, by: float) -> Tensor:
        return x * by if more is None else x * by + more

    schema = str(torch.ops.longspan.a_test_of_operators.default._schema)
    assert schema == "longspan::a_test_of_operators(Tensor? more, Tensor x, float by) -> Tensor"
    assert torch.equal(scaled(None, torch.ones(2), by=3.0), torch.full((2,), 3.0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current_one() -> None:
    q, k, v = torch.randn(3, 1, 2, 300, 32, device="cuda:1", dtype=torch.float16, requires_grad=True).unbind()
    out = longspan.attention(q, k, v, impl="triton")
    torch.testing.assert_close(out, longspan.attention(q, k, v, impl="reference"), rtol=1e-2, atol=1e-2)
    assert torch.cuda.current_device() == 0
