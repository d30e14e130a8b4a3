"""Greedy continuations of prompts of different lengths at once."""

from collections.abc import Iterator, Sequence

import torch

from longspan.nn.generate import CausalModel, generate


def continuations(
    model: CausalModel, prompts: Sequence[Sequence[int]], most: int, *, stop: int, device: torch.device | str
) -> list[list[int]]:
    """Up to `most` tokens after each prompt, the stop and what follows it left out."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    tokens = torch.full((len(prompts), longest), stop)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
    unequal = lengths.to(device) if int(lengths.min()) < longest else None
    said = generate(model, tokens.to(device), most, stop=stop, lengths=unequal)[:, longest:].tolist()
    return [row[: row.index(stop)] if stop in row else row for row in said]


def batches_by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Numbers of texts, longest first, in batches of at most `tokens` tokens with their padding, or of one text."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    start = 0
    while start < len(order):
        rows = max(1, tokens // lengths[order[start]])
        yield order[start : start + rows]
        start += rows
