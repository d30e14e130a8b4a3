"""Every probe measures, draws and agrees with its claim; and the closed forms they rest on, on random instances."""

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from longspan.cli import app
from longspan.cli import probes as commands
from longspan.functional import attention, entmax
from longspan.probes import (
    all_probes,
    collapse,
    dispersion,
    get_probe,
    non_vanishing,
    probe_names,
    transformation,
    two_level,
)
from longspan.probes.base import Report, Size
from longspan.results import Row, append_rows, read_rows

ALPHAS = (1.2, 1.5, 1.75, 2.0, 3.0)


@functools.cache
def rows_of(name: str) -> list[Row]:
    return list(get_probe(name).measure("small", lambda done, total, note: None))


def test_the_folder_is_the_registry() -> None:
    assert {"collapse", "dispersion", "non-vanishing", "transformation", "two-level"} <= set(probe_names())
    assert [probe.name for probe in all_probes()] == probe_names()
    with pytest.raises(ValueError, match=r"unknown probe 'nothing'; there are .*collapse"):
        get_probe("nothing")


# Over-squashing and the scaling law train models for minutes; tests of their own do the same at a tiny size.
@pytest.mark.parametrize("name", [name for name in probe_names() if name not in ("over-squashing", "scaling-law")])
def test_each_probe_measures_draws_and_agrees(name: str, tmp_path: Path) -> None:
    probe, rows = get_probe(name), rows_of(name)
    agrees, said = probe.verdict(rows)
    assert agrees, said
    assert any(letter.isdigit() for letter in said)
    table = probe.table(rows)
    assert all(line.keys() == table[0].keys() for line in table)
    assert json.loads(json.dumps(rows)) == rows
    probe.draw(rows, tmp_path / "figure.png")
    assert [file.name for file in tmp_path.iterdir()] == ["figure.png"]


@pytest.mark.parametrize("name", probe_names())
def test_each_probe_reports_its_progress(name: str) -> None:
    steps: list[tuple[int, int]] = []
    first = next(get_probe(name).measure("small", lambda done, total, note: steps.append((done, total))))
    assert first
    assert steps[0][0] == 0 < steps[0][1]


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_weight_is_zero_exactly_from_its_cutoff_on(alpha: float) -> None:
    z = torch.rand(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).sort(descending=True).values
    assert transformation.cutoff(z.tolist(), 0, alpha) is None
    for k in range(1, 6):
        cutoff = transformation.cutoff(z.tolist(), k, alpha)
        assert cutoff is not None
        assert entmax(z * cutoff * (1 - 1e-6), alpha)[k] > 0
        assert entmax(z * cutoff * (1 + 1e-6), alpha)[k] == 0


def test_the_cutoffs_of_sparsemax_by_hand() -> None:
    # 1 / sum(z_i - z_k): 1/0.2, 1/0.6, 1/1.2, 1/2.0
    cutoffs = [transformation.cutoff(transformation.LOGITS, k, 2.0) for k in range(1, 5)]
    assert cutoffs == pytest.approx([5, 5 / 3, 5 / 6, 0.5])


