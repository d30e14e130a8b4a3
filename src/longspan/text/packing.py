"""Batches of packed text: the stream of documents cut into windows of the context length.

    stream      <begin> a  b  <end> <begin> c  d  e  <end>
    tokens      <begin> a  b  <end> <begin> c  d  e
    targets     a       b  <end>  .  c      d  e  <end>
    mask        x       x  x      .  x      x  x  x
    documents   0       0  0      0  1      1  1  1

A position whose target begins another document does not count: there is nothing to predict it from. `documents` keeps
attention, and the n that a scaler counts, within a document; without it a window is one text.

Which windows a step reads is a function of the seed and the step alone, so a run resumes where it stopped without
saving a position. Each pass over the corpus has an order of its own, and starts at another of the tokens that do not
fill a window.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.tasks.base import stream_seed
from longspan.text.documents import CorpusError
from longspan.text.shards import TokenStream


class TextBatch(NamedTuple):
    tokens: Tensor  # (batch, time) int64
    targets: Tensor  # (batch, time) int64, 0 where the mask is False
    mask: Tensor  # (batch, time) bool, the positions that count
    documents: Tensor | None  # (batch, time) int32 ids, or None where documents see each other

    def to(self, device: torch.device | str) -> "TextBatch":
        return self._each(lambda part: part.to(device, non_blocking=True))

    def pinned(self) -> "TextBatch":
        """In memory that a GPU copies from while other work goes on."""
        return self._each(Tensor.pin_memory)

    def split(self, rows: int) -> list["TextBatch"]:
        """Batches of `rows` rows each."""

        def rows_from(start: int) -> "TextBatch":
            return self._each(lambda part: part[start : start + rows])

        return [rows_from(start) for start in range(0, len(self.tokens), rows)]

    def _each(self, change: Callable[[Tensor], Tensor]) -> "TextBatch":
        documents = None if self.documents is None else change(self.documents)
        return TextBatch(change(self.tokens), change(self.targets), change(self.mask), documents)


def window(stream: TokenStream, start: int, context: int, separate: bool = True) -> TextBatch:
    """One row: the `context` tokens from `start`, each with the one behind it as its target."""
    ids = stream.read(start, start + context + 1)
    numbers = stream.document_numbers(start, start + context + 1)
    mask = numbers[1:] == numbers[:-1]
    documents = (numbers[:-1] - numbers[0]).int()[None] if separate else None
    return TextBatch(ids[None, :-1], (ids[1:] * mask)[None], mask[None], documents)


def stacked(rows: list[TextBatch]) -> TextBatch:
    """Rows of one length as one batch."""
    tokens, targets, mask, documents = zip(*rows, strict=True)
    joined = None if documents[0] is None else torch.cat(documents)
    return TextBatch(torch.cat(tokens), torch.cat(targets), torch.cat(mask), joined)


class Windows:
    """The windows of a stream in the order in which a run with `seed` reads them."""

    def __init__(self, stream: TokenStream, context: int, batch: int, *, seed: int = 0, separate: bool = True):
        if context < 1 or batch < 1:
            raise CorpusError(f"context and batch must be at least 1, got {context} and {batch}")
        if len(stream) <= context:
            raise CorpusError(f"a window of {context} tokens and a target does not fit in {len(stream)} tokens")
        self.stream, self.context, self.batch = stream, context, batch
        self.seed, self.separate = seed, separate
        self.count = (len(stream) - 1) // context  # windows in a pass
        self._pass, self._order = -1, torch.empty(0, dtype=torch.int64)

    def starts(self, step: int) -> list[int]:
        """Where the windows of a step begin in the stream."""
        return [self._start(*divmod(index, self.count)) for index in range(step * self.batch, (step + 1) * self.batch)]

    def draw(self, step: int) -> TextBatch:
        """The batch of a step."""
        return stacked([window(self.stream, start, self.context, self.separate) for start in self.starts(step)])

    def _start(self, number: int, place: int) -> int:
        """The beginning of the window at a place of a pass over the corpus."""
        if number != self._pass:
            generator = torch.Generator().manual_seed(stream_seed("train", self.seed, number))
            self._pass, self._order = number, torch.randperm(self.count, generator=generator)
        left_over = (len(self.stream) - 1) % self.context
        shift = stream_seed("train", self.seed, number) // 4 % (left_over + 1)
        return shift + int(self._order[place]) * self.context


def evenly_spaced(stream: TokenStream, context: int, rows: int, separate: bool = True) -> TextBatch:
    """Up to `rows` windows spread over a stream, always the same: what validation reads."""
    count = (len(stream) - 1) // context
    if not count:
        raise CorpusError(f"a window of {context} tokens and a target does not fit in {len(stream)} tokens")
    chosen = sorted({number * count // rows for number in range(rows)})
    return stacked([window(stream, number * context, context, separate) for number in chosen])
