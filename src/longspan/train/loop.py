"""A run from its config to its last checkpoint: progress, logs, validation, and a clean end whatever happens."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

from longspan.evaluate.ladder import measure
from longspan.results import Row, append_rows, now, provenance, write_whole
from longspan.train import checkpoint as checkpoints
from longspan.train.config import RunConfig, fingerprint, from_json, read_fields, to_json
from longspan.train.softening import is_soft
from longspan.train.trainer import Metrics, Trainer, learning_rate, model_of

Report = Callable[[Row], None]
SHARED_BY = "LONGSPAN_SIDE_BY_SIDE"  # how many runs share the device, told by what started them


class Diverged(RuntimeError):
    """The loss is no longer a number."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    ending: Literal["finished", "stopped"]
    step: int
    checkpoint: Path


class Stop:
    """A wish to stop, set by a signal and looked at between steps."""

    def __init__(self) -> None:
        self.wanted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM set the flag instead of breaking a step; a second one breaks it all the same."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.wanted:
            raise KeyboardInterrupt
        stop(number, frame)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(config: RunConfig, folder: Path, device: torch.device | str, report: Report, stop: Stop) -> Outcome:
    """Train `config` in `folder`, going on from its last checkpoint if it has one.

    `report` gets a row for every entry of the log, which goes to ``log.jsonl`` too.
    """
    import numpy  # noqa: F401  (safetensors writes by it; missing, both are missed now and not at the first checkpoint)
    import safetensors  # noqa: F401

    if holds_another(folder, config):
        raise ValueError(f"{folder} holds a run of another config; choose another folder or delete it")
    trainer = Trainer(config, device)  # before the folder is its own: it may be refused
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        return _run(trainer, folder, report, stop)


def _run(trainer: Trainer, folder: Path, report: Report, stop: Stop) -> Outcome:
    config, device = trainer.config, trainer.device
    write_whole(folder / "config.json", json.dumps(to_json(config), indent=2) + "\n")
    saved = checkpoints.saved(folder / "checkpoints")
    if saved:
        trainer.restore(checkpoints.load(saved[-1]))
    log = folder / "log.jsonl"

    def note(row: Row) -> None:
        append_rows(log, [row])
        report(row)

    shared = int(os.environ.get(SHARED_BY, 1))
    note({"event": "start", "step": trainer.step, "side_by_side": shared, "time": now(), **provenance(device)})
    started, first = time.monotonic(), trainer.step
    with failures_told(note, lambda: trainer.step):
        _train(trainer, folder, note, stop, started)
        path = saved[-1] if saved and trainer.step == first else _save(trainer, folder)
    ending: Literal["finished", "stopped"] = "finished" if trainer.step >= config.steps else "stopped"
    note({"event": ending, "step": trainer.step, "seconds": time.monotonic() - started, "time": now()})
    return Outcome(ending, trainer.step, path)


@contextmanager
def failures_told(note: Report, step: Callable[[], int]) -> Iterator[None]:
    """An error has the last word in the log."""
    started = time.monotonic()
    try:
        yield
    except Exception as error:
        event, seconds = ("diverged" if isinstance(error, Diverged) else "failed"), time.monotonic() - started
        with suppress(OSError):  # a full disk has no room for a last word
            note({"event": event, "step": step(), "seconds": seconds, "time": now(), "reason": str(error)})
        raise


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder of a run: two processes in one would write the same files and delete each other's."""
    try:
        import fcntl
    except ImportError:  # on Windows
        yield
        return
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is being trained by another process") from None
        except OSError:  # a file system without locks
            pass
        yield


def _train(trainer: Trainer, folder: Path, note: Report, stop: Stop, started: float) -> None:
    """Step to the end, or until told to stop, with logs, checkpoints and validation on the way."""
    config, first = trainer.config, trainer.step
    logged, logged_step = started, first
    while trainer.step < config.steps and not stop.wanted:
        trainer.advance()
        ended = trainer.step == config.steps
        if trainer.step % config.log_every == 0 or ended:
            metrics = trainer.metrics()  # waits for the device, so the clock is read after it
            now = time.monotonic()
            _log(trainer, metrics, note, (trainer.step - logged_step) / max(now - logged, 1e-9))
            logged, logged_step = now, trainer.step
        if ended or (config.validate_every and trainer.step % config.validate_every == 0):
            _validate(trainer, folder, note)
        # After the validation: who goes on from this step must have had it.
        if trainer.step % config.save_every == 0 and not ended:
            _save(trainer, folder)


def holds_another(folder: Path, config: RunConfig) -> bool:
    """Whether the folder is that of a run of another config."""
    path = folder / "config.json"
    return path.exists() and fingerprint(from_json(RunConfig, read_fields(path))) != fingerprint(config)


def _log(trainer: Trainer, metrics: Metrics, note: Report, speed: float) -> None:
    rate = learning_rate(trainer.step - 1, trainer.config)
    row = {"event": "train", "step": trainer.step, **metrics._asdict(), "rate": rate, "steps_per_second": speed}
    note(row)
    if not math.isfinite(metrics.loss):
        raise Diverged(
            f"the loss is {metrics.loss} after {trainer.step} steps; the checkpoints before it are kept. "
            "A lower learning rate, a longer warm-up or gradient clipping may help."
        )


def _save(trainer: Trainer, folder: Path) -> Path:
    _check_finite(trainer)
    return checkpoints.save(folder / "checkpoints", trainer.checkpoint())


def _check_finite(trainer: Trainer) -> None:
    """A broken checkpoint must not push out a good one."""
    for name, parameter in trainer.model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise Diverged(f"{name} is not finite after {trainer.step} steps; the checkpoints before it are kept")


def _validate(trainer: Trainer, folder: Path, note: Report) -> None:
    """Measure the model on validation samples; keep it as the best if no earlier one was better."""
    config = trainer.config
    if not config.validate_lengths:
        return
    _check_finite(trainer)
    checkpoint = trainer.checkpoint()
    model, _ = model_of(checkpoint, trainer.device)
    scores = {
        str(length): measure(
            model, trainer.task, length, config.validate_samples, purpose="validation", precision=config.precision
        ).value
        for length in config.validate_lengths
    }
    mean = sum(scores.values()) / len(scores)
    best = folder / "best.json"
    record = json.loads(best.read_text())["mean"] if best.exists() else -1.0
    kept = mean >= record and not is_soft(config, trainer.step - 1)  # else tables would name it by another alpha
    note({"event": "validate", "step": trainer.step, "scores": scores, "mean": mean, "best": kept})
    if kept:
        checkpoints.save(folder / "best", checkpoint, keep=1)
        told = {"step": trainer.step, "mean": mean, "scores": scores}
        write_whole(best, json.dumps(told, indent=2) + "\n")
