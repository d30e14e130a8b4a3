"""The language models of the report, one after the other: trained, measured, tuned on needles and measured again.

Each model is `longspan lm train`, `perplexity`, `inspect`, `tune` and `needle` with the same settings for all; models
with RoPE are measured with the adjusted base too. As each of these stages ends its rows go to OUT/results.jsonl, and
its time, with the log of a training, to OUT/logs.jsonl. The same command goes on: a stage with its time there is left
out, and a training goes on from its checkpoint.

Half a minute before the time is over a training saves and stops, and any other stage is cut, to be done again. What by
the longest so far would not end in time is not begun.

    python benchmarks/language_models.py CORPUS --preset 50m --steps 1600 --minutes 25 --out lm
"""

import argparse
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import typer

from longspan.cli import lm, lm_inspect, lm_measure, lm_tune
from longspan.evaluate.perplexity import long_documents
from longspan.results import Row, append_rows, now, read_rows
from longspan.text.corpora import open_corpus
from longspan.text.documents import CorpusError
from longspan.text.needles import NeedleMaker
from longspan.train import checkpoint as checkpoints
from longspan.train.lm import RECIPES
from longspan.train.loop import Diverged
from longspan.train.needles import Tuning

MODELS = ("asentmax/nape", "softmax/nape", "entmax/nape", "ssmax/nape", "softmax/rope", "asentmax/rope")
ADJUSTED_BASE = 500_000.0  # the paper's
TASKS: tuple[Literal["s-niah-1", "s-niah-2"], ...] = ("s-niah-1", "s-niah-2")
ANSWER_TOKENS = 16
HEAD_DOCUMENTS, HEAD_QUERIES = 2, 256
MARGIN = 30.0  # seconds before the time is over, for a checkpoint to be written in
SETTINGS = ("preset", "steps", "context", "lengths", "samples", "tuning_steps", "tuning_samples", "shortest")


class Stage(NamedTuple):
    """A part of a model's work, the folder that it leaves rows in, and what does it."""

    name: str
    folder: Path
    work: Callable[[], None]

    @property
    def kind(self) -> str:
        """The name without a base: what takes as long for every model."""
        return self.name.split()[0]


