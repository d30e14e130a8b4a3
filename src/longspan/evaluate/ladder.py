"""Accuracy against length.

Greedy decoding matches the reference exactly when, at every position of the answer, the most likely token after the
reference so far is the reference's next one. So one teacher-forced forward decides exact match.
"""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from longspan.nn.decoder import Decoder
from longspan.results import Row, provenance, read_rows
from longspan.tasks.base import Batch, Task, stream_seed
from longspan.train.config import RunConfig, fingerprint

_CPU_TOKENS = 1 << 15
_UNIT_TOKENS = 1 << 14


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
    purpose: Literal["validation", "test"] = "test",
    precision: Literal["float32", "bfloat16"] = "float32",
) -> Measurement:
    """Measure `model` on `samples` fresh sequences of a length.

    The samples depend on the purpose and the length alone: not on the device, nor on how many fit at once.
    """
    device = next(model.parameters()).device
    started = time.monotonic()
    rows = _rows_at_once(model, task.time(length), device)
    while True:
        try:
            exact, right, counted = _counts(model, _batches(task, length, samples, purpose, rows), precision)
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


def _counts(
    model: Decoder, batches: Iterator[Batch], precision: Literal["float32", "bfloat16"]
) -> tuple[int, int, int]:
    """Sequences all right, tokens right, tokens that count."""
    device = next(model.parameters()).device
    half = precision == "bfloat16" and device.type == "cuda"
    exact = right = counted = 0
    for batch in batches:
        tokens, targets, mask = (part.to(device) for part in batch)
        columns = mask.any(0).nonzero().squeeze(1)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            guesses = model(tokens, only=columns).argmax(-1)
        hits, mask = guesses == targets[:, columns], mask[:, columns]
        exact += int((hits | ~mask).all(1).sum())
        right += int((hits & mask).sum())
        counted += int(mask.sum())
    return exact, right, counted


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson 1927), which stays sensible at 0 and at 1."""
    if not trials:
        return 0.0, 1.0
    p = successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def row_of(config: RunConfig, step: int, length: int, measurement: Measurement, device: torch.device) -> Row:
    """A result row: what was measured, of what, where and when."""
    attention = config.model.attention
    return {
        "task": config.task,
        "method": attention.method,
        "position": attention.position,
        "length": length,
        **measurement._asdict(),
        "recipe": config.name,
        "seed": config.seed,
        "step": step,
        "config": fingerprint(config),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **provenance(device),
    }


def lengths_measured(path: Path, step: int, samples: int) -> set[int]:
    """The lengths that have a row in the file for this step, of at least so many samples."""
    rows = read_rows(path) if path.exists() else ()
    return {row["length"] for row in rows if row["step"] == step and row["samples"] >= samples}


def _batches(
    task: Task, length: int, samples: int, purpose: Literal["validation", "test"], rows: int
) -> Iterator[Batch]:
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


def _rows_at_once(model: Decoder, time_steps: int, device: torch.device) -> int:
    """How many sequences fit: by free memory on a GPU, by what keeps a CPU's caches useful elsewhere."""
    if device.type != "cuda":
        return max(1, _CPU_TOKENS // time_steps)
    free, _ = torch.cuda.mem_get_info(device)
    bytes_a_token = 4 * (12 * model.config.dim + 4 * model.config.hidden)
    return max(1, int(0.25 * free) // (bytes_a_token * time_steps))
