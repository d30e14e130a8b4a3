"""`longspan train` as a process of its own: real signals, and the same command again."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY_EDITS, log_of, train

from longspan.cli.training import config_of
from longspan.train.checkpoint import load, saved, step_of

STEPS = 150
EDITS = [*TINY_EDITS, f"--set=steps={STEPS}", "--set=log_every=1", "--set=save_every=1000"]


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "longspan.cli", "train", "copy", "--smoke", "--device=cpu", f"--out={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(
        [*command, *EDITS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def wait_for_steps(folder: Path, process: subprocess.Popen[str], steps: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "log.jsonl").exists() and len(log_of(folder, "train")) >= steps:
            return
        time.sleep(0.02)
    process.kill()
    pytest.fail(f"no {steps} steps: {process.communicate()[0]}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    edits = [edit.removeprefix("--set=") for edit in EDITS]
    train(config_of("longspan/copy/nape/asentmax", 0, True, edits), folder)
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_saves_and_the_same_command_goes_on(tmp_path: Path, whole: Path, number: signal.Signals) -> None:
    folder = tmp_path / "run"
    process = start(folder)
    wait_for_steps(folder, process, 3)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    (stopped,) = log_of(folder, "stopped")
    assert 3 <= stopped["step"] < STEPS
    assert re.search(rf"stopped at step {stopped['step']}: .*run", output)
    assert [step_of(path) for path in saved(folder / "checkpoints")] == [stopped["step"]]

    process = start(folder)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert f"going on from step {stopped['step']}" in output
    assert f"finished at step {STEPS}" in output
    mine, theirs = (load(saved(each / "checkpoints")[-1]).tensors for each in (folder, whole))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert [row["loss"] for row in log_of(folder, "train")] == [row["loss"] for row in log_of(whole, "train")]
