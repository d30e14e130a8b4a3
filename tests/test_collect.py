"""Rows of runs brought together: each once, failed runs too."""

import json
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY, tiny, train
from typer.testing import CliRunner

from longspan.cli import app
from longspan.collect import Harvest, collect, keep_weights, rows_of_run, run_row
from longspan.evaluate.ladder import measure, row_of
from longspan.results import append_rows, read_rows
from longspan.tasks import get_task
from longspan.train import checkpoint as checkpoints
from longspan.train.config import fingerprint, to_json
from longspan.train.loop import SHARED_BY, Diverged, Stop
from longspan.train.trainer import Trainer, model_of


def log(folder: Path, *rows: dict[str, object], **changes: object) -> Path:
    """The folder of a run with this log."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_json(tiny(**changes))))
    append_rows(folder / "log.jsonl", rows)
    return folder


def step(number: int, accuracy: float = 0.5, speed: float = 10.0, loss: float = 1.0) -> dict[str, object]:
    return {"event": "train", "step": number, "loss": loss, "token_accuracy": accuracy, "steps_per_second": speed}


def test_the_row_on_a_run_tells_its_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_BY, "4")
    config = tiny(name="longspan/copy/nape/asentmax/smoke+steps=30+batch=4")
    train(config, tmp_path)
    row = run_row(tmp_path)
    (start,) = [row for row in read_rows(tmp_path / "log.jsonl") if row["event"] == "start"]
    assert row["event"] == "run"
    assert (row["recipe"], row["edits"]) == (config.name, ["steps=30", "batch=4"])
    assert (row["config"], row["seed"], row["steps"], row["step"]) == (fingerprint(config), 0, 30, 30)
    assert (row["ending"], row["escape_step"]) == ("finished", None)
    assert {key: row[key] for key in ("commit", "command", "device")} == {
        key: start[key] for key in ("commit", "command", "device")
    }
    assert row["gpu_seconds"] == pytest.approx(row["seconds"] / 4, abs=0.1)


def test_the_plateau_is_left_at_the_first_logged_step_above_90_percent(tmp_path: Path) -> None:
    rows = [step(4, 0.3), step(8, 0.9), step(12, 0.91), step(16, 0.4), step(20, 0.99, loss=0.25)]
    row = run_row(log(tmp_path, {"event": "start", "step": 0}, *rows))
    assert (row["escape_step"], row["loss"], row["token_accuracy"]) == (12, 0.25, 0.99)


def test_time_is_that_of_every_start_and_one_cut_short_counts_by_its_speeds(tmp_path: Path) -> None:
    rows = [
        {"event": "start", "step": 0, "side_by_side": 2}, step(10), step(20, speed=5.0),  # 1 + 2 seconds, then killed
        {"event": "start", "step": 10, "side_by_side": 3}, step(20), {"event": "stopped", "step": 25, "seconds": 6.0},
        {"event": "start", "step": 25}, {"event": "finished", "step": 30, "seconds": 4.0},
    ]  # fmt: skip
    row = run_row(log(tmp_path, *rows))
    assert (row["seconds"], row["gpu_seconds"], row["ending"]) == (13.0, 1.5 + 2 + 4, "finished")
    assert run_row(log(tmp_path / "cut", *rows[:3]))["ending"] == "cut"


def test_a_run_that_diverges_says_so_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Trainer.advance

    def poisoned(trainer: Trainer) -> None:
        advance(trainer)
        if trainer.step == 11:
            with torch.no_grad():
                trainer.model.embed.weight.fill_(torch.nan)

    monkeypatch.setattr(Trainer, "advance", poisoned)
    with pytest.raises(Diverged):
        train(TINY, tmp_path)
    row = run_row(tmp_path)
    assert (row["ending"], row["loss"]) == ("diverged", None)
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_a_run_that_fails_says_so_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "advance", lambda trainer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(TINY, tmp_path)
    assert run_row(tmp_path)["ending"] == "failed"
    last = list(read_rows(tmp_path / "log.jsonl"))[-1]
    assert last["reason"] == "division by zero"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a test row, a validation row and a row from before there were purposes."""
    folder = tmp_path_factory.mktemp("measured")
    train(TINY, folder)
    model, config = model_of(checkpoints.load(checkpoints.of_run(folder)))
    result = measure(model, get_task(config.task, **config.task_options), 6, 5)
    cpu = torch.device("cpu")
    old = row_of(config, 30, 12, result, cpu)
    for key in ("purpose", "variant", "rates", "trained_to"):
        del old[key]
    rows = [row_of(config, 30, 6, result, cpu, "test"), row_of(config, 30, 6, result, cpu, "validation"), old]
    append_rows(folder / "results.jsonl", rows)
    return folder


