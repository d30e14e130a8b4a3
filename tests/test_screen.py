"""The look in 8 bits before the survey: it may spare tiles, and never one that holds a survivor."""

from typing import Any

import pytest
import torch
from attention_cases import gradients
from long_problems import Content, Problem, equal_maxima, level, noise, one_large, ties, topics
from test_long_kernels import HALF, arguments, made, ops, skipped_tiles
from torch import Tensor

from longspan import attention

TILE = 128
LONG: dict[str, Any] = {"query_time": 140, "key_time": 1000, "content": topics(TILE)}


def one_survivor_a_tile(large: float) -> Content:
    """All rows have their maximum at key 800, and every tile one score that is 0.9 of what survives below it. `large`:
    a coordinate of another key of those tiles, of no use to any query, so that a step of 8 bits hides the survivor."""

    def content(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = torch.zeros_like(q), torch.zeros_like(k)
        q[..., 0], k[..., 0] = 8.0, -6.0  # half of a quarter of the product is k[0] itself
        k[:, :, 800, 0] = 2.0
        k[:, :, 5:700:TILE, 0] = 1.1
        k[:, :, 9:700:TILE, 1] = large
        return q, k

    return content


PROBLEMS: dict[str, Problem] = {
    "topics": Problem(**LONG),
    "short_topics": Problem(**LONG | {"content": topics(40)}),
    "noise": Problem(**LONG | {"content": noise}),
    "alpha_1.25": Problem(**LONG, alpha=1.25),
    "alpha_2": Problem(**LONG, alpha=2.0),
    "alpha_8": Problem(**LONG, alpha=8.0),
    "shared_keys": Problem(**LONG, heads=2, dim=24, value_dim=40),
    "wide_heads": Problem(**LONG, dim=128),
    "some_slopes": Problem(**LONG, heads=2, slopes=(0.5, 0.0)),
    "not_causal": Problem(**LONG, causal=False),
    "documents": Problem(**LONG, documents="contiguous"),
    "no_scale": Problem(**LONG, scale=0.0),
    "ties": Problem(**LONG | {"content": ties}),
    "equal_maxima": Problem(**LONG | {"content": equal_maxima}),
    "one_score_of_10000": Problem(**LONG | {"content": one_large}),
    "scores_near_-1000": Problem(**LONG | {"content": level(-1000.0, topics(TILE))}),
    "one_survivor_a_tile": Problem(**LONG | {"content": one_survivor_a_tile(0.0)}),
    "one_hidden_survivor_a_tile": Problem(**LONG | {"content": one_survivor_a_tile(300.0)}),
}


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Screens everything; what is left of every block of queries, a tensor for each call."""
    counts: list[Tensor] = []
    screen = ops._screen

    def counted(*given: Any) -> Any:
        made = screen(*given)
        counts.append(made[1])
        return made

    monkeypatch.setattr(ops, "SCREENED_FROM", 0)
    monkeypatch.setattr(ops, "_screen", counted)
    return counts


@torch.no_grad()
def outputs(call: dict[str, Any]) -> Any:
    return ops._Outputs(*ops.long_attention(*arguments(call), True, False))


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_tile_with_a_survivor_is_spared(name: str, device: torch.device, left: list[Tensor]) -> None:
    call = made(PROBLEMS[name], HALF, device)
    z = float((call["alpha"] - 1) * (call["q"].detach() @ call["k"].detach().mT).abs().max())
    assert (skipped_tiles(call) <= 1e-6 * max(1.0, z)).all()
    assert len(left) == 1


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_spared_changes_nothing(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    call = made(PROBLEMS[name], HALF, device)
    plain = outputs(call)
    monkeypatch.setattr(ops, "SCREENED_FROM", 0)
    screened = outputs(call)
    assert ((screened.live > 0) <= (plain.live > 0)).all()
    torch.testing.assert_close(screened.out, plain.out, rtol=0, atol=2e-3 * max(1.0, float(plain.out.abs().max())))
    if torch.equal(screened.live, plain.live):
        assert torch.equal(screened.out, plain.out)


def test_tiles_of_other_topics_are_spared(device: torch.device, left: list[Tensor]) -> None:
    outputs(made(PROBLEMS["topics"], HALF, device))
    # Of the 6 and 7 tiles before the diagonal every fourth has a topic of the block's, which may have two.
    assert all(1 <= count <= 2 for count in left[0].flatten().tolist())


def test_it_looks_no_further_where_the_nearest_tiles_are_all_alive(device: torch.device, left: list[Tensor]) -> None:
    outputs(made(PROBLEMS["noise"], HALF, device))
    assert (left[0] == -1).all()


def test_heads_with_slopes_are_left_to_the_survey(device: torch.device, left: list[Tensor]) -> None:
    outputs(made(PROBLEMS["some_slopes"], HALF, device))
    assert (left[0][0, 0] == -1).all()
    assert (left[0][0, 1] >= 0).all()


def left_over(call: dict[str, Any]) -> list[list[int]]:
    """The tiles that the screen alone leaves of each block of queries."""
    q, k, v, *masks, alpha, scale, causal = arguments(call)
    constants = ops._constants(q, v, *masks, causal)
    del constants["BLOCK_DV"]
    tiles = ops._outputs(q, k, v, alpha, False, False).tiles
    lists, counts = ops._screen(q, k, None, None, None, alpha - 1, scale, tiles, constants)
    return [row[:count].tolist() for row, count in zip(lists.flatten(0, 2), counts.flatten(), strict=True)]


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.usefixtures("left")
@torch.no_grad()
def test_a_tile_with_a_spoilt_key_is_never_spared(spoilt: float, device: torch.device) -> None:
    """And what the other tiles show is as before."""
    call = made(PROBLEMS["topics"], HALF, device)
    expected = left_over(call)
    call["k"][0, 0, 300, 3] = spoilt
    for found, wanted in zip(left_over(call), expected, strict=True):
        assert set(found) == {*wanted, 300 // TILE}


def test_gradients_go_the_same_way(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    call = made(PROBLEMS["topics"], HALF, device)
    plain = gradients(attention(**call, impl="triton"), call)
    monkeypatch.setattr(ops, "SCREENED_FROM", 0)
    for name, found in gradients(attention(**call, impl="triton"), call).items():
        assert torch.equal(found, plain[name]), name
