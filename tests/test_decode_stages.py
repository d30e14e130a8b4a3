"""Decoding's stages at their seams: which rows are finished where, and that it makes no difference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from long_problems import noise, ties, topics
from test_decode import (
    DTYPES,
    LARGE,
    Step,
    arguments,
    assert_is_the_oracles,
    decode_ops,
    in_float64,
    made,
    needs_gpu,
    summary_of,
)
from torch import Tensor

from longspan.functional.decode import decode
from longspan.kernels.pages import PAGE

# What is small here is large on a GPU, so that few keys take every way that many would.
THIRD_STAGE = {"SHORT": 0, "MOST_SURVIVORS": 30}
ALL_THIRD = {"SHORT": 0, "MOST_SURVIVORS": 0}
LITTLE_HELD = {"MOST_HELD": 2, "PAGES_HELD": 2}
SHARED = {"ROW": decode_ops.Launch(8, 8, 4), "GATHERED": 1 << 10}
SEVERAL_RUNS = {"LONGEST_RUN": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "third_stage": THIRD_STAGE,
    "all_third": ALL_THIRD,
    "little_held": LITTLE_HELD,
    "shared": SHARED,
    "third_stage_little_held_shared": THIRD_STAGE | LITTLE_HELD | SEVERAL_RUNS | SHARED,
}


def uneven(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The first half of the heads keep nearly all keys, the others a few."""
    factors = torch.ones(q.shape[1], dtype=q.dtype)
    factors[: q.shape[1] // 2] = 0.01
    return q * factors[:, None, None], k


STEPS: dict[str, Step] = {
    "noise": Step(room=400),
    "uneven_heads": Step(heads=4, kv_heads=1, room=260, content=uneven),
    "heads_of_their_own": Step(heads=3, kv_heads=3, room=200),
    "groups_of_8": Step(heads=16, kv_heads=2, room=200, content=uneven),
    "queries": Step(heads=4, kv_heads=2, queries=5, room=200, content=uneven, slopes=(0.1, 0.0, 0.0, 0.5)),
    "more_rows_than_a_tile": Step(heads=5, queries=14, room=66, content=uneven),
    "ties": Step(content=ties, room=400),
    "topics": Step(content=topics(PAGE), room=700),
    "lengths": Step(batch=4, lengths=(300, 0, 64, 129), room=300, queries=2),
    "starts": Step(batch=3, starts=(1, 70, 129), room=200),
    "pages": Step(batch=2, lengths=(150, 65), room=192, paged=True, queries=2, slopes=(2.0, 0.0), content=uneven),
    "softmax": Step(alpha=1.0, room=300),
    "softmax_in_pages": Step(batch=2, lengths=(150, 0), room=192, paged=True, alpha=1.0),
    "sparsemax": Step(alpha=2.0, room=300, content=uneven),
    "alpha_1.3": Step(alpha=1.3, room=300),
    "alpha_2.5": Step(alpha=2.5, room=200, logits=0.3),
    "alpha_8": Step(alpha=8.0, room=200, heads=4, content=uneven, logits=0.01),
    "ties_of_alpha_64": Step(alpha=64.0, room=200, content=ties),
    "wide_values": Step(dim=32, value_dim=200, room=200, content=uneven),
}
EVERYWHERE = ("noise", "uneven_heads", "lengths", "starts", "queries", "pages", "softmax", "alpha_8")


def cells() -> list[Any]:
    """Every step with a third stage, a few with all else."""
    return [
        pytest.param(name, setting, id=f"{name}-{setting}")
        for setting in SETTINGS
        for name in STEPS
        if setting == "third_stage" or name in EVERYWHERE
    ]


@pytest.fixture
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to(monkeypatch, SETTINGS[request.param])


def set_to(monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any]) -> None:
    for name, value in setting.items():
        monkeypatch.setattr(decode_ops, name, value)


@pytest.mark.parametrize(("name", "settings"), cells(), indirect=["settings"])
@pytest.mark.usefixtures("settings")
def test_every_way_is_as_close_to_the_oracle_as_plain_torch(name: str, device: torch.device) -> None:
    call = made(STEPS[name], torch.float32, device)
    assert_is_the_oracles(call)
    if name == "queries":
        assert_is_the_oracles(call, summary=summary_of(call, boxes=True))


@pytest.mark.parametrize("settings", ["third_stage", "all_third"], indirect=True)
@pytest.mark.usefixtures("settings")
def test_half_precision_takes_the_third_stage_too(device: torch.device) -> None:
    assert_is_the_oracles(made(STEPS["uneven_heads"], DTYPES[1], device))


@pytest.mark.parametrize("settings", list(SETTINGS), indirect=True)
@pytest.mark.parametrize("alpha", [1.0, 1.5, 4.0])
@pytest.mark.usefixtures("settings")
def test_stats_are_the_same_on_every_way(alpha: float, device: torch.device) -> None:
    call = made(replace(STEPS["uneven_heads"], alpha=alpha), torch.float32, device)
    _, found = decode(**call, impl="triton", return_stats=True)
    _, exact = decode(**in_float64(call), impl="reference", return_stats=True)
    assert torch.equal(found.support, exact.support)
    for key in ("tau", "entropy", "largest"):
        expected = getattr(exact, key)
        error = (getattr(found, key) - expected).abs().max()
        assert error <= 2e-5 * expected.abs().max().clamp_min(1.0), key


