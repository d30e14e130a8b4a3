"""What a layer remembers between decoding steps."""

import torch
from torch import Tensor

from longspan.functional import PageSummary
from longspan.functional.decode import extended_summary


class KVCache:
    """The keys, values and document ids of the tokens one layer has seen.

    Args:
        room: tokens to have room for from the start, so that nothing is copied until there are more. Beyond it, room
            doubles.
        starts: (batch,), where every sequence begins: tokens before it are left padding, which the others do not see.

        boxes: whether the summary of its pages has boxes, by which keys may be left unread whatever the slopes. They
            pay where a page's keys are alike.

    `reset` forgets the tokens and keeps the memory.
    """

    def __init__(self, room: int = 0, starts: Tensor | None = None, boxes: bool = False) -> None:
        self.boxes = boxes
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._held = False
        self.reset(room, starts)

    def __len__(self) -> int:
        return self._length

    @property
    def starts(self) -> Tensor | None:
        return self._starts

    def reset(self, room: int = 0, starts: Tensor | None = None) -> None:
        """Forget every token; arguments as of the constructor. The memory serves again if what comes next fits it."""
        if room < 0:
            raise ValueError(f"room must not be negative, got {room}")
        if starts is not None and (starts.ndim != 1 or starts.is_floating_point() or starts.dtype == torch.bool):
            raise ValueError(f"starts must be integers of shape (batch,), got {starts.dtype} {tuple(starts.shape)}")
        if self._k is not None and (self._k.requires_grad or self._held):
            self._k = self._v = None  # it belongs to a graph
        self._length, self._room, self._starts, self._held = 0, room, starts, False
        self._documents: Tensor | None = None
        self._summary: PageSummary | None = None
        self._summarised = 0

    def append(
        self, k: Tensor, v: Tensor, documents: Tensor | None, held: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add the new tokens' keys and values (batch, kv_heads, time, dim); return those of all tokens so far.

        Tokens without ids continue the document of the last one before them. Tokens that are refused leave no trace.
        `held`: a backward will want all keys and values as they are now, even if they have no gradients themselves.
        """
        self._check(k, v, documents)
        if self._length and documents is None and self._documents is not None:
            documents = self._documents[:, -1:].expand(-1, k.shape[2])
        if documents is not None:
            documents = documents.to(k.device)
            before = [] if self._documents is None else [self._documents]
            self._documents = torch.cat([*before, documents], dim=1)
        self._k, self._v = self._store(self._k, k), self._store(self._v, v)
        self._length += k.shape[2]
        self._held = held
        return self._k[:, :, : self._length], self._v[:, :, : self._length], self._documents

    def _check(self, k: Tensor, v: Tensor, documents: Tensor | None) -> None:
        batch, _, time, _ = k.shape
        if self._starts is not None and len(self._starts) != batch:
            raise ValueError(f"the cache has {len(self._starts)} starts, the new tokens are a batch of {batch}")
        for memory, new in ((self._k, k), (self._v, v)):
            if self._length and memory is not None and not _fits(memory, new):
                raise ValueError(f"the cache holds {_kind(memory)}, the new tokens are {_kind(new)}")
        if documents is None:
            return
        if self._starts is not None:
            raise ValueError("a cache with left padding has no document ids")
        if documents.shape != (batch, time) or documents.is_floating_point():
            raise ValueError(
                f"documents must be integer ids of shape ({batch}, {time}), one per new token, "
                f"got {documents.dtype} {tuple(documents.shape)}"
            )
        if self._length and self._documents is None:
            raise ValueError("the cached tokens have no document ids, so new ones cannot have any")

    def own_positions(self, time: int, device: torch.device) -> Tensor:
        """Of the next `time` tokens, counted from where their sequence begins: (time,), or (batch, time) after padding.

        The padding itself has position 0.
        """
        positions = torch.arange(self._length, self._length + time, device=device)
        return positions if self._starts is None else (positions - self._starts.to(device)[:, None]).clamp_min(0)

    def padding_as_document(self, device: torch.device) -> Tensor | None:
        """Ids (batch, length) that keep left padding and tokens apart; None without padding."""
        if self._starts is None:
            return None
        return (torch.arange(self._length, device=device) >= self._starts.to(device)[:, None]).long()

    def summary(self) -> PageSummary | None:
        """What is known of every page of keys. Only keys that came since it was last asked for are read."""
        if self._k is None or not self._length:
            return None
        new = self._k[:, :, self._summarised : self._length]
        self._summary = extended_summary(self._summary, new, self._summarised, self._k.shape[2], self.boxes)
        self._summarised = self._length
        return self._summary.first(self._length)

    def _store(self, room: Tensor | None, new: Tensor) -> Tensor:
        if room is not None and not self._length and not _fits(room, new):
            room = None  # what a reset left
        return extended(room, self._length, new, self._room, self._held)


def _fits(memory: Tensor, new: Tensor) -> bool:
    same_kind = memory.dtype == new.dtype and memory.device == new.device
    return same_kind and memory.shape[:2] == new.shape[:2] and memory.shape[3] == new.shape[3]


def _kind(tensor: Tensor) -> str:
    batch, heads, _, dim = tensor.shape
    return f"{tensor.dtype} on {tensor.device} in a batch of {batch} with {heads} heads of {dim}"


def extended(memory: Tensor | None, length: int, new: Tensor, room: int, held: bool = False) -> Tensor:
    """Memory (batch, heads, tokens, dim) with the new tokens behind its first `length`.

    The same memory if they fit and may be written there, which is not so if a graph holds it; else some that is larger,
    with room for at least `room`.
    """
    batch, heads, time, dim = new.shape
    end = length + time
    # A compiler cannot ask this of a tensor.
    outlives = not torch.compiler.is_compiling() and memory is not None and memory.is_inference()
    outlives = outlives and not torch.is_inference_mode_enabled()
    if memory is None or end > memory.shape[2] or outlives:
        larger = new.new_empty(batch, heads, max(end, 2 * length, room), dim)
        if memory is not None:
            larger[:, :, :length] = memory[:, :, :length]
        memory = larger
    elif held or memory.requires_grad or new.requires_grad:
        memory = memory.clone()
    memory[:, :, length:end] = new
    return memory
