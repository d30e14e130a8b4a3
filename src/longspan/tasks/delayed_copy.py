"""Delayed Copy, the probe of over-squashing: a prefix of random tokens, a separator, the prefix again.

    tokens    BOS   4    17   4    SEP   4    17   4        length 8
    targets   .     .    .    .    4     17   4    EOS

It is Copy measured by the whole sequence: every target lies half a sequence behind its source. The length counts all
that the decoder reads, as in the paper's "sequences of length 256", which gives a prefix of 127; of an odd length one
token stays unused. The paper trains at this one length and does not say its vocabulary; here it is that of Copy.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from longspan.tasks.symbols import SymbolTask


@dataclass(frozen=True)
class DelayedCopy(SymbolTask):
    name = "delayed_copy"
    summary = "repeat a prefix that fills half of the sequence"
    train_lengths: ClassVar[tuple[int, int]] = (256, 256)

    @property
    def shortest(self) -> int:
        return 4

    def source_length(self, length: int) -> int:
        return length // 2 - 1

    def answer(self, source: Tensor) -> Tensor:
        return source
