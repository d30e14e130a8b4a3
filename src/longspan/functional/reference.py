"""Dense attention in plain PyTorch, any dtype and device: the oracle of every other implementation."""

from collections.abc import Callable

import torch
from torch import Tensor

from longspan.functional.scores import Rules, grouped_product, query_positions, score_block, tracked

# Scores kept at once when no gradient is wanted: 64 MiB of float32.
_SCORES_AT_ONCE = 1 << 24

Normalise = Callable[[Tensor], Tensor]


def dense_scores(q: Tensor, k: Tensor, rules: Rules, rows: Tensor | None = None) -> Tensor:
    """The masked scores of the queries `rows` (all of them by default) with every key, in float32 or better."""
    positions = query_positions(q.shape[2], k.shape[2], q.device)
    if rows is not None:
        q, positions = q[:, :, rows], positions[rows]
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys = torch.arange(k.shape[2], device=q.device)
    return score_block(q.to(dtype), k.to(dtype), rules, positions, keys)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, rules: Rules, normalise: Normalise) -> Tensor:
    """``normalise(scores) @ v`` for any map from masked scores (-inf where hidden) to weights, row by row.

    Without gradients the queries go through in blocks, so memory does not grow with the square of the length.
    """
    step = max(1, _SCORES_AT_ONCE // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    if tracked(rules, q, k, v) or step >= q.shape[2]:
        return _weighted_sum(normalise(dense_scores(q, k, rules)), v)
    blocks = torch.arange(q.shape[2], device=q.device).split(step)
    return torch.cat([_weighted_sum(normalise(dense_scores(q, k, rules, rows)), v) for rows in blocks], dim=2)


def _weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    return grouped_product(weights, v.to(weights.dtype)).to(v.dtype)
