"""Kernels in Gluon do what their namesakes do, in the interpreter by stand-ins that are late in all; and votes."""

from functools import cache
from typing import Any

import pytest
import torch
from long_problems import PROBLEMS
from test_kernels import dtypes
from test_long_kernels import arguments, assert_as_close_as_plain_torch, made, ops
from torch import Tensor

from longspan.kernels import launches

HALVES = [dtype for dtype in dtypes() if dtype.itemsize == 2]
SPARSE = [name for name, problem in PROBLEMS.items() if isinstance(problem.alpha, float) and 1 < problem.alpha <= 2]
KERNELS = launches.Hopper._fields
# Every kernel alone on these in the interpreter, where each takes a second; all kernels together on every problem.
TELLING = [
    "alpha_1.25",
    "alpha_1.75",
    "2_tokens",
    "130_tokens",
    "300_tokens",
    "one_key",
    "fewer_queries",
    "more_queries",
    "more_queries_and_the_future",
    "grouped_heads",
    "slopes_and_grouped_heads",
    "mixed_slopes",
    "negative_slope",
    "a_window_of_few_tiles",
    "windows_and_fewer_queries",
    "lengths",
    "lengths_and_fewer_queries",
    "interleaved_documents",
    "documents_and_more_queries",
    "dim_24",
    "dim_128",
    "wide_values",
    "topics_and_slopes",
    "equal_maxima",
    "queries_of_100",
    "scores_near_-1000",
]
ALONE = SPARSE if torch.cuda.is_available() else TELLING


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("another GPU")

    def use(*kernels: str) -> None:
        monkeypatch.setattr(launches, "ON_HOPPER", frozenset(kernels))

    return use


def results(call: dict[str, Any]) -> list[Tensor]:
    """The output with and without gradients, and they."""
    inputs = [call["q"], call["k"], call["v"]]
    out, _ = ops.attend(*arguments(call), False)
    gradients = torch.autograd.grad(out, inputs, torch.cos(out.detach()))
    with torch.no_grad():
        return [out.detach(), ops.attend(*arguments(call), False)[0], *gradients]


@cache
def of_namesakes(name: str, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The same by the kernels in use, once for all that are compared with them."""
    assert not launches.ON_HOPPER
    return results(made(PROBLEMS[name], dtype, device))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ALONE)
def test_as_its_namesake(name: str, kernel: str, dtype: torch.dtype, device: torch.device, on_hopper: Any) -> None:
    """The same bits where sums are made in the same order, and elsewhere the same but for rounding."""
    wanted = of_namesakes(name, dtype, device)
    on_hopper(kernel)
    for mine, theirs in zip(results(made(PROBLEMS[name], dtype, device)), wanted, strict=True):
        if kernel in ("survey", "key"):
            assert torch.equal(mine, theirs)
        size = float(theirs.double().abs().max())
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=0, atol=3 * torch.finfo(dtype).eps * size)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", SPARSE)
def test_together_as_close_to_the_oracle_as_plain_torch(
    name: str, dtype: torch.dtype, device: torch.device, on_hopper: Any
) -> None:
    on_hopper(*KERNELS)
    assert_as_close_as_plain_torch(made(PROBLEMS[name], dtype, device))


@pytest.mark.parametrize("dtype", HALVES)
def test_rounds_do_not_meet_the_copies_of_those_before(
    dtype: torch.dtype, device: torch.device, on_hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row is far from its norm if no distance is allowed."""
    monkeypatch.setattr(ops, "_slack", lambda dtype: 1e-9)
    wanted = results(made(PROBLEMS["300_tokens"], dtype, device))
    on_hopper("output", "output_alone")
    for mine, theirs in zip(results(made(PROBLEMS["300_tokens"], dtype, device)), wanted, strict=True):
        size = float(theirs.double().abs().max())
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=0, atol=3 * torch.finfo(dtype).eps * size)


@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("name", ["300_tokens", "grouped_heads", "slopes_and_grouped_heads"])
def test_a_vote_says_what_a_maximum_does(
    name: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled by an instruction of the GPU, in the interpreter by a maximum after all."""
    wanted = of_namesakes(name, dtype, device)
    monkeypatch.setattr(ops, "blocks_of", lambda q, v: launches.with_votes(launches.blocks_of(q, v)))
    mine = results(made(PROBLEMS[name], dtype, device))
    assert all(torch.equal(one, other) for one, other in zip(mine, wanted, strict=True))
