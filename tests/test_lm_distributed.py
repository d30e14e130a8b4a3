"""Two processes on a CPU train what one process trains, and each goes on from the other's checkpoint.

Run as a script under torchrun this file is a process of those tests, and trains the runs that `RUNS` names.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_runs import log_of
from tiny_text import tiny_corpus
from torch._C._distributed_c10d import HashStore

from longspan.text.packing import TextBatch
from longspan.train.checkpoint import load, saved
from longspan.train.config import from_json, to_json
from longspan.train.distributed import ALONE, Processes, joined
from longspan.train.lm import LanguageConfig, LanguageTrainer, language_recipe
from longspan.train.lm_loop import run_language
from longspan.train.loop import Outcome, Stop

STEPS = 6
# Rounding in float32, which Adam's first steps, the signs of the gradients, make larger.
LOSS, WEIGHTS = 1e-5, 2e-5
RUNS: dict[str, dict[str, Any]] = {
    "resumed": {},  # on the first three steps of one process
    "recomputed": {"activations": "recomputed"},
    "joined": {"documents": "joined", "micro_batch": 4},
    "bfloat16": {"precision": "bfloat16"},
    "muon": {"optimizer": "muon"},
    "muon, resumed": {"optimizer": "muon"},  # on the first three steps of one process
    "stopped": {},  # by a signal that only the second process gets
}


def changed(config: LanguageConfig, changes: dict[str, Any]) -> LanguageConfig:
    """With other fields, the optimiser's by its name."""
    if name := changes.get("optimizer"):
        changes = changes | {"optimizer": replace(config.optimizer, name=name, muon_learning_rate=0.02)}
    return replace(config, **changes)


def train(config: LanguageConfig, folder: Path, processes: Processes = ALONE, stop: Stop | None = None) -> Outcome:
    return run_language(config, folder, "cpu", lambda row: None, stop or Stop(), processes)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> LanguageConfig:
    """Six steps of four windows, one at a time; three heads, so that their parameters do not split evenly."""
    corpus = tiny_corpus(tmp_path_factory.mktemp("text"))
    recipe = language_recipe(corpus.folder, steps=STEPS, context=64)
    model = replace(recipe.model, layers=2, dim=18, hidden=25, heads=3)
    optimizer = replace(recipe.optimizer, learning_rate=3e-3, warmup=2, clip=0.5)
    return replace(
        recipe,
        model=model,
        optimizer=optimizer,
        batch=4,
        micro_batch=1,
        log_every=1,
        save_every=3,
        validate_every=3,
        validate_windows=5,
    )


