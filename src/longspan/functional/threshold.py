"""Solvers for alpha-entmax: where the cut lies, to the last bits of the dtype.

With ``a = alpha - 1``, alpha-entmax is ``p_i = [a s_i - tau]_+ ** (1/a)`` with tau such that the row sums to one.
Tau itself is a poor thing to store: for alpha near 1 every ``a s_i - tau`` is near 1 and is raised to a huge power,
and for large alpha one ulp of tau moves a small weight from 0 to 0.1. Both are cured by naming an *anchor*: one
element of the support, its score ``s_0`` and its weight ``p_0``, which give every other weight as

    p_i = [a (s_i - s_0) + p_0 ** a]_+ ** (1/a).

For alpha <= 2 the anchor is the row's maximum: the norm ``(sum p) ** a`` is convex in ``p_0 ** a``, so Newton's method
from ``p_0 = 1`` falls monotonically to the root; as alpha tends to 1 one step gives softmax. For
alpha > 2 the anchor is the smallest survivor: found by bisection over the sorted row, after which the sum is an
l_a norm in ``p_0``, convex again. Everything works on the last dimension and knows nothing of autograd.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

Alpha = float | Tensor

_LARGE = 1 << 22  # scores: a pass over them takes a GPU longer than a word with the host


class Anchor(NamedTuple):
    """One supported element of every row: its score and its weight, shapes ``(..., 1)``."""

    score: Tensor
    weight: Tensor


class AlphaRange(NamedTuple):
    """The least and the greatest alpha in a call, which decide the branches that run."""

    low: float
    high: float


def alpha_range(alpha: Alpha) -> AlphaRange:
    """The range of `alpha`; raises if any is not a finite number >= 1."""
    if isinstance(alpha, Tensor):
        if _in_graph(alpha):  # reading a value here would break the graph: cover every case instead
            return AlphaRange(1.0, math.inf)
        if alpha.numel() == 0:
            return AlphaRange(1.5, 1.5)
        low, high = (float(bound) for bound in alpha.detach().aminmax())
    else:
        low = high = float(alpha)
    if not (low >= 1.0 and high < math.inf):
        raise ValueError(f"alpha must be a finite number >= 1, got values from {low} to {high}")
    return AlphaRange(low, high)


def alpha_of_kernels(alpha: float) -> float:
    """The alpha that kernels compute with: 1 where softmax is nearer to it than they would be.

    They raise float32 numbers to the power 1 / (alpha - 1), which takes 1e-7 / (alpha - 1) off a weight's digits;
    softmax is off by a few times alpha - 1. The two meet here, near 1e-3; at 1 + 1e-7 no digit would be left.
    """
    return 1.0 if alpha < 1.0002 else alpha


def _tiny() -> float:
    """The smallest normal number of float32.

    A function and no constant: where shapes are dynamic a compiler takes a global float for one of its inputs, and
    fails at the second layer that reads it.
    """
    return torch.finfo(torch.float32).tiny


def newton_steps(n: int) -> int:
    """Enough steps for any row of n scores; devices that should not wait for the host run them without looking.

    Needed in float64, at most, over alpha in [1, 64] and the rows of the solver's tests: 8 at n = 64, 12 at 4096, 17 at
    2^20.
    """
    return 8 + math.ceil(0.6 * math.log2(max(n, 1)))


def solve(scores: Tensor, alpha: Alpha, bounds: AlphaRange) -> Anchor:
    """The anchor of every row of `scores`; `alpha` is a float or a tensor of shape ``(..., 1)``."""
    if bounds.high <= 2:
        return anchor_at_maximum(scores, alpha)
    if bounds.low > 2:
        return _anchor_at_edge(scores, alpha)
    assert isinstance(alpha, Tensor)
    dense = anchor_at_maximum(scores, alpha.clamp_max(2))
    sparse = _anchor_at_edge(scores, alpha.clamp_min(2))
    at_edge = alpha > 2
    return Anchor(torch.where(at_edge, sparse.score, dense.score), torch.where(at_edge, sparse.weight, dense.weight))


def weights(scores: Tensor, alpha: Alpha, anchor: Anchor, bounds: AlphaRange) -> Tensor:
    """The weights ``p`` of every row, given its anchor."""
    if isinstance(alpha, Tensor) and bounds.low <= 2 < bounds.high:
        dense = _weights_below(scores, alpha.clamp_max(2), anchor)
        return torch.where(alpha > 2, _weights_above(scores, alpha.clamp_min(2), anchor), dense)
    return (_weights_below if bounds.high <= 2 else _weights_above)(scores, alpha, anchor)


def tau_of(anchor: Anchor, alpha: Alpha) -> Tensor:
    """The paper's threshold, ``p_i > 0 iff (alpha-1) s_i > tau``; it tends to -1 as alpha tends to 1."""
    a = alpha - 1
    return a * anchor.score - anchor.weight**a


