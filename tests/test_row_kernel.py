"""The row-wise kernel against the solver in plain torch: in Triton's interpreter on a CPU, compiled on a GPU."""

import math

import pytest
import torch
from torch import Tensor

from longspan import entmax

rows = pytest.importorskip("longspan.kernels.rows")

ALPHAS = (1.1, 1.25, 1.5, 1.75, 2.0)


def hostile(n: int) -> Tensor:
    """Rows of every kind that trips a solver, (9, n)."""
    noise = torch.randn(n, generator=torch.Generator().manual_seed(n))
    ramp = torch.arange(n, dtype=torch.float32)
    one = torch.full((n,), -math.inf)
    one[n // 2] = 3.0
    half = torch.where(ramp % 2 == 0, noise, -math.inf)
    return torch.stack(
        [noise, 0.01 * noise, 30 * noise, torch.zeros(n), ramp, noise - 1e4, one, half, torch.full((n,), -math.inf)]
    )


@pytest.mark.parametrize("n", [1, 2, 17, 64, 300, 1500])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_weights_are_those_of_the_solver(alpha: float, n: int, device: torch.device) -> None:
    scores = hostile(n)
    exact = entmax(scores.double(), alpha)
    plain = entmax(scores, alpha)
    found = rows.entmax_rows(scores.to(device), alpha).cpu()
    error = (plain.double() - exact).abs().max()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=3 * float(error) + 4e-6)
    sums = found.sum(-1)
    assert torch.allclose(sums[:-1], torch.ones(len(sums) - 1), atol=2e-6)
    assert (found[-1] == 0).all()


def test_a_spoilt_row_spoils_itself_alone(device: torch.device) -> None:
    scores = torch.randn(4, 40)
    scores[1, 3], scores[2, 5] = math.nan, math.inf
    found = rows.entmax_rows(scores.to(device), 1.5).cpu()
    assert found[[1, 2]].isnan().all()
    assert found[[0, 3]].isfinite().all()


def test_it_takes_what_it_says(device: torch.device) -> None:
    scores = torch.randn(3, 5)
    assert rows.serves(scores, 1.5)
    assert not rows.serves(scores, 1.0)
    assert not rows.serves(scores, 1.01)  # its powers would have four digits
    assert not rows.serves(scores, 2.5)
    assert not rows.serves(scores.double(), 1.5)
    assert not rows.serves(torch.empty(2, rows.LONGEST + 1), 1.5)
    torch.library.opcheck(rows.entmax_rows, (scores.to(device), 1.5))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU entmax does not take the kernel")
@pytest.mark.parametrize("alpha", ALPHAS)
def test_entmax_takes_it_on_a_gpu(alpha: float) -> None:
    scores = torch.randn(64, 1000, device="cuda", requires_grad=True)
    gradient = torch.autograd.grad(entmax(scores, alpha).square().sum(), scores)[0]
    on_cpu = scores.detach().cpu().double().requires_grad_()
    expected = torch.autograd.grad(entmax(on_cpu, alpha).square().sum(), on_cpu)[0]
    torch.testing.assert_close(gradient.cpu().double(), expected, rtol=1e-3, atol=1e-5)
