"""Retrieval against length: needles in haystacks, greedy decoding with a cache, scored by the exact string."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from longspan.evaluate.continuation import batches_by_length, continuations
from longspan.evaluate.ladder import wilson
from longspan.nn.llama import Llama
from longspan.text.needles import Needle, NeedleMaker, is_right
from longspan.train.config import Precision

_TOKENS = {"cpu": 1 << 14, "cuda": 1 << 18}  # read at once
_FIFTHS = 5


class Retrieval(NamedTuple):
    """Percent of the needles found with its 95 % interval, and by the depth they lay at, in fifths of the haystack."""

    value: float
    low: float
    high: float
    by_depth: list[float | None]
    samples: int
    seconds: float


@torch.no_grad()
def retrieval(
    model: Llama,
    maker: NeedleMaker,
    needles: Sequence[Needle],
    precision: Precision = "float32",
) -> Retrieval:
    """How many of the needles `model` finds."""
    device = next(model.parameters()).device
    half = precision == "bfloat16" and device.type == "cuda"
    started = time.monotonic()
    right = [False] * len(needles)
    for numbers in batches_by_length([needle.tokens for needle in needles], _TOKENS.get(device.type, 1 << 14)):
        prompts = [needles[number].ids.tolist() for number in numbers]
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            said = continuations(model, prompts, maker.answer_tokens, stop=maker.tokenizer.end, device=device)
        for number, answer in zip(numbers, said, strict=True):
            right[number] = is_right(needles[number].answer, maker.tokenizer.decode(answer))
    low, high = wilson(sum(right), len(right))
    return Retrieval(
        100 * sum(right) / len(right),
        100 * low,
        100 * high,
        _by_depth(needles, right),
        len(right),
        time.monotonic() - started,
    )


def _by_depth(needles: Sequence[Needle], right: Sequence[bool]) -> list[float | None]:
    found: list[list[bool]] = [[] for _ in range(_FIFTHS)]
    for needle, hit in zip(needles, right, strict=True):
        found[min(int(needle.depth * _FIFTHS), _FIFTHS - 1)].append(hit)
    return [100 * sum(hits) / len(hits) if hits else None for hits in found]
