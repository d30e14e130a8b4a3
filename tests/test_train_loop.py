"""A run from its config to its last checkpoint: exact resume, a clean end, and nothing good ever lost."""

import errno
import json
import math
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TINY, log_of, tiny, train

from longspan.evaluate.ladder import Measurement, measure
from longspan.results import Row
from longspan.tasks.base import Task
from longspan.train import checkpoint as checkpoints
from longspan.train import loop
from longspan.train.checkpoint import CheckpointError, load, saved, step_of
from longspan.train.config import RunConfig
from longspan.train.loop import Diverged, Stop, stop_on_signals
from longspan.train.trainer import Trainer

OPTIMIZERS = {
    "muon": TINY,
    "adamw": tiny(optimizer__name="adamw", average=None, optimizer__weight_decay=0.1),
}


def before_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[Trainer], None]) -> None:
    """Have `act` look at the trainer, or break it, before every step."""
    advance = Trainer.advance

    def wrapped(self: Trainer) -> None:
        act(self)
        advance(self)

    monkeypatch.setattr(Trainer, "advance", wrapped)


def assert_same_end(folder: Path, other: Path) -> None:
    """Weights, optimiser, average, the best model and every logged number, to the last bit."""
    for kind in ("checkpoints", "best"):
        mine, theirs = (load(saved(each / kind)[-1]) for each in (folder, other))
        assert mine.step == theirs.step
        assert mine.tensors.keys() == theirs.tensors.keys()
        assert [name for name, tensor in mine.tensors.items() if not torch.equal(tensor, theirs.tensors[name])] == []

    def numbers(path: Path) -> list[Row]:
        rows = {row["step"]: row for row in log_of(path, "train")}  # a crash repeats rows
        return [{key: value for key, value in row.items() if key != "steps_per_second"} for row in rows.values()]

    assert numbers(folder) == numbers(other)
    assert (folder / "best.json").read_text() == (other / "best.json").read_text()


