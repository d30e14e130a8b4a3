"""Max Retrieval (Velickovic et al. 2024, arXiv:2410.01104): name the class of the item with the highest priority.

    items    0.31 c4   0.97 c2   0.55 c9   0.12 c0      query 0.68
    target             c2

An item is a priority, uniform in [0, 1), and a class out of ten, as one number and a one-hot vector. The query is a
uniform number without meaning: the answer depends on the items alone. Attention must put nearly all of its weight on
one item however many there are, which makes the task a plain probe of dispersion.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn


class MaxRetrievalBatch(NamedTuple):
    items: Tensor  # (batch, length, 1 + classes)
    query: Tensor  # (batch, 1)
    target: Tensor  # (batch,) class of the best item
    best: Tensor  # (batch,) its index


@dataclass(frozen=True)
class MaxRetrieval:
    """The task; `num_classes` is 10 in the original. Not for the decoder: `longspan demo` runs it."""

    name: ClassVar[str] = "max_retrieval"
    summary: ClassVar[str] = "name the class of the item with the highest priority"

    num_classes: int = 10

    def sample(
        self, batch: int, length: int, *, generator: torch.Generator | None = None, device: torch.device | str = "cpu"
    ) -> MaxRetrievalBatch:
        if length < 1:
            raise ValueError(f"Max Retrieval needs at least one item, got length {length}")
        priority = torch.rand(batch, length, generator=generator, device=device)
        category = torch.randint(self.num_classes, (batch, length), generator=generator, device=device)
        query = torch.rand(batch, 1, generator=generator, device=device)
        best = priority.argmax(dim=-1)
        items = torch.cat([priority[..., None], nn.functional.one_hot(category, self.num_classes)], dim=-1)
        return MaxRetrievalBatch(items, query, category.gather(1, best[:, None]).squeeze(1), best)
