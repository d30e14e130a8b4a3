"""Accuracy against length.

Greedy decoding matches the reference exactly when, at every position of the answer, the most likely token after the
reference so far is the reference's next one. So one teacher-forced forward decides exact match.
"""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from longspan.nn.decoder import Decoder
from longspan.results import Row, now, provenance, read_rows
from longspan.tasks.base import Batch, Task, counted_tail, stream_seed
from longspan.train.config import Precision, RunConfig, fingerprint

VALIDATION_MULTIPLES = (1, 2, 4, 8)  # of the longest training length; nothing longer may decide anything
LONG, LONG_SAMPLES = 16_384, 200  # from so many tokens on, so many samples will do
_CPU_TOKENS = 1 << 15
_UNIT_TOKENS = 1 << 14

Purpose = Literal["validation", "test"]


class Measurement(NamedTuple):
    """Percentages over samples: the task's metric with its 95 % interval, and the accuracy by token."""

    metric: str
    value: float
    low: float
    high: float
    token_accuracy: float
    samples: int
    seconds: float


@torch.no_grad()
def measure(
    model: Decoder,
    task: Task,
    length: int,
    samples: int,
    *,
    purpose: Purpose = "test",
    precision: Precision = "float32",
) -> Measurement:
    """Measure `model` on `samples` fresh sequences of a length.

    The samples depend on the purpose and the length alone: not on the device, nor on how many fit at once.
    """
    task.check_length(length)
    device = next(model.parameters()).device
    started = time.monotonic()
    rows = _rows_at_once(model, task.time(length), device)
    while True:
        try:
            batches = _batches(task, length, samples, purpose, rows)
            batches = _ahead(batches) if device.type == "cuda" else batches  # two would wait for each other on a CPU
            exact, right, counted = _counts(model, batches, precision)
            break
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
            rows //= 2
    successes, trials = (exact, samples) if task.metric == "exact_match" else (right, counted)
    low, high = wilson(successes, trials)
    return Measurement(
        task.metric,
        100 * successes / trials,
        100 * low,
        100 * high,
        100 * right / counted,
        samples,
        time.monotonic() - started,
    )


def _counts(model: Decoder, batches: Iterator[Batch], precision: Precision) -> tuple[int, int, int]:
    """Sequences all right, tokens right, tokens that count."""
    device = next(model.parameters()).device
    half = precision == "bfloat16" and device.type == "cuda"
    exact = right = counted = 0
    for batch in batches:
        tokens, targets, mask = (part.to(device) for part in batch)
        last = counted_tail(mask)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            guesses = model(tokens, last=last).argmax(-1)
        hits, mask = guesses == targets[:, -last:], mask[:, -last:]
        exact += int((hits | ~mask).all(1).sum())
        right += int((hits & mask).sum())
        counted += int(mask.sum())
    return exact, right, counted


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson 1927), which stays sensible at 0 and at 1."""
    if not trials:
        return 0.0, 1.0
    p, z = successes / trials, 1.96
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def samples_at(config: RunConfig, purpose: Purpose) -> dict[int, int]:
    """The lengths a run is measured at for a purpose, the shortest first, and the samples of each."""
    if purpose == "validation":
        return {multiple * config.longest: config.test_samples for multiple in VALIDATION_MULTIPLES}
    few = min(config.test_samples, LONG_SAMPLES)
    return {length: config.test_samples if length < LONG else few for length in sorted(config.test_lengths)}


def identity(config: RunConfig) -> Row:
    """What says which run a row belongs to; `variant` is shared by the seeds of one config."""
    optimizer = config.optimizer
    rates = f"AdamW {optimizer.learning_rate:g}"
    return {
        "task": config.task,
        "method": config.model.attention.method,
        "position": config.model.attention.position,
        "recipe": config.name,
        "seed": config.seed,
        "config": fingerprint(config),
        "variant": fingerprint(replace(config, seed=0)),
        "rates": f"Muon {optimizer.muon_learning_rate:g}, {rates}" if optimizer.name == "muon" else rates,
        "trained_to": config.longest,
    }


def row_of(
    config: RunConfig,
    step: int,
    length: int,
    measurement: Measurement,
    device: torch.device,
    purpose: Purpose = "test",
) -> Row:
    """A result row: what was measured, of what, where and when."""
    return {
        **identity(config),
        "step": step,
        "purpose": purpose,
        "length": length,
        **measurement._asdict(),
        "time": now(),
        **provenance(device),
    }


def purpose_of(row: Row) -> str:
    """Rows older than the word were all measured on test samples."""
    return str(row.get("purpose", "test"))


def lengths_measured(path: Path, step: int, samples: dict[int, int], purpose: Purpose = "test") -> set[int]:
    """The lengths of `samples` that have a row in the file for this step, of at least so many samples."""
    rows = [row for row in read_rows(path) if purpose_of(row) == purpose] if path.exists() else []
    return {
        length
        for length, least in samples.items()
        if any(row["length"] == length and row["step"] == step and row["samples"] >= least for row in rows)
    }


def _batches(task: Task, length: int, samples: int, purpose: Purpose, rows: int) -> Iterator[Batch]:
    """Batches of about `rows` sequences, put together from units that are always drawn alike, on the CPU."""
    unit = max(1, min(64, _UNIT_TOKENS // task.time(length)))
    pending: list[Batch] = []
    for number, start in enumerate(range(0, samples, unit)):
        generator = torch.Generator().manual_seed(stream_seed(purpose, length, number))
        drawn = task.sample(unit, length, generator=generator)
        pending.append(Batch(*(part[: samples - start] for part in drawn)))
        if sum(len(batch.tokens) for batch in pending) >= rows or start + unit >= samples:
            whole = Batch(*(torch.cat(parts) for parts in zip(*pending, strict=True)))
            yield from (Batch(*parts) for parts in zip(*(part.split(rows) for part in whole), strict=True))
            pending = []


def _ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, each drawn by a thread while the one before it is at work."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = thread.submit(next, batches, None)
            yield batch


def _rows_at_once(model: Decoder, time_steps: int, device: torch.device) -> int:
    """How many sequences fit: by free memory on a GPU, by what keeps a CPU's caches useful elsewhere."""
    if device.type != "cuda":
        return max(1, _CPU_TOKENS // time_steps)
    free, _ = torch.cuda.mem_get_info(device)
    bytes_a_token = 4 * (12 * model.config.dim + 4 * model.config.hidden)
    return max(1, int(0.25 * free) // (bytes_a_token * time_steps))
