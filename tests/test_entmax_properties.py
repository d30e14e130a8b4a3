"""Properties that hold for every row and every alpha, searched by hypothesis.

Scores lie on a grid of 2^-20: sums and shifts of them are exact in float64, so that a large alpha, which turns one
rounding of a score into a visible change of a weight, sees the row that the property speaks of.
"""

from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from longspan import entmax, threshold

GRID = 2.0**-20
TOLERANCE = 1e-12

cells = st.one_of(st.integers(-20, 20), st.integers(-(2**12), 2**12), st.integers(-(2**25), 2**25))
rows = st.lists(cells, min_size=1, max_size=12).map(lambda row: torch.tensor(row, dtype=torch.float64) * GRID)
alphas = st.one_of(st.sampled_from([1.0, 1.01, 1.5, 2.0, 3.0, 64.0]), st.floats(1, 2), st.floats(2, 16))
shifts = st.integers(-(2**34), 2**34).map(lambda cell: cell * GRID)  # up to 1.6e4


def close(left: Tensor, right: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


@given(rows, alphas)
def test_on_the_simplex(row: Tensor, alpha: float) -> None:
    p = entmax(row, alpha)
    assert bool((p >= 0).all())
    close(p.sum(), torch.tensor(1.0, dtype=torch.float64))


@given(rows, alphas, shifts)
def test_shift_changes_nothing(row: Tensor, alpha: float, shift: float) -> None:
    close(entmax(row + shift, alpha), entmax(row, alpha))


@given(rows, alphas, st.randoms(use_true_random=False))
def test_permutation_moves_the_weights_along(row: Tensor, alpha: float, random: Random) -> None:
    order = list(range(len(row)))
    random.shuffle(order)
    close(entmax(row[order], alpha), entmax(row, alpha)[order])


@given(rows, alphas)
def test_larger_scores_have_no_smaller_weights(row: Tensor, alpha: float) -> None:
    ordered = entmax(row, alpha)[row.argsort()]
    assert bool((ordered.diff() >= -TOLERANCE).all())


@given(rows, alphas, st.data())
def test_raising_a_score_raises_its_weight_alone(row: Tensor, alpha: float, data: st.DataObject) -> None:
    raised = data.draw(st.integers(0, len(row) - 1))
    higher = row.clone()
    higher[raised] += GRID * data.draw(st.integers(1, 2**22))
    change = entmax(higher, alpha) - entmax(row, alpha)
    assert float(change[raised]) >= -TOLERANCE
    change[raised] = 0
    assert bool((change <= TOLERANCE).all())


@given(rows, st.one_of(st.sampled_from([1.5, 2.0, 3.0, 64.0]), st.floats(1.01, 2), st.floats(2, 16)))
def test_exact_zeros_below_tau_and_none_above(row: Tensor, alpha: float) -> None:
    p = entmax(row, alpha)
    tau, support = threshold(row, alpha)
    way = (alpha - 1) * row - tau
    rounding = 1e-13 * (1 + (alpha - 1) * float(row.abs().max()))
    assert bool((p[way < -rounding] == 0).all())
    assert bool((p[way > rounding] > 0).all())
    assert int(support) == int((p > 0).sum()) >= 1


@given(rows, st.floats(0, 1e-9))
def test_tends_to_softmax(row: Tensor, above: float) -> None:
    """``|dp/dalpha|`` is at most a few units, since ``p log(p)^2 < 0.55``."""
    softmax = row.softmax(-1)
    close(entmax(row, 1.0), softmax)
    close(entmax(row, 1 + above), softmax, 10 * above + TOLERANCE)
    close(entmax(row, torch.tensor(1 + above, dtype=torch.float64)), softmax, 10 * above + TOLERANCE)
