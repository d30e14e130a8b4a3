"""Sweeps: the grid, what is skipped, what goes on, what fails, and how they stop."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TINY_EDITS, log_of, tiny, train
from typer.testing import CliRunner

from longspan.cli import app, main
from longspan.cli.training import config_of, folder_of
from longspan.results import append_rows, read_rows
from longspan.train import sweep as sweeps
from longspan.train.loop import Stop
from longspan.train.sweep import Job, expected_seconds, sweep
from longspan.train.worker import Worker

EDITS = [edit.removeprefix("--set=") for edit in TINY_EDITS]


@pytest.fixture
def jobs_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `longspan sweep` would run, instead of running it."""
    seen: dict[str, Any] = {}

    def record(jobs: list[Job], side_by_side: int, seconds: float, *_: object, **__: object) -> None:
        seen.update(jobs=jobs, side_by_side=side_by_side, seconds=seconds)

    monkeypatch.setattr(sweeps, "sweep", record)

    def call(*args: str) -> Any:
        result = CliRunner().invoke(app, ["sweep", *args], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return seen

    return call


def test_the_grid_is_every_combination(jobs_of: Any) -> None:
    seen = jobs_of(
        "copy", "mqmtar", "--methods", "softmax", "asentmax", "--seeds", "3", "--rates", "5e-4", "1e-3",
        "--recipe", "longspan", "--minutes", "25", "--side-by-side", "3", "--positions", "nape", "rope",
    )  # fmt: skip
    assert (seen["side_by_side"], seen["seconds"]) == (3, 1500)
    jobs = seen["jobs"]
    assert len({job.folder for job in jobs}) == len({job.title for job in jobs}) == len(jobs) == 2 * 2 * 3 * 2 * 2
    (job,) = [job for job in jobs if job.title == "longspan/mqmtar/rope/softmax learning_rate=0.001 seed 2"]
    assert job.config.optimizer.learning_rate == 1e-3
    assert (job.config.seed, job.config.model.attention.method, job.config.steps) == (2, "softmax", 10_000)
    assert job.folder == Path("runs/longspan-mqmtar-rope-softmax+optimizer.learning_rate=0.001-s2")
    assert job.train == [
        "train", "longspan/mqmtar/rope/softmax", "--seed", "2", "--out", str(job.folder), "--device", "auto",
        "--set", "optimizer.learning_rate=0.001",
    ]  # fmt: skip
    assert job.evaluate is None


def test_a_combination_named_twice_runs_once_and_edits_reach_every_run(jobs_of: Any) -> None:
    args = ("copy", "--methods", "softmax", "softmax", "--muon-rates", "0.02", "--smoke", "--evaluate", "--out=there")
    jobs = jobs_of(*args, "--device=cpu", "--set", "steps=7", "batch=3")["jobs"]
    (job,) = jobs
    assert (job.config.steps, job.config.batch, job.config.optimizer.muon_learning_rate) == (7, 3, 0.02)
    assert job.config.model.dim == 64
    assert job.folder.parent == Path("there")
    assert job.evaluate == ["evaluate", str(job.folder), "--purpose", "both", "--device", "cpu"]


def test_whole_recipes_with_their_edits_and_a_plan_in_its_order(jobs_of: Any, tmp_path: Path) -> None:
    plan = tmp_path / "plan.txt"
    plan.write_text(
        "# the most urgent first\npaper/sort/nope/softmax+steps=7 2 0\n\nlongspan/copy/nape/entmax  # all\n"
    )
    jobs = jobs_of("paper/copy/rope/ssmax/smoke+batch=3", "--plan", str(plan), "--seeds", "2", "--out=r")["jobs"]
    assert [(job.config.name, job.config.seed) for job in jobs] == [
        ("paper/copy/rope/ssmax/smoke+batch=3", 0),
        ("paper/copy/rope/ssmax/smoke+batch=3", 1),
        ("paper/sort/nope/softmax+steps=7", 2),
        ("paper/sort/nope/softmax+steps=7", 0),
        ("longspan/copy/nape/entmax", 0),
        ("longspan/copy/nape/entmax", 1),
    ]
    assert jobs[0].train == [
        "train", "paper/copy/rope/ssmax", "--seed", "0", "--out", str(jobs[0].folder), "--device", "auto",
        "--smoke", "--set", "batch=3",
    ]  # fmt: skip
    # A row's recipe makes the same run again.
    again = jobs_of(jobs[2].config.name, "--seeds", "3", "--out=r")["jobs"][2]
    assert (again.folder, again.train) == (jobs[2].folder, jobs[2].train)


def test_a_name_that_is_too_long_for_a_folder_ends_in_its_hash(tmp_path: Path) -> None:
    def folder(seed: int, edits: list[str]) -> str:
        return folder_of(config_of("longspan/copy/nape/asentmax", seed, False, edits), tmp_path).name

    short = ["steps=7"] * 25
    assert folder(0, short) == "+".join(["longspan-copy-nape-asentmax", *short]) + "-s0"
    long = [folder(seed, ["steps=7"] * count) for seed in (0, 1) for count in (40, 41)]
    assert len(set(long)) == 4
    for name in long:
        (tmp_path / name).mkdir()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "nothing to train"),
        (["--plan=plan.txt"], "plan.txt, line 2: a line is a recipe and its seeds"),
        (["max_retrieval"], "`longspan demo` trains and measures it"),
        (["paper/copy"], "there is no recipe 'paper/copy'"),
        (["paper/copy/nape/softmax/huge"], "there is no size 'huge'"),
        (["paper/copy/nape/softmax+steps=x"], "steps must be int"),
        (["copy", "--minutes=0.5"], "--minutes 0.5 leaves no time for training: --reserve is 30 seconds"),
    ],
)
def test_what_cannot_be_swept_is_told(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.txt").write_text("paper/copy/nape/softmax 1\npaper/copy/nape/softmax one\n")
    monkeypatch.setattr(sys, "argv", ["longspan", "sweep", *args])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def job_in(folder: Path, evaluate: bool = False, **changes: Any) -> Job:
    config = tiny(**changes)
    return Job(folder.name, config, folder, ["train"], ["evaluate"] if evaluate else None)


def test_what_is_left_to_do_is_read_from_the_run(tmp_path: Path) -> None:
    job = job_in(tmp_path, evaluate=True, steps=6)
    assert job.next_command() is job.train
    stop = Stop()
    stop.wanted = True
    train(job.config, tmp_path, stop)
    assert job.next_command() is job.train
    train(job.config, tmp_path)
    assert job.next_command() is job.evaluate
    assert job_in(tmp_path, steps=6).next_command() is None
    results = tmp_path / "results.jsonl"
    append_rows(results, [{"step": 6, "length": 6, "samples": 20}, {"step": 5, "length": 12, "samples": 20}])
    assert job.next_command() is job.evaluate
    append_rows(results, [{"step": 6, "length": 12, "samples": 20}])
    assert job.next_command() is job.evaluate
    job.purposes = ["test"]
    assert job.next_command() is None
    job.purposes = ["validation", "test"]
    validated = [{"step": 6, "length": length, "samples": 20, "purpose": "validation"} for length in (6, 12, 24, 48)]
    append_rows(results, validated)
    assert job.next_command() is None
    job.look()
    assert job.step == 6
    assert job.loss == log_of(tmp_path, "train")[-1]["loss"]


def test_a_sweep_trains_measures_skips_and_survives_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["copy", "--methods", "softmax", "entmax", "--smoke", "--evaluate", "--device=cpu", "--side-by-side=2"]
    args += ["--set", *EDITS, "steps=4"]
    # A folder that holds another run makes one of the two fail.
    other = tiny(steps=3)
    broken = next(name for name in _folders(args) if "entmax" in name)
    train(other, tmp_path / broken)

    result = CliRunner().invoke(app, ["sweep", *args], catch_exceptions=False)
    assert result.exit_code == 1, result.output
    assert "longspan/copy/nape/softmax seed 0: finished, step 4" in result.output
    assert "holds a run of another config" in result.output
    assert "failed: " in result.output
    assert "Traceback" not in result.output
    (good,) = [path for path in (tmp_path / "runs").iterdir() if "softmax" in path.name]
    measured = [(row["purpose"], row["length"]) for row in read_rows(good / "results.jsonl")]
    assert measured == [*(("validation", length) for length in (6, 12, 24, 48)), ("test", 6), ("test", 12)]
    before = (good / "output.log").read_bytes()

    args.remove("entmax")
    result = CliRunner().invoke(app, ["sweep", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "training" not in result.output
    assert (good / "output.log").read_bytes() == before


def test_a_sweep_brings_in_rows_of_runs_that_went_well_and_of_one_that_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    edits = "+".join(edit for edit in EDITS if "lengths" not in edit)
    good = f"longspan/copy/nape/softmax/smoke+{edits}+test_lengths=[6]+steps=4"
    bad = f"{good}+optimizer.learning_rate=1e30"
    args = ["sweep", good, bad, "--evaluate", "--device=cpu", "--side-by-side=2", "--collect=out", "--weights=weights"]
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "2 runs, 2 at a time; 2 have no earlier run to go by" in result.output
    assert ": diverged, step " in result.output
    rows = list(read_rows(Path("out/results.jsonl")))
    assert {(row["recipe"], row["ending"]) for row in rows if row.get("event") == "run"} == {
        (good, "finished"),
        (bad, "diverged"),
    }
    measured = [(row["purpose"], row["length"]) for row in rows if row["recipe"] == good and "length" in row]
    assert measured == [*(("validation", length) for length in (6, 12, 24, 48)), ("test", 6)]
    assert {row["event"] for row in read_rows(Path("out/logs.jsonl"))} >= {"start", "train", "finished", "diverged"}
    assert [path.name for path in Path("weights").iterdir()] == [f"{good.replace('/', '-')}-s0"]

    # The same command again: nothing is run, not even what diverged, and nothing is written twice.
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "training" not in result.output
    assert list(read_rows(Path("out/results.jsonl"))) == rows


def test_times_are_estimated_by_runs_of_the_same_task_and_method() -> None:
    config = tiny(steps=1000)

    def row(method: str, step: int, seconds: float, task: str = "copy") -> Any:
        return {"event": "run", "task": task, "method": method, "step": step, "gpu_seconds": seconds}

    assert expected_seconds(config, 0, []) is None
    assert expected_seconds(config, 0, [row("asentmax", 10, 1.0, task="sort"), {"task": "copy"}]) is None
    others = [row("softmax", 100, 1.0), row("softmax", 0, 9.0)]
    assert expected_seconds(config, 0, others) == pytest.approx(10.0)
    own = [row("asentmax", 100, seconds) for seconds in (2.0, 3.0, 50.0)]
    assert expected_seconds(config, 400, [*others, *own]) == pytest.approx(18.0)


def test_a_run_that_does_not_fit_is_passed_over(tmp_path: Path) -> None:
    first, second = jobs = [long_job(tmp_path / "first"), job_in(tmp_path / "second", steps=3)]
    train(second.config, second.folder)
    sweep(jobs, 1, 60, Stop(), lambda: None, pause=0.01, fits=lambda job, left: job is second)
    assert (first.state, second.state) == ("waiting", "finished")
    sweep([first], 1, 60, Stop(), lambda: None, pause=0.01, reserve=60)  # all of the time is for saving
    assert first.state == "waiting"


def _folders(args: list[str]) -> list[str]:
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps, "sweep", lambda jobs, *_, **__: seen.extend(str(job.folder) for job in jobs))
        CliRunner().invoke(app, ["sweep", *args], catch_exceptions=False)
    return seen


def long_job(folder: Path) -> Job:
    edits = [*EDITS, "steps=60", "log_every=1"]
    command = ["train", "copy", "--smoke", "--device=cpu", f"--out={folder}", *(f"--set={edit}" for edit in edits)]
    return Job(folder.name, config_of("longspan/copy/nape/asentmax", 0, True, edits), folder, command)


def test_a_sweep_that_is_over_has_every_run_save_itself_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two threads wait for each other for seconds where others are at work
    first, second = jobs = [long_job(tmp_path / "first"), long_job(tmp_path / "second")]
    states: list[tuple[str, str]] = []
    stop = Stop()

    def show() -> None:
        states.append((first.state, second.state))
        stop.wanted = first.step >= 3

    sweep(jobs, 1, 300, stop, show, pause=0.05)
    assert states[0] == ("training", "waiting")
    assert states[-1] == ("stopped", "waiting")
    (stopped,) = log_of(first.folder, "stopped")
    assert 3 <= stopped["step"] == first.step < 60
    assert not second.folder.exists()

    again = long_job(first.folder)
    sweep([again], 1, 300, Stop(), lambda: None, pause=0.05)
    assert (again.state, again.step) == ("finished", 60)
    assert [row["step"] for row in log_of(first.folder, "start")] == [0, stopped["step"]]

    sweep([again, second], 1, 0.0, Stop(), lambda: None)  # no time at all
    assert second.state == "waiting"


@pytest.mark.parametrize("stopped", [False, True], ids=["alone", "after-ctrl-c"])
def test_an_error_of_the_sweep_lets_every_run_save_itself(
    stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, for instance, where the rows are brought in."""
    told: list[signal.Signals] = []
    workers: list[Any] = []

    class Saving(Worker):
        """One that takes two looks to save what it does."""

        looks = 2

        def begin(self, arguments: Sequence[str], output: Path) -> None:
            workers.append(self)
            self.busy = True

        def code(self) -> int | None:
            self.looks -= bool(told)
            self.busy = self.looks >= 0
            return None if self.busy else 130

        def send(self, number: signal.Signals) -> None:
            told.append(number)

    stop, shows = Stop(), 0

    def show() -> None:
        nonlocal shows
        shows += 1
        stop.wanted = stopped
        if shows == 2:
            raise OSError("no space left on device")

    monkeypatch.setattr(sweeps, "Worker", Saving)
    with pytest.raises(OSError, match="no space left"):
        sweep([job_in(tmp_path / "run")], 1, 300, stop, show, pause=0.01)
    assert [worker.looks for worker in workers] == [-1]
    assert told == [signal.SIGTERM, signal.SIGKILL]  # the last one finds nothing at work


def test_what_was_measured_when_the_time_is_up_stays_and_the_next_sweep_goes_on(tmp_path: Path) -> None:
    folder, results = tmp_path / "run", tmp_path / "run" / "results.jsonl"
    edits = [*EDITS, "steps=2", "test_samples=300", "test_lengths=[96,192]"]

    def job() -> Job:
        train = ["train", "copy", "--smoke", "--device=cpu", f"--out={folder}", *(f"--set={edit}" for edit in edits)]
        config = config_of("longspan/copy/nape/asentmax", 0, True, edits)
        return Job("run", config, folder, train, ["evaluate", str(folder), "--purpose=both", "--device=cpu"])

    first, second, stop = job(), job(), Stop()

    def show() -> None:
        stop.wanted = results.exists() and results.stat().st_size > 0

    sweep([first], 1, 300, stop, show, pause=0.02)
    assert first.state == "stopped"
    measured = list(read_rows(results))
    assert 1 <= len(measured) < 6
    sweep([second], 1, 300, Stop(), lambda: None, pause=0.02)
    assert second.state == "finished"
    rows = list(read_rows(results))
    assert rows[: len(measured)] == measured
    assert [row["length"] for row in rows] == [6, 12, 24, 48, 96, 192]
    assert len(log_of(folder, "start")) == 1


def test_ctrl_c_stops_every_run_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "longspan.cli", "sweep", "copy", "--methods", "softmax", "--smoke", "--seeds=2"]
    command += ["--side-by-side=2", "--device=cpu", "--set", *EDITS, "steps=100000", "log_every=1"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ}
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(tmp_path.glob("runs/*/log.jsonl"))) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "2 of 2 are not finished: the same command goes on." in output
    assert "Traceback" not in output
    for folder in (tmp_path / "runs").iterdir():
        assert len(log_of(folder, "stopped")) == 1
        assert list((folder / "checkpoints").glob("step-*"))


def test_seeds_may_begin_anywhere(jobs_of: Any) -> None:
    jobs = jobs_of("copy", "--seeds", "2", "--first-seed", "3")["jobs"]
    assert [job.config.seed for job in jobs] == [3, 4]
