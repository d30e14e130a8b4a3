"""What a query sees and how a score is made: the one definition every implementation of attention shares.

    score[i, j] = scale * (q_i . k_j) - slope_h * |position_i - j|,   -inf where query i does not see key j

Queries stand at the end of the keys (bottom-right alignment): query i has position ``i + key_time - query_time``.
So a training pass, a prefill and a decoding step with a cache mean the same thing.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rules:
    """Who sees whom, and the bias of a score. Checked by `longspan.functional.attention`."""

    scale: float
    causal: bool = True
    slopes: Tensor | None = None  # (heads,)
    lengths: Tensor | None = None  # (batch,)
    documents: Tensor | None = None  # (batch, key_time)


def tracked(rules: Rules, *inputs: Tensor | None) -> bool:
    """Whether a gradient may be asked for of the inputs or of the slopes."""
    tensors = (tensor for tensor in (*inputs, rules.slopes) if tensor is not None)
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def query_positions(query_time: int, key_time: int, device: torch.device) -> Tensor:
    """The position of every query among the keys."""
    return torch.arange(query_time, device=device) + (key_time - query_time)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast would round scores to half precision: one of 30 by 0.1, which moves a threshold and what it leaves."""
    return torch.autocast(device.type, enabled=False) if device.type != "meta" else nullcontext()


def grouped_product(heads: Tensor, kv_heads: Tensor) -> Tensor:
    """``heads @ kv_heads`` where the right side may have fewer heads, each serving a run of the left's."""
    batch, num_heads, rows, inner = heads.shape
    shared_by = num_heads // kv_heads.shape[1]
    groups = heads.reshape(batch, kv_heads.shape[1], shared_by * rows, inner)
    with without_autocast(heads.device):
        product = groups @ kv_heads
    return product.view(batch, num_heads, rows, kv_heads.shape[-1])


def score_block(q: Tensor, k: Tensor, rules: Rules, rows: Tensor, keys: Tensor) -> Tensor:
    """The scores of the queries at positions `rows` with the keys at positions `keys`.

    `q` is (batch, heads, len(rows), dim) and `k` (batch, kv_heads, len(keys), dim).
    """
    scores = grouped_product(q * rules.scale, k.transpose(-1, -2))  # (B, H, rows, keys)
    if rules.slopes is not None:
        scores = scores - rules.slopes.to(scores.dtype)[:, None, None] * distances(rows, keys, scores.dtype)
    hidden = hidden_block(rules, rows, keys)
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def distances(rows: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows[:, None] - keys).abs().to(dtype)


def hidden_block(rules: Rules, rows: Tensor, keys: Tensor) -> Tensor | None:
    """True where a key is hidden from a query, broadcastable to (batch, heads, rows, keys); None if nothing is."""
    hidden = None
    if rules.causal:
        hidden = (keys > rows[:, None])[None, None]
    if rules.lengths is not None:
        end = rules.lengths[:, None, None, None]
        padding = (keys >= end) | (rows[:, None] >= end)
        hidden = padding if hidden is None else hidden | padding
    if rules.documents is not None and rules.documents.shape[1]:
        # A query before the first key (more queries than keys) belongs to no document, and to no key.
        own = rules.documents[:, rows.clamp_min(0)]
        foreign = (own[:, None, :, None] != rules.documents[:, keys][:, None, None, :]) | (rows < 0)[:, None]
        hidden = foreign if hidden is None else hidden | foreign
    return hidden


def visible_tokens(rules: Rules, query_time: int, key_time: int, batch: int, device: torch.device) -> Tensor:
    """How many tokens each query sees, (batch, query_time): the n of every length-dependent scale.

    With documents it counts within the query's own. Linear in the length up to a sort. At least 1, so that a padded
    row never makes a logarithm that is not finite.
    """
    rows = query_positions(query_time, key_time, device)
    end = torch.full((batch, 1), key_time, device=device)
    if rules.lengths is not None:
        end = rules.lengths.long()[:, None].clamp_max(key_time)
    if rules.documents is None or not rules.documents.numel():
        seen = rows.expand(batch, -1) + 1 if rules.causal else end.expand(-1, query_time)
        return torch.minimum(seen, end).clamp_min(1)
    keys = torch.arange(key_time, device=device)
    # Padding becomes documents of its own, one beyond every real id, which a dtype of few bits may not have.
    documents = rules.documents.long()
    ids = torch.where(keys < end, documents, documents.amax() + 1)
    return fellow_tokens(ids, rules.causal)[:, rows.clamp_min(0)]


@torch.library.custom_op("longspan::fellow_tokens", mutates_args=())
def fellow_tokens(ids: Tensor, causal: bool) -> Tensor:
    """For every token how many of its row have its id, itself included; causal: of those up to it. (batch, time).

    An operator of its own, so that no compiler takes it apart: inductor's code on a GPU is known to be silently wrong
    for some searches (github.com/pytorch/pytorch/issues/182343) and for a gather after a scatter (.../191571).
    """
    ordered, order = ids.sort(dim=-1, stable=True)
    first = torch.searchsorted(ordered, ordered, side="left")
    if causal:
        count = torch.arange(1, ids.shape[1] + 1, device=ids.device) - first
    else:
        count = torch.searchsorted(ordered, ordered, side="right") - first
    return torch.empty_like(count).scatter_(-1, order, count)


@fellow_tokens.register_fake
def _(ids: Tensor, causal: bool) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.int64)
