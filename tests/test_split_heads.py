"""Heads with and without a slope are served by kernels of their own, launched one after the other."""

from typing import Any

import pytest
import torch
from attention_cases import call_of
from long_problems import Problem, square
from test_kernels import dtypes
from test_long_kernels import assert_as_close_as_plain_torch, made, ops
from torch import Tensor

from longspan import attention

MIXED = {  # heads of 40 and more than 128 keys: no kernel of short rows can take the first
    "by_turns": square(160, heads=4, kv_heads=4, dim=40, value_dim=40, slopes=(0.5, 0.0, 0.1, 0.0)),
    "none": square(200, heads=2, kv_heads=2, slopes=(0.0, 0.0)),
    "within_a_group": square(200, heads=4, kv_heads=2, slopes=(0.5, 0.0, 0.0, 0.0)),
    "negative": square(200, heads=2, kv_heads=2, slopes=(-0.1, 0.0)),
    "softmax": square(200, heads=4, kv_heads=2, slopes=(0.5, 0.0, 0.0, 0.0), alpha=1.0),
    "alpha_1.75": square(200, heads=2, kv_heads=2, slopes=(0.2, 0.0), alpha=1.75),
    "alpha_3": square(200, heads=2, kv_heads=2, slopes=(0.2, 0.0), alpha=3.0),
    "future": square(150, heads=2, kv_heads=2, slopes=(0.2, 0.0), causal=False),
    "documents": square(200, heads=2, kv_heads=2, slopes=(0.2, 0.0), documents="packed"),
    "lengths": square(200, batch=2, heads=2, kv_heads=2, slopes=(0.2, 0.0), lengths=(200, 77)),
    "fewer_queries": Problem(query_time=70, key_time=300, heads=2, kv_heads=2, slopes=(0.2, 0.0)),
}


def fixed(problem: Problem, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """A call whose slopes learn nothing, as those of every layer."""
    call = made(problem, dtype, device)
    return call | {"slopes": call["slopes"].detach()}


def results(q: Tensor, k: Tensor, v: Tensor, alpha: float, slopes: Tensor | None) -> list[Tensor]:
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out, stats = attention(*inputs, alpha=alpha, slopes=slopes, impl="triton", return_stats=True)
    without_stats = attention(*inputs, alpha=alpha, slopes=slopes, impl="triton")
    assert stats.tau is not None
    return [out, stats.tau, *torch.autograd.grad(without_stats, inputs, torch.ones_like(out))]


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_slopes_that_do_not_learn(name: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_as_close_as_plain_torch(fixed(MIXED[name], dtype, device))


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.25, 1.5, 2.0])
def test_a_head_without_a_slope_is_served_as_if_none_had_one(
    alpha: float, dtype: torch.dtype, device: torch.device
) -> None:
    """To the last bit, so that it costs no more either."""
    call = fixed(MIXED["by_turns"], dtype, device)
    together = results(call["q"], call["k"], call["v"], alpha, call["slopes"])
    own = call["slopes"] == 0
    q, k, v = (call[name][:, own] for name in ("q", "k", "v"))
    alone = results(q, k, v, alpha, None)
    for mine, theirs in zip(together, alone, strict=True):
        assert torch.equal(mine[:, own], theirs)


def test_slopes_that_learn_do_so_at_zero(device: torch.device) -> None:
    """What a slope of 0 would gain by growing is asked of the kernels with slopes."""
    call = made(MIXED["by_turns"], torch.float32, device)
    dense = call_of(MIXED["by_turns"])
    found = torch.autograd.grad(attention(**call, impl="triton").sum(), call["slopes"])[0]
    given = {name: dense[name].double().detach() for name in ("q", "k", "v")}
    slopes = dense["slopes"].double().detach().requires_grad_()
    exact = torch.autograd.grad(attention(**dense | given | {"slopes": slopes}, impl="reference").sum(), slopes)[0]
    assert (exact[1::2].abs() > 1e-3).all()
    assert (found.double() - exact.to(device)).abs().max() < 1e-3 * exact.abs().max()


def test_one_launch_each_and_none_for_what_nobody_asks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    launched: list[tuple[bool, bool]] = []

    class Spy:
        def __init__(self, kernel: Any):
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(*given: Any, **options: Any) -> None:
                launched.append((options["SLOPES"], options["SPLIT"]))
                self.kernel[grid](*given, **options)

            return launch

    monkeypatch.setattr(ops, "query_kernel", Spy(ops.query_kernel))
    problem = square(140, heads=2, kv_heads=2, dim=40, value_dim=40, slopes=(0.5, 0.0))
    call = made(problem, torch.float32, device)
    attention(**call, impl="triton").sum().backward()
    assert launched == [(True, False)]  # slopes that learn
    launched.clear()
    attention(**fixed(problem, torch.float32, device), impl="triton").sum().backward()
    assert launched == [(True, True), (False, True)]
    launched.clear()
    attention(**call | {"slopes": None}, impl="triton").sum().backward()
    assert launched == [(False, False)]
