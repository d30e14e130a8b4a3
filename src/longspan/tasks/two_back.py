"""2Back: at every token, name the token two places before.

    tokens    0    7    12   3    3    15
    targets   0    0    0    7    12   3

The first token is always 0 and no other is, so that the first two positions have something to say: 0. The others are
uniform. The task asks for nothing but a focus at a fixed distance.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from longspan.tasks.base import Batch, Device, Task, classification_batch


@dataclass(frozen=True)
class TwoBack(Task):
    """`num_symbols` counts the 0 in front; the paper's is 16."""

    name = "2back"
    summary = "name the token two places before"
    metric = "accuracy"

    num_symbols: int = 16

    def __post_init__(self) -> None:
        if self.num_symbols < 3:
            raise ValueError(f"2back needs the symbol 0 and at least two more, got num_symbols {self.num_symbols}")

    @property
    def vocabulary(self) -> int:
        return self.num_symbols

    @property
    def shortest(self) -> int:
        return 3

    def time(self, length: int) -> int:
        return length

    def draw(self, batch: int, length: int, generator: torch.Generator | None, device: Device) -> Batch:
        symbols = torch.randint(1, self.num_symbols, (batch, length - 1), generator=generator, device=device)
        return classification_batch(tokens=F.pad(symbols, (1, 0)), targets=F.pad(symbols[:, :-2], (3, 0)))
