"""First and second derivatives of entmax in the scores and in alpha, against finite differences in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from mpmath import mp, mpf  # type: ignore[import-untyped]
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from longspan import entmax, threshold

ALPHAS = [1.0001, 1.001, 1.01, 1.2, 1.5, 1.75, 2.0, 2.5, 4.0, 16.0]


def weights_for(alpha: float) -> tuple[float, ...]:
    """Weights to build scores from. ``weight ** (alpha-1)`` is the way to the support's edge, so none is small."""
    return (0.4, 0.3, 0.2, 0.1) if alpha <= 4 else (0.55, 0.45)


def step_for(alpha: float) -> float:
    return 1e-6 if alpha <= 4 else 1e-9


def scores_of(weights: tuple[float, ...], alpha: float, length: int) -> Tensor:
    """A row of `length` scores with these weights, by inverting ``p ** a = a s - tau`` at tau = -1; the rest get 0."""
    a = alpha - 1
    inside = [math.expm1(a * math.log(weight)) / a if a else math.log(weight) for weight in weights]
    outside = -1.5 / a if a else -math.inf
    return torch.tensor(inside + [outside] * (length - len(inside)), dtype=torch.float64)


def assert_smooth(scores: Tensor, alpha: float | Tensor, step: float) -> None:
    """Several survive, and no step of the finite differences changes who does."""
    tau, support = threshold(scores, alpha)
    assert int(support.min()) > 1
    way = ((alpha - 1) * scores - tau).abs()
    reach = (alpha - 1) * step + scores.abs() * step
    assert bool((way > 20 * reach).all())


def rows_for(alpha: float, device: torch.device) -> Tensor:
    """Three rows, (3, 6): some dropped, none dropped, and one permuted and shifted."""
    weights = weights_for(alpha)
    row = scores_of(weights, alpha, 6)
    full = scores_of(weights, alpha, len(weights)).repeat(2)[:6] if alpha <= 1.01 else row.flip(0)
    return torch.stack([row, full, row.roll(2) + 0.25]).to(device)


