"""A dynamic cache of transformers that grows without copying: `longspan.nn.KVCache` as transformers has it.

Transformers' own joins old and new keys anew for every token, so that a step writes as much memory as it reads.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from longspan.nn.cache import extended


class GrowingLayer(DynamicLayer):
    """A layer whose `keys` and `values` are the beginning of memory with room to spare."""

    keys: Tensor
    values: Tensor

    def __init__(self, room: int = 0) -> None:
        super().__init__()
        self.room = room
        self._memory: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add the new tokens' keys and values (batch, kv_heads, time, dim); return those of all tokens so far."""
        length, new = self.get_seq_length(), (key_states, value_states)
        held = [self.keys, self.values] if length else []
        if torch.compiler.is_compiling() or (held and _dtypes(held) != _dtypes(new)):
            self._memory = []  # a compiler knows no addresses, and other dtypes meet in a larger one
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        # Cropped, they still are the beginning of the memory; reordered for beams, they have memory of their own.
        if not (held and self._memory and all(map(_begins, self._memory, held))):
            self._memory = held
        memory = self._memory or (None, None)
        self._memory = [extended(old, length, part, self.room) for old, part in zip(memory, new, strict=True)]
        end = length + key_states.shape[2]
        self.keys, self.values = (memory[:, :, :end] for memory in self._memory)
        return self.keys, self.values


def _dtypes(tensors: Iterable[Tensor]) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors]


def _begins(memory: Tensor, part: Tensor) -> bool:
    same_place = memory.data_ptr() == part.data_ptr() and memory.stride() == part.stride()
    return same_place and memory.shape[:2] == part.shape[:2]


def growing(layers: list[Any], room: int = 0) -> list[Any]:
    """Layers of a cache, those that keep every token as `GrowingLayer`; nothing is in them yet."""
    return [GrowingLayer(room) if type(layer) is DynamicLayer else layer for layer in layers]


class GrowingCache(DynamicCache):
    """For `generate(..., past_key_values=GrowingCache(config=model.config))`; our own models have it by themselves.

    Args:
        config: the model's; its layers with a window get transformers' own cache of that window.
        room: tokens to have room for from the start. Beyond it, room doubles.
    """

    layers: list[Any]

    def __init__(self, config: PreTrainedConfig | None = None, room: int = 0) -> None:
        super().__init__(config=config)
        self.layers = growing(self.layers, room)
        if not self.layers:
            self.layer_class_to_replicate = partial(GrowingLayer, room)


class GeneratesWithoutCopies:
    """A model whose `generate` has growing layers where it would have transformers' dynamic ones."""

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *others: Any) -> None:
        given = model_kwargs.get("past_key_values")
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *others)  # type: ignore[misc]
        made: Any = model_kwargs.get("past_key_values")
        if given is None and type(made) is DynamicCache and not made.offloading:
            made.layers = growing(made.layers)