def anchor_at_maximum(scores: Tensor, alpha: Alpha, most_steps: int | None = None) -> Anchor:
    """The anchor for alpha <= 2; after a few steps only, one whose weight is too large, and whose tau too low."""
    top = _finite_maximum(scores)
    gap = scores - top  # (..., n), <= 0
    if not isinstance(alpha, Tensor) and alpha == 1:
        return Anchor(top, gap.exp_().sum(-1, keepdim=True).clamp_min_(1).reciprocal_())
    moments = _MOMENTS.get(alpha, _moments) if not isinstance(alpha, Tensor) else _moments
    weight = torch.ones_like(top)
    look = _may_branch_on_values(gap)
    room = torch.empty_like(gap) if look else None  # fresh memory costs a CPU more than the sums
    for _ in range(newton_steps(scores.shape[-1]) if most_steps is None else most_steps):
        mass, slope = moments(gap, weight, alpha, room)
        residual = mass - 1
        before, weight = weight, _step_on_the_norm(weight, mass, slope, alpha)
        if look and _converged(torch.where(weight < before, residual, 0)):  # no step, no need of another
            break
        if moments is _moments and (packed := _drop_the_dead(gap, weight, alpha)) is not gap:
            gap, room = packed, torch.empty_like(packed)
    return Anchor(top, weight)


def _step_on_the_norm(weight: Tensor, mass: Tensor, slope: Tensor, alpha: Alpha) -> Tensor:
    """Newton's step for ``mass ** a = 1`` in ``weight ** a``, given d mass / d weight.

    ``mass ** a`` is a norm, convex in ``weight ** a``, and exactly linear where all supported scores tie.
    """
    a = _at_least_tiny(alpha - 1, weight.dtype)
    log_mass = mass.clamp_min(_tiny()).log()  # a row that sees nothing has none
    share = (
        torch.expm1(a * log_mass) * torch.exp((1 - a) * log_mass) / (weight * slope.clamp_min(1))
    )  # >= the maximum's 1
    return weight * torch.exp(torch.log1p(-share.clamp_max(1 - torch.finfo(weight.dtype).eps)) / a)


def _at_least_tiny(a: Alpha, dtype: torch.dtype) -> Alpha:
    """`a`, and a number whose inverse is finite in place of 0, where softmax is its limit."""
    tiny = torch.finfo(dtype).tiny ** 0.5
    return a.clamp_min(tiny) if isinstance(a, Tensor) else max(a, tiny)


