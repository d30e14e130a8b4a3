"""Reverse: say the source backwards.

    tokens    BOS   4    17   9    SEP   9    17   4
    targets   .     .    .    .    9     17   4    EOS

The symbol to say is 1, then 3, then 5 places back, to twice the length: no fixed distance serves.
"""

from dataclasses import dataclass

from torch import Tensor

from longspan.tasks.symbols import SymbolTask


@dataclass(frozen=True)
class Reverse(SymbolTask):
    name = "reverse"
    summary = "repeat the source backwards"

    def answer(self, source: Tensor) -> Tensor:
        return source.flip(1)
