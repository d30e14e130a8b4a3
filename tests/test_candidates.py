"""The candidates of long rows for alpha > 1.5: what is collected, the seams of it, and the roots found from it."""

from typing import Any

import pytest
import torch
from attention_cases import STAT_NAMES, attend_with_stats
from long_problems import Problem, equal_maxima, level, square, ties, topics
from test_kernels import dtypes, in_float64
from test_long_kernels import (
    above_the_threshold,
    arguments,
    assert_as_close_as_plain_torch,
    made,
    oracle,
    ours,
    plain,
)
from torch import Tensor

from longspan.functional.attention import check_rules
from longspan.functional.reference import dense_scores

ops: Any = pytest.importorskip("longspan.kernels.ops")
candidates: Any = pytest.importorskip("longspan.kernels.candidates")


class Spy:
    """Keeps what was collected, in buffers of a size of our own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cap: int | None = None) -> None:
        self.found: Any = None
        monkeypatch.setattr(ops, "room_for", self.room_for)
        if cap is not None:
            monkeypatch.setattr(ops, "capacity", lambda alpha: cap if candidates.capacity(alpha) else 0)

    def room_for(self, rows: Tensor, blocks: int, cap: int) -> Any:
        self.found = candidates.room_for(rows, blocks, cap)
        return self.found


def test_alphas_with_few_candidates_collect_them() -> None:
    assert [candidates.capacity(alpha) for alpha in (1.1, 1.25, 1.5)] == [0, 0, 0]
    assert [candidates.capacity(alpha) for alpha in (1.6, 1.75, 2.0, 2.5, 3.0, 4.0)] == [128, 64, 64, 32, 32, 32]


CALLS = {
    "noise": square(130),
    "lengths": square(70, batch=3, lengths=(70, 0, 33)),
    "documents": square(130, documents="contiguous"),
    "slopes": square(70, heads=2, slopes=(0.3, 0.0)),
    "the_future": square(70, causal=False, slopes=(0.1,)),
    "fewer_queries": Problem(query_time=40, key_time=130),
    "more_queries": Problem(query_time=130, key_time=40),
    "grouped_heads": square(20, batch=2, heads=4, kv_heads=2),
    "topics": square(160, content=topics(32)),
    "ties": square(70, content=ties),
    "equal_maxima": square(130, content=equal_maxima),
    "scores_near_-1000": square(70, content=level(-1e3)),
    "one_key": Problem(query_time=70, key_time=1),
}


def with_alpha(problem: Problem, alpha: float) -> Problem:
    return Problem(**{**problem.__dict__, "alpha": alpha})


SOME = ("slopes", "documents", "equal_maxima")


@pytest.mark.parametrize(("name", "alpha"), [*((name, 3.0) for name in CALLS), *((name, 1.75) for name in SOME)])
def test_every_option_is_as_close_as_plain_torch(
    name: str, alpha: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    assert_as_close_as_plain_torch(made(with_alpha(CALLS[name], alpha), torch.float32, device))
    assert not spy.found.over.any()


@pytest.mark.parametrize("name", ["noise", "lengths", "documents", "slopes", "equal_maxima"])
@pytest.mark.parametrize("alpha", [1.75, 3.0])
def test_candidates_are_the_scores_above_the_survey(
    name: str, alpha: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No survivor is missing, nothing is there that the row does not have, and ties are counted."""
    spy = Spy(monkeypatch)
    call = made(with_alpha(CALLS[name], alpha), torch.float32, device)
    exact = in_float64(call)
    options: dict[str, Any] = {key: exact.get(key) for key in ("slopes", "scale", "causal", "lengths", "documents")}
    rules = check_rules(exact["q"], exact["k"], exact["v"], **options)
    with torch.no_grad():
        ops.attend(*arguments(call), False)
        scores = (alpha - 1) * dense_scores(exact["q"], exact["k"], rules)
    found, above = spy.found, above_the_threshold(call)
    there = torch.arange(found.scores.shape[-1], device=device) < found.held[..., None]
    kept, copies = found.scores.double(), found.copies.long() * there
    near = 1e-5 * scores[scores > -torch.inf].abs().max().clamp_min(1.0)
    nearest = (kept[..., :, None] - scores[..., None, :]).abs().nan_to_num(torch.inf).amin(-1)
    assert (nearest[there] <= near).all()
    lowest = torch.where(there, kept, torch.inf).amin(-1, keepdim=True)
    assert (copies.sum(-1) >= (above > 1e-6).sum(-1)).all()
    assert (copies.sum(-1) >= (scores > lowest + near).sum(-1)).all()
    assert (copies.sum(-1) <= (scores > lowest - near).sum(-1)).all()
    assert torch.equal(found.held > 0, (scores > -torch.inf).any(-1))


