"""Copy: say the source again.

    tokens    BOS   4    17   4    SEP   4    17   4
    targets   .     .    .    .    4     17   4    EOS

Symbols repeat, so content alone does not tell where in the source the next symbol is: the model must keep its place.
"""

from dataclasses import dataclass

from torch import Tensor

from longspan.tasks.symbols import SymbolTask


@dataclass(frozen=True)
class Copy(SymbolTask):
    name = "copy"
    summary = "repeat the source"

    def answer(self, source: Tensor) -> Tensor:
        return source
