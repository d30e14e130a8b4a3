"""Who sees whom in a transformers model, said in a way that kernels understand.

Transformers describes a mask by a function of indices and asks the attention in use to make of it what it needs. What
we make, and what then travels through the model as its `attention_mask`, is one of

    None                                 causal, the queries standing at the end of the keys
    integers (batch, 1, 1, used)         the same among equal ids: packed documents are 0, 1, ..., padding is -1; the
                                         keys from `used` on are room of a static cache that is not filled yet
    booleans (batch, 1, queries, keys)   anything else, True where a query sees a key

The first two run on every implementation of `longspan.attention`; the third builds its scores.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from longspan.functional.scores import Rules, visible_tokens

MaskFunction = Callable[..., Any]


def longspan_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    config: PreTrainedConfig | None = None,
    **others: Any,
) -> Tensor | None:
    """The mask of one kind of layers, as transformers asks for it.

    Queries stand at `q_offset` and after, keys at `kv_offset` and after. `attention_mask` is (batch, time) and False at
    padding; `local_size` is the size of a window or of chunks.
    """
    check_model(type(config))
    tracing = is_tracing(attention_mask)
    # A static cache counts its tokens in a tensor. Read where a step is compiled it would break the graph, and a
    # number that grows with every step would compile every step anew.
    unreadable = isinstance(q_offset, Tensor) and (tracing or q_length == 1)
    used = kv_length if unreadable else int(q_offset) + q_length - kv_offset
    waiting = q_length == 1 and used < kv_length
    local = local_size is not None and kv_offset + used > local_size
    dense = partial(
        sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        use_vmap=use_vmap,
        device=device,
    )
    if unreadable or waiting or local or use_vmap or not _is_causal(mask_function):
        return dense()
    ids = _documents(mask_function, batch_size, kv_offset, used, device)
    real = _real(attention_mask, kv_offset, used)
    if not tracing:  # where the values may be looked at, what says nothing is dropped
        ids = ids if ids is not None and bool(ids.any()) else None
        real = real if real is not None and not bool(real.all()) else None
    if ids is None and not allow_is_causal_skip:
        return dense()  # no documents forbid to leave the mask away, so the model itself does: it reads its mask
    if ids is None and real is None and used == kv_length:
        return None
    if ids is None:
        ids = torch.zeros(batch_size, used, dtype=torch.int32, device=device)
    if real is not None:
        ids = torch.where(real, ids, -1)
    return ids[:, None, None]


@torch.compiler.assume_constant_result
def check_model(config: type) -> None:
    """Refuse the models of a config that see the future where our mask is None, or never ask for our attention.

    Transformers takes any registered name for models with an attention of their own, and a few that take theirs from
    its interface do not say there that it is causal.
    """
    name = _of_its_own_kind(config)
    if name is not None:
        raise ValueError(f"{name} cannot run longspan attention: it says that it runs none but its own")


@cache
def _of_its_own_kind(config: type) -> str | None:
    """The model of a config that is said to run no other attention than its own."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING):
        model = mapping.get(config, None)
        if model is not None and not (model._supports_sdpa or model._supports_attention_backend):
            return model.__name__
    return None


def _is_causal(mask_function: MaskFunction) -> bool:
    """Whether a mask function is the causal one, or that and a restriction to documents, windows or chunks.

    Transformers adds restrictions with `and_masks`; what it adds with `or_masks`, blocks of an image for instance, sees
    the future.
    """
    return mask_function is causal_mask_function or getattr(mask_function, "__qualname__", "").startswith("and_masks")


def _documents(
    mask_function: MaskFunction, batch: int, start: int, used: int, device: torch.device | str
) -> Tensor | None:
    """Ids of the documents, (batch, used): a new one begins wherever a token does not see the one before it."""
    if mask_function is causal_mask_function:
        return None
    rows = torch.arange(start + 1, start + used, device=device)[None]
    batches = torch.arange(batch, device=device)[:, None]
    joined = mask_function(batches, torch.zeros_like(batches), rows, rows - 1).expand(batch, -1)
    return torch.nn.functional.pad((~joined).cumsum(-1), (1, 0)).to(torch.int32)


def _real(attention_mask: Tensor | None, start: int, used: int) -> Tensor | None:
    """False at padding, (batch, used)."""
    if attention_mask is None:
        return None
    missing = start + used - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, start : start + used]


class View(NamedTuple):
    """A mask as attention reads it; see the top of this file."""

    used: int  # keys to look at
    documents: Tensor | None = None  # (batch, used)
    dense: Tensor | None = None  # (batch, 1 or heads, 1 or queries, used): True where a query sees a key
    bias: Tensor | None = None  # like `dense`, added to the scores: only masks made by hand have one

    def rows(self, part: slice) -> "View":
        """Of some of the queries."""
        if self.dense is None or self.dense.shape[2] == 1:
            return self
        return self._replace(dense=self.dense[:, :, part], bias=None if self.bias is None else self.bias[:, :, part])


def read_mask(mask: Tensor | None, key_time: int) -> View:
    """What a mask says. One made by hand may be of booleans, or of numbers that are added to the scores."""
    if mask is None:
        return View(key_time)
    if mask.ndim != 4:
        raise ValueError(f"a mask must be (batch, 1, queries, keys), got shape {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        return View(key_time, dense=mask[..., :key_time])
    if mask.is_floating_point():
        mask = mask[..., :key_time]
        seen = mask > torch.finfo(mask.dtype).min / 2
        return View(key_time, dense=seen, bias=mask.masked_fill(~seen, 0))
    if mask.shape[1:3] != (1, 1):
        raise ValueError(f"a mask made by hand must be of booleans or of floats to add, got {mask.dtype}")
    return View(mask.shape[-1], documents=mask[:, 0, 0])


def tokens_seen(view: View, batch: int, query_time: int, causal: bool, device: torch.device) -> Tensor:
    """How many tokens each query sees, at least 1, (batch, query_time): the n of a scale."""
    if view.dense is not None:
        return view.dense.sum(-1).amax(1).clamp_min(1).expand(batch, -1)
    rules = Rules(1.0, causal, documents=view.documents)
    return visible_tokens(rules, query_time, view.used, batch, device)