@pytest.mark.parametrize("alpha", [1.0, *ALPHAS])
def test_nobody_gains_from_a_newcomer_and_b_max_is_exact(alpha: float) -> None:
    generator = torch.Generator().manual_seed(2)
    for n in (1, 2, 5, 40):
        context = torch.randn(n, generator=generator, dtype=torch.float64)
        alone = entmax(context, alpha)
        b_max = non_vanishing.b_max(context.tolist(), alpha)
        b = (
            torch.linspace(-8, 8, 33, dtype=torch.float64)
            if b_max is None
            else b_max + torch.linspace(-1, 1, 33).double()
        )
        weights = non_vanishing.with_newcomer(context.tolist(), b, alpha)
        others = torch.cat([weights[:, :-2], weights[:, -1:]], -1)
        assert (others <= alone + 1e-12).all()
        if b_max is None:
            assert (others < alone).all()
        else:
            assert (weights[b < b_max - 1e-9, -2] == 0).all()
            assert (weights[b > b_max + 1e-9, -2] > 0).all()
            torch.testing.assert_close(others[b <= b_max], alone.expand_as(others[b <= b_max]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("k", [1, 3, 10])
def test_the_gap_of_two_level_logits_does_not_depend_on_n(alpha: float, k: int) -> None:
    for n in (20, 1000):
        needed = two_level.needed_gap(n, k, alpha)
        logits = torch.zeros(n, dtype=torch.float64)
        logits[:k] = needed * (1 + 1e-9)
        assert entmax(logits, alpha)[:k].tolist() == pytest.approx([1 / k] * k)
        assert (entmax(logits, alpha)[k:] == 0).all()
        logits[:k] = needed * (1 - 1e-4)
        assert (entmax(logits, alpha)[k:] > 0).all()


def test_entropy_and_support_of_known_weights() -> None:
    even = torch.zeros(1, 64, dtype=torch.float64)
    for method in dispersion.METHODS.values():
        assert dispersion.entropy_and_support(even, method) == pytest.approx((1, 64))
    entropy, support = dispersion.entropy_and_support(dispersion.two_level(64), dispersion.METHODS["entmax 2"])
    assert (entropy, support) == pytest.approx((math.log(4) / math.log(64), 4))


@pytest.mark.parametrize("n", [2, 7, 1000])
def test_the_papers_gap_at_every_n(n: int) -> None:
    # Sparsemax of [0, ..., 0, 0.5] is dense with p_n = 0.5 + 0.5/n; with two 0.5 it is [0, ..., 0, 0.5, 0.5].
    scenario = collapse.SCENARIOS["closed form"]
    gap = collapse.gap(collapse.prefix_states(scenario, n, 2.0), scenario.phi, 2.0)
    assert gap == pytest.approx((0.5 - 0.5 / n) * math.sqrt(0.5))
    assert collapse.limit(scenario, 2.0) == pytest.approx(0.354, abs=5e-4)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("name", ["constant prefix", "random prefix"])
def test_the_last_rows_are_those_of_the_whole_network(name: str, alpha: float) -> None:
    scenario, n = collapse.SCENARIOS[name], 40
    states = collapse.prefix_states(scenario, n, alpha)
    ends = []
    for repeats in (1, 2):
        last = torch.full((states[0].shape[0], repeats), math.sqrt(scenario.phi), dtype=torch.float64)
        x = torch.cat([states[0], last], -1)[:, None, :, None]
        for _ in range(scenario.layers):
            x = x + attention(x, x, x, alpha=alpha, scale=1.0)
        ends.append(x[:, 0, -1, 0])
    expected = (ends[0] - ends[1]).abs().mean().item()
    assert collapse.gap(states, scenario.phi, alpha) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("alpha", [1.5, 1.75, 2.0])
@pytest.mark.parametrize("name", ["closed form", "constant prefix", "distant prefix"])
def test_the_gap_goes_to_its_limit(name: str, alpha: float) -> None:
    scenario = collapse.SCENARIOS[name]
    gap = collapse.gap(collapse.prefix_states(scenario, 2**20, alpha), scenario.phi, alpha)
    assert gap == pytest.approx(collapse.limit(scenario, alpha), abs=2e-3)


def test_a_larger_alpha_can_preserve_less() -> None:
    limits = [collapse.limit(collapse.SCENARIOS["distant prefix"], alpha) for alpha in (1.5, 1.75, 2.0)]
    assert limits == sorted(limits, key=lambda value: -(value or 0))
    assert limits[-1] == 0


def test_the_command_measures_and_redraws(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, result.output
        return result.output

    assert all(name in run("probe") for name in probe_names())
    said = run("probe", "transformation", "--out", str(tmp_path), "--format", "svg")
    assert "agrees" in said
    assert "0.833333" in said
    rows = tmp_path / "transformation.jsonl"
    assert {"commit", "command", "probe", "size"} <= next(read_rows(rows)).keys()
    assert (tmp_path / "transformation.svg").exists()
    run("figure", "probe", "transformation", "--rows", str(rows))
    assert (tmp_path / "transformation.png").read_bytes().startswith(b"\x89PNG")
    for wrong in (["collapse", "--rows", str(rows)], ["transformation", "--rows", str(rows), "--out", "figure.txt"]):
        assert CliRunner().invoke(app, ["figure", "probe", *wrong]).exit_code == 2


def test_a_measurement_that_is_stopped_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(size: Size, report: Report) -> Iterator[Row]:
        for number in range(3):
            report(number, 10, "some")
            yield {"number": number}
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "get_probe", lambda name: replace(get_probe("collapse"), measure=stopped))
    with pytest.raises(KeyboardInterrupt):
        commands.probe("collapse", out=tmp_path)
    assert [row["number"] for row in read_rows(tmp_path / "collapse.jsonl")] == [0, 1, 2]


def test_rows_stay_until_there_are_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "collapse.jsonl"
    append_rows(path, [{"number": 7}])
    new: list[Row] = []

    def stopped(size: Size, report: Report) -> Iterator[Row]:
        yield from new
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "get_probe", lambda name: replace(get_probe("collapse"), measure=stopped))
    monkeypatch.setattr(commands, "KEEP", -1.0)  # every row at once
    with pytest.raises(KeyboardInterrupt):
        commands.probe("collapse", out=tmp_path)
    assert [row["number"] for row in read_rows(path)] == [7]
    new += [{"number": 1}, {"number": 2}]
    with pytest.raises(KeyboardInterrupt):
        commands.probe("collapse", out=tmp_path)
    assert [row["number"] for row in read_rows(path)] == [1, 2]
