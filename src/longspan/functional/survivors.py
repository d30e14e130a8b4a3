"""The few scores of a row that can have a weight, found by one look at all of them: what a CPU does instead of ten.

The highest score of every group of keys is a score of the row, and the threshold of a part of a row never exceeds that
of the whole. So the threshold over these few numbers rules out every group that does not reach it, and in the groups
that are left every score that does not. A group is keys at equal distances over the whole row: its maximum is one of
whole vectors, and neighbours that survive together are in groups of their own.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from longspan.functional.threshold import Alpha, AlphaRange, anchor_at_maximum, pack, solve

_GROUP = 16  # keys
_SHORTEST = 512  # keys in a row: below, all of them are as cheap
_SHARE = 2  # at most one in so many scores is looked at twice: above, the whole row is as cheap
_STEPS = 3  # of Newton's method on the part of a row: a bound, and not a solution, is wanted
_ROUNDING = 16  # times the last digit of the highest score and of the threshold's distance to it


class Survivors(NamedTuple):
    """Of every row the scores that may survive, -inf where a row has fewer than another; and the keys they are of."""

    scores: Tensor  # (..., rows, most)
    keys: Tensor  # (..., rows, most), 0 where there is none


def survivors(scores: Tensor, alpha: Alpha, bounds: AlphaRange) -> Survivors | None:
    """Those of `scores` (..., rows, keys), a superset of the support; None where they are not few, or not numbers."""
    width = scores.shape[-1]
    if scores.device.type != "cpu" or bounds.low <= 1 or width < _SHORTEST or scores.numel() == 0:
        return None
    rows = scores.reshape(-1, width)
    groups = width // _GROUP
    whole, rest = rows.split([groups * _GROUP, width - groups * _GROUP], dim=-1)
    highest = whole.unflatten(-1, (_GROUP, groups)).amax(-2)
    floor = _lower_bound(_beside(highest, rest), alpha, bounds)
    alive = pack(highest > floor, width // (_GROUP * _SHARE)) if bool(floor.isfinite().all()) else None
    if alive is None:
        return None
    chosen, absent = alive
    keys = (chosen[:, None] + groups * torch.arange(_GROUP)[:, None]).flatten(1)  # (rows, _GROUP * chosen)
    again = _beside(rows.gather(-1, keys).masked_fill_(absent.repeat(1, _GROUP), -torch.inf), rest)
    keys = _beside(keys, torch.arange(groups * _GROUP, width).expand(len(rows), -1))
    reach = pack(again > floor, width)
    assert reach is not None
    places, absent = reach
    shape = (*scores.shape[:-1], -1)
    return Survivors(
        again.gather(-1, places).masked_fill_(absent, -torch.inf).view(shape),
        keys.gather(-1, places).masked_fill_(absent, 0).view(shape),
    )


def _beside(columns: Tensor, more: Tensor) -> Tensor:
    return torch.cat([columns, more], dim=-1) if more.shape[-1] else columns


def _lower_bound(part: Tensor, alpha: Alpha, bounds: AlphaRange) -> Tensor:
    """What no score at or below survives, (rows, 1), given a part of every row."""
    a = alpha - 1
    anchor = anchor_at_maximum(part, alpha, _STEPS) if bounds.high <= 2 else solve(part, alpha, bounds)
    below = anchor.weight**a / a
    return anchor.score - below - _ROUNDING * torch.finfo(part.dtype).eps * (anchor.score.abs() + below)


def weighted_sum(weights: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """``sum_j weights[b, i, j] * values[b, keys[b, i, j]]``, (batch, rows, dim), without a copy of the values."""
    flat = _in_batch(keys, values).flatten(0, 1)
    out = torch.nn.functional.embedding_bag(
        flat, values.flatten(0, 1), per_sample_weights=weights.flatten(0, 1), mode="sum"
    )
    return out.view(*weights.shape[:2], -1)


def weighted_sum_vjp(weights: Tensor, keys: Tensor, values: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `weighted_sum` in the weights and in the values."""
    with torch.enable_grad():
        tracked = weights.detach().requires_grad_()
        (d_weights,) = torch.autograd.grad(weighted_sum(tracked, keys, values), tracked, grad)
    return d_weights, spread(weights, keys, values, grad)


def spread(weights: Tensor, keys: Tensor, values: Tensor, grad: Tensor) -> Tensor:
    """The gradient of `weighted_sum` in the values alone, where it matters only what shape they have."""
    pieces = weights[..., None] * grad[:, :, None]  # (batch, rows, few, dim): a few times the block's own rows
    out = torch.zeros_like(values, dtype=weights.dtype, memory_format=torch.contiguous_format)
    out.flatten(0, 1).index_add_(0, _in_batch(keys, values).flatten(), pieces.flatten(0, 2))
    return out


def _in_batch(keys: Tensor, values: Tensor) -> Tensor:
    """The keys as rows of all values of the batch."""
    return keys + torch.arange(len(keys))[:, None, None] * values.shape[1]