def test_a_folder_has_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, refused = tiny(steps=2), []

    def begin_another(trainer: Trainer) -> None:
        with pytest.raises(ValueError, match="is being trained by another process"):
            train(config, tmp_path)
        refused.append(trainer.step)

    before_step(monkeypatch, begin_another)
    train(config, tmp_path)
    train(config, tmp_path)  # the first has let go
    assert refused == [0, 1]
    assert [row["step"] for row in log_of(tmp_path, "start")] == [0, 2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same runs, uninterrupted."""
    folders = {name: tmp_path_factory.mktemp(name) for name in OPTIMIZERS}
    for name, folder in folders.items():
        assert train(OPTIMIZERS[name], folder).ending == "finished"
    return folders


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stops", [(1,), (7,), (8,), (10,), (29,), (3, 13, 14)], ids=str)
def test_interrupted_and_resumed_is_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Path], optimizer: str, stops: tuple[int, ...]
) -> None:
    config = OPTIMIZERS[optimizer]
    for step in stops:
        stop = Stop()
        with monkeypatch.context() as patch:
            before_step(patch, lambda trainer, stop=stop, step=step: _stop_after(trainer, stop, step))  # type: ignore[misc]
            outcome = train(config, tmp_path, stop)
        assert (outcome.ending, outcome.step, step_of(outcome.checkpoint)) == ("stopped", step, step)
    assert train(config, tmp_path).ending == "finished"
    assert [row["step"] for row in log_of(tmp_path, "start")] == [0, *stops]
    assert [row["step"] for row in log_of(tmp_path, "stopped")] == list(stops)
    assert_same_end(tmp_path, whole[optimizer])


def _stop_after(trainer: Trainer, stop: Stop, step: int) -> None:
    stop.wanted = trainer.step + 1 == step


def test_a_crash_goes_on_from_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Path]
) -> None:
    def crash(trainer: Trainer) -> None:
        if trainer.step == 17:
            raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        before_step(patch, crash)
        with pytest.raises(RuntimeError, match="power cut"):
            train(TINY, tmp_path)
    assert train(TINY, tmp_path).ending == "finished"
    assert [row["step"] for row in log_of(tmp_path, "start")] == [0, 10]
    assert_same_end(tmp_path, whole["muon"])


def test_a_kill_in_a_validation_costs_no_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(save_every=7)  # saved at the steps that are validated
    train(config, tmp_path / "whole")

    def killed(*arguments: Any, **options: Any) -> Measurement:
        if len(log_of(tmp_path / "killed", "validate")) == 1:
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "measure", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "killed")
    assert train(config, tmp_path / "killed").ending == "finished"
    steps = [[row["step"] for row in log_of(tmp_path / name, "validate")] for name in ("killed", "whole")]
    assert steps[0] == steps[1] == [7, 14, 21, 28, 30]
    assert_same_end(tmp_path / "killed", tmp_path / "whole")


def test_a_full_disk_stops_the_run_and_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Path]
) -> None:
    write = checkpoints._write

    def full(path: Path, data: bytes) -> None:
        if path.name == "index.json" and json.loads(data)["step"] == 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_write", full)
        with pytest.raises(CheckpointError, match=r"No space left.*last good one is .*step-00000010"):
            train(TINY, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]
    train(TINY, tmp_path)
    assert_same_end(tmp_path, whole["muon"])


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_serves(tmp_path: Path, whole: dict[str, Path]) -> None:
    train(TINY, tmp_path)
    last = saved(tmp_path / "checkpoints")[-1]
    (last / "part-0000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"Delete it to go on from .*step-00000020"):
        train(TINY, tmp_path)
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    train(TINY, tmp_path)
    assert_same_end(tmp_path, whole["muon"])


def test_the_log_tells_the_whole_story(whole: dict[str, Path]) -> None:
    folder = whole["muon"]
    (start,) = log_of(folder, "start")
    assert {"commit", "command", "device", "torch", "python"} <= start.keys()
    rows = log_of(folder, "train")
    assert [row["step"] for row in rows] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert rows[0].keys() == {
        "event", "step", "loss", "token_accuracy", "gradient_norm", "rate", "steps_per_second"
    }  # fmt: skip
    assert [row["step"] for row in log_of(folder, "validate")] == [7, 14, 21, 28, 30]
    assert [row["step"] for row in log_of(folder, "finished")] == [30]
    assert json.loads((folder / "config.json").read_text())["steps"] == 30
    assert [step_of(path) for path in saved(folder / "checkpoints")] == [20, 30]
    assert not list(folder.glob("*.part"))


def test_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    path = train(TINY, tmp_path).checkpoint
    written = (path / "index.json").stat().st_mtime_ns
    assert train(TINY, tmp_path) == loop.Outcome("finished", 30, path)
    assert (path / "index.json").stat().st_mtime_ns == written


def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    train(tiny(steps=2), tmp_path)
    with pytest.raises(ValueError, match="holds a run of another config"):
        train(tiny(steps=2, seed=1), tmp_path)
    train(tiny(steps=2, log_every=1, name="watched more closely"), tmp_path)


def test_a_run_that_cannot_be_leaves_its_folder_free(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not divide"):
        train(tiny(steps=2, model__heads=3), tmp_path / "run")
    assert train(tiny(steps=2), tmp_path / "run").ending == "finished"


def test_a_checkpoint_of_another_config_is_refused() -> None:
    with pytest.raises(ValueError, match="another config"):
        Trainer(tiny(seed=1)).restore(Trainer(TINY).checkpoint())


def poison(step: int) -> Callable[[Trainer], None]:
    def act(trainer: Trainer) -> None:
        if trainer.step == step:
            with torch.no_grad():
                trainer.model.embed.weight.fill_(torch.nan)

    return act


@pytest.mark.parametrize(
    ("config", "message", "kept", "best"),
    [
        (tiny(validate_every=9), "the loss is nan after 16 steps", 10, 9),
        (tiny(log_every=100, validate_every=None), "embed.weight is not finite after 20 steps", 10, None),
        (tiny(log_every=100), "embed.weight is not finite after 14 steps", 10, 7),
        (tiny(log_every=100, save_every=100, validate_every=None), "the loss is nan after 30 steps", None, None),
    ],
    ids=["seen-in-the-log", "seen-when-saving", "seen-when-validating", "seen-at-the-end"],
)
def test_a_run_that_diverges_keeps_its_last_good_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: RunConfig,
    message: str,
    kept: int | None,
    best: int | None,
) -> None:
    before_step(monkeypatch, poison(12))
    with pytest.raises(Diverged, match=message):
        train(config, tmp_path)
    for kind, step in (("checkpoints", kept), ("best", best)):
        found = [load(path) for path in saved(tmp_path / kind)]
        assert [checkpoint.step for checkpoint in found] == ([] if step is None else [step])
        assert all(tensor.isfinite().all() for checkpoint in found for tensor in checkpoint.tensors.values())


def test_validation_keeps_the_best_and_of_equals_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([10.0, 20.0, 60.0, 40.0, 30.0, 50.0, 60.0, 40.0, 0.0, 20.0])  # two lengths each
    asked = []

    def scripted(model: object, task: Task, length: int, samples: int, **options: object) -> Measurement:
        asked.append((length, samples, options["purpose"]))
        return Measurement("exact_match", next(scores), 0, 100, 0, samples, 0)

    monkeypatch.setattr(loop, "measure", scripted)
    train(TINY, tmp_path)
    rows = log_of(tmp_path, "validate")
    assert [row["mean"] for row in rows] == [15, 50, 40, 50, 10]
    assert [row["best"] for row in rows] == [True, True, False, True, False]
    assert set(asked) == {(6, 8, "validation"), (9, 8, "validation")}
    assert json.loads((tmp_path / "best.json").read_text()) == {
        "step": 28,
        "mean": 50,
        "scores": {"6": 60.0, "9": 40.0},
    }
    assert [step_of(path) for path in saved(tmp_path / "best")] == [28]


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_sets_a_flag_and_a_second_one_breaks(second: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        assert not stop.wanted
        signal.raise_signal(signal.SIGTERM)
        assert stop.wanted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(second)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_thread_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def inside() -> None:
        with stop_on_signals() as stop:
            seen.append((stop.wanted, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


def test_a_step_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, save = [], checkpoints.save

    def spy(folder: Path, checkpoint: checkpoints.Checkpoint, **options: Any) -> Path:
        steps.append(checkpoint.step)
        return save(folder, checkpoint, **options)

    monkeypatch.setattr(checkpoints, "save", spy)
    train(tiny(steps=6, save_every=3, validate_every=None, validate_lengths=()), tmp_path)
    assert steps == [3, 6]


def test_the_logged_rate_is_that_of_the_step(whole: dict[str, Path]) -> None:
    """A step of warm-up short of its end, and the last one, which is not yet at zero."""
    rates = {row["step"]: row["rate"] for row in log_of(whole["muon"], "train")}
    assert rates[4] == pytest.approx(4 / 5 * (1 + math.cos(math.pi * 3 / 30)) / 2)
    assert rates[30] == pytest.approx((1 + math.cos(math.pi * 29 / 30)) / 2)