@pytest.mark.parametrize("short", [2, 3])
@pytest.mark.parametrize("room", [2 * PAGE, 2 * PAGE + 1, 3 * PAGE, 3 * PAGE + 1])
def test_at_the_switch(room: int, short: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to(monkeypatch, {"SHORT": short, "MOST_SURVIVORS": 5})
    call = made(Step(heads=2, room=room, logits=0.3), torch.float32, device)
    launched = watch(monkeypatch)
    assert_is_the_oracles(call)
    assert launched == ["_rows"] if room <= short * PAGE else ["_rows", "_values"]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the later stages, as they are launched."""
    launched: list[str] = []
    for name in ("_rows", "_values"):
        stage = getattr(decode_ops, name)

        def noted(*given: Any, name: str = name, stage: Any = stage) -> None:
            launched.append(name)
            stage(*given)

        monkeypatch.setattr(decode_ops, name, noted)
    return launched


def left_over(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Which rows the second stage left to the third."""
    marks: list[Tensor] = []
    stage = decode_ops._values

    def noted(step: Any, v: Tensor, many: Tensor) -> None:
        marks.append(many.clone())
        stage(step, v, many)

    with monkeypatch.context() as patch:
        patch.setattr(decode_ops, "_values", noted)
        decode_ops.decode_attention(*arguments(call, boxes=False))
    return marks[0]


def test_a_row_is_left_over_if_its_survivors_exceed_the_list(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = made(STEPS["uneven_heads"], torch.float32, device)
    _, exact = decode(**in_float64(call), impl="reference", return_stats=True)
    most = int(exact.support.flatten().sort().values[1])
    for limit, left in ((most, 2), (most - 1, 3), (260, 0)):
        set_to(monkeypatch, {"SHORT": 0, "MOST_SURVIVORS": limit})
        marks = left_over(call, monkeypatch)
        assert torch.equal(marks.bool(), exact.support.flatten() > limit)
        assert int(marks.sum()) == left


@pytest.mark.parametrize("content", [noise, ties], ids=["few", "all"])
def test_shares_change_no_more_than_the_order_of_sums(
    content: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = made(Step(heads=1, value_dim=256, room=500, content=content), torch.float32, device)
    outputs = []
    for shares in (1, 2, 8):
        monkeypatch.setattr(decode_ops, "row_shares", lambda *_, shares=shares: shares)
        outputs.append(decode(**call, impl="triton"))
        assert torch.equal(outputs[-1], decode(**call, impl="triton"))
    assert torch.allclose(outputs[0], outputs[1], atol=1e-6)
    assert torch.allclose(outputs[0], outputs[2], atol=1e-6)


@pytest.mark.parametrize("setting", [THIRD_STAGE | {"MOST_SURVIVORS": 3}, LITTLE_HELD], ids=["third_stage", "rows"])
@pytest.mark.parametrize("alike", [PAGE, PAGE // 4], ids=["pages", "quarters"])
@pytest.mark.parametrize("alpha", [1.0, 1.5, 8.0])
def test_scores_that_no_survivor_has_are_never_asked_for(
    alpha: float, alike: int, setting: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first stage does not store is filled with numbers that would win."""
    set_to(monkeypatch, setting)
    monkeypatch.setattr(decode_ops, "score_splits", lambda *_: 2)  # on a GPU a page each, and each its own highest
    step = Step(room=600, content=topics(alike), alpha=alpha, scale=4.0 if alpha == 1 else None)
    call = made(step, torch.float32, device)
    expected, step_of, rows = decode(**call, impl="triton"), decode_ops._step_of, decode_ops._rows
    unstored: list[int] = []

    def filled(*given: Any) -> Any:
        step = step_of(*given)
        step.scores.fill_(1e9)
        return step

    def counted(step: Any, *given: Any) -> None:
        unstored.append(int((step.scores == 1e9).sum()))
        rows(step, *given)

    monkeypatch.setattr(decode_ops, "_step_of", filled)
    monkeypatch.setattr(decode_ops, "_rows", counted)
    assert torch.equal(decode(**call, impl="triton"), expected)
    assert unstored[0] > 0, "every score is stored, so nothing is tested"


@needs_gpu
@pytest.mark.parametrize("name", ["one_sequence", "nape", "a_batch", "a_million_ties", "softmax"])
def test_the_same_bits_every_time(name: str, device: torch.device) -> None:
    call = made(LARGE[name], DTYPES[1], device)
    first = decode(**call, impl="triton")
    assert all(torch.equal(decode(**call, impl="triton"), first) for _ in range(20))


@needs_gpu
@pytest.mark.parametrize("most", [16, 1024])
@pytest.mark.parametrize("name", LARGE)
def test_long_caches_on_both_ways(name: str, most: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to(monkeypatch, {"SHORT": 0, "MOST_SURVIVORS": most})
    assert_is_the_oracles(made(LARGE[name], DTYPES[1], device))


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("unknown", [-1, 1_000_000])
def test_what_holds_no_token_of_a_sequence_may_be_anything(impl: str, unknown: int, device: torch.device) -> None:
    """Entries of a table before and beyond a sequence, and the keys and values in its own pages that are not its."""
    step = Step(batch=2, lengths=(150, 200), starts=(70, 140), room=5 * PAGE, slopes=(0.3, 0.0), paged=True)
    call = made(step, torch.float32, device)
    expected = decode(**in_float64(call), impl="reference")
    table = call["table"]
    for item, pages in enumerate((range(1, 3), range(2, 4))):
        for column in set(range(table.shape[1])) - set(pages):
            table[item, column] = unknown
    for item, (start, page) in enumerate(((70, 1), (140, 2))):
        for pool in (call["k"], call["v"]):
            pool[table[item, page], :, : start % PAGE] = torch.nan
    torch.testing.assert_close(decode(**call, impl=impl).double(), expected, rtol=0, atol=1e-5)
