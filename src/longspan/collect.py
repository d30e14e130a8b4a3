"""Rows of many runs brought together: what each run measured, and one row on the run itself, failed ones too.

A row on a run has `event: run`: its recipe and what was changed, how it ended, when it left the plateau, what it cost.
Rows are appended and never rewritten; of two rows on one run the later counts.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from longspan.evaluate.ladder import identity, purpose_of
from longspan.paper.names import parse_name
from longspan.results import Row, append_rows, read_rows
from longspan.train import checkpoint as checkpoints
from longspan.train.config import RunConfig, from_json, read_fields

ESCAPED = 0.9  # accuracy by token above which a run has left the plateau
_ENDINGS = ("finished", "stopped", "diverged", "failed")
_PROVENANCE = ("commit", "command", "device", "torch", "python")

# What besides the run tells rows of a language model apart: one is measured in many ways.
_MEASURED_BY = (
    *("task", "recipe", "benchmark", "metric", "scoring", "rope_base", "answer_tokens", "documents", "shots", "limit"),
    *("data", "longest", "scored", "depth", "needle_seed", "queries", "layer", "head"),
)

Key = tuple[object, ...]


def run_row(folder: Path) -> Row:
    """The row on the run in `folder`, from its config and its log."""
    config, log = _config(folder), list(read_rows(folder / "log.jsonl"))
    trained = [row for row in log if row["event"] == "train"]
    start = next((row for row in log if row["event"] == "start"), {})
    last = trained[-1] if trained else {}
    name = parse_name(config.name)
    seconds, share = _seconds(log)
    return {
        "event": "run",
        **identity(config),
        "edits": list(name.edits) if name else [],
        "steps": config.steps,
        "step": log[-1]["step"] if log else 0,
        "ending": _ending(log),
        "seconds": round(seconds, 1),
        "gpu_seconds": round(share, 1),
        "escape_step": next((row["step"] for row in trained if row["token_accuracy"] > ESCAPED), None),
        "loss": _finite(last.get("loss")),
        "token_accuracy": _finite(last.get("token_accuracy")),
        "time": _time(folder, log),
        **{key: start.get(key) for key in _PROVENANCE},
    }


def rows_of_run(folder: Path) -> Iterator[Row]:
    """The row on a run and everything that it measured; what rows of an older kind leave out is filled in.

    Of a language model there are only the measurements, which say all of it themselves.
    """
    if _is_language(folder):
        yield from read_rows(folder / "results.jsonl") if (folder / "results.jsonl").exists() else ()
        return
    if not (folder / "config.json").is_file() or not (folder / "log.jsonl").is_file():
        raise ValueError(f"{folder} is not the folder of a run: it has no config.json or no log.jsonl")
    known = identity(_config(folder))
    yield run_row(folder)
    if (folder / "results.jsonl").exists():
        yield from ({**known, **row, "purpose": purpose_of(row)} for row in read_rows(folder / "results.jsonl"))


def key_of(row: Row) -> Key:
    """What two rows share exactly when one of them is enough."""
    if row.get("event") == "run":
        return "run", row["config"], row["seed"], row["ending"], row["step"]
    measured = row["config"], row["seed"], row["step"], row["length"], row.get("samples"), purpose_of(row)
    return (*measured, *(row.get(name) for name in _MEASURED_BY)) if "context" in row else measured


def is_row(row: Row) -> bool:
    """Whether it is a row on a run, or one of its measurements."""
    return "config" in row and (row.get("event") == "run" or "length" in row)


class Collection:
    """Files of rows that only ever grow, each row in them once."""

    def __init__(self, paths: Iterable[Path]):
        found = [row for path in paths if path.exists() for row in read_rows(path)]
        self.seen = {key_of(row) for row in found if is_row(row)}

    def add(self, path: Path, rows: Iterable[Row]) -> int:
        """Append those of `rows` that are new; how many they were."""
        new = {key_of(row): row for row in rows if is_row(row)}
        new = {key: row for key, row in new.items() if key not in self.seen}
        if new:
            append_rows(path, new.values())
            self.seen |= new.keys()
        return len(new)


def collect(sources: Iterable[Path], into: Path) -> Mapping[str, int]:
    """Append the rows of runs (their folders) or of files of rows to `into`/<task>.jsonl; the number of new ones."""
    collection = Collection(into.glob("*.jsonl"))
    by_task: dict[str, list[Row]] = defaultdict(list)
    for source in sources:
        rows = list(rows_of_run(source) if source.is_dir() else read_rows(source))
        wanted = [row for row in rows if is_row(row)]
        if rows and not wanted:
            raise ValueError(f"{source} has no rows to collect: those say the `config` of their run")
        for row in wanted:
            by_task[row["task"]].append(row)
    return {task: collection.add(into / f"{task}.jsonl", rows) for task, rows in sorted(by_task.items())}


class Harvest:
    """The rows of runs that are still going on, in one file, and their logs in another."""

    def __init__(self, folder: Path):
        self.results, self.logs = folder / "results.jsonl", folder / "logs.jsonl"
        self.collection = Collection([self.results])
        self.logged: dict[str, int] = defaultdict(int)  # rows of the log that are there already, by config
        for row in read_rows(self.logs) if self.logs.exists() else ():
            self.logged[row["config"]] += 1

    def add(self, run: Path, ended: bool) -> None:
        """Bring in what is new of a run; the row on it when it has `ended`."""
        if not (run / "config.json").exists() or not (run / "log.jsonl").exists():
            return
        rows = [row for row in rows_of_run(run) if ended or row.get("event") != "run"]
        self.collection.add(self.results, rows)
        config = identity(_config(run))["config"]
        new = list(read_rows(run / "log.jsonl"))[self.logged[config] :]
        if new:
            append_rows(self.logs, [{"config": config, **row} for row in new])
            self.logged[config] += len(new)


def keep_weights(run: Path, into: Path) -> Path:
    """Save the weights that a run is measured with, in half precision, in a folder that `longspan evaluate` reads."""
    loaded = checkpoints.load(checkpoints.of_run(run))
    prefix = "model." if from_json(RunConfig, loaded.config).average is None else "average."
    half = {name: tensor.half() for name, tensor in loaded.tensors.items() if name.startswith(prefix)}
    checkpoints.save(into / run.name / "best", replace(loaded, tensors=half), keep=1)
    return into / run.name


def _is_language(folder: Path) -> bool:
    """Whether it holds the run of a language model: only these are trained on a corpus."""
    path = folder / "config.json"
    return path.is_file() and "corpus" in read_fields(path)


def _config(folder: Path) -> RunConfig:
    return from_json(RunConfig, read_fields(folder / "config.json"))


def _time(folder: Path, log: list[Row]) -> str:
    """When a run was last heard of; logs of an older kind do not say, but what was measured then does."""
    told = [row["time"] for row in log if "time" in row]
    if not told and (folder / "results.jsonl").exists():
        told = [row["time"] for row in read_rows(folder / "results.jsonl")]
    return str(told[-1]) if told else ""


def _finite(value: float | None) -> float | None:
    """JSON has no word for what is not a number."""
    return value if value is not None and math.isfinite(value) else None


def _ending(log: list[Row]) -> str:
    """How a run ended; `cut` is one that left no word on it: killed, or still going on."""
    return str(log[-1]["event"]) if log and log[-1]["event"] in _ENDINGS else "cut"


def _seconds(log: list[Row]) -> tuple[float, float]:
    """How long a run trained, and its share of that where several runs shared the device.

    Every start to its end; one that left no word counts by the speeds that it logged.
    """
    seconds = share = 0.0
    part, step, shared = 0.0, 0, 1
    for row in [*log, {"event": "start", "step": 0}]:
        if row["event"] == "train":
            part += (row["step"] - step) / max(row["steps_per_second"], 1e-9)
            step = row["step"]
        elif row["event"] in _ENDINGS:
            part = row["seconds"]
        elif row["event"] == "start":
            seconds, share = seconds + part, share + part / shared
            part, step, shared = 0.0, row["step"], row.get("side_by_side", 1)
    return seconds, share
