"""Tasks whose source is a row of uniform random symbols and whose target follows from it, token for token."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.tasks.base import FIRST_SYMBOL, Batch, Device, Generative, generative_batch


@dataclass(frozen=True)
class SymbolTask(Generative):
    """`num_symbols` is 32 in the paper: few, so that symbols repeat and repeat more in longer sequences."""

    num_symbols: int = 32

    def __post_init__(self) -> None:
        if self.num_symbols < 2:
            raise ValueError(f"{self.name} needs at least two symbols, got num_symbols {self.num_symbols}")

    @property
    def vocabulary(self) -> int:
        return FIRST_SYMBOL + self.num_symbols

    def source_length(self, length: int) -> int:
        """Number of symbols to draw."""
        return length

    @abstractmethod
    def answer(self, source: Tensor) -> Tensor:
        """The target (batch, s) of a source (batch, s)."""

    def time(self, length: int) -> int:
        return 2 * self.source_length(length) + 2

    def source(self, batch: int, length: int, generator: torch.Generator | None, device: Device) -> Tensor:
        """`length` symbols a row."""
        return torch.randint(FIRST_SYMBOL, self.vocabulary, (batch, length), generator=generator, device=device)

    def draw(self, batch: int, length: int, generator: torch.Generator | None, device: Device) -> Batch:
        source = self.source(batch, self.source_length(length), generator, device)
        return generative_batch(source, self.answer(source))
