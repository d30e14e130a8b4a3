"""alpha-entmax: its values against oracles, hostile input, errors, the threshold and the solver's step count."""

import importlib
import math
from collections.abc import Callable

import pytest
import torch
from oracles import entmax_by_bisection, entmax_oracle
from torch import Tensor

from longspan import entmax, entmax15, sparsemax, threshold

# The package exports a function of this name, which hides the module from an ordinary import.
solver = importlib.import_module("longspan.functional.threshold")

INF = math.inf
EVERY_ALPHA = (1.0, 1.01, 1.1, 1.25, 1.5, 1.6, 1.75, 1.9, 1.99, 2.0, 2.01, 2.5, 3.0, 4.0, 8.0, 16.0, 64.0)
FLOATS = [pytest.param(torch.float64, id="float64"), pytest.param(torch.float32, id="float32")]
HALVES = [pytest.param(torch.float16, id="float16"), pytest.param(torch.bfloat16, id="bfloat16")]
SUM_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}


def gaussian(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def index(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float64)


ROWS: dict[str, Callable[[int], Tensor]] = {
    "gaussian_1e-6": lambda n: gaussian(n) * 1e-6,
    "gaussian_0.01": lambda n: gaussian(n) * 0.01,
    "gaussian_0.1": lambda n: gaussian(n) * 0.1,
    "gaussian_1": gaussian,
    "gaussian_4": lambda n: gaussian(n) * 4,
    "gaussian_100": lambda n: gaussian(n) * 100,
    "gaussian_1e4": lambda n: gaussian(n) * 1e4,
    "all_tied": lambda n: torch.zeros(n, dtype=torch.float64),
    "rounded_ties": lambda n: (gaussian(n) * 4).round() / 4,
    "ramp_of_height_0.9": lambda n: -index(n) * 0.9 / n,
    "ramp_of_step_0.01": lambda n: -index(n) * 0.01,
    "ramp_of_step_1": lambda n: -index(n),
    "two_levels": lambda n: torch.where(index(n) < n // 3, 0.0, -0.5).double(),
    "one_above_many": lambda n: torch.where(index(n) < 1, 0.0, -0.9).double(),
    "one_dominant": lambda n: torch.where(index(n) < 1, 50.0, gaussian(n)),
    "geometric_gaps": lambda n: -torch.pow(2.0, index(n).clamp_max(60)),
    "geometric_decay": lambda n: torch.pow(0.9, index(n)),
    "logarithmic": lambda n: -torch.log(index(n) + 1),
}
every_row = pytest.mark.parametrize("name", ROWS)


@every_row
@pytest.mark.parametrize("n", [1, 2, 17, 257, 4096])
@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [pytest.param(torch.float64, 1e-12, id="float64"), pytest.param(torch.float32, 1e-6, id="float32")],
)
def test_equals_the_sorted_solution(
    name: str, n: int, alpha: float, dtype: torch.dtype, tolerance: float, device: torch.device
) -> None:
    scores = ROWS[name](n).to(device, dtype)
    p = entmax(scores, alpha)
    torch.testing.assert_close(p.double(), entmax_oracle(scores, alpha), rtol=0, atol=tolerance)


@every_row
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [2, 17, 255, 4096])
def test_sums_to_one(name: str, n: int, dtype: torch.dtype, device: torch.device) -> None:
    scores = ROWS[name](n).to(device, dtype)
    excess = {alpha: abs(float(entmax(scores, alpha).double().sum()) - 1) for alpha in EVERY_ALPHA}
    assert {alpha: value for alpha, value in excess.items() if not value <= SUM_TOLERANCE[dtype]} == {}


