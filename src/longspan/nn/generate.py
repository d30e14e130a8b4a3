"""Decoding with a cache, greedy or sampled, for prompts of one length or of several."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from longspan.nn.cache import KVCache


class CausalModel(Protocol):
    """A decoder of any style: tokens to logits, with caches and a choice of positions."""

    def __call__(self, *args: Any, **options: Any) -> Any: ...

    def new_caches(self) -> list[KVCache]: ...


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits: divided by `temperature`, then cut to the `top_k` largest, then to the fewest
    that together have a probability of at least `top_p`. Ties at the cut of `top_k` stay."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}: greedy decoding is no sampling")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    def probabilities(self, logits: Tensor) -> Tensor:
        """(..., vocabulary), 0 for what is cut."""
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        p = scaled.softmax(-1)
        if self.top_p is None:
            return p
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # what the likelier ones have together
        kept = torch.zeros_like(p).scatter_(-1, order, ordered * (before < self.top_p))
        return kept / kept.sum(-1, keepdim=True)

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """A token for every row of logits (batch, vocabulary), (batch, 1)."""
        return torch.multinomial(self.probabilities(logits), 1, generator=generator)


@torch.no_grad()
def generate(
    model: CausalModel,
    prompt: Tensor,
    most: int,
    *,
    stop: int | None = None,
    lengths: Tensor | None = None,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The prompt (batch, time) followed by up to `most` tokens.

    Args:
        stop: a row that has produced it goes on producing it; once every row has, decoding ends.
        lengths: (batch,), for prompts of unequal lengths, each at the right end of its row: what lies to the left is
            padding, of any tokens. Positions and the n of every scale count from a prompt's own first token.
        sampling: how tokens are drawn; by default the likeliest is taken.
        generator: of the draws, on the prompt's device.
    """
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"the prompt must be (batch, time) with at least one token, got {tuple(prompt.shape)}")
    caches = model.new_caches()
    starts = None if lengths is None else _starts(prompt, lengths)
    for cache in caches:
        cache.reset(prompt.shape[1] + most, starts)
    tokens, new = [prompt], prompt
    finished = torch.zeros(len(prompt), 1, dtype=torch.bool, device=prompt.device)
    for _ in range(most):
        logits = model(new, caches=caches, last=1)  # (B, 1, V)
        new = logits.argmax(-1) if sampling is None else sampling.draw(logits[:, -1], generator)  # (B, 1)
        if stop is not None:
            new = torch.where(finished, stop, new)
            finished |= new == stop
        tokens.append(new)
        if stop is not None and bool(finished.all()):
            break
    return torch.cat(tokens, dim=1)


def _starts(prompt: Tensor, lengths: Tensor) -> Tensor | None:
    """Where every prompt begins; None where all begin at once."""
    if lengths.shape != prompt.shape[:1] or lengths.is_floating_point():
        raise ValueError(
            f"lengths must be integers of shape ({len(prompt)},), got {lengths.dtype} {tuple(lengths.shape)}"
        )
    if bool(((lengths < 1) | (lengths > prompt.shape[1])).any()):
        raise ValueError(f"every prompt has between 1 and {prompt.shape[1]} tokens, got {lengths.tolist()}")
    starts = prompt.shape[1] - lengths.to(prompt.device)
    return starts if bool(starts.any()) else None
