"""Statistics against dense attention maps, for every method and position; the maps' pooling; the commands."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from tiny_runs import tiny, train
from typer.testing import CliRunner

from longspan.cli import app
from longspan.cli import inspect as commands
from longspan.evaluate.inspect import (
    attention_layers,
    head_rows,
    heads_of,
    layer_inputs,
    live_tiles,
    map_rows,
    query_blocks,
    query_rows,
    sample_tokens,
    spread_of,
    weights_of,
)
from longspan.functional import attention_weights
from longspan.nn.decoder import AttentionConfig, Decoder, DecoderConfig
from longspan.nn.methods import METHODS
from longspan.nn.scalers import Adaptive
from longspan.plots import Panel, _draw_panel
from longspan.results import read_rows
from longspan.tasks import get_task

TASK = get_task("copy", num_symbols=4)
CPU = torch.device("cpu")
CELLS = [(method, METHODS[method].position) for method in METHODS]
CELLS += [("asentmax", position) for position in ("nope", "alibi", "rope")]


def model_of(method: str = "asentmax", position: str = "nape", **options: Any) -> Decoder:
    torch.manual_seed(0)
    attention = AttentionConfig(method=method, position=position, top_k=3, initial_beta=None, **options)
    model = Decoder(DecoderConfig(TASK.vocabulary, 2, 16, 24, 4, attention)).eval()
    with torch.no_grad():
        for layer in attention_layers(model):
            layer.query.weight.mul_(30)
            layer.key.weight.mul_(30)
    return model


@pytest.mark.parametrize(("method", "position"), CELLS)
def test_the_weights_are_those_of_the_layer(method: str, position: str) -> None:
    model = model_of(method, position, qk_norm=position == "rope")
    tokens = sample_tokens(TASK, 7, 2, CPU)
    for layer, x in zip(attention_layers(model), layer_inputs(model, tokens), strict=True):
        weights = weights_of(layer, heads_of(layer, x), torch.arange(x.shape[1]))
        values = layer.value(x).unflatten(-1, (4, 4)).transpose(1, 2)
        out = layer.output((weights @ values).transpose(1, 2).flatten(2))
        torch.testing.assert_close(out, layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("method", "position"), CELLS)
def test_the_rows_are_those_of_dense_maps(method: str, position: str) -> None:
    model = model_of(method, position)
    rows = head_rows(model, TASK, 6, samples=3, queries=1000)
    assert [(row["layer"], row["head"]) for row in rows] == [(layer, head) for layer in (1, 2) for head in (1, 2, 3, 4)]
    tokens = sample_tokens(TASK, 6, 3, CPU)
    time = tokens.shape[1]
    inputs = layer_inputs(model, tokens)
    for row in rows:
        layer = attention_layers(model)[row["layer"] - 1]
        x, head = inputs[row["layer"] - 1], row["head"] - 1
        heads = heads_of(layer, x)
        form = layer.normalizer.entmax_form()
        if form is None:
            weights = weights_of(layer, heads, torch.arange(time))[:, head]
        else:
            weights = attention_weights(
                heads.q, heads.k, alpha=form.alpha, slopes=layer.position.slopes, scale=layer.scale
            )[:, head]
        found: dict[str, list[float]] = {"support": [], "entropy": [], "largest": [], "distance": []}
        for sequence in weights.tolist():
            for query, line in enumerate(sequence[1:], start=1):
                total = sum(line) or 1.0
                shares = [weight / total for weight in line if weight > 0]
                found["support"].append(len(shares))
                found["entropy"].append(-sum(share * math.log(share) for share in shares) / math.log(query + 1))
                found["largest"].append(max(line))
                found["distance"].append(sum(weight / total * (query - key) for key, weight in enumerate(line)))
        for name, numbers in found.items():
            assert row[name] == pytest.approx(sum(numbers) / len(numbers), rel=1e-4, abs=1e-6), name


def test_the_parts_of_the_scale_of_asentmax() -> None:
    model = model_of("asentmax", "nape", delta=0.5)
    rows = {(row["layer"], row["head"]): row for row in head_rows(model, TASK, 6, samples=2, queries=1000)}
    tokens = sample_tokens(TASK, 6, 2, CPU)
    for number, (layer, x) in enumerate(
        zip(attention_layers(model), layer_inputs(model, tokens), strict=True), start=1
    ):
        scaler = layer.scaler
        assert isinstance(scaler, Adaptive)
        assert isinstance(scaler.gamma, torch.nn.Linear)
        n = torch.arange(1, x.shape[1] + 1).expand(2, -1)
        scale = scaler(x, n)
        gamma = 2 * scaler.gamma(x).tanh().transpose(1, 2)
        beta = (scale - 0.5) / (n + 1).log()[:, None] ** gamma
        for head in (3, 4):
            row = rows[number, head]
            for name, part in (("scale", scale), ("beta", beta), ("gamma", gamma)):
                assert row[name] == pytest.approx(part[:, head - 1, 1:].mean().item(), rel=1e-4)
            assert row["gamma_negative"] == pytest.approx((gamma[:, head - 1, 1:] < 0).double().mean().item())
            ends = gamma[:, head - 1, 1:].flatten().quantile(torch.tensor([0.05, 0.95])).tolist()
            assert [row["gamma_low"], row["gamma_high"]] == pytest.approx(ends, rel=1e-4)
        for head in (1, 2):  # ALiBi's heads: their beta and gamma are projections that nothing reads
            assert [rows[number, head][name] for name in ("scale", "beta", "gamma", "gamma_low")] == [None] * 4


@pytest.mark.parametrize(
    ("method", "known"), [("softmax", []), ("ssmax", ["scale", "beta"]), ("sentmax", ["scale", "beta", "gamma"])]
)
def test_only_what_a_method_has(method: str, known: list[str]) -> None:
    row = head_rows(model_of(method), TASK, 6, samples=1)[-1]
    assert [name for name in ("scale", "beta", "gamma") if row[name] is not None] == known


def test_statistics_of_known_weights() -> None:
    weights = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 1, 0], [0.25, 0.25, 0.25, 0.25]])[None, None]
    found = {name: value[0, 0].tolist() for name, value in spread_of(weights, torch.tensor([1, 2, 3])).items()}
    assert found["support"] == [2, 1, 4]
    assert found["entropy"] == pytest.approx([1, 0, 1])
    assert found["largest"] == [0.5, 1, 0.25]
    assert found["distance"] == [0.5, 0, 1.5]


@pytest.mark.parametrize("method", ["softmax", "asentmax"])
def test_live_tiles_are_those_of_the_whole_map(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.evaluate.inspect.TILE", 3)
    monkeypatch.setattr("longspan.evaluate.inspect._WEIGHTS_AT_ONCE", 1)  # a row at a time
    model = model_of(method, "nape")
    tokens = sample_tokens(TASK, 9, 2, CPU)
    width = tokens.shape[1]
    layer, x = attention_layers(model)[1], layer_inputs(model, tokens)[1]
    heads = heads_of(layer, x if method == "softmax" else 20 * x)  # so sharp that some tiles are dead
    weights = weights_of(layer, heads, torch.arange(width))
    count = -(-width // 3)
    for head, share in enumerate(live_tiles(layer, heads, range(count)).tolist()):
        found = []
        for sequence in weights[:, head]:
            for row in range(count):
                tiles = [sequence[3 * row : 3 * row + 3, 3 * key : 3 * key + 3] for key in range(row + 1)]
                found.append(sum(bool((tile > 0).any()) for tile in tiles) / len(tiles))
        assert share == pytest.approx(sum(found) / len(found))
        assert (share == 1) == (method == "softmax")


def test_query_blocks_are_few_even_and_end_at_the_last() -> None:
    assert query_blocks(5, 1) == [0]
    assert query_blocks(129, 1000) == [0, 1]
    assert query_blocks(1024, 256) == [3, 7]
    assert query_blocks(1025, 1) == [8]


def test_query_rows_are_few_even_and_end_at_the_last() -> None:
    assert query_rows(5, 100).tolist() == [1, 2, 3, 4]
    few = query_rows(100_000, 64)
    assert len(few) == 64
    assert few[[0, -1]].tolist() == [1, 99_999]
    assert few.diff().max() - few.diff().min() <= 1
    with pytest.raises(ValueError, match="a sequence of 1 token"):
        query_rows(1, 10)


@pytest.mark.parametrize("cells", [3, 4, 16, 100])
def test_maps_are_the_largest_weight_of_every_window(cells: int) -> None:
    model = model_of()
    (tokens,) = sample_tokens(TASK, 7, 1, CPU).split(1)  # 16 tokens
    layer = attention_layers(model)[1]
    weights = weights_of(layer, heads_of(layer, layer_inputs(model, tokens)[1]), torch.arange(16))[0]
    rows = list(map_rows(model, TASK, 7, [2], cells))
    assert [row["head"] for row in rows] == [1, 2, 3, 4]
    for row, full in zip(rows, weights, strict=True):
        window = row["window"]
        assert window == math.ceil(16 / cells)
        pooled = [
            [full[i : i + window, j : j + window].max().item() for j in range(0, 16, window)]
            for i in range(0, 16, window)
        ]
        for line, expected in zip(row["weights"], pooled, strict=True):
            assert line == pytest.approx(expected, rel=6e-3)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    whole = head_rows(model, TASK, 9, samples=1), list(map_rows(model, TASK, 9, [1, 2], 7))
    monkeypatch.setattr("longspan.evaluate.inspect._WEIGHTS_AT_ONCE", 300)
    pieces = head_rows(model, TASK, 9, samples=1), list(map_rows(model, TASK, 9, [1, 2], 7))
    assert whole[1] == pieces[1]
    for one, other in zip(whole[0], pieces[0], strict=True):
        assert one.keys() == other.keys()
        assert [value for value in one.values() if value is not None] == pytest.approx(
            [value for value in other.values() if value is not None], rel=1e-5
        )


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    train(tiny(steps=2, validate_every=None), folder)
    return folder


def test_the_command_writes_rows_and_figures(run_folder: Path, tmp_path: Path) -> None:
    words = ["inspect", str(run_folder), "--length", "6", "--length", "12", "--samples", "2", "--maps", "--cells", "8"]
    result = CliRunner().invoke(app, [*words, "--format", "svg", "--out", str(tmp_path), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "scaled heads" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"inspect.jsonl", "inspect.svg", "maps.jsonl", "maps.svg"}
    rows = list(read_rows(tmp_path / "inspect.jsonl"))
    assert [(row["length"], row["head"]) for row in rows] == [(6, 1), (6, 2), (12, 1), (12, 2)]
    assert {"commit", "command", "device", "task", "method", "position", "recipe", "seed", "step"} <= rows[0].keys()
    figure = tmp_path / "some.png"
    words = ["figure", "maps", str(tmp_path / "maps.jsonl"), "--head", "2", "--out", str(figure)]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_what_is_measured_is_written_before_it_is_shown(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(table: object) -> None:
        raise UnicodeEncodeError("latin-1", "β", 0, 1, "no such letter")

    monkeypatch.setattr(commands, "print_whole", broken)
    words = ["inspect", str(run_folder), "--length=6", "--samples=1", f"--out={tmp_path}", "--device=cpu"]
    assert isinstance(CliRunner().invoke(app, words).exception, UnicodeEncodeError)
    assert {path.name for path in tmp_path.iterdir()} == {"inspect.jsonl", "inspect.png"}


def test_lengths_below_those_of_the_training_leave_its_mark_within_the_figure() -> None:
    axes = Figure().subplots()
    _draw_panel(axes, Panel("", "", {"head 1": {3: 1.0, 5: 2.0}}, trained_to=64))
    (mark,) = axes.texts
    assert isinstance(mark, Annotation)
    assert mark.xy[0] == pytest.approx(axes.get_xlim()[1])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layer", "1"], "--layer chooses the layers of --maps"),
        (["--maps", "--layer", "3"], "the model has the layers 1 to 1, got --layer 3"),
        (["--samples", "0"], "samples"),
        (["--device", "nothing"], "there is no device"),
    ],
)
def test_wrong_options_say_so(run_folder: Path, words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["inspect", str(run_folder), *words])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_wrong_lengths_and_folders_say_so(run_folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(run_folder), "--length", "0"])
    assert "length 0 is too short" in str(result.exception)
    assert "has no checkpoint" in str(CliRunner().invoke(app, ["inspect", str(tmp_path)]).exception)
    assert CliRunner().invoke(app, ["inspect", str(tmp_path / "nowhere")]).exit_code == 2
    (tmp_path / "rows.jsonl").write_text("{}\n")
    result = CliRunner().invoke(app, ["figure", "maps", str(tmp_path / "rows.jsonl")])
    assert result.exit_code == 2
    assert "there are no such maps" in result.output