@every_row
@pytest.mark.parametrize("alpha", [1.0001, 1.01, 1.2, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 8.0, 16.0, 64.0])
def test_equals_bisection_in_many_digits(name: str, alpha: float, device: torch.device) -> None:
    scores = ROWS[name](7).to(device)
    expected = torch.tensor(entmax_by_bisection(scores.tolist(), alpha), dtype=torch.float64, device=device)
    p = entmax(scores, alpha)
    torch.testing.assert_close(p, expected, rtol=0, atol=1e-12)
    assert torch.equal(p > 0, expected > 0)


@pytest.mark.parametrize("alpha", [2.0001, 2.25, 3.0, 4.0, 8.0, 16.0, 32.0, 64.0])
@pytest.mark.parametrize("ties", [1, 2, 7])
@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_that_all_but_vanish(dtype: torch.dtype, ties: int, alpha: float, device: torch.device) -> None:
    """The edge of the support within some units in the last place of where it dies; entmax 64 trains on such rows."""
    eps = torch.finfo(dtype).eps
    units = torch.cat([torch.arange(0, 500), 2 ** torch.arange(9, 40)]).double()
    rows = torch.zeros(len(units), 1 + ties, dtype=torch.float64)
    rows[:, 0] = (1 - units * eps / 4) / (alpha - 1)
    for shift in (0.0, 0.03):
        scores = (rows + shift).to(device, dtype).requires_grad_()
        p = entmax(scores, alpha)
        (slope,) = torch.autograd.grad((p * torch.linspace(-1, 2, p.numel(), device=device).view_as(p)).sum(), scores)
        assert p.isfinite().all()
        assert (p >= 0).all()
        assert (p.sum(-1) - 1).abs().max() <= 8 * eps
        assert slope.isfinite().all()
        if dtype == torch.float32:
            torch.testing.assert_close(p.double(), entmax(scores.double(), alpha), rtol=0, atol=8 * eps)


@pytest.mark.parametrize("alpha", [3.0, 16.0, 64.0])
def test_weights_that_hang_on_digits_beyond_tau(alpha: float, device: torch.device) -> None:
    """Scores a few ulps apart: ``(alpha-1) * scores - tau`` has no correct digit left, the weights have all."""
    ulp = torch.finfo(torch.float64).eps
    scores = torch.tensor([0.0, -1.0, -1.0, -7.0, -40.0], dtype=torch.float64, device=device) * ulp
    expected = torch.tensor(entmax_by_bisection(scores.tolist(), alpha), dtype=torch.float64, device=device)
    torch.testing.assert_close(entmax(scores, alpha), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 1.75, 2.0, 2.5, 16.0])
