"""Sort: say the source in ascending order, repeats included.

    tokens    BOS   9    17   4    4    SEP   4    4    9    17
    targets   .     .    .    .    .    4     4    9    17   EOS

The model must count: how many of the current symbol the source holds, and how many of them it has said.
"""

from dataclasses import dataclass

from torch import Tensor

from longspan.tasks.symbols import SymbolTask


@dataclass(frozen=True)
class Sort(SymbolTask):
    name = "sort"
    summary = "repeat the source in ascending order"

    def answer(self, source: Tensor) -> Tensor:
        return source.sort(dim=1).values