SEAMS = {
    "noise": square(130),
    "topics": square(130, content=topics(32)),
    "slopes": square(70, heads=2, slopes=(8.0, 0.0)),
    "lengths": square(70, batch=2, lengths=(70, 2)),
    "documents": square(70, documents="contiguous"),
}


def few(alpha: float) -> int:
    """A size of the buffer that some blocks of the rows below exceed, and some do not."""
    return 4 if alpha <= 2 else 2


@pytest.mark.parametrize("alpha", [1.75, 3.0])
@pytest.mark.parametrize("name", SEAMS)
def test_blocks_with_too_many_candidates_are_solved_over_their_tiles(
    name: str, alpha: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cap = few(alpha)
    spy = Spy(monkeypatch, cap)
    assert_as_close_as_plain_torch(made(with_alpha(SEAMS[name], alpha), torch.float32, device))
    found = spy.found
    rows = ops.blocks_of(torch.empty(1, 1, 1, 16), torch.empty(1, 1, 1, 16)).rows
    counts = torch.nn.functional.pad(found.held, (0, -found.held.shape[2] % rows)).unflatten(2, (-1, rows)).amax(-1)
    assert torch.equal(found.over.bool(), counts > cap)
    assert (found.held <= cap + 1).all()
    assert found.over.any()
    if name in ("slopes", "lengths"):  # some blocks of either sort, in one call
        assert (found.over == 0).any()


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("alpha", [1.75, 3.0])
def test_statistics_on_both_sides_of_the_seam(
    alpha: float, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch, few(alpha))
    call = made(square(70, heads=2, slopes=(8.0, 0.0), alpha=alpha), dtype, device)
    _, found = ops.attend(*arguments(call), True)
    assert spy.found.over.any()
    assert (spy.found.over == 0).any()
    _, exact = attend_with_stats(in_float64(call), "reference")
    for key in STAT_NAMES:
        value = getattr(exact, key).double()
        if key != "support":
            assert (getattr(found, key) - value).abs().max() <= 1e-3 * value.abs().max().clamp_min(1.0), key
    above = above_the_threshold(call)
    assert ((above > 1e-4).sum(-1) <= found.support).all()
    assert (found.support <= (above > -1e-4).sum(-1)).all()


@pytest.mark.parametrize("alpha", [1.75, 2.0, 3.0, 16.0, 64.0])
def test_ties_take_one_place_a_tile(alpha: float, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    call = made(square(300, content=ties, alpha=alpha), torch.float32, device)
    with torch.no_grad():
        out, _ = ops.attend(*arguments(call), False)
    part = ops.blocks_of(call["q"], call["v"]).collect.part
    assert torch.equal(spy.found.held[0, 0], torch.arange(300, device=device, dtype=torch.int32) // part + 1)
    mean = call["v"].detach().double().cumsum(2) / torch.arange(1, 301, device=device)[:, None]
    assert (out.double() - mean).abs().max() <= 1e-5


@pytest.mark.parametrize("alpha", [2.5, 4.0, 6.0])
def test_above_alpha_2_float32_keeps_the_digits_of_dense_float32(alpha: float, device: torch.device) -> None:
    """Weights that are roots of their distance to the threshold, and gains that grow without bound towards it."""
    call = made(square(200, alpha=alpha), torch.float32, device)
    exact, dense, found = oracle(in_float64(call)), plain(call), ours(call)
    for key, value in exact.items():
        errors = [(side[key].double() - value).abs().max() for side in (found, dense)]
        assert errors[0] <= 3 * errors[1] + 1e-6 * value.abs().max(), f"{key}: {errors[0]:.3g}, dense {errors[1]:.3g}"


@pytest.mark.parametrize("alpha", [1.75, 3.0])
def test_rows_that_see_nothing_hold_nothing(
    alpha: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    call = made(square(70, batch=2, lengths=(0, 33), alpha=alpha), torch.float32, device)
    found = ours(call)
    assert (spy.found.held[0] == 0).all()
    assert (spy.found.held[1, :, 33:] == 0).all()
    assert all((found[key][0] == 0).all() for key in ("out", "q", "k", "v"))


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("alpha", [1.75, 3.0])
def test_the_same_bits_every_time(alpha: float, dtype: torch.dtype, device: torch.device) -> None:
    call = made(square(70, alpha=alpha), dtype, device)
    first, again = ours(call), ours(call)
    assert all(torch.equal(first[key], again[key]) for key in first)
