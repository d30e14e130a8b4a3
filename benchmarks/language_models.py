"""The language models of the report, one after the other: trained, measured, tuned on needles and measured again.

Each model is `longspan lm train`, `perplexity`, `tune` and `needle` with the same settings for all; models with RoPE
are measured with the adjusted base too. Rows go to OUT/results.jsonl and logs to OUT/logs.jsonl as each model ends. A
model that has its last row there is left out, so that the same command goes on; one that by the longest so far would
not end in time is not begun.

    python benchmarks/language_models.py CORPUS --preset 50m --steps 1600 --minutes 25 --out lm
"""

import argparse
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from longspan.cli import lm, lm_measure
from longspan.results import append_rows, read_rows
from longspan.train.lm import LanguageConfig
from longspan.train.needles import Lesson, Tuning, lessons, makers_for, save_tuned, tune

MODELS = ("asentmax/nape", "softmax/nape", "entmax/nape", "ssmax/nape", "softmax/rope", "asentmax/rope")
ADJUSTED_BASE = 500_000.0  # the paper's
TASKS: tuple[Literal["s-niah-1", "s-niah-2"], ...] = ("s-niah-1", "s-niah-2")


@dataclass(frozen=True)
class Settings:
    corpus: Path
    preset: str
    steps: int | None
    context: int | None
    lengths: list[int] | None
    samples: int
    tuning: Tuning
    seed: int
    runs: Path
    out: Path
    device: str


def bases(position: str) -> tuple[float | None, ...]:
    """What a model is measured with: as it was trained, and adjusted."""
    return (None, ADJUSTED_BASE) if position == "rope" else (None,)


def measured(settings: Settings, name: str) -> bool:
    """Whether the last rows of a model are there: the second task of needles, with every base."""
    method, position = name.split("/")
    path = settings.out / "results.jsonl"
    last = (f"lm/{settings.preset}/{position}/{method}+needles", TASKS[-1], settings.seed)
    rows = read_rows(path) if path.exists() else iter(())
    found = {row["rope_base"] for row in rows if (row["recipe"], row["task"], row["seed"]) == last}
    return len(found) == len(bases(position))


def run_model(settings: Settings, name: str, lesson_book: dict[int, list[Lesson]]) -> None:
    """One model from nothing to its last row. The needles that it learns from are made once for all models."""
    method, position = name.split("/")
    folder = settings.runs / f"lm-{settings.preset}-{position}-{method}-s{settings.seed}"
    tuned = folder.with_name(f"{folder.name}-needles")
    shutil.rmtree(tuned, ignore_errors=True)  # of a try that was cut
    lm.train(
        settings.corpus, settings.preset, method, position,
        steps=settings.steps, context=settings.context, seed=settings.seed, out=folder, device=settings.device,
    )  # fmt: skip
    (folder / "results.jsonl").unlink(missing_ok=True)
    for base in bases(position):
        lm_measure.perplexity(folder, settings.lengths, rope_base=base, device=settings.device)
    config = tune_on_needles(settings, folder, tuned, lesson_book)
    print(f"tuned: {config.name}", flush=True)
    for base in bases(position):
        for task in TASKS:
            lm_measure.needle(
                tuned, task, settings.lengths, settings.samples, answer_tokens=16, rope_base=base,
                device=settings.device,
            )  # fmt: skip
    for file in (folder, tuned):
        append_rows(settings.out / "results.jsonl", read_rows(file / "results.jsonl"))
    origin = {"recipe": config.name, "seed": settings.seed}
    append_rows(settings.out / "logs.jsonl", (origin | row for row in read_rows(folder / "log.jsonl")))


def tune_on_needles(
    settings: Settings, folder: Path, tuned: Path, lesson_book: dict[int, list[Lesson]]
) -> LanguageConfig:
    of = lm_measure.opened(folder, None, None, settings.device)
    context = of.config.context
    if context not in lesson_book:
        lesson_book[context] = lessons(makers_for(of.corpus), context, settings.tuning)
    loss = tune(of.model, lesson_book[context], settings.tuning, of.config.precision)
    print(f"answers' loss {loss:.4f}", flush=True)
    save_tuned(tuned, of.model, of.config, of.step)
    return of.config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="METHOD/POSITION")
    parser.add_argument("--preset", default="50m")
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
    tuning = Tuning(
        steps=given.tuning_steps, samples=given.tuning_samples, shortest=given.shortest, warmup=given.tuning_steps // 10
    )
    settings = Settings(
        given.corpus, given.preset, given.steps, given.context, given.lengths, given.samples, tuning, given.seed,
        given.runs, given.out, given.device,
    )  # fmt: skip
    begun, longest, lesson_book = time.monotonic(), 0.0, dict[int, list[Lesson]]()
    for name in given.models:
        if measured(settings, name):
            print(f"{name}: measured before")
            continue
        if time.monotonic() - begun + longest > 60 * given.minutes:
            print(f"{name}: not begun, the longest so far took {longest:.0f} s")
            continue
        print(f"{name}: begins after {time.monotonic() - begun:.0f} s", flush=True)
        torch._dynamo.reset()
        started = time.monotonic()
        run_model(settings, name, lesson_book)
        longest = max(longest, time.monotonic() - started)


if __name__ == "__main__":
    main()