def check_twice(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], step: float) -> None:
    inputs = tuple(tensor.clone().requires_grad_() for tensor in inputs)
    assert gradcheck(function, inputs, eps=step, atol=1e-5, rtol=1e-3)
    assert gradgradcheck(function, inputs, eps=step, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("alpha", [1.0, *ALPHAS])
def test_alpha_is_a_number(alpha: float, device: torch.device) -> None:
    scores = rows_for(alpha, device)
    if alpha > 1:
        assert_smooth(scores, alpha, step_for(alpha))
    else:
        scores = scores.clamp_min(-3)
    check_twice(lambda scores: entmax(scores, alpha), (scores,), step_for(alpha))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_alpha_is_a_scalar_tensor(alpha: float, device: torch.device) -> None:
    scores = rows_for(alpha, device)
    assert_smooth(scores, alpha, step_for(alpha))
    check_twice(entmax, (scores, torch.tensor(alpha, dtype=torch.float64, device=device)), step_for(alpha))


BROADCASTS = {
    "per_row": ((1.01, 1.5, 1.75), (3, 1)),
    "per_row_on_both_sides_of_2": ((1.2, 2.0, 3.0), (3, 1)),
    "per_row_above_2": ((2.5, 3.0, 4.0), (3, 1)),
    "per_head": ((1.001, 1.9), (2, 1, 1)),
    "per_head_on_both_sides_of_2": ((1.3, 4.0), (2, 1, 1)),
}


@pytest.mark.parametrize("case", BROADCASTS)
def test_alpha_broadcasts(case: str, device: torch.device) -> None:
    values, shape = BROADCASTS[case]
    alpha = torch.tensor(values, dtype=torch.float64, device=device).reshape(shape)
    scores = torch.stack([scores_of(weights_for(value), value, 6) for value in values]).to(device)
    if len(shape) == 3:  # (heads, rows, n)
        scores = torch.stack([scores, scores.flip(-1), scores.roll(3, -1)], dim=1)
    assert_smooth(scores, alpha, 1e-6)
    check_twice(entmax, (scores, alpha), 1e-6)


def test_another_dimension(device: torch.device) -> None:
    scores = rows_for(1.5, device).T
    alpha = torch.tensor([1.4, 1.5, 1.6], dtype=torch.float64, device=device)
    assert_smooth(scores.T, alpha[:, None], 1e-6)
    check_twice(lambda scores, alpha: entmax(scores, alpha, dim=0), (scores, alpha), 1e-6)


def test_minus_infinity_and_empty_rows(device: torch.device) -> None:
    """Hidden scores are constants, so only the visible ones are perturbed."""
    visible = torch.tensor([[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)

    def masked(scores: Tensor, alpha: Tensor) -> Tensor:
        return entmax(scores.masked_fill(~visible.to(device), -math.inf), alpha)

    alpha = torch.tensor(1.6, dtype=torch.float64, device=device)
    check_twice(masked, (torch.linspace(-1, 1, 18, dtype=torch.float64, device=device).reshape(3, 6), alpha), 1e-6)


def one_sided(function: Callable[[float], Tensor], at: float, step: float) -> Tensor:
    """The forward difference of second order."""
    return (4 * function(at + step) - 3 * function(at) - function(at + 2 * step)) / (2 * step)


def test_derivative_in_alpha_at_1(device: torch.device) -> None:
    """Below 1 there is nothing, so the difference looks up only."""
    scores = torch.tensor([[0.3, -1.2, 2.0, 0.0, -4.0]], dtype=torch.float64, device=device)
    direction = torch.tensor([[1.0, -2.0, 0.5, 3.0, -1.0]], dtype=torch.float64, device=device)
    alpha = torch.tensor(1.0, dtype=torch.float64, device=device, requires_grad=True)
    (derivative,) = torch.autograd.grad((entmax(scores, alpha) * direction).sum(), alpha)
    expected = one_sided(lambda value: (entmax(scores, value) * direction).sum(), 1.0, 1e-4)
    torch.testing.assert_close(derivative, expected, rtol=1e-6, atol=1e-7)


def test_mixed_second_derivative_at_1(device: torch.device) -> None:
    direction = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64, device=device)
    scores = torch.tensor([0.3, -1.2, 2.0, 0.0, -4.0], dtype=torch.float64, device=device, requires_grad=True)

    def gradient(alpha: float | Tensor) -> Tensor:
        return torch.autograd.grad((entmax(scores, alpha) * direction).sum(), scores, create_graph=True)[0]

    alpha = torch.tensor(1.0, dtype=torch.float64, device=device, requires_grad=True)
    (mixed,) = torch.autograd.grad((gradient(alpha) * direction.flip(0)).sum(), alpha)
    expected = one_sided(lambda value: (gradient(value) * direction.flip(0)).sum(), 1.0, 1e-4)
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [1.0, 1.0001, 1.3, 1.5, 1.75, 2.0, 2.5, 4.0])
def test_number_and_tensor_agree(alpha: float, device: torch.device) -> None:
    """The closed forms of the special numbers give what the general formulas give."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 300, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    direction = torch.randn(5, 300, generator=generator, dtype=torch.float64).to(device)
    tensor = torch.tensor(alpha, dtype=torch.float64, device=device, requires_grad=True)
    number_gradient, tensor_gradient = (
        torch.autograd.grad((entmax(scores, kind) * direction).sum(), scores)[0] for kind in (alpha, tensor)
    )
    torch.testing.assert_close(number_gradient, tensor_gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("alpha", [1.0, 1.01, 1.5, 1.75, 2.0, 2.5, 16.0, 64.0])
def test_float32_gradients_are_finite_and_sum_to_zero(alpha: float, device: torch.device) -> None:
    """A shift of a row changes nothing, so the gradient in its scores sums to zero, however small the weights."""
    generator = torch.Generator().manual_seed(1)
    for scale in (1e-6, 1e-2, 1.0, 1e2, 1e4):
        scores = (torch.randn(4, 500, generator=generator) * scale).to(device).requires_grad_()
        learnt = torch.tensor(alpha, device=device, requires_grad=True)
        direction = torch.randn(4, 500, generator=generator).to(device)
        d_scores, d_alpha = torch.autograd.grad((entmax(scores, learnt) * direction).sum(), (scores, learnt))
        assert bool(d_scores.isfinite().all())
        assert bool(d_alpha.isfinite())
        rounding = 1e-5 * d_scores.abs().sum(-1) + 1e-6 * direction.abs().amax(-1)
        assert bool((d_scores.sum(-1).abs() <= rounding).all())


def test_only_alpha_is_learnt(device: torch.device) -> None:
    scores = rows_for(1.5, device)
    alpha = torch.tensor(1.5, dtype=torch.float64, device=device)
    assert_smooth(scores, alpha, 1e-6)
    check_twice(lambda alpha: entmax(scores, alpha), (alpha,), 1e-6)


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # by dynamo itself
@pytest.mark.parametrize("alpha", [1.5, 3.0, torch.tensor(1.3)], ids=str)
def test_several_layers_compile_with_dynamic_shapes(alpha: float | Tensor) -> None:
    """A compiler that is told of them takes floats for inputs too, which a second layer must not trip over."""

    def layers(scores: Tensor, alpha: float | Tensor) -> Tensor:
        return entmax(5 * entmax(scores, alpha), alpha).square().sum()

    compiled = torch.compile(layers, backend="eager", fullgraph=True, dynamic=True)
    for time in (5, 9):
        scores = torch.randn(2, time, dtype=torch.float64, generator=torch.Generator().manual_seed(time))
        inputs = [scores.requires_grad_()]
        if isinstance(alpha, Tensor):
            inputs.append(alpha.requires_grad_())
        expected = torch.autograd.grad(layers(scores, alpha), inputs)
        for found, wanted in zip(torch.autograd.grad(compiled(scores, alpha), inputs), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    torch._dynamo.reset()


@pytest.mark.parametrize("alpha", [1.0, 1.25, 1.5, 2.0, 4.0, torch.tensor(1.6, dtype=torch.float64)], ids=str)
def test_transforms_of_torch_func(alpha: float | Tensor) -> None:
    scores = torch.randn(5, 7, dtype=torch.float64)
    scores[0, 2] = -math.inf

    def of_row(row: Tensor) -> Tensor:
        return entmax(row, alpha)

    expected = torch.stack([torch.autograd.functional.jacobian(of_row, row) for row in scores])
    torch.testing.assert_close(torch.func.vmap(torch.func.jacrev(of_row))(scores), expected)
    by_columns = torch.func.vmap(of_row, in_dims=1, out_dims=1)(scores.T)
    torch.testing.assert_close(by_columns, entmax(scores, alpha).T)


def alpha_derivative_in_many_digits(weights: list[float], alpha: float) -> list[float]:
    """The formula of `functional.entmax`, whose ``1 - y - exp(-y)`` wants more digits than its result has."""
    with mp.workprec(200):
        a, p = mpf(alpha) - 1, [mpf(weight) for weight in weights]
        gains = [weight ** (1 - a) for weight in p]
        held = [(weight * (1 - a * mp.log(weight)) - gain) / a**2 for weight, gain in zip(p, gains, strict=True)]
        mean = mp.fsum(held) / mp.fsum(gains)
        return [float(own - gain * mean) for own, gain in zip(held, gains, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("alpha", [1.001, 1.01, 1.03, 1.06, 1.1])
def test_derivative_in_alpha_keeps_its_digits_near_1(alpha: float, dtype: torch.dtype, device: torch.device) -> None:
    scores = torch.linspace(0, -6, 12, dtype=dtype, device=device)
    learnt = torch.tensor(alpha, dtype=dtype, device=device)
    found = torch.autograd.functional.jacobian(lambda value: entmax(scores, value), learnt)
    expected = alpha_derivative_in_many_digits(entmax(scores, learnt).tolist(), learnt.item())
    torch.testing.assert_close(found.tolist(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)
