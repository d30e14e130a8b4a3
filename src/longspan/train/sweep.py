"""Many runs within a time budget: a few workers take one after the other, and each run goes on where it stopped."""

import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longspan.evaluate.ladder import Purpose, lengths_measured, samples_at
from longspan.results import Row
from longspan.train import checkpoint as checkpoints
from longspan.train.config import RunConfig
from longspan.train.loop import SHARED_BY, Stop, holds_another
from longspan.train.worker import Worker

GRACE = 120.0  # seconds that a run has to save itself when it is told to stop by hand
_SAVED_AND_LEFT = 130

State = Literal["waiting", "training", "measuring", "finished", "stopped", "diverged", "failed"]


@dataclass
class Job:
    """A run of a sweep: the arguments of `longspan` that train it and, if wanted, measure it, and where it stands."""

    title: str
    config: RunConfig
    folder: Path
    train: Sequence[str]
    evaluate: Sequence[str] | None = None
    purposes: Sequence[Purpose] = ("validation", "test")  # that `evaluate` measures for
    state: State = "waiting"
    step: int = 0
    loss: float | None = None
    worker: Worker | None = None  # that is at work on it

    def next_command(self) -> Sequence[str] | None:
        """What is still to be done, None if nothing."""
        rows = _last_rows(self.folder / "log.jsonl")
        ended = rows[-1]["event"] if rows else "never started"
        if ended not in ("finished", "diverged") or holds_another(self.folder, self.config):
            return self.train
        if self.evaluate is not None and not self._measured():
            return self.evaluate
        return None

    def _measured(self) -> bool:
        """Whether everything is measured, or nothing can be: a run may diverge before its first checkpoint."""
        if not any(checkpoints.saved(self.folder / kind) for kind in ("best", "checkpoints")):
            return True
        step = checkpoints.step_of(checkpoints.of_run(self.folder))
        plans = {purpose: samples_at(self.config, purpose) for purpose in self.purposes}
        rows = self.folder / "results.jsonl"
        return all(lengths_measured(rows, step, plan, purpose) == set(plan) for purpose, plan in plans.items())

    @property
    def diverged(self) -> bool:
        rows = _last_rows(self.folder / "log.jsonl")
        return bool(rows) and rows[-1]["event"] == "diverged"

    def start(self, worker: Worker) -> None:
        """Have what is still to be done done, if anything is."""
        self.look()
        command = self.next_command()
        if command is None:
            self.state = "diverged" if self.diverged else "finished"
            return
        self.state = "training" if command is self.train else "measuring"
        self.folder.mkdir(parents=True, exist_ok=True)
        worker.begin(command, self.folder / "output.log")
        self.worker = worker

    def look(self) -> None:
        """Read from its log how far it is."""
        rows = _last_rows(self.folder / "log.jsonl")
        self.step = rows[-1]["step"] if rows else 0
        self.loss = next((row["loss"] for row in reversed(rows) if row["event"] == "train"), None)

    def tail(self) -> str:
        """The end of what it printed."""
        return "\n".join(_end_of(self.folder / "output.log").splitlines()[-12:])


def sweep(
    jobs: Sequence[Job],
    side_by_side: int,
    seconds: float,
    stop: Stop,
    show: Callable[[], None],
    pause: float = 0.5,
    reserve: float = 0.0,
    fits: Callable[[Job, float], bool] = lambda job, left: True,
) -> None:
    """Bring the jobs to their end, in their order, up to `side_by_side` at a time, within `seconds`.

    `reserve` seconds before the time is up, or when `stop` is set, every run is told to save itself and leave. A job
    that does not fit into the seconds that are left is passed over. `show` is called after each look.
    """
    threads = max(1, (os.cpu_count() or 1) // side_by_side)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, SHARED_BY: str(side_by_side)}
    workers = [Worker(environment) for _ in range(side_by_side)]
    waiting = list(jobs)
    deadline = time.monotonic() + seconds - reserve
    patience = reserve or GRACE
    told: float | None = None
    try:
        while True:
            now = time.monotonic()
            if told is None and (stop.wanted or now >= deadline):
                told = now
                patience = GRACE if stop.wanted else patience
                _send(jobs, signal.SIGTERM)
            elif told is not None and now > told + patience:
                _send(jobs, signal.SIGKILL)
            while told is None and (free := [worker for worker in workers if not worker.busy]):
                following = next((job for job in waiting if fits(job, deadline - now)), None)
                if following is None:
                    break
                waiting.remove(following)
                following.start(free[0])
            for job in _running(jobs):
                _follow(job, told is not None)
            show()
            if not _running(jobs) and (told is not None or not any(fits(job, deadline - now) for job in waiting)):
                return
            time.sleep(pause)
    except Exception:  # of this process, which may have found a disk full: the runs are not to blame
        if told is None:  # twice would be a second Ctrl-C
            _send(jobs, signal.SIGTERM)
        _wait([worker for worker in workers if worker.busy], GRACE, pause)
        raise
    finally:  # none are at work, unless by a second Ctrl-C or for want of patience; their last checkpoints stay
        for worker in workers:
            worker.send(signal.SIGKILL)
        for worker in workers:
            worker.end()


def expected_seconds(config: RunConfig, step: int, runs: Iterable[Row]) -> float | None:
    """How long a run alone on the device still trains, by rows on earlier runs; None where nothing is known.

    The median of the runs of its task and method, or else of its task.
    """
    known = [row for row in runs if row.get("event") == "run" and row["task"] == config.task and row["step"] > 0]
    alike = [row for row in known if row["method"] == config.model.attention.method] or known
    if not alike:
        return None
    return (config.steps - step) * statistics.median(row["gpu_seconds"] / row["step"] for row in alike)


def _running(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if job.worker is not None]


def _send(jobs: Sequence[Job], number: signal.Signals) -> None:
    for job in jobs:
        if job.worker is not None:
            job.worker.send(number)


def _wait(workers: Sequence[Worker], patience: float, pause: float) -> None:
    """Until what they are at work on has ended, or the time is up."""
    deadline = time.monotonic() + patience
    while (workers := [worker for worker in workers if worker.code() is None]) and time.monotonic() < deadline:
        time.sleep(pause)


def _follow(job: Job, told: bool) -> None:
    """Look how far a running job is; when its command has ended, say how, and start what follows."""
    assert job.worker is not None
    worker, code = job.worker, job.worker.code()
    job.look()
    if code is None:
        return
    job.worker = None
    trained = job.state == "training" and (not code or job.diverged)
    if code in (_SAVED_AND_LEFT, -signal.SIGTERM) or (told and code == -signal.SIGKILL):
        job.state = "stopped"
    elif trained and job.evaluate is not None and not told:
        job.start(worker)
    elif code and not trained:
        job.state = "failed"
        worker.end()  # whatever broke, the device may not be what it was
    elif job.next_command() is None:
        job.state = "diverged" if job.diverged else "finished"
    else:
        job.state = "stopped"


def _last_rows(path: Path) -> list[Row]:
    """The rows at the end of a log."""
    rows = []
    for line in _end_of(path).splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # cut by the place where reading starts, or being written
    return rows


def _end_of(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 14)))
        return file.read().decode(errors="replace")
