"""A run of milliseconds that has everything a long one has, for the tests of the loop and of the commands."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from longspan.paper.recipes import recipe, smoke
from longspan.results import Row, read_rows
from longspan.train.config import RunConfig, edited
from longspan.train.loop import Outcome, Stop, run

_SMOKE = smoke(recipe("longspan/copy/nape/asentmax"))
TINY = replace(
    _SMOKE,
    model=replace(_SMOKE.model, layers=1, dim=16, hidden=24, heads=2),
    optimizer=replace(_SMOKE.optimizer, warmup=5),
    steps=30,
    batch=4,
    shortest=3,
    longest=6,
    average=0.9,
    log_every=4,
    save_every=10,
    validate_every=7,
    validate_lengths=(6, 9),
    validate_samples=8,
    test_lengths=(6, 12),
    test_samples=20,
)

# The same as arguments of a command, beside `--smoke`.
TINY_EDITS = [
    f"--set={edit}"
    for edit in (
        "model.layers=1",
        "model.dim=16",
        "model.hidden=24",
        "model.heads=2",
        "batch=4",
        "shortest=3",
        "longest=6",
        "validate_lengths=[6]",
        "validate_samples=8",
        "test_lengths=[6,12]",
        "test_samples=20",
    )
]


def tiny(**changes: Any) -> RunConfig:
    """`TINY` with fields changed; a double underscore goes into one."""
    config = TINY
    for path, value in changes.items():
        config = edited(config, path.replace("__", "."), value)
    return config


def train(config: RunConfig, folder: Path, stop: Stop | None = None) -> Outcome:
    return run(config, folder, "cpu", lambda row: None, stop or Stop())


def log_of(folder: Path, event: str) -> list[Row]:
    return [row for row in read_rows(folder / "log.jsonl") if row["event"] == event]