@pytest.fixture(scope="module")
def alone(config: LanguageConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    train(config, folder)
    return folder


@pytest.fixture(scope="module")
def alone_by_muon(config: LanguageConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone_by_muon")
    train(changed(config, RUNS["muon"]), folder)
    return folder


@pytest.fixture(scope="module")
def together(
    config: LanguageConfig, alone: Path, alone_by_muon: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The runs of `RUNS` in two processes."""
    folder = tmp_path_factory.mktemp("together")
    (folder / "config.json").write_text(json.dumps(to_json(config)))
    first_half(alone, folder / "resumed")
    first_half(alone_by_muon, folder / "muon, resumed")
    torchrun(__file__, str(folder))
    return folder


def torchrun(*arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def first_half(run: Path, folder: Path) -> None:
    """A copy of a run as it was after three steps."""
    shutil.copytree(run, folder)
    shutil.rmtree(saved(folder / "checkpoints")[-1])
    (folder / "log.jsonl").unlink()


def assert_same(mine: Path, theirs: Path) -> None:
    """Losses, gradient norms, validation and the last checkpoint, where both have them."""
    for event in ("train", "validate"):
        others = {row["step"]: row for row in log_of(theirs, event)}
        rows = [row for row in log_of(mine, event) if row["step"] in others]
        assert rows[-1]["step"] == STEPS
        for row in rows:
            for key in ("loss", "gradient_norm", "tokens") if event == "train" else ("loss",):
                assert row[key] == pytest.approx(others[row["step"]][key], rel=LOSS), (event, key, row["step"])
    found, expected = (load(saved(folder / "checkpoints")[-1]) for folder in (mine, theirs))
    assert found.step == expected.step == STEPS
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in found.tensors.items():
        assert tensor.shape == expected.tensors[name].shape, name
        assert torch.allclose(tensor, expected.tensors[name], rtol=1e-4, atol=WEIGHTS), name


def test_the_command_trains_the_same_in_two_processes(config: LanguageConfig, tmp_path: Path) -> None:
    words = ["lm", "train", config.corpus, f"--steps={STEPS}", "--context=32", "--set=batch=4", "--set=micro_batch=1"]
    words += ["--set=model.layers=1", "--set=log_every=1", "--set=save_every=3", "--device=cpu"]
    said = torchrun("-m", "longspan.cli", *words, f"--out={tmp_path / 'two'}")
    assert said.count("2 processes") == said.count("finished at step 6") == 1
    theirs = from_json(LanguageConfig, json.loads((tmp_path / "two" / "config.json").read_text()))
    train(theirs, tmp_path / "one")
    assert_same(tmp_path / "two", tmp_path / "one")
    assert [row["processes"] for row in log_of(tmp_path / "two", "start")] == [2]


@pytest.mark.parametrize("name", ["recomputed", "resumed"])
def test_two_processes_train_what_one_does(together: Path, alone: Path, name: str) -> None:
    assert_same(together / name, alone)


@pytest.mark.parametrize("name", ["muon", "muon, resumed"])
def test_muon_in_two_processes_is_muon_in_one(together: Path, alone_by_muon: Path, name: str) -> None:
    assert_same(together / name, alone_by_muon)


def test_one_process_goes_on_from_two_by_muon(
    together: Path, alone_by_muon: Path, config: LanguageConfig, tmp_path: Path
) -> None:
    first_half(together / "muon", tmp_path / "run")
    train(changed(config, RUNS["muon"]), tmp_path / "run")
    assert_same(tmp_path / "run", alone_by_muon)


def test_windows_of_joined_documents_all_at_once(together: Path, config: LanguageConfig, tmp_path: Path) -> None:
    train(replace(config, **RUNS["joined"]), tmp_path)
    assert_same(together / "joined", tmp_path)


def test_one_process_goes_on_from_two(together: Path, alone: Path, config: LanguageConfig, tmp_path: Path) -> None:
    first_half(together / "recomputed", tmp_path / "run")
    train(config, tmp_path / "run")
    assert [row["step"] for row in log_of(tmp_path / "run", "start")] == [3]
    assert_same(tmp_path / "run", alone)


def test_bfloat16_is_near(together: Path, config: LanguageConfig, tmp_path: Path) -> None:
    train(replace(config, **RUNS["bfloat16"]), tmp_path)
    mine, theirs = ([row["loss"] for row in log_of(folder, "train")] for folder in (together / "bfloat16", tmp_path))
    assert mine == pytest.approx(theirs, rel=2e-3)
    assert load(saved(together / "bfloat16" / "checkpoints")[-1]).tensors["model.embed.weight"].dtype == torch.float32


def test_all_stop_at_the_same_step(together: Path) -> None:
    assert [row["step"] for row in log_of(together / "stopped", "stopped")] == [2]
    assert load(saved(together / "stopped" / "checkpoints")[-1]).step == 2


def test_what_cannot_be_shared_is_told(config: LanguageConfig) -> None:
    with pytest.raises(ValueError, match=r"batch \(4\) must be a multiple of the number of processes \(3\)"):
        LanguageTrainer(config, processes=Processes(0, 3))


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_shares_are_of_one_size_and_every_row_counts_once(rows: int) -> None:
    numbers = torch.arange(rows)[:, None].expand(rows, 2)
    batch = TextBatch(numbers, numbers, torch.ones(rows, 2, dtype=torch.bool), None)
    shares = [Processes(rank, 3).share(batch) for rank in range(3)]
    assert {len(share.tokens) for share in shares} == {-(-rows // 3)}
    assert sorted(int(row[0]) for share in shares for row in share.tokens[share.mask[:, 0]]) == list(range(rows))
    assert ALONE.share(batch) is batch


def test_recomputed_activations_change_nothing(config: LanguageConfig, alone: Path, tmp_path: Path) -> None:
    train(replace(config, activations="recomputed"), tmp_path)
    losses = ([row["loss"] for row in log_of(folder, "train")] for folder in (tmp_path, alone))
    assert next(losses) == next(losses)


def test_processes_part_only_when_their_threads_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that a thread lets go of while the interpreter ends aborts the process."""
    held: list[dist.Work] = []
    sums: list[torch.Size] = []
    all_reduce = dist.all_reduce

    def slowly(tensor: torch.Tensor) -> None:
        held.append(all_reduce(tensor, async_op=True))  # and with it the tensor
        held[-1].wait()
        sums.append(tensor.shape)
        Timer(0.2, held.clear).start()

    monkeypatch.setattr(dist, "all_reduce", slowly)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with joined(torch.device("cpu")):
        assert not sums
    assert sums
    assert not held
    assert not dist.is_initialized()


def main(folder: Path) -> None:
    """What one of two processes does."""
    config = from_json(LanguageConfig, json.loads((folder / "config.json").read_text()))
    with joined(torch.device("cpu")) as (processes, _):
        for name, changes in RUNS.items():
            stop = Stop()
            if name == "stopped" and processes.rank == 1:
                advance = LanguageTrainer.advance

                def stopping(self: LanguageTrainer, stop: Stop = stop, advance: Any = advance) -> None:
                    advance(self)
                    stop.wanted = self.step == 2

                LanguageTrainer.advance = stopping  # type: ignore[method-assign]
            train(changed(config, changes), folder / name, processes, stop)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
