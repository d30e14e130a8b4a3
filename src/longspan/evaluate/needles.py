"""Retrieval against length: needles in haystacks, greedy decoding with a cache, scored by the exact string."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch

from longspan.evaluate.ladder import wilson
from longspan.nn.generate import generate
from longspan.nn.llama import Llama
from longspan.text.needles import Needle, NeedleMaker, is_right

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
    precision: Literal["float32", "bfloat16"] = "float32",
) -> Retrieval:
    """How many of the needles `model` finds."""
    device = next(model.parameters()).device
    half = precision == "bfloat16" and device.type == "cuda"
    started = time.monotonic()
    right = [False] * len(needles)
    for numbers in _equally_long(needles, _TOKENS.get(device.type, 1 << 14)):
        prompts = torch.tensor([maker.ids(needles[number]) for number in numbers], device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            said = generate(model, prompts, maker.answer_tokens, stop=maker.tokenizer.end)
        for number, answer in zip(numbers, said[:, prompts.shape[1] :].tolist(), strict=True):
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


def _equally_long(needles: Sequence[Needle], tokens: int) -> Iterator[list[int]]:
    """The numbers of needles in batches of one length, which need no padding, of about `tokens` tokens."""
    lengths: dict[int, list[int]] = defaultdict(list)
    for number, needle in enumerate(needles):
        lengths[needle.tokens].append(number)
    for length, numbers in lengths.items():
        rows = max(1, tokens // length)
        yield from (numbers[start : start + rows] for start in range(0, len(numbers), rows))


def _by_depth(needles: Sequence[Needle], right: Sequence[bool]) -> list[float | None]:
    found: list[list[bool]] = [[] for _ in range(_FIFTHS)]
    for needle, hit in zip(needles, right, strict=True):
        found[min(int(needle.depth * _FIFTHS), _FIFTHS - 1)].append(hit)
    return [100 * sum(hits) / len(hits) if hits else None for hits in found]