def _anchor_at_edge(scores: Tensor, alpha: Alpha) -> Anchor:
    a = alpha - 1
    look = _may_branch_on_values(scores)
    ordered = _candidates(scores, a)  # (..., m), descending
    rank = torch.arange(ordered.shape[-1], device=scores.device)
    inside = torch.zeros_like(ordered[..., :1], dtype=torch.long)  # the maximum is always in
    outside = torch.full_like(inside, ordered.shape[-1])
    for _ in range(ordered.shape[-1].bit_length()):
        middle = (inside + outside) // 2
        edge = ordered.gather(-1, middle)
        survives = ((ordered - edge) * a).clamp_min_(0).pow_(1 / a).sum(-1, keepdim=True) < 1
        inside = torch.where(survives, middle, inside)
        outside = torch.where(survives, outside, torch.maximum(middle, inside + 1))
    edge = ordered.gather(-1, inside)
    size = inside + 1
    gap = torch.where(rank < size, (ordered - edge) * a, -1)  # (..., m), >= 0 on the support
    weight = size.to(scores.dtype).reciprocal()
    for _ in range(newton_steps(scores.shape[-1])):
        p = torch.where(gap > 0, (gap.clamp_min(0) + weight**a).pow(1 / a), weight)
        p = torch.where(gap < 0, math.inf, p)  # so that (weight / p) vanishes off the support
        slope = (weight / p).pow(a - 1).sum(-1, keepdim=True)
        residual = torch.where(gap < 0, 0, p).sum(-1, keepdim=True) - 1
        # An edge that all but dies has less weight than the sum can tell; none at all would make 0 / 0 of its slope.
        weight = (weight - residual / slope.clamp_min(1)).clamp_min(_tiny())
        if look and _converged(residual):
            break
    edge = torch.where(edge == math.inf, math.nan, edge)  # +inf has no weights: NaN, as below alpha = 2
    return Anchor(torch.where(edge == -math.inf, 0, edge), weight)


def _converged(residual: Tensor) -> bool:
    """Whether the step just taken was the last: it roughly squared this excess of the row sum over one.

    A row that is NaN or sees nothing compares false and does not hold up the others.
    """
    return not bool((residual > torch.finfo(residual.dtype).eps ** 0.85).any())