def test_rows_are_collected_once_and_old_ones_are_completed(measured: Path, tmp_path: Path) -> None:
    assert collect([measured], tmp_path) == {"copy": 4}
    assert collect([measured, measured], tmp_path) == {"copy": 0}
    rows = list(read_rows(tmp_path / "copy.jsonl"))
    assert [(row.get("event"), row.get("purpose"), row.get("length")) for row in rows] == [
        ("run", None, None), (None, "test", 6), (None, "validation", 6), (None, "test", 12),
    ]  # fmt: skip
    assert len({(row["variant"], row["rates"], row["trained_to"]) for row in rows}) == 1
    # A file of collected rows is a source too, and a row more is one row more.
    assert collect([tmp_path / "copy.jsonl"], tmp_path / "other") == {"copy": 4}
    append_rows(tmp_path / "copy.jsonl", [{**rows[1], "samples": 1000}])
    assert collect([tmp_path / "copy.jsonl"], tmp_path / "other") == {"copy": 1}


def test_a_source_with_nothing_to_collect_is_named(measured: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    append_rows(other, [{"task": "max_retrieval", "length": 16, "accuracy": 99.0}])
    with pytest.raises(ValueError, match=r"other\.jsonl has no rows to collect"):
        collect([measured, other], tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_rows_of_a_language_model_are_told_apart_by_how_they_were_measured(tmp_path: Path) -> None:
    known = {"config": "c0ffee", "seed": 0, "step": 5, "length": 64, "context": 64, "recipe": "lm/tiny/rope/softmax"}
    known |= {"method": "softmax", "position": "rope", "rope_base": 1e4, "time": "2026-01-01T00:00:00Z", "value": 1.0}
    reading = known | {"task": "lm-perplexity", "scoring": "same", "documents": 9}
    tuned = known | {"task": "s-niah-1", "recipe": "lm/tiny/rope/softmax+needles", "samples": 10, "answer_tokens": 16}
    rows = [
        reading, reading | {"scoring": "all"}, reading | {"rope_base": 5e5}, reading | {"length": 128},
        known | {"task": "s-niah-1", "samples": 10, "answer_tokens": 16}, tuned, tuned | {"task": "s-niah-2"},
        tuned | {"rope_base": 5e5}, tuned | {"answer_tokens": 128},
        *(reading | {name: value} for name, value in (("data", "c0de"), ("longest", 512), ("scored", 8))),
        tuned | {"depth": 0.5}, tuned | {"needle_seed": 1},
        *(known | {"task": "lm-short", "benchmark": name, "samples": 10} for name in ("piqa", "lambada")),
        *(known | {"task": "lm-heads", "layer": layer, "head": head} for layer in (1, 2) for head in (1, 2)),
    ]  # fmt: skip
    run = tmp_path / "run"  # one that was tuned has no log
    append_rows(run / "results.jsonl", rows)
    (run / "config.json").write_text('{"corpus": "text"}')
    told = {"lm-heads": 4, "lm-perplexity": 7, "lm-short": 2, "s-niah-1": 6, "s-niah-2": 1}
    assert collect([run], tmp_path / "results") == told
    assert collect([run, run / "results.jsonl"], tmp_path / "results") == dict.fromkeys(told, 0)


def test_a_run_that_went_on_gets_another_row(tmp_path: Path) -> None:
    run = log(tmp_path / "run", {"event": "start", "step": 0}, {"event": "stopped", "step": 5, "seconds": 1.0})
    assert collect([run], tmp_path) == {"copy": 1}
    append_rows(run / "log.jsonl", [{"event": "start", "step": 5}, {"event": "finished", "step": 30, "seconds": 1.0}])
    assert collect([run], tmp_path) == {"copy": 1}
    assert [row["ending"] for row in read_rows(tmp_path / "copy.jsonl")] == ["stopped", "finished"]


def test_the_command_collects(measured: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["collect", str(measured), "--into", str(tmp_path / "results")])
    assert result.exit_code == 0, result.output
    assert "copy.jsonl: 4 new rows" in result.output
    with pytest.raises(ValueError, match="is not the folder of a run"):
        list(rows_of_run(tmp_path))


def test_a_harvest_brings_in_rows_as_they_come(measured: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    Harvest(out).add(tmp_path / "nothing yet", ended=False)
    harvest = Harvest(out)
    harvest.add(measured, ended=False)
    assert all("event" not in row for row in read_rows(out / "results.jsonl"))
    harvest.add(measured, ended=True)
    harvest.add(measured, ended=True)
    Harvest(out).add(measured, ended=True)  # another process goes on with the same folder
    assert [row.get("event") for row in read_rows(out / "results.jsonl")] == [None, None, None, "run"]
    logged = list(read_rows(out / "logs.jsonl"))
    assert {row.pop("config") for row in logged} == {fingerprint(TINY)}
    assert logged == list(read_rows(measured / "log.jsonl"))


def test_kept_weights_are_those_that_were_measured_in_half_precision(measured: Path, tmp_path: Path) -> None:
    kept = keep_weights(measured, tmp_path)
    small, whole = (checkpoints.load(checkpoints.of_run(folder)) for folder in (kept, measured))
    assert {tensor.dtype for tensor in small.tensors.values()} == {torch.float16}
    assert small.step == whole.step
    ours, _ = model_of(small)
    theirs, _ = model_of(whole)
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=1e-3, atol=1e-6)


def test_a_stopped_run_is_no_failure(tmp_path: Path) -> None:
    stop = Stop()
    stop.wanted = True
    train(TINY, tmp_path, stop)
    assert run_row(tmp_path)["ending"] == "stopped"
