"""Flip-Flop (Liu et al. 2023, arXiv:2306.00946): recall the bit that was written last.

    tokens    BOS  w 1   i 0   i 1   w 0   i 1   r    SEP   0
    targets   .    . .   . .   . .   . .   . .   .    0     EOS

Instructions, each with a random bit: write or ignore. The first is a write, the others are with `write_probability`,
0.1 for the sparse variant and 0.8 for the dense one, and a read without a bit comes last. Sparse, the model must find
one old write among many ignored bits; dense, it must tell the last write from many others.

The source is `length` tokens for an odd length and `length - 1` for an even one: 64 is 31 instructions and the read,
with the answer for the 64th. The paper speaks of 4 symbols beside the 3 special tokens; with the read as a token of
its own, w i r 0 1, there are 5. Its example has no reads before the last one, nor have these sources.
"""

from dataclasses import dataclass

import torch

from longspan.tasks.base import FIRST_SYMBOL, Batch, Device, Generative, generative_batch

SYMBOLS = ("i", "w", "r", "0", "1")
IGNORE, WRITE, READ, ZERO, ONE = range(FIRST_SYMBOL, FIRST_SYMBOL + len(SYMBOLS))


@dataclass(frozen=True)
class FlipFlop(Generative):
    """`write_probability` is that of every instruction after the first."""

    write_probability: float

    def __post_init__(self) -> None:
        if not 0 <= self.write_probability <= 1:
            raise ValueError(f"{self.name}: write_probability is in [0, 1], got {self.write_probability}")

    @property
    def vocabulary(self) -> int:
        return FIRST_SYMBOL + len(SYMBOLS)

    @property
    def shortest(self) -> int:
        return 3

    def content(self, index: int) -> str:
        return SYMBOLS[index]

    def time(self, length: int) -> int:
        return 2 * ((length - 1) // 2) + 4

    def draw(self, batch: int, length: int, generator: torch.Generator | None, device: Device) -> Batch:
        size = (batch, (length - 1) // 2)
        write = torch.rand(size, generator=generator, device=device) < self.write_probability
        write[:, 0] = True
        bits = torch.randint(ZERO, ONE + 1, size, generator=generator, device=device)
        last = (write * torch.arange(size[1], device=device)).amax(dim=1, keepdim=True)  # (batch, 1) place of a write
        source = torch.stack([write + IGNORE, bits], dim=-1).flatten(1)
        read = source.new_full((batch, 1), READ)
        return generative_batch(torch.cat([source, read], dim=1), bits.gather(1, last))


@dataclass(frozen=True)
class SparseFlipFlop(FlipFlop):
    name = "flip_flop_sparse"
    summary = "recall the bit written last, one instruction in ten a write"

    write_probability: float = 0.1


@dataclass(frozen=True)
class DenseFlipFlop(FlipFlop):
    name = "flip_flop_dense"
    summary = "recall the bit written last, eight instructions in ten a write"

    write_probability: float = 0.8