def _drop_the_dead(gap: Tensor, weight: Tensor, alpha: Alpha) -> Tensor:
    """`gap` with its survivors packed to the left, if they are few: the weight only falls, so the dead stay dead."""
    width = gap.shape[-1]
    if width < 256 or not _may_branch_on_values(gap):
        return gap
    a = alpha - 1
    alive = gap.reshape(-1, width) > (-(weight**a) / a).reshape(-1, 1)
    packed = pack(alive, width // 4)
    if packed is None:
        return gap
    columns, absent = packed
    few = gap.reshape(-1, width).gather(-1, columns).masked_fill_(absent, -math.inf)
    return few.view(*gap.shape[:-1], -1)


def pack(chosen: Tensor, most: int) -> tuple[Tensor, Tensor] | None:
    """The columns that a mask (rows, width) chooses, moved to the left, and where a row has fewer than the longest.

    There the column is 0. None if a row has more than `most`.
    """
    counts = chosen.sum(-1)
    longest = max(int(counts.max()), 1)
    if longest > most:
        return None
    row, column = chosen.nonzero(as_tuple=True)
    place = torch.arange(len(row), device=chosen.device) - (counts.cumsum(0) - counts)[row]
    columns = column.new_zeros((len(chosen), longest))
    columns[row, place] = column
    return columns, torch.arange(longest, device=chosen.device) >= counts[:, None]


def _candidates(scores: Tensor, a: Alpha) -> Tensor:
    """The scores that can survive, sorted; few, so that a CPU does not sort whole rows."""
    if not _may_branch_on_values(scores):
        return scores.sort(-1, descending=True).values
    height = (scores - _finite_maximum(scores)).mul_(a).add_(1)  # exactly 1 for ties of the maximum, however large
    most = int(height.clamp_min_(0).sign_().sum(-1).nan_to_num_(1).max())
    return scores.topk(max(most, 1), dim=-1).values


def _weights_below(scores: Tensor, alpha: Alpha, anchor: Anchor) -> Tensor:
    a = alpha - 1
    if not isinstance(alpha, Tensor):
        if alpha == 1:
            return (scores - anchor.score).exp_().mul_(anchor.weight)
        if alpha in _MOMENTS:
            u = (scores - anchor.score).mul_(a).add_(anchor.weight**a).clamp_min_(0)
            alive = u.sign()
            if alpha == 2:
                return _rebalanced(u, alive, u.sum(-1, keepdim=True), alive.sum(-1, keepdim=True))
            mass, slope = u.square().sum(-1, keepdim=True), 2 * u.sum(-1, keepdim=True)
            return _rebalanced(u, alive, mass, slope).square_()
    p = _relative_weight(scores - anchor.score, anchor.weight, alpha)[0].mul_(anchor.weight)
    gain = p.pow(2 - alpha).mul_(p.sign())
    return _rebalanced(p, gain, p.sum(-1, keepdim=True), gain.sum(-1, keepdim=True))


def _rebalanced(values: Tensor, gain: Tensor, mass: Tensor, slope: Tensor) -> Tensor:
    """One more Newton step, on the values themselves, in place.

    Many weights far below the anchor's inherit one ulp of it each, and only their own resolution can take it back: in
    float32 the sum of 4096 such weights is off by 1e-4 without this.
    """
    return values.sub_(gain.mul_((mass - 1) / slope.clamp_min(_tiny()))).clamp_min_(0)


def _weights_above(scores: Tensor, alpha: Alpha, anchor: Anchor) -> Tensor:
    a = alpha - 1
    gap = scores - anchor.score
    p = (gap * a).add_(anchor.weight**a).pow_(1 / a)
    # Ties of the anchor keep its weight even where weight ** a underflows; below it rounding must not let any in.
    return torch.where(gap < 0, 0, torch.where(gap == 0, anchor.weight, p))


def _relative_weight(gap: Tensor, weight: Tensor, alpha: Alpha, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``p / weight`` and ``u = (p / weight) ** a`` for any alpha in [1, 2]; alpha = 1 is its own limit."""
    a = _at_least_tiny(alpha - 1, gap.dtype)
    if not isinstance(a, Tensor) and a >= 0.25:  # one transcendental function instead of two
        u = torch.mul(gap, a / weight**a, out=room).add_(1).clamp_min_(0)
        return u.pow(1 / a), u
    u_minus_1 = torch.mul(gap, a / weight**a, out=room).clamp_min_(-1)
    return torch.log1p(u_minus_1).div_(a).exp_(), u_minus_1.add_(1)


def _moments(gap: Tensor, weight: Tensor, alpha: Alpha, room: Tensor | None) -> tuple[Tensor, Tensor]:
    """The row sum of p and its derivative in the anchor's weight, ``sum (p / weight) ** (2 - alpha)``.

    `room` is memory of the size of `gap` that may be written.
    """
    relative, u = _relative_weight(gap, weight, alpha, room)
    mass = relative.sum(-1, keepdim=True) * weight
    slope = relative.div_(u.clamp_min_(torch.finfo(gap.dtype).tiny)).sum(-1, keepdim=True)
    return mass, slope


def _moments_entmax15(gap: Tensor, weight: Tensor, alpha: Alpha, room: Tensor | None) -> tuple[Tensor, Tensor]:
    root = weight.sqrt()
    u = torch.add(root, gap, alpha=0.5, out=room).clamp_min_(0)
    slope = u.sum(-1, keepdim=True) / root
    return u.square_().sum(-1, keepdim=True), slope


def _moments_sparsemax(gap: Tensor, weight: Tensor, alpha: Alpha, room: Tensor | None) -> tuple[Tensor, Tensor]:
    u = torch.add(gap, weight, out=room).clamp_min_(0)
    mass = u.sum(-1, keepdim=True)
    return mass, u.sign_().sum(-1, keepdim=True)


# The two alphas whose powers need no transcendental function.
_MOMENTS = {1.5: _moments_entmax15, 2.0: _moments_sparsemax}


def _finite_maximum(scores: Tensor) -> Tensor:
    """The row maximum, and 0 for a row that is all -inf, so that ``scores - maximum`` stays -inf there."""
    top = scores.amax(-1, keepdim=True)
    return torch.where(top == -math.inf, 0, top)


def _may_branch_on_values(tensor: Tensor) -> bool:
    """Whether to look at values before going on: free on a CPU; elsewhere the host must wait, which pays if the work
    it may save is large. In a captured graph it fails."""
    return (tensor.device.type == "cpu" or tensor.numel() >= _LARGE) and not _in_graph(tensor)


def _in_graph(tensor: Tensor) -> bool:
    """Whether this call is being captured, where control flow must not depend on values."""
    return torch.compiler.is_compiling() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