def test_without_looking_at_values(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of devices and captured graphs, where the solver may not stop early or pack rows, gives the same."""
    scores = torch.stack([row(300) for row in ROWS.values()] + [torch.full((300,), -INF, dtype=torch.float64)])
    looking = entmax(scores, alpha)
    monkeypatch.setattr(solver, "_may_branch_on_values", lambda tensor: False)
    torch.testing.assert_close(entmax(scores, alpha), looking, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("alpha", [1.0, 1.5, 1.75, 2.0, 4.0])
def test_half_precision_is_solved_in_float32(dtype: torch.dtype, alpha: float, device: torch.device) -> None:
    scores = gaussian(77).reshape(7, 11).to(device, dtype).requires_grad_()
    p = entmax(scores, alpha)
    assert p.dtype == dtype
    assert torch.equal(p, entmax(scores.float(), alpha).to(dtype))
    p[:, 0].sum().backward()
    assert scores.grad is not None
    assert scores.grad.dtype == dtype
    assert bool(scores.grad.isfinite().all())


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_alpha(dtype: torch.dtype, device: torch.device) -> None:
    scores = gaussian(77).reshape(7, 11).to(device)
    alpha = torch.tensor(1.75, dtype=dtype, device=device, requires_grad=True)  # exact in both
    p = entmax(scores, alpha)
    torch.testing.assert_close(p, entmax(scores, 1.75), rtol=0, atol=1e-12)
    (d_alpha,) = torch.autograd.grad(p[:, 0].sum(), alpha)
    assert d_alpha.dtype == dtype


def test_names_of_the_special_cases(device: torch.device) -> None:
    scores = gaussian(30).reshape(5, 6).to(device)
    assert torch.equal(entmax(scores), entmax(scores, 1.5))
    assert torch.equal(entmax15(scores, dim=0), entmax(scores, 1.5, dim=0))
    assert torch.equal(sparsemax(scores, dim=0), entmax(scores, 2.0, dim=0))
    torch.testing.assert_close(entmax(scores, 1.0), scores.softmax(-1), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "shape",
    [(), (1,), (5, 1), (1, 5, 1), (3, 1, 1), (3, 5, 1)],
    ids=lambda shape: "x".join(map(str, shape)) or "scalar",
)
def test_alpha_broadcasts(shape: tuple[int, ...], device: torch.device) -> None:
    """Each row gets what it would get alone; the values of alpha lie on both sides of 2."""
    scores = gaussian(3 * 5 * 7).reshape(3, 5, 7).to(device)
    alpha = torch.linspace(1.0, 3.1, max(math.prod(shape), 1), dtype=torch.float64, device=device).reshape(shape)
    p = entmax(scores, alpha)
    alone = alpha.expand(3, 5, 1)
    for i in range(3):
        for j in range(5):
            expected = entmax(scores[i, j], float(alone[i, j]))
            torch.testing.assert_close(p[i, j], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("alpha", [1.0, 1.5, 1.75, 3.0, "tensor"])
def test_any_dimension(dim: int, alpha: float | str, device: torch.device) -> None:
    scores = gaussian(3 * 4 * 5).reshape(3, 4, 5).to(device)
    last = scores.movedim(dim, -1).contiguous()
    if isinstance(alpha, str):
        row_alpha = torch.linspace(1.1, 2.9, last[..., 0].numel(), dtype=torch.float64, device=device)
        row_alpha = row_alpha.reshape(*last.shape[:-1], 1)
        p, expected = entmax(scores, row_alpha.movedim(-1, dim), dim), entmax(last, row_alpha)
    else:
        p, expected = entmax(scores, alpha, dim), entmax(last, alpha)
    torch.testing.assert_close(p, expected.movedim(-1, dim), rtol=0, atol=1e-15)


NON_CONTIGUOUS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda full: full.transpose(0, 1),
    "strided": lambda full: full[::2, 1::3],
    "expanded": lambda full: full[:1].expand(4, -1),
}


@pytest.mark.parametrize("layout", NON_CONTIGUOUS)
@pytest.mark.parametrize("alpha", [1.0, 1.5, 1.75, 2.0, 3.0])
def test_non_contiguous_input_is_read_and_not_written(layout: str, alpha: float, device: torch.device) -> None:
    full = gaussian(600 * 9).reshape(9, 600).to(device)
    scores = NON_CONTIGUOUS[layout](full)
    before = full.clone()
    p = entmax(scores, alpha)
    assert torch.equal(full, before)
    torch.testing.assert_close(p, entmax(scores.contiguous(), alpha), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("shape", "dim"), [((0, 5), -1), ((5, 0), -1), ((3, 0, 4), 0), ((3, 0, 4), 1), ((0,), 0)])
@pytest.mark.parametrize("alpha", [1.0, 1.5, 3.0, "tensor"])
def test_zero_size(shape: tuple[int, ...], dim: int, alpha: float | str, device: torch.device) -> None:
    scores = torch.zeros(shape, device=device, requires_grad=True)
    p = entmax(scores, torch.tensor(1.5, device=device) if isinstance(alpha, str) else alpha, dim)
    assert p.shape == shape
    p.sum().backward()
    assert scores.grad is not None
    assert scores.grad.shape == shape


HOSTILE_ALPHAS = [1.0, 1.01, 1.5, 1.75, 2.0, 2.5, 16.0, 64.0]


def both_kinds(alpha: float, device: torch.device) -> tuple[float | Tensor, ...]:
    """A number and a learnt one, which take different branches."""
    return alpha, torch.tensor(alpha, dtype=torch.float64, device=device, requires_grad=True)


@pytest.mark.parametrize("alpha", HOSTILE_ALPHAS)
def test_minus_infinity_is_as_good_as_absent(alpha: float, device: torch.device) -> None:
    hidden = torch.arange(11, device=device) % 3 == 1
    values = gaussian(22).reshape(2, 11).to(device) / alpha
    for kind in both_kinds(alpha, device):
        scores = values.masked_fill(hidden, -INF).requires_grad_()
        p = entmax(scores, kind)
        assert bool((p[:, hidden] == 0).all())
        torch.testing.assert_close(p[:, ~hidden], entmax(values[:, ~hidden], kind), rtol=0, atol=1e-15)
        p.square().sum().backward()
        assert scores.grad is not None
        assert bool((scores.grad[:, hidden] == 0).all())
        assert bool(scores.grad.isfinite().all())


@pytest.mark.parametrize("alpha", HOSTILE_ALPHAS)
@pytest.mark.parametrize("n", [1, 3, 300])
def test_a_row_of_minus_infinity_gives_zeros(alpha: float, n: int, device: torch.device) -> None:
    values = torch.stack([gaussian(n), torch.full((n,), -INF, dtype=torch.float64), gaussian(n) / 100]).to(device)
    for kind in both_kinds(alpha, device):
        scores = values.clone().requires_grad_()
        p = entmax(scores, kind)
        assert bool((p[1] == 0).all())
        torch.testing.assert_close(p[::2].sum(-1), torch.ones_like(p[::2, 0]), rtol=0, atol=1e-12)
        p.square().sum().backward()
        assert scores.grad is not None
        assert bool((scores.grad[1] == 0).all())
        assert bool(scores.grad.isfinite().all())
        if isinstance(kind, Tensor):
            assert kind.grad is not None
            assert bool(kind.grad.isfinite())
        alone = torch.full((n,), -INF, dtype=torch.float64, device=device, requires_grad=True)
        entmax(alone, kind).sum().backward()
        assert alone.grad is not None
        assert bool((alone.grad == 0).all())


@pytest.mark.parametrize("bad", [math.nan, INF], ids=["nan", "plus_infinity"])
@pytest.mark.parametrize("alpha", HOSTILE_ALPHAS)
@pytest.mark.parametrize("n", [3, 300])
def test_a_poisoned_row_is_nan_and_alone(bad: float, alpha: float, n: int, device: torch.device) -> None:
    clean = gaussian(3 * n).reshape(3, n).to(device)
    poisoned = clean.clone()
    poisoned[1, 1] = bad
    for kind in both_kinds(alpha, device):
        p = entmax(poisoned, kind)
        assert bool(p[1].isnan().all())
        torch.testing.assert_close(p[::2], entmax(clean, kind)[::2], rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shift", [-1e4, 1e4])
@pytest.mark.parametrize("alpha", HOSTILE_ALPHAS)
def test_shift(dtype: torch.dtype, shift: float, alpha: float, device: torch.device) -> None:
    """Scores on a grid coarse enough that the shift is exact, so any change is the solver's."""
    scores = (gaussian(40).reshape(4, 10) * 256).round().to(device, dtype) / 256
    assert torch.equal((scores + shift) - shift, scores)
    atol = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(entmax(scores + shift, alpha), entmax(scores, alpha), rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("alpha", HOSTILE_ALPHAS)
def test_scale(dtype: torch.dtype, alpha: float, device: torch.device) -> None:
    """At 1e4 the winner takes all, tied winners share, and gradients stay finite."""
    scores = gaussian(40).reshape(4, 10).to(device, dtype) * 1e4
    scores[2, 4] = scores[2, 7] = scores[2].max() + 1e4
    winners = (scores == scores.amax(-1, keepdim=True)).to(dtype)
    p = entmax(scores.requires_grad_(), alpha)
    torch.testing.assert_close(p, winners / winners.sum(-1, keepdim=True), rtol=0, atol=1e-6)
    p[:, 4].sum().backward()
    assert scores.grad is not None
    assert bool(scores.grad.isfinite().all())


@pytest.mark.parametrize("alpha", HOSTILE_ALPHAS)
def test_ties_share_alike(alpha: float, device: torch.device) -> None:
    scores = torch.tensor([0.3, -2.0, 0.3, 0.3, -5.0], dtype=torch.float64, device=device)
    for kind in both_kinds(alpha, device):
        p = entmax(scores, kind)
        assert torch.equal(p[[0, 2]], p[[2, 3]])
        torch.testing.assert_close(entmax(torch.zeros_like(scores), kind), torch.full_like(scores, 0.2))


@pytest.mark.parametrize("alpha", HOSTILE_ALPHAS)
@pytest.mark.parametrize("value", [1e9, -1e15, 1e30, -1e300])
def test_ties_share_alike_where_a_threshold_rounds_to_them(alpha: float, value: float, device: torch.device) -> None:
    for dtype in (torch.float64, torch.float32) if abs(value) < 1e38 else (torch.float64,):
        row = torch.full((7,), value, dtype=dtype, device=device)
        row[[1, 4, 5]] = value - abs(value) / 2
        for kind in both_kinds(alpha, device):
            expected = torch.tensor([0.25, 0, 0.25, 0.25, 0, 0, 0.25], dtype=dtype, device=device)
            torch.testing.assert_close(entmax(row, kind), expected)


@pytest.mark.parametrize("alpha", HOSTILE_ALPHAS)
@pytest.mark.parametrize("value", [0.0, -1e4, 1e300])
def test_one_element_takes_all(alpha: float, value: float, device: torch.device) -> None:
    scores = torch.full((3, 1), value, dtype=torch.float64, device=device, requires_grad=True)
    for kind in both_kinds(alpha, device):
        p = entmax(scores, kind)
        assert bool((p == 1).all())
        (gradient,) = torch.autograd.grad(p.sum(), scores)
        assert bool((gradient == 0).all())


TWO_ROWS = torch.zeros(2, 3)
ERRORS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "alpha_below_1": (lambda: entmax(TWO_ROWS, 0.99), ValueError, "alpha must be a finite number >= 1, got .*0.99"),
    "alpha_nan": (lambda: entmax(TWO_ROWS, math.nan), ValueError, "alpha must be a finite number"),
    "alpha_infinite": (lambda: entmax(TWO_ROWS, INF), ValueError, "alpha must be a finite number"),
    "one_alpha_below_1": (
        lambda: entmax(TWO_ROWS, torch.tensor([[1.5], [0.5]])),
        ValueError,
        "alpha must be a finite number >= 1, got values from 0.5 to 1.5",
    ),
    "one_alpha_nan": (lambda: entmax(TWO_ROWS, torch.tensor([[1.5], [math.nan]])), ValueError, "finite number"),
    "alpha_along_dim": (lambda: entmax(TWO_ROWS, torch.full((2, 3), 1.5)), ValueError, "does not broadcast"),
    "alpha_of_other_rows": (lambda: entmax(TWO_ROWS, torch.full((3, 1), 1.5)), ValueError, r"\(3, 1\).*\(2, 3\)"),
    "alpha_of_too_many_dimensions": (
        lambda: entmax(TWO_ROWS, torch.full((1, 1, 1), 1.5)),
        ValueError,
        r"alpha of shape \(1, 1, 1\) does not broadcast",
    ),
    "integer_scores": (lambda: entmax(TWO_ROWS.long()), TypeError, "floating-point tensor, got torch.int64"),
    "boolean_scores": (lambda: entmax(TWO_ROWS.bool()), TypeError, "floating-point tensor, got torch.bool"),
    "dim_too_large": (lambda: entmax(TWO_ROWS, dim=2), IndexError, r"dim 2 is out of range .*\(2, 3\)"),
    "dim_too_small": (lambda: sparsemax(TWO_ROWS, dim=-3), IndexError, "dim -3 is out of range"),
    "no_dimension": (lambda: entmax15(torch.tensor(1.0)), ValueError, "at least one dimension"),
    "threshold_of_nothing": (lambda: threshold(torch.zeros(2, 0)), ValueError, "at least one score"),
    "threshold_alpha_below_1": (lambda: threshold(TWO_ROWS, 0.5), ValueError, "alpha must be a finite number"),
    "threshold_integer_scores": (lambda: threshold(TWO_ROWS.long()), TypeError, "floating-point tensor"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_is_wrong(case: str) -> None:
    call, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        call()


@every_row
@pytest.mark.parametrize("alpha", [1.1, 1.5, 1.75, 2.0, 3.0])
def test_threshold_rebuilds_the_weights(name: str, alpha: float, device: torch.device) -> None:
    scores = ROWS[name](33).to(device)
    scores = scores - scores.max()  # so that tau, near -1, carries all its digits
    p = entmax(scores, alpha)
    tau, support = threshold(scores, alpha)
    assert tau.shape == support.shape == (1,)
    assert int(support) == int((p > 0).sum())
    rebuilt = ((alpha - 1) * scores - tau).clamp_min(0) ** (1 / (alpha - 1))
    # The power amplifies an ulp of tau by at most its own derivative, or its root where that is infinite.
    torch.testing.assert_close(rebuilt, p, rtol=0, atol=1e-12 if alpha <= 2 else 1e-7)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_threshold_keeps_the_dimension(dim: int, device: torch.device) -> None:
    scores = gaussian(3 * 4 * 5).reshape(3, 4, 5).to(device).requires_grad_()
    tau, support = threshold(scores, 1.5, dim)
    assert tau.shape == support.shape == scores.sum(dim, keepdim=True).shape
    assert not tau.requires_grad
    torch.testing.assert_close(((scores / 2 - tau).clamp_min(0) ** 2), entmax(scores, 1.5, dim), rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", HOSTILE_ALPHAS)
def test_threshold_of_rows_that_see_little(alpha: float, device: torch.device) -> None:
    scores = torch.tensor([[-INF] * 3, [-INF, 2.0, -INF]], dtype=torch.float64, device=device)
    for kind in both_kinds(alpha, device):
        tau, support = threshold(scores, kind)
        assert support.tolist() == [[0], [1]]
        torch.testing.assert_close(tau.tolist(), [[INF], [2 * (alpha - 1) - 1]])
        tau, support = threshold(scores[:0], kind)
        assert tau.shape == support.shape == (0, 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("alpha", [1.01, 1.25, 1.5, 1.75, 1.99, 2.0, 2.5, 4.0, 64.0])
@pytest.mark.parametrize("n", [2, 257, 4096, 2**18])
def test_newton_converges_with_steps_to_spare(
    n: int, alpha: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim of `newton_steps`, so that a device which runs them blindly has converged, with two steps to spare."""
    converged = solver._converged
    verdicts: list[bool] = []

    def spy(residual: Tensor) -> bool:
        verdicts.append(converged(residual))
        return verdicts[-1]

    monkeypatch.setattr(solver, "_converged", spy)
    steps = {}
    for name, row in ROWS.items():
        verdicts.clear()
        entmax(row(n).to(dtype), alpha)
        steps[name] = len(verdicts) if verdicts[-1] else math.inf
    assert {name: count for name, count in steps.items() if count > solver.newton_steps(n) - 2} == {}
