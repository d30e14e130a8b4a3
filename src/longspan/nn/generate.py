"""Greedy decoding with a cache."""

from typing import Any, Protocol

import torch
from torch import Tensor

from longspan.nn.cache import KVCache


class CausalModel(Protocol):
    """A decoder of any style: tokens to logits, with caches and a choice of positions."""

    def __call__(self, *args: Any, **options: Any) -> Any: ...

    def new_caches(self) -> list[KVCache]: ...


@torch.no_grad()
def generate(model: CausalModel, prompt: Tensor, most: int, *, stop: int | None = None) -> Tensor:
    """The prompt (batch, time) followed by up to `most` greedy tokens.

    A row that has produced `stop` goes on producing it; once every row has, decoding ends.
    """
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"the prompt must be (batch, time) with at least one token, got {tuple(prompt.shape)}")
    caches = model.new_caches()
    tokens, new = [prompt], prompt
    finished = torch.zeros(len(prompt), 1, dtype=torch.bool, device=prompt.device)
    for _ in range(most):
        last = torch.tensor([new.shape[1] - 1], device=prompt.device)
        new = model(new, caches=caches, only=last).argmax(-1)  # (B, 1)
        if stop is not None:
            new = torch.where(finished, stop, new)
            finished |= new == stop
        tokens.append(new)
        if stop is not None and bool(finished.all()):
            break
    return torch.cat(tokens, dim=1)
