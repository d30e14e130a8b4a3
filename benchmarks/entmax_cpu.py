"""Forward plus backward of entmax on a CPU, beside the package `entmax` 1.3 and torch's softmax.

    python benchmarks/entmax_cpu.py [--rows 1024 --columns 4096 --rounds 9 --out FILE]

Every round times every contender once, in turn, so that a slow moment of the machine hits all alike; the table gives
medians. The scores are Gaussian: the larger their scale, the fewer survive.
"""

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from entmax import entmax15, entmax_bisect, sparsemax
from torch import Tensor

import longspan

SCALES = (0.1, 1.0, 4.0)
HERE = Path(__file__).resolve().parent

CONTENDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "longspan 1.5": lambda scores: longspan.entmax(scores, 1.5),
    "entmax15": lambda scores: entmax15(scores, dim=-1),
    "longspan 2": lambda scores: longspan.entmax(scores, 2.0),
    "sparsemax": lambda scores: sparsemax(scores, dim=-1),
    "longspan 1.75": lambda scores: longspan.entmax(scores, 1.75),
    "entmax_bisect 1.75": lambda scores: entmax_bisect(scores, alpha=1.75, dim=-1),
    "torch softmax": lambda scores: scores.softmax(-1),
}
# Ours, theirs, and how many times as fast ours ought to be.
PAIRS = (
    ("longspan 1.5", "entmax15", 3.0),
    ("longspan 2", "sparsemax", None),
    ("longspan 1.75", "entmax_bisect 1.75", 5.0),
)


def seconds(function: Callable[[Tensor], Tensor], scores: Tensor, gradient: Tensor) -> float:
    scores = scores.detach().requires_grad_()
    start = time.perf_counter()
    function(scores).backward(gradient)
    return time.perf_counter() - start


def medians(scale: float, rows: int, columns: int, rounds: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(rows, columns, generator=generator) * scale
    gradient = torch.randn(rows, columns, generator=generator)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for name, function in CONTENDERS.items():
        seconds(function, scores, gradient)
        assert bool(function(scores[:2]).isfinite().all()), name
    for _ in range(rounds):
        for name, function in CONTENDERS.items():
            times[name].append(seconds(function, scores, gradient))
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, object]:
    model = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = (line.split(":", 1) for line in information.read_text().splitlines() if ":" in line)
        model = next((value.strip() for key, value in lines if key.strip() == "model name"), model)
    return {"cpu": model, "threads": torch.get_num_threads(), "torch": torch.__version__}


def commit() -> str:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    described = subprocess.run(command, capture_output=True, text=True, check=False)
    return described.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time entmax forward plus backward on a CPU.")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "entmax_cpu.jsonl")
    arguments = parser.parse_args()

    about = machine() | {"commit": commit(), "command": shlex.join(["python", *sys.argv])}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(
        f"{arguments.rows} x {arguments.columns} float32, forward + backward, median of {arguments.rounds} rounds, ms"
    )
    print(f"{'':24}" + "".join(f"{f'scale {scale:g}':>12}" for scale in SCALES))
    shape = (arguments.rows, arguments.columns, arguments.rounds)
    results = {scale: medians(scale, *shape) for scale in SCALES}
    for name in CONTENDERS:
        print(f"{name:24}" + "".join(f"{results[scale][name] * 1e3:12.1f}" for scale in SCALES))
    for ours, theirs, goal in PAIRS:
        ratios = "".join(f"{results[scale][theirs] / results[scale][ours]:11.1f}x" for scale in SCALES)
        print(f"{f'vs {theirs}':24}{ratios}" + (f"   goal {goal:g}x" if goal else ""))

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a") as file:
        for scale, by_name in results.items():
            row = dict(zip(("rows", "columns", "rounds"), shape, strict=True)) | {"scale": scale}
            row |= {"milliseconds": {name: round(value * 1e3, 3) for name, value in by_name.items()}}
            file.write(json.dumps(row | about) + "\n")


if __name__ == "__main__":
    main()
