"""The scores that can survive, found without solving the row: never one too few, and attention by them alone."""

import math

import pytest
import torch
from attention_cases import Case, attend, call_of, gradients
from hypothesis import given
from hypothesis import strategies as st
from test_attention import LARGE, SMALL, assert_chunked_equals_reference
from torch import Tensor

from longspan import entmax
from longspan.functional import chunked, survivors
from longspan.functional.threshold import alpha_range

ALPHAS = (1.2, 1.5, 1.75, 2.0, 3.0, 16.0)


def rows_of(kind: str, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """24 rows of one kind."""
    generator = torch.Generator().manual_seed(width)
    noise = torch.randn(24, width, generator=generator, dtype=torch.float64)
    if kind == "causal":
        noise = noise.masked_fill(torch.arange(width) > torch.arange(24)[:, None] * width // 23, -math.inf)
    elif kind == "nothing seen":
        noise[::3] = -math.inf
    elif kind == "one peak":
        noise[:, 7 * width // 11] += 30
    elif kind == "peaks that tie":
        noise = noise.round() * 3
        noise[:, 5 : width : width // 9] = 12
    elif kind == "neighbours":
        noise[:, width // 3 : width // 3 + 40] += 9
    elif kind == "deep":
        noise = noise * 4 - 1000
    elif kind == "large":
        noise = noise * 1e4
    return noise.to(dtype)


KINDS = ("noise", "causal", "nothing seen", "one peak", "peaks that tie", "neighbours", "deep", "large")


def assert_covers_the_support(scores: Tensor, alpha: float) -> bool:
    """Whether there were few; if so, what is named is of the row and nothing that survives is missing."""
    found = survivors.survivors(scores, alpha, alpha_range(alpha))
    if found is None:
        return False
    real = found.scores > -math.inf
    assert torch.equal(torch.where(real, scores.gather(-1, found.keys), -math.inf), found.scores)
    named = torch.zeros_like(scores, dtype=torch.int32).scatter_add_(-1, found.keys, real.int())
    assert int(named.max()) <= 1
    assert bool((named[entmax(scores.double(), alpha) > 0] == 1).all())
    return True


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [512, 1999, 4096])
def test_nothing_that_survives_is_missing(kind: str, width: int, alpha: float) -> None:
    for dtype in (torch.float32, torch.float64):
        few = assert_covers_the_support(rows_of(kind, width, dtype), alpha)
        assert few or alpha < 1.75 or (kind, width) == ("causal", 512)  # else the test would say nothing


@given(
    st.lists(
        st.sampled_from([-math.inf, -3.0, -0.7, -0.1, 0.0, 0.1, 0.11, 0.7, 2.0, 2.0000002]), min_size=4, max_size=60
    ),
    st.sampled_from(ALPHAS),
    st.sampled_from([1, 2, 3, 5]),
)
def test_nothing_is_missing_at_any_size(row: list[float], alpha: float, group: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_SHORTEST": 1, "_SHARE": 1, "_GROUP": min(group, len(row))}.items():
            patch.setattr(survivors, name, value)
        assert_covers_the_support(torch.tensor([row, row[::-1]]), alpha)


@pytest.mark.parametrize(
    ("scores", "alpha"),
    [
        pytest.param(torch.zeros(4, 2048), 1.5, id="flat"),
        pytest.param(torch.randn(4, 2048), 1.0, id="softmax"),
        pytest.param(torch.randn(4, 511), 2.0, id="short"),
        pytest.param(torch.randn(4, 2048).index_fill(1, torch.tensor([1000]), math.nan), 2.0, id="nan"),
        pytest.param(torch.randn(4, 2047).index_fill(1, torch.tensor([2046]), math.nan), 2.0, id="nan_at_the_end"),
        pytest.param(torch.randn(4, 2048).index_fill(1, torch.tensor([3]), math.inf), 2.0, id="infinite"),
        pytest.param(torch.zeros(0, 2048), 1.5, id="no_rows"),
    ],
)
def test_rows_that_are_left_to_the_solver(scores: Tensor, alpha: float) -> None:
    assert survivors.survivors(scores, alpha, alpha_range(alpha)) is None


def count_few(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each block of `chunked` had few survivors."""
    few: list[bool] = []

    def spy(*arguments: object) -> survivors.Survivors | None:
        found = survivors.survivors(*arguments)  # type: ignore[arg-type]
        few.append(found is not None)
        return found

    monkeypatch.setattr(chunked, "survivors", spy)
    return few


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_attention_by_survivors_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, statistics and every gradient, whatever the options, with all that can be few made to be."""
    case = (SMALL | LARGE)[name]
    for constant, value in {"_SHORTEST": 2, "_SHARE": 1, "_GROUP": 2}.items():
        monkeypatch.setattr(survivors, constant, value)
    few = count_few(monkeypatch)
    assert_chunked_equals_reference(call_of(case))
    lowest = case.alpha if isinstance(case.alpha, float) else min(case.alpha)
    assert any(few) == (bool(few) and lowest > 1 and case.key_time > 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows_at_the_shipped_sizes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float64 as the reference in that dtype is, and most of it by survivors."""
    call = call_of(Case(2, 4, 2, 1500, 2100, 16, 8, slopes=(0.0, 0.0, 0.02, 1.0), logits=3.0), dtype)
    exact = {
        name: value.detach().double().requires_grad_() for name, value in call.items() if isinstance(value, Tensor)
    }
    truth = attend(call | exact, "reference")
    true_gradients = gradients(truth, call | exact)
    few = count_few(monkeypatch)
    errors = []
    for impl in ("reference", "chunked"):
        out = attend(call, impl)
        found = gradients(out, call)
        pairs = [(out.detach(), truth.detach()), *((found[name], true_gradients[name]) for name in found)]
        errors.append([float((left.double() - right).abs().max() / right.abs().max()) for left, right in pairs])
    assert few.count(True) > len(few) // 2  # steep slopes make windows too short for it
    for of_reference, of_chunked in zip(*errors, strict=True):
        assert of_chunked <= 2 * of_reference + 4 * torch.finfo(dtype).eps


def test_sums_over_few_keys_and_their_gradients() -> None:
    weights = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    values = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    keys = torch.tensor([[[0, 1, 4, 1]] * 3, [[2, 2, 2, 3]] * 3])
    dense = torch.stack([values[batch][keys[batch]] for batch in range(2)])  # (2, 3, 4, 6)
    expected = (weights[..., None] * dense).sum(2)
    torch.testing.assert_close(survivors.weighted_sum(weights, keys, values), expected)
    grad = torch.randn_like(expected)
    both = survivors.weighted_sum_vjp(weights.detach(), keys.int(), values.detach(), grad)
    for found, true in zip(both, torch.autograd.grad(expected, (weights, values), grad), strict=True):
        torch.testing.assert_close(found, true)
