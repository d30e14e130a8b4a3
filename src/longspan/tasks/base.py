"""What every task for a decoder shares: the batch, the layout of a sequence, and the seed of a random stream.

A generative task has a source and a target; the decoder reads both and is judged on the target alone:

    tokens    BOS  s    s    s    SEP  t    t
    targets   .    .    .    .    t    t    EOS
    mask      .    .    .    .    x    x    x

A classification task has a class for every token it reads:

    tokens    s    s    s    s
    targets   c    c    c    c
    mask      x    x    x    x

A batch is drawn on its device by a fixed number of tensor operations whose shapes follow from the length alone: nothing
waits for the device, so a CUDA graph can hold it, and all randomness is the generator's.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

Device = torch.device | str
Metric = Literal["exact_match", "accuracy"]
Purpose = Literal["train", "validation", "test", "noise"]

BOS, SEP, EOS = 0, 1, 2
SPECIAL = ("BOS", "SEP", "EOS")
FIRST_SYMBOL = len(SPECIAL)

PURPOSES: tuple[Purpose, ...] = ("train", "validation", "test", "noise")


class Batch(NamedTuple):
    tokens: Tensor  # (batch, time) int64, what the decoder reads
    targets: Tensor  # (batch, time) int64, what each position must predict; 0 where the mask is False
    mask: Tensor  # (batch, time) bool, the positions that count


class Task(ABC):
    """A task for a decoder; each is a frozen dataclass whose fields are its parameters.

    Attributes:
        name: What recipes, commands and result rows call it.
        summary: One line for a listing.
        metric: "exact_match" counts whole targets, "accuracy" counts positions, as in the paper.
        train_lengths: The shortest and the longest training length of the paper, both inclusive.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    metric: ClassVar[Metric]
    train_lengths: ClassVar[tuple[int, int]] = (32, 64)

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids, special ones included; inputs and targets share them."""

    @property
    def shortest(self) -> int:
        """The shortest length that makes sense."""
        return 1

    @abstractmethod
    def time(self, length: int) -> int:
        """Width of `Batch.tokens` for a length."""

    @abstractmethod
    def draw(self, batch: int, length: int, generator: torch.Generator | None, device: Device) -> Batch:
        """`sample` after its checks; what a new task writes."""

    def sample(
        self, batch: int, length: int, *, generator: torch.Generator | None = None, device: Device = "cpu"
    ) -> Batch:
        """A batch of one length, all rows equally wide, no padding.

        Args:
            batch: Number of rows.
            length: Number of source tokens, unless the task's file says otherwise.
            generator: Of the same device; the same state gives the same batch.
            device: Where the batch is made.
        """
        if batch < 1:
            raise ValueError(f"{self.name}: a batch has at least one row, got {batch}")
        self.check_length(length)
        return self.draw(batch, length, generator, device)

    def check_length(self, length: int) -> None:
        """Raises ValueError when no sample of this length exists."""
        if length < self.shortest:
            raise ValueError(f"{self.name}: length {length} is too short, the shortest is {self.shortest}")

    def symbol(self, token: int) -> str:
        """One token for a person to read."""
        return str(token)

    def render(self, ids: Sequence[int]) -> str:
        """Tokens for a person to read."""
        return " ".join(map(self.symbol, ids))


class Generative(Task):
    """A task with a source and a target: special tokens first, then the task's own."""

    metric = "exact_match"

    def content(self, index: int) -> str:
        """The task's own token `index`, for a person to read."""
        return str(index)

    def symbol(self, token: int) -> str:
        return SPECIAL[token] if token < FIRST_SYMBOL else self.content(token - FIRST_SYMBOL)


def generative_batch(source: Tensor, target: Tensor) -> Batch:
    """Lays out `BOS source SEP target EOS` from source (batch, s) and target (batch, t): width s + t + 2."""
    rows, end = source.shape
    time = end + target.shape[1] + 2
    special = torch.arange(FIRST_SYMBOL, device=source.device).expand(rows, FIRST_SYMBOL)
    bos, sep, eos = special.split(1, dim=1)
    return Batch(
        tokens=torch.cat([bos, source, sep, target], dim=1),
        targets=torch.cat([bos.expand(rows, end + 1), target, eos], dim=1),  # BOS is the 0 of what does not count
        mask=torch.arange(time, device=source.device).expand(rows, time) > end,
    )


def classification_batch(tokens: Tensor, targets: Tensor, uncounted: int = 0) -> Batch:
    """Every position of tokens (batch, time) counts, but for the first `uncounted`."""
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return Batch(tokens, targets, places >= uncounted)


def counted_tail(mask: Tensor) -> int:
    """How many of the last positions of a mask (batch, time) hold all that count."""
    return mask.shape[1] - int(mask.any(0).nonzero()[0])


def stream_seed(purpose: Purpose, seed: int, index: int = 0) -> int:
    """The seed, of 63 bits, of the generator that draws stream `index` of a run for one purpose.

    The two low bits are the purpose and the rest is a hash of everything, so a stream to test on never shares its seed
    with one to train on, whatever the seeds and indices. Low bits, because torch's CPU generator keeps only 32 of them;
    by the same fact two streams of one purpose coincide there with chance 2^-30.
    """
    if purpose not in PURPOSES:
        raise ValueError(f"unknown purpose {purpose!r}; there are {', '.join(PURPOSES)}")
    digest = hashlib.blake2b(f"{purpose} {seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 3 << 2 | PURPOSES.index(purpose)
