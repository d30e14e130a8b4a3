"""Multi-Query Multi-Token Associative Recall: look up the values of four keys in a long list of pairs.

    source    31 200 : 7 64 _   _ _   18 18 : 90 2 _   _   5 77 : 64 64 _        three pairs, three free places
    queries   ? 18 18   ? 5 77   ? 31 200   ? 5 77
    target    ? 90 2    ? 64 64  ? 7 64     ? 64 64

    tokens    BOS source queries SEP target             width: length + 26

A unit of six tokens `k k : v v _` holds a key and a value, two tokens each. There are floor(0.8 length / 6) units; the
places they leave free are empty too and lie before, between and after them, every arrangement equally likely. Keys and
values are words of two fixed vocabularies, 10,000 random words each of the 65,536 there are over 256 symbols: the model
must match whole words, since every symbol is part of many. The four queries follow the source and may repeat.

The paper writes `0`, `1` and `3` for `_`, `:` and `?`; here they are ids of their own beside the 256 symbols. The
sources do not say whether two units may have the same key. Here a query always has one answer: the keys of a sample are
all different, and where there are more units than words (length > 75,000) the keys that are asked occur once while the
others repeat, with unrelated values.
"""

import functools
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.tasks.base import FIRST_SYMBOL, Batch, Device, Generative, generative_batch

MARKS = ("_", ":", "?")
EMPTY, COLON, QUERY = range(FIRST_SYMBOL, FIRST_SYMBOL + len(MARKS))
FIRST_LETTER = FIRST_SYMBOL + len(MARKS)
UNIT = 6


class Words(NamedTuple):
    """The two vocabularies as the halves of a unit."""

    keys: Tensor  # (num_words, 3): k k :
    values: Tensor  # (num_words, 3): v v _


@functools.cache
def words(num_words: int, alphabet: int, seed: int, device: torch.device) -> Words:
    """Made once per device, by Python's generator: its numbers never change, and checkpoints depend on them."""
    numbers = random.Random(seed)

    def half(mark: int) -> Tensor:
        drawn = sorted(range(alphabet**2), key=lambda _: numbers.random())[:num_words]
        rows = [(FIRST_LETTER + word // alphabet, FIRST_LETTER + word % alphabet, mark) for word in drawn]
        return torch.tensor(rows, device=device)

    return Words(half(COLON), half(EMPTY))


@dataclass(frozen=True)
class MQMTAR(Generative):
    """The task.

    Attributes:
        alphabet: Number of symbols that words are made of.
        num_words: Size of each vocabulary, keys and values.
        num_queries: Keys asked for.
        density: Share of the source that units fill.
        seed: Of the vocabularies, which are part of the task and not of a run.
    """

    name = "mqmtar"
    summary = "look up the values of four two-token keys among many pairs"

    alphabet: int = 256
    num_words: int = 10_000
    num_queries: int = 4
    density: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_words > self.alphabet**2:
            raise ValueError(
                f"mqmtar: an alphabet of {self.alphabet} has {self.alphabet**2} words of two tokens, "
                f"fewer than num_words {self.num_words}"
            )
        if not 1 <= self.num_queries < self.num_words:
            raise ValueError(
                f"mqmtar needs 1 <= num_queries < num_words, "
                f"got num_queries {self.num_queries} and num_words {self.num_words}"
            )
        if not 0 < self.density <= 1:
            raise ValueError(f"mqmtar: density is in (0, 1], got {self.density}")

    @property
    def vocabulary(self) -> int:
        return FIRST_LETTER + self.alphabet

    def num_pairs(self, length: int) -> int:
        return int(self.density * length / UNIT + 1e-9)

    def check_length(self, length: int) -> None:
        if self.num_pairs(length) < self.num_queries:
            raise ValueError(
                f"mqmtar: length {length} holds {max(self.num_pairs(length), 0)} pairs at density {self.density}, "
                f"fewer than the {self.num_queries} queries; the shortest is {self.shortest}"
            )

    @property
    def shortest(self) -> int:
        length = int(self.num_queries * UNIT / self.density)
        return length + (self.num_pairs(length) < self.num_queries)

    def time(self, length: int) -> int:
        return length + 6 * self.num_queries + 2

    def content(self, index: int) -> str:
        return MARKS[index] if index < len(MARKS) else str(index - len(MARKS))

    def draw(self, batch: int, length: int, generator: torch.Generator | None, device: Device) -> Batch:
        pairs = self.num_pairs(length)
        asked = torch.randint(pairs, (batch, self.num_queries), generator=generator, device=device)
        keys = self._keys(asked, pairs, generator)
        values = torch.randint(self.num_words, (batch, pairs), generator=generator, device=device)
        halves = words(self.num_words, self.alphabet, self.seed, asked.device)
        units = torch.cat([halves.keys[keys], halves.values[values]], dim=-1)  # (batch, pairs, 6)

        # Shrunk to one place each, the units are a random subset of the places; grown again, each moves the later ones.
        places = torch.rand(batch, length - (UNIT - 1) * pairs, generator=generator, device=device)
        starts = places.topk(pairs, sorted=False).indices.sort().values
        growth = torch.arange((UNIT - 1) * pairs + 1, device=device).unfold(0, UNIT, UNIT - 1)  # (pairs, 6): 5 j + i
        index = starts[..., None] + growth
        source = asked.new_full((batch, length), EMPTY).scatter_(1, index.flatten(1), units.flatten(1))

        found = units.gather(1, asked[..., None].expand(-1, -1, UNIT))  # (batch, queries, 6)
        queries, target = (F.pad(word, (1, 0), value=QUERY).flatten(1) for word in (found[..., :2], found[..., 3:5]))
        return generative_batch(torch.cat([source, queries], dim=1), target)

    def _keys(self, asked: Tensor, pairs: int, generator: torch.Generator | None) -> Tensor:
        """The word of every pair's key (batch, pairs): those of the `asked` pairs (batch, queries) occur once."""
        batch = asked.shape[0]
        lots = torch.rand(batch, self.num_words, generator=generator, device=asked.device)
        # Sorted by lot, which makes the order random too.
        different = lots.topk(min(pairs, self.num_words), sorted=True).indices
        if pairs <= self.num_words:
            return different
        single, others = different.split([self.num_queries, self.num_words - self.num_queries], dim=1)
        pick = torch.randint(others.shape[1], (batch, pairs), generator=generator, device=asked.device)
        keys = others.gather(1, pick)
        # One at a time: a pair asked twice is written twice, and the order must not be left to chance.
        for query, word in zip(asked.split(1, dim=1), single.split(1, dim=1), strict=True):
            keys.scatter_(1, query, word)
        return keys
