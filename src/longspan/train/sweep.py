"""Many runs within a time budget: each is a process of its own, a few at a time, and goes on where it stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longspan.evaluate.ladder import lengths_measured
from longspan.results import Row
from longspan.train import checkpoint as checkpoints
from longspan.train.config import RunConfig
from longspan.train.loop import Stop, holds_another

GRACE = 120.0  # seconds that a run has to save itself when it is told to stop
_SAVED_AND_LEFT = 130

State = Literal["waiting", "training", "measuring", "finished", "stopped", "failed"]


@dataclass
class Job:
    """A run of a sweep: the arguments of `longspan` that train it and, if wanted, measure it, and where it stands."""

    title: str
    config: RunConfig
    folder: Path
    train: Sequence[str]
    evaluate: Sequence[str] | None = None
    state: State = "waiting"
    step: int = 0
    loss: float | None = None
    process: subprocess.Popen[bytes] | None = None

    def next_command(self) -> Sequence[str] | None:
        """What is still to be done, None if nothing."""
        rows = _last_rows(self.folder / "log.jsonl")
        if not rows or rows[-1]["event"] != "finished" or holds_another(self.folder, self.config):
            return self.train
        if self.evaluate is not None and not self._measured():
            return self.evaluate
        return None

    def _measured(self) -> bool:
        step = checkpoints.step_of(checkpoints.of_run(self.folder))
        done = lengths_measured(self.folder / "results.jsonl", step, self.config.test_samples)
        return set(self.config.test_lengths) <= done

    def start(self, threads: int) -> None:
        """Start what is still to be done, if anything is."""
        self.look()
        command = self.next_command()
        if command is None:
            self.state = "finished"
            return
        self.state = "training" if command is self.train else "measuring"
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "output.log").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "longspan.cli", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": str(threads), **os.environ},
                process_group=0,  # Ctrl-C is the sweep's alone, which passes it on once
            )

    def look(self) -> None:
        """Read from its log how far it is."""
        rows = _last_rows(self.folder / "log.jsonl")
        self.step = rows[-1]["step"] if rows else 0
        self.loss = next((row["loss"] for row in reversed(rows) if row["event"] == "train"), None)

    def tail(self, lines: int = 12) -> str:
        """The end of what it printed."""
        return "\n".join(_end_of(self.folder / "output.log").splitlines()[-lines:])


def sweep(
    jobs: Sequence[Job],
    side_by_side: int,
    seconds: float,
    stop: Stop,
    show: Callable[[], None],
    pause: float = 0.5,
) -> None:
    """Bring the jobs to their end, up to `side_by_side` at a time, within about `seconds`.

    When the time is up, or `stop` is set, every run is told to save itself and leave. `show` is called after each look.
    """
    threads = max(1, (os.cpu_count() or 1) // side_by_side)
    waiting = list(jobs)
    deadline = time.monotonic() + seconds
    told: float | None = None
    try:
        while True:
            if told is None and (stop.wanted or time.monotonic() >= deadline):
                told = time.monotonic()
                _send(jobs, signal.SIGTERM)
            elif told is not None and time.monotonic() > told + GRACE:
                _send(jobs, signal.SIGKILL)
            while told is None and waiting and len(_running(jobs)) < side_by_side:
                waiting.pop(0).start(threads)
            for job in _running(jobs):
                _follow(job, threads, told is not None)
            show()
            if not _running(jobs) and (told is not None or not waiting):
                return
            time.sleep(pause)
    finally:  # none are left, unless by an error or a second Ctrl-C; their last checkpoints stay
        _send(jobs, signal.SIGKILL)


def _running(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if job.process is not None]


def _send(jobs: Sequence[Job], number: signal.Signals) -> None:
    for job in jobs:
        if job.process is not None:
            job.process.send_signal(number)


def _follow(job: Job, threads: int, told: bool) -> None:
    """Look how far a running job is; when its process has ended, say how, and start what follows."""
    assert job.process is not None
    code = job.process.poll()
    job.look()
    if code is None:
        return
    job.process = None
    if code in (_SAVED_AND_LEFT, -signal.SIGTERM) or (told and code == -signal.SIGKILL):
        job.state = "stopped"
    elif code:
        job.state = "failed"
    elif job.state == "training" and job.evaluate is not None and not told:
        job.start(threads)
    else:
        job.state = "finished" if job.next_command() is None else "stopped"


def _last_rows(path: Path) -> list[Row]:
    """The rows at the end of a log."""
    rows = []
    for line in _end_of(path).splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # cut by the place where reading starts, or being written
    return rows


def _end_of(path: Path, size: int = 1 << 14) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read().decode(errors="replace")
