"""What a layer remembers between decoding steps."""

import torch
from torch import Tensor


class KVCache:
    """The keys, values and document ids of the tokens one layer has seen. Room doubles as it fills."""

    def __init__(self) -> None:
        self._length = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._documents: Tensor | None = None

    def __len__(self) -> int:
        return self._length

    def append(self, k: Tensor, v: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add the new tokens' keys and values (batch, kv_heads, time, dim); return those of all tokens so far.

        Tokens without ids continue the document of the last one before them.
        """
        if self._length and documents is None and self._documents is not None:
            documents = self._documents[:, -1:].expand(-1, k.shape[2])
        elif self._length and documents is not None and self._documents is None:
            raise ValueError("the cached tokens have no document ids, so new ones cannot have any")
        if documents is not None:
            documents = documents.to(k.device)
            before = [] if self._documents is None else [self._documents]
            self._documents = torch.cat([*before, documents], dim=1)
        self._k, self._v = self._store(self._k, k), self._store(self._v, v)
        self._length += k.shape[2]
        return self._k[:, :, : self._length], self._v[:, :, : self._length], self._documents

    def _store(self, room: Tensor | None, new: Tensor) -> Tensor:
        batch, heads, time, dim = new.shape
        end = self._length + time
        if room is not None and room.shape[0] != batch:
            raise ValueError(f"the cache holds a batch of {room.shape[0]}, the new tokens are a batch of {batch}")
        if room is None or end > room.shape[2]:
            larger = new.new_empty(batch, heads, max(end, 2 * self._length), dim)
            if room is not None:
                larger[:, :, : self._length] = room[:, :, : self._length]
            room = larger
        elif room.requires_grad or new.requires_grad:
            room = room.clone()
        room[:, :, self._length : end] = new
        return room
