"""The scaling-law probe: fits of laws that are known, and the whole of it on a model of a minute's size made tiny."""

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_text import tiny_corpus

from longspan.nn.decoder import AttentionConfig, DecoderConfig
from longspan.nn.llama import Llama
from longspan.probes import scaling_law
from longspan.probes.scaling_law import PROBE, Scale, ceiling, fits, head_row, overall, scaled_llama
from longspan.results import Row
from longspan.text.documents import CorpusError

TINY = Scale(None, 2, 16, 2, 24, 2, 2, 12, 3e-2, 0.0)


def law(delta: float, beta: float, gamma: float, length: int = 200) -> list[float]:
    return [delta + beta * math.log1p(n) ** gamma for n in range(1, length + 1)]


@pytest.mark.parametrize("gamma", [-2.5, -0.5, 0.3, 1.0, 1.7, 3.0])
@pytest.mark.parametrize(("delta", "beta"), [(1.0, 0.4), (-0.5, 2.0), (3.0, -0.1)])
def test_the_power_law_is_recovered(delta: float, beta: float, gamma: float) -> None:
    found = fits(law(delta, beta, gamma))["power"]
    assert found.r2 == pytest.approx(1, abs=1e-9)
    assert (found.delta, found.beta, found.gamma) == pytest.approx((delta, beta, gamma), rel=1e-3, abs=1e-3)


def test_the_first_position_has_no_say() -> None:
    scales = law(1.0, 0.4, 1.3)
    assert fits([99.0, *scales[1:]]) == fits(scales)
    assert ceiling([99.0, *scales[1:]]) == ceiling(scales)


def test_gamma_stays_where_it_is_looked_for() -> None:
    jump = [1.0] * 150 + [2.0] * 5  # the steeper the better
    assert fits(jump)["power"].gamma == pytest.approx(scaling_law.GAMMAS[1])


def test_simpler_laws_are_recovered_and_told_apart() -> None:
    line = fits([0.02 * n for n in range(1, 301)])
    assert (line["linear"].beta, line["linear"].r2) == pytest.approx((0.02, 1))
    assert line["log"].r2 < 0.95
    found = fits(law(0.7, 0.3, 1.0))
    assert (found["log"].delta, found["log"].beta, found["log"].r2) == pytest.approx((0.7, 0.3, 1))
    assert found["power"].gamma == pytest.approx(1, abs=1e-3)
    assert fits(law(0.0, 0.3, 1.0))["beta_log"].r2 == pytest.approx(1)


@pytest.mark.parametrize("seed", range(5))
def test_free_constants_are_never_worse_and_never_below_zero(seed: int) -> None:
    noise = torch.randn(100, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = fits((5 + noise).tolist())
    assert found["power"].r2 >= found["log"].r2 >= 0  # what an overall R^2 of -14 cannot be
    assert found["beta_log"].r2 < 0
    assert found["linear"].r2 < 0
    assert ceiling((5 + noise).tolist()) == pytest.approx(0, abs=0.3)


def test_the_ceiling_is_the_share_of_what_is_smooth() -> None:
    smooth = torch.tensor(law(1.0, 0.5, 1.2, 2000), dtype=torch.float64)
    assert ceiling(smooth.tolist()) == pytest.approx(1, abs=1e-3)
    noise = smooth.std() * torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert ceiling((smooth + noise).tolist()) == pytest.approx(0.5, abs=0.05)


def test_the_overall_fit_weighs_heads_by_what_they_learned() -> None:
    heads = [head_row({}, law(1, 1, 1)), head_row({}, [1 + 0.01 * (-1) ** n for n in range(200)])]
    assert overall(heads, "log") > 0.999  # the second head hardly varies, and none of it is explained
    assert heads[1]["log"]["r2"] < 0.1


def test_scales_of_one_change_nothing_and_others_do() -> None:
    config = DecoderConfig(30, 2, 16, 32, 2, AttentionConfig(method="softmax", position="rope"))
    torch.manual_seed(0)
    plain = Llama(config)
    torch.manual_seed(0)
    scaled = scaled_llama(config, 12)
    tokens = torch.randint(30, (3, 12))
    torch.testing.assert_close(scaled(tokens), plain(tokens))
    with torch.no_grad():
        scaled.blocks[0].attention.scaler.scale[1, 7] = 40.0  # type: ignore[union-attr, operator]
    changed = (scaled(tokens) - plain(tokens)).abs().amax((0, 2)) > 1e-6
    assert changed.tolist() == [False] * 7 + [True] * 5  # that position, and those that read it later


def test_it_measures_draws_and_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = tiny_corpus(tmp_path / "text")
    monkeypatch.setitem(scaling_law.SCALES, "small", TINY)
    monkeypatch.setenv(scaling_law.CORPUS, str(corpus.folder))
    steps: list[int] = []
    rows: list[Row] = list(PROBE.measure("small", lambda done, total, note: steps.append(done)))
    assert json.loads(json.dumps(rows)) == rows
    trained = [row for row in rows if row["step"]]
    assert len(trained) == 2 * 2 * 2  # methods, layers, heads
    assert all(len(row["scales"]) == 24 and len(set(row["scales"])) > 20 for row in trained)
    assert steps == sorted(steps)
    assert steps[-1] == 24
    table = PROBE.table(rows)
    assert [line["law"] for line in table] == list(scaling_law.LABELS.values()) * 2
    assert isinstance(PROBE.verdict(rows)[0], bool)
    assert "R² over 4 heads" in PROBE.verdict(rows)[1]
    PROBE.draw(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_the_papers_size_asks_for_a_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(scaling_law.CORPUS, raising=False)
    with pytest.raises(CorpusError, match="set LONGSPAN_CORPUS"):
        list(PROBE.measure("paper", lambda done, total, note: None))
