"""Workers: one command after the other in one process, none touched by the one before, and how they break."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY_EDITS, log_of, tiny

from longspan.results import read_rows
from longspan.train import sweep as sweeps
from longspan.train.checkpoint import load, saved
from longspan.train.loop import Stop
from longspan.train.sweep import Job, sweep
from longspan.train.trainer import Trainer
from longspan.train.worker import Worker, compile_without_limit, release

ODD = ("-m", "odd_commands")
TESTS = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": TESTS}


@pytest.fixture
def odd() -> Iterator[Worker]:
    worker = Worker(ENVIRONMENT, ODD)
    yield worker
    worker.end()


def result_of(worker: Worker, *arguments: str, output: Path) -> int:
    worker.begin(arguments, output)
    deadline = time.monotonic() + 60
    while (code := worker.code()) is None:
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.01)
    assert not worker.busy
    return code


def test_a_command_that_leaves_is_followed_by_the_next_in_the_same_process(odd: Worker, tmp_path: Path) -> None:
    first, other, last = (tmp_path / name for name in ("first", "other", "last"))
    assert result_of(odd, "pid", output=first) == 0
    assert result_of(odd, "exit", "3", output=other) == 3
    assert result_of(odd, "words", output=other) == 1
    assert result_of(odd, "print", output=other) == 0
    assert result_of(odd, "pid", output=last) == 0
    assert result_of(odd, "pid", output=first) == 0
    assert first.read_text() == 2 * last.read_text()
    # By whatever hand, in the file of its command alone; and there is nothing to read.
    assert sorted(other.read_text().splitlines()) == [
        "by Python", "by a child", "by a library", "read: ", "some last words",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [("raise", 1, "RuntimeError: CUDA error"), ("kill", -signal.SIGKILL, "about to be killed")],
)
def test_a_command_that_breaks_its_worker_leaves_the_next_a_new_one(
    odd: Worker, tmp_path: Path, how: str, code: int, words: str
) -> None:
    before, broken, after = (tmp_path / name for name in ("before", "broken", "after"))
    assert result_of(odd, "pid", output=before) == 0
    assert result_of(odd, how, output=broken) == code
    assert words in broken.read_text()
    assert result_of(odd, "pid", output=after) == 0
    assert before.read_text() != after.read_text()


def test_a_worker_that_dies_between_two_commands_or_at_once_is_not_waited_for(tmp_path: Path) -> None:
    worker = Worker(ENVIRONMENT, ["-c", "import sys; sys.exit('nothing is installed here')"])
    assert result_of(worker, "pid", output=tmp_path / "first") == 1
    assert result_of(worker, "pid", output=tmp_path / "second") == 1
    assert (tmp_path / "second").read_text() == "nothing is installed here\n"
    worker.send(signal.SIGTERM)  # to nobody
    worker.end()


def test_what_a_command_changes_is_put_back(odd: Worker, tmp_path: Path) -> None:
    for command in ("look", "change", "look"):
        assert result_of(odd, command, output=tmp_path / command) == 0
    assert (tmp_path / "look").read_text() == 2 * "highest torch.float32 False\n"


def arguments_of(folder: Path, method: str, *edits: str) -> list[str]:
    recipe = f"longspan/copy/nape/{method}"
    return ["train", recipe, "--smoke", "--device=cpu", f"--out={folder}", *TINY_EDITS, *(f"--set={e}" for e in edits)]


def test_a_run_in_a_used_worker_is_that_of_a_fresh_process(tmp_path: Path) -> None:
    """Bit by bit, with noise, which is drawn from the generator that all share."""
    used, fresh, earlier = (tmp_path / name for name in ("used", "fresh", "earlier"))
    noisy = ("steps=12", "log_every=1", "model.attention.qk_noise=0.5", "noise_from=0.0")
    worker = Worker(ENVIRONMENT)
    output = tmp_path / "output"
    for arguments in (
        arguments_of(earlier, "softmax", "steps=3", "model.dim=32"),
        ["evaluate", str(earlier), "--device=cpu"],
        arguments_of(used, "asentmax", *noisy),
        ["evaluate", str(used), "--device=cpu"],
    ):
        assert result_of(worker, *arguments, output=output) == 0, output.read_text()
    worker.end()
    for arguments in (arguments_of(fresh, "asentmax", *noisy), ["evaluate", str(fresh), "--device=cpu"]):
        subprocess.run([sys.executable, "-m", "longspan.cli", *arguments], check=True, env=ENVIRONMENT)

    mine, theirs = (load(saved(folder / "checkpoints")[-1]).tensors for folder in (used, fresh))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert [row["loss"] for row in log_of(used, "train")] == [row["loss"] for row in log_of(fresh, "train")]
    told, expected = (list(read_rows(folder / "results.jsonl")) for folder in (used, fresh))
    assert [row["token_accuracy"] for row in told] == [row["token_accuracy"] for row in expected]
    assert told[0]["command"] == f"longspan evaluate {used.name} --device=cpu"
    assert told[0]["commit"] == expected[0]["commit"]


def job_of(folder: Path, *command: str) -> Job:
    return Job(folder.name, tiny(), folder, command)


def test_in_a_sweep_a_worker_goes_on_until_a_job_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "Worker", lambda environment: Worker({**environment, **ENVIRONMENT}, ODD))
    commands = [["pid"], ["exit", "130"], ["pid"], ["kill"], ["pid"], ["exit", "2"], ["pid"]]
    jobs = [job_of(tmp_path / str(number), *command) for number, command in enumerate(commands)]
    sweep(jobs, 1, 60, Stop(), lambda: None, pause=0.01)
    assert [number for number, job in enumerate(jobs) if job.state == "failed"] == [3, 5]
    assert jobs[3].tail() == "about to be killed"
    assert jobs[0].tail() == jobs[2].tail() != ""
    assert len({jobs[number].tail() for number in (0, 4, 6)}) == 3
    assert all(job.worker is None for job in jobs)


def test_what_does_not_listen_is_killed_when_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "Worker", lambda environment: Worker({**environment, **ENVIRONMENT}, ODD))
    monkeypatch.setattr(sweeps, "GRACE", 0.1)
    job, stop = job_of(tmp_path / "deaf", "deaf"), Stop()

    def show() -> None:
        stop.wanted = job.tail() == "deaf"

    started = time.monotonic()
    sweep([job], 1, 60, stop, show, pause=0.01)
    assert job.state == "stopped"
    assert time.monotonic() - started < 50


def test_more_variants_of_a_function_than_a_run_needs_are_all_compiled() -> None:
    compiled = 0

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        nonlocal compiled
        compiled += 1
        return graph.forward

    def times(x: torch.Tensor, factor: str) -> torch.Tensor:
        return x * int(factor)

    import torch._dynamo.config as compiler

    with compiler.patch(recompile_limit=8, accumulated_recompile_limit=256):
        compile_without_limit()
        function = torch.compile(times, backend=count, dynamic=False)
        for factor in range(2, 14):
            function(torch.ones(3), str(factor))
    assert compiled == 12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_of_a_run_stays_on_the_gpu() -> None:
    def train() -> None:
        trainer = Trainer(tiny(steps=20, model__dim=64, model__hidden=4096, precision="bfloat16"), "cuda")
        for _ in range(20):
            trainer.advance()
        trainer.metrics()

    kept = []
    for _ in range(3):
        train()
        release()
        kept.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert kept[0][0] < 1 << 20, kept
    assert all(later <= first for later, first in zip(kept[2], kept[0], strict=True)), kept
