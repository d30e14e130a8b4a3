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
from pathlib import Path
from typing import Literal

import torch

from longspan.cli import lm, lm_measure, lm_tune
from longspan.results import append_rows, read_rows
from longspan.train.needles import Tuning

MODELS = ("asentmax/nape", "softmax/nape", "entmax/nape", "ssmax/nape", "softmax/rope", "asentmax/rope")
ADJUSTED_BASE = 500_000.0  # the paper's
TASKS: tuple[Literal["s-niah-1", "s-niah-2"], ...] = ("s-niah-1", "s-niah-2")


def bases(position: str) -> tuple[float | None, ...]:
    """What a model is measured with: as it was trained, and adjusted."""
    return (None, ADJUSTED_BASE) if position == "rope" else (None,)


def measured(given: argparse.Namespace, name: str) -> bool:
    """Whether the last rows of a model are there: the second task of needles, with every base."""
    method, position = name.split("/")
    path = given.out / "results.jsonl"
    last = (f"lm/{given.preset}/{position}/{method}+needles", TASKS[-1], given.seed)
    rows = read_rows(path) if path.exists() else iter(())
    found = {row["rope_base"] for row in rows if (row["recipe"], row["task"], row["seed"]) == last}
    return len(found) == len(bases(position))


def run_model(given: argparse.Namespace, name: str) -> None:
    """One model from nothing to its last row."""
    method, position = name.split("/")
    folder = given.runs / f"lm-{given.preset}-{position}-{method}-s{given.seed}"
    tuned = folder.with_name(f"{folder.name}-needles")
    shutil.rmtree(tuned, ignore_errors=True)  # of a try that was cut
    lm.train(
        given.corpus, given.preset, method, position,
        steps=given.steps, context=given.context, seed=given.seed, out=folder, device=given.device,
    )  # fmt: skip
    (folder / "results.jsonl").unlink(missing_ok=True)
    for base in bases(position):
        lm_measure.perplexity(folder, given.lengths, rope_base=base, device=given.device)
    lm_tune.tune(
        folder, steps=given.tuning_steps, samples=given.tuning_samples, shortest=given.shortest, device=given.device
    )
    for base in bases(position):
        for task in TASKS:
            lm_measure.needle(
                tuned, task, given.lengths, given.samples, answer_tokens=16, rope_base=base, device=given.device
            )
    for run in (folder, tuned):
        append_rows(given.out / "results.jsonl", read_rows(run / "results.jsonl"))
    origin = {"recipe": f"lm/{given.preset}/{position}/{method}", "seed": given.seed}
    append_rows(given.out / "logs.jsonl", (origin | row for row in read_rows(folder / "log.jsonl")))


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
    begun, longest = time.monotonic(), 0.0
    for name in given.models:
        if measured(given, name):
            print(f"{name}: measured before")
            continue
        if time.monotonic() - begun + longest > 60 * given.minutes:
            print(f"{name}: not begun, the longest so far took {longest:.0f} s")
            continue
        print(f"{name}: begins after {time.monotonic() - begun:.0f} s", flush=True)
        torch._dynamo.reset()
        started = time.monotonic()
        run_model(given, name)
        longest = max(longest, time.monotonic() - started)


if __name__ == "__main__":
    main()
