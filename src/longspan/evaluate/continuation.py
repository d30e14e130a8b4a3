"""Greedy continuations of prompts of different lengths at once: padded on the left, the padding its own document."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from longspan.nn.cache import KVCache
from longspan.nn.generate import CausalModel, generate


def continuations(
    model: CausalModel, prompts: Sequence[Sequence[int]], most: int, *, stop: int, device: torch.device | str
) -> list[list[int]]:
    """Up to `most` tokens after each prompt, the stop and what follows it left out."""
    tokens, documents = left_padded(prompts, stop)
    reader = model if documents is None else _Padded(model, documents.to(device))
    said = generate(reader, tokens.to(device), most, stop=stop)[:, tokens.shape[1] :].tolist()
    return [row[: row.index(stop)] if stop in row else row for row in said]


def left_padded(prompts: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor | None]:
    """Tokens (batch, time), and which are padding (0) and text (1), or None where no prompt needs any."""
    longest = max(map(len, prompts))
    tokens = torch.full((len(prompts), longest), padding)
    documents = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        documents[row, longest - len(prompt) :] = 1
    return tokens, None if bool(documents.all()) else documents


def batches_by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Numbers of texts, longest first, in batches of at most `tokens` tokens with their padding, or of one text."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    start = 0
    while start < len(order):
        rows = max(1, tokens // lengths[order[start]])
        yield order[start : start + rows]
        start += rows


class _Padded:
    """A model that tells padding from text when it reads a prompt; what is generated continues the text."""

    def __init__(self, model: CausalModel, documents: Tensor):
        self.model, self.documents = model, documents

    def new_caches(self) -> list[KVCache]:
        return self.model.new_caches()

    def __call__(self, tokens: Tensor, **options: Any) -> Any:
        prompt = tokens.shape == self.documents.shape and not any(map(len, options["caches"]))
        return self.model(tokens, documents=self.documents, **options) if prompt else self.model(tokens, **options)
