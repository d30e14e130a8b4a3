"""Sort: say the source in ascending order, repeats included.

    tokens    BOS   9    17   4    4    SEP   4    4    9    17
    targets   .     .    .    .    .    4     4    9    17   EOS

The model must count: how many of the current symbol the source holds, and how many of them it has said.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.tasks.base import FIRST_SYMBOL, Device
from longspan.tasks.symbols import SymbolTask


@dataclass(frozen=True)
class Sort(SymbolTask):
    """`few`, 0 in the paper: the share of the sources, drawn at random, that hold some of the symbols only.

    How many is uniform from 1 to all. A symbol that repeats 20 times is rare in 64 uniform symbols and usual in 512;
    with `few` a model can learn to count so far without ever seeing a longer source.
    """

    few: float = 0.0

    name = "sort"
    summary = "repeat the source in ascending order"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.few <= 1:
            raise ValueError(f"{self.name}: few is a share between 0 and 1, got {self.few}")

    def source(self, batch: int, length: int, generator: torch.Generator | None, device: Device) -> Tensor:
        source = super().source(batch, length, generator, device)
        if not self.few:
            return source

        def uniform(*size: int) -> Tensor:
            return torch.rand(size, generator=generator, device=device)

        kinds = torch.randint(1, self.num_symbols + 1, (batch, 1), generator=generator, device=device)
        shuffled = uniform(batch, self.num_symbols).argsort(1)
        some = FIRST_SYMBOL + shuffled.gather(1, (uniform(batch, length) * kinds).long())
        return torch.where(uniform(batch, 1) < self.few, some, source)

    def answer(self, source: Tensor) -> Tensor:
        return source.sort(dim=1).values