class Book:
    """What was done and how long it took, in OUT/logs.jsonl, for the settings of this command."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.path = given, given.out / "logs.jsonl"
        self.settings: Row = {name: getattr(given, name) for name in SETTINGS}
        self.settings["data"] = open_corpus(given.corpus).checksum

    def origin(self, name: str) -> Row:
        """What tells the rows of a model from those of any other."""
        method, position = name.split("/")
        return {"recipe": f"lm/{self.given.preset}/{position}/{method}", "seed": self.given.seed, **self.settings}

    def stages(self) -> list[Row]:
        """The rows on stages that ended, of all models."""
        rows = read_rows(self.path) if self.path.exists() else iter(())
        # Rows from before they told the corpus count for any.
        found = [{"data": self.settings["data"]} | row for row in rows if row["event"] == "stage"]
        return [row for row in found if all(row.get(name) == value for name, value in self.settings.items())]

    def done(self, name: str) -> set[str]:
        """The stages of a model that ended."""
        origin = self.origin(name)
        return {row["stage"] for row in self.stages() if row["ended"] and row | origin == row}

    def seconds_of_stage(self, stage: Stage) -> float:
        """The longest that one of its kind took so far, 0 for the first."""
        taken = [row["seconds"] for row in self.stages() if row["ended"] and row["stage"].split()[0] == stage.kind]
        return max(taken, default=0.0)

    def seconds_of_model(self) -> float:
        """The longest that all of a model took so far, stops included."""
        taken: dict[tuple[str, int], float] = defaultdict(float)
        for row in self.stages():
            taken[row["recipe"], row["seed"]] += row["seconds"]
        return max(taken.values(), default=0.0)

    def note(self, name: str, stage: Stage, seconds: float, ended: bool) -> None:
        """Write down how long a stage took, after the log of a training that ended."""
        origin, rows = self.origin(name), []
        if stage.kind == "train" and ended and stage.name not in self.done(name):
            rows = [origin | row for row in read_rows(stage.folder / "log.jsonl")]
        told = {"event": "stage", "stage": stage.name, "seconds": round(seconds, 1), "ended": ended, "time": now()}
        append_rows(self.path, [*rows, origin | told])


def bases(position: str) -> tuple[float | None, ...]:
    """What a model is measured with: as it was trained, and adjusted."""
    return (None, ADJUSTED_BASE) if position == "rope" else (None,)


def named(name: str, base: float | None) -> str:
    return name if base is None else f"{name} rope_base={base:g}"


def stages_of(given: argparse.Namespace, name: str, done: set[str]) -> list[Stage]:
    """What is left to do of a model, in order; none where every row is there, wherever its run is."""
    method, position = name.split("/")
    folder = given.runs / f"lm-{given.preset}-{position}-{method}-s{given.seed}"
    tuned = folder.with_name(f"{folder.name}-needles")

    def train() -> None:
        lm.train(
            given.corpus, given.preset, method, position,
            steps=given.steps, context=given.context, seed=given.seed, out=folder, device=given.device,
        )  # fmt: skip

    def perplexity(base: float | None) -> None:
        lm_measure.perplexity(folder, given.lengths, rope_base=base, device=given.device)

    def heads() -> None:
        ends = [min(given.lengths), max(given.lengths)]
        lm_inspect.inspect(folder, ends, samples=HEAD_DOCUMENTS, queries=HEAD_QUERIES, device=given.device)

    def tune() -> None:
        shutil.rmtree(tuned, ignore_errors=True)  # of a try that was cut, or of other settings
        steps, samples = given.tuning_steps, given.tuning_samples
        lm_tune.tune(folder, steps=steps, samples=samples, shortest=given.shortest, device=given.device)

    def needle(task: Literal["s-niah-1", "s-niah-2"], base: float | None) -> None:
        options = {"answer_tokens": ANSWER_TOKENS, "rope_base": base, "device": given.device}
        lm_measure.needle(tuned, task, given.lengths, given.samples, **options)

    def left(stages: list[Stage]) -> list[Stage]:
        return [stage for stage in stages if stage.name not in done]

    reading = [Stage(named("perplexity", base), folder, partial(perplexity, base)) for base in bases(position)]
    reading = left([*reading, Stage("heads", folder, heads)])
    finding = left(
        [Stage(named(task, base), tuned, partial(needle, task, base)) for base in bases(position) for task in TASKS]
    )
    if finding and not ("tune" in done and checkpoints.saved(tuned / "checkpoints")):
        finding = [Stage("tune", tuned, tune), *finding]
    return [Stage("train", folder, train), *reading, *finding] if reading or finding else []


def rows_of(folder: Path) -> list[Row]:
    path = folder / "results.jsonl"
    return list(read_rows(path)) if path.exists() else []


def run_stage(given: argparse.Namespace, book: Book, name: str, stage: Stage) -> None:
    """Do a stage, bring its rows out and tell its time, also where it is stopped."""
    begun, before, ended = time.monotonic(), len(rows_of(stage.folder)), False
    try:
        stage.work()
        append_rows(given.out / "results.jsonl", rows_of(stage.folder)[before:])
        ended = True
    finally:
        seconds = time.monotonic() - begun
        book.note(name, stage, seconds, ended)
        print(f"{name}: {stage.name} {'took' if ended else 'stopped after'} {seconds:.1f} s", flush=True)


def check(given: argparse.Namespace) -> None:
    """Raises CorpusError for what would only be told after the first training."""
    corpus = open_corpus(given.corpus)
    long_documents(corpus.split("validation"), max(given.lengths), 1)
    if not given.shortest <= given.context:
        raise CorpusError(f"--shortest ({given.shortest}) is more than the context of {given.context}")
    maker = NeedleMaker(TASKS[0], corpus.tokenizer, answer_tokens=ANSWER_TOKENS)
    maker.samples(min(*given.lengths, given.shortest), 40)


def run_all(given: argparse.Namespace, left: Callable[[], float]) -> None:
    """Every model that is not measured yet, as far as the time goes."""
    book, whole = Book(given), left()
    for name in given.models:
        stages = stages_of(given, name, book.done(name))
        if not stages:
            print(f"{name}: measured before")
            continue
        training = book.seconds_of_model() if not checkpoints.saved(stages[0].folder / "checkpoints") else 0.0
        if left() < training <= whole:  # one that no call has the time for is begun all the same, and goes on later
            print(f"{name}: not begun, the longest so far took {training:.0f} s and {left():.0f} s are left")
            return
        torch._dynamo.reset()
        try:
            for stage in stages:
                if stage.kind != "train" and left() < (needed := book.seconds_of_stage(stage)) <= whole:
                    print(f"{name}: {stage.name} not begun, it takes up to {needed:.0f} s and {left():.0f} s are left")
                    return
                run_stage(given, book, name, stage)
        except Diverged as error:
            print(f"{name}: {error}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="METHOD/POSITION")
    parser.add_argument("--preset", default="50m", choices=list(RECIPES))
    parser.add_argument("--steps", type=int, help="Of training, instead of the preset's.")
    parser.add_argument("--context", type=int, help="Tokens of a window, instead of the preset's.")
    parser.add_argument("--lengths", nargs="+", type=int, help="Instead of 1 to 16 times the context.")
    parser.add_argument("--samples", type=int, default=200, help="Needles at each length.")
    parser.add_argument("--tuning-steps", type=int, default=Tuning.steps)
    parser.add_argument("--tuning-samples", type=int, default=Tuning.samples)
    parser.add_argument("--shortest", type=int, default=Tuning.shortest, help="Tokens of the shortest tuning needle.")
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("lm"))
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    if not given.minutes > 0:
        parser.error("--minutes must be more than 0")
    given.steps = given.steps or RECIPES[given.preset].steps
    given.context = given.context or RECIPES[given.preset].context
    given.lengths = given.lengths or [given.context * times for times in (1, 2, 4, 8, 16)]
    return given


def main() -> None:
    begun, given = time.monotonic(), arguments()
    seconds = 60 * given.minutes - min(MARGIN, 6 * given.minutes)

    def left() -> float:
        return begun + seconds - time.monotonic()

    # As Ctrl-C does it: a training saves and stops, anything else is cut. A shell has what it starts in the background
    # ignore the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        check(given)
        run_all(given, left)
    except (KeyboardInterrupt, typer.Exit):
        over = left() <= 0
        print("the time is over" if over else "stopped", "- the same command goes on", flush=True)
        if not over:
            sys.exit(130)
    except CorpusError as error:
        sys.exit(f"error: {error}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(f"{time.monotonic() - begun:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
