"""Local Count: at every token, say how many equal tokens stand directly before it.

    tokens    BOS  5    5    5    9    9    5    5    5    5    2
    targets   .    0    1    2    0    1    0    1    2    3    0

The source is a row of blocks, each one symbol repeated, neighbours of different symbols, the last block cut off by the
end. The same symbol comes back in other blocks, which must not be counted. Repeats are uniform in 2..48 as in the
released code, where the paper has U(1, 48), and the target is the 0-based place in the block. Token and class share
ids: 16 symbols, then BOS, and 48 classes.

BOS, which does not count, is what the first block is counted from: without it all keys of that block are equal, weights
that sum to 1 say the same of each of its tokens, and but for roundings none can be told from another. The paper's table
has 100 % for RoPE, so its sources must begin with something.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from longspan.tasks.base import Batch, Device, Task, classification_batch


@dataclass(frozen=True)
class LocalCount(Task):
    name = "local_count"
    summary = "count the equal tokens directly before"
    metric = "accuracy"
    train_lengths: ClassVar[tuple[int, int]] = (64, 128)

    num_symbols: int = 16
    min_repeats: int = 2
    max_repeats: int = 48

    def __post_init__(self) -> None:
        if self.num_symbols < 2:
            raise ValueError(
                f"local_count needs two symbols for neighbours to differ, got num_symbols {self.num_symbols}"
            )
        if not 1 <= self.min_repeats <= self.max_repeats:
            raise ValueError(
                "local_count needs 1 <= min_repeats <= max_repeats, "
                f"got min_repeats {self.min_repeats} and max_repeats {self.max_repeats}"
            )

    @property
    def vocabulary(self) -> int:
        return max(self.num_symbols + 1, self.max_repeats)

    def symbol(self, token: int) -> str:
        return "BOS" if token == self.num_symbols else str(token)

    def time(self, length: int) -> int:
        return 1 + length

    def draw(self, batch: int, length: int, generator: torch.Generator | None, device: Device) -> Batch:
        def integers(low: int, high: int, width: int) -> torch.Tensor:
            return torch.randint(low, high, (batch, width), generator=generator, device=device)

        blocks = -(-length // self.min_repeats)  # enough, even if every block is as short as can be
        repeats = integers(self.min_repeats, self.max_repeats + 1, blocks)
        # A step of 1..num_symbols - 1 around the circle of symbols never ends where it began.
        steps = integers(1, self.num_symbols, blocks)
        symbols = (integers(0, self.num_symbols, 1) + steps.cumsum(1)) % self.num_symbols
        ends = repeats.cumsum(1)
        place = torch.arange(length, device=device).repeat(batch, 1)
        block = torch.searchsorted(ends, place, right=True)  # (batch, length)
        return classification_batch(
            tokens=F.pad(symbols.gather(1, block), (1, 0), value=self.num_symbols),
            targets=F.pad(place - (ends - repeats).gather(1, block), (1, 0)),
            uncounted=1,
        )
