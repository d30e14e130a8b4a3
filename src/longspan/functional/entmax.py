"""alpha-entmax as a differentiable function of the scores and of alpha.

With ``g = p ** (2 - alpha)`` on the support and 0 elsewhere, the derivatives of ``p = entmax(s, alpha)`` are

    dp = g (ds - <g, ds> / <g, 1>) + (h - g <h, 1> / <g, 1>) dalpha,
    h  = p log(p)^2 phi((alpha-1) log p),   phi(y) = (1 - y - exp(-y)) / y^2,   phi(0) = -1/2,

where h is the derivative in alpha with the normaliser held. Nothing in it is singular at alpha = 1. The backward
is written in differentiable operations of p, alpha and the incoming gradient, so it can be differentiated again.
"""

import importlib.util
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.functional.threshold import Alpha, AlphaRange, alpha_range, solve, tau_of, weights


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


HAS_TRITON = _installed("triton")  # looked up once: inside a compiled function the question cannot be asked

_SERIES_TERMS = 14  # within a radius of 0.5: 0.5^14 / 16! is below float64's resolution


class Threshold(NamedTuple):
    """Where a row is cut: ``p_i > 0`` exactly when ``(alpha-1) s_i > tau``, and how many are. Shape of alpha."""

    tau: Tensor
    support: Tensor


def entmax(scores: Tensor, alpha: Alpha = 1.5, dim: int = -1) -> Tensor:
    """alpha-entmax of `scores` along `dim`: softmax at alpha = 1, sparsemax at alpha = 2, exact zeros above 1.

    Args:
        scores: any floating tensor. Half precisions are solved in float32. -inf gets weight 0; a row of nothing
            but -inf gives zeros; NaN or +inf makes its own row NaN.
        alpha: a number >= 1, or a tensor that broadcasts against `scores` and has size 1 along `dim`.
        dim: the dimension that sums to one.

    Differentiable, twice, in `scores` and in `alpha`.
    """
    rows, row_alpha, dim = _as_rows(scores, alpha, dim)
    if rows.numel() == 0:
        return scores.clone()
    p = _Entmax.apply(rows, row_alpha, alpha_range(row_alpha))
    return p.movedim(-1, dim).to(scores.dtype)


def entmax15(scores: Tensor, dim: int = -1) -> Tensor:
    """`entmax` at alpha = 1.5."""
    return entmax(scores, 1.5, dim)


def sparsemax(scores: Tensor, dim: int = -1) -> Tensor:
    """`entmax` at alpha = 2: the Euclidean projection onto the simplex."""
    return entmax(scores, 2.0, dim)


@torch.no_grad()
def threshold(scores: Tensor, alpha: Alpha = 1.5, dim: int = -1) -> Threshold:
    """tau and the support size of every row, with `dim` kept at size 1. A row that sees nothing has tau = inf.

    Not differentiable. tau and scores satisfy ``entmax(scores, alpha) = [(alpha-1) scores - tau]_+ ^ (1/(alpha-1))``.
    """
    rows, row_alpha, dim = _as_rows(scores, alpha, dim)
    if rows.shape[-1] == 0:
        raise ValueError("threshold needs at least one score in a row")
    if rows.numel() == 0:
        tau = rows.new_empty((*rows.shape[:-1], 1))
        return Threshold(tau.movedim(-1, dim), tau.long().movedim(-1, dim))
    bounds = alpha_range(row_alpha)
    anchor = solve(rows, row_alpha, bounds)
    support = (weights(rows, row_alpha, anchor, bounds) > 0).sum(-1, keepdim=True)
    tau = torch.where(rows.amax(-1, keepdim=True) == -math.inf, math.inf, tau_of(anchor, row_alpha))
    return Threshold(tau.movedim(-1, dim), support.movedim(-1, dim))


class _Entmax(torch.autograd.Function):
    """In the form that torch.func takes; without a `jvp`, with which torch.compile would refuse it."""

    @staticmethod
    def forward(scores: Tensor, alpha: Alpha, bounds: AlphaRange) -> Tensor:
        return _weights_of_rows(scores, alpha, bounds)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Alpha, AlphaRange], output: Tensor) -> None:
        _scores, alpha, ctx.bounds = inputs
        if isinstance(alpha, Tensor):
            ctx.save_for_backward(output, alpha)
        else:
            ctx.save_for_backward(output)
            ctx.alpha = alpha

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        p, *rest = ctx.saved_tensors
        alpha = rest[0] if rest else ctx.alpha
        d_scores, d_alpha = entmax_vjp(p, alpha, grads[0], ctx.bounds, ctx.needs_input_grad[1])
        return d_scores, d_alpha, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], scores: Tensor, alpha: Alpha, bounds: AlphaRange
    ) -> tuple[Tensor, int]:
        """Rows know nothing of each other: one dim more of them. A batched alpha has failed before, asked its range."""
        assert in_dims[0] is not None
        return _Entmax.apply(
            scores.movedim(in_dims[0], 0), alpha[None] if isinstance(alpha, Tensor) else alpha, bounds
        ), 0


def _weights_of_rows(scores: Tensor, alpha: Alpha, bounds: AlphaRange) -> Tensor:
    if scores.is_cuda and not isinstance(alpha, Tensor) and HAS_TRITON:
        from longspan.kernels.rows import entmax_rows, serves

        if serves(scores, alpha):
            return entmax_rows(scores, alpha)
    return weights(scores, alpha, solve(scores, alpha, bounds), bounds)


def entmax_vjp(
    p: Tensor, alpha: Alpha, grad: Tensor, bounds: AlphaRange, wants_alpha: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients in the scores and, if wanted, in alpha, of rows with weights `p` and incoming gradient `grad`."""
    gain = _gain(p, alpha, bounds)
    if bounds.high > 2:
        # The smallest weight has by far the largest gain, so the mean below is its gradient but for a little, and
        # their difference would cancel. Measuring gradients from that one keeps the digits.
        smallest = torch.where(p > 0, p, math.inf).argmin(-1, keepdim=True)
        grad = grad - grad.gather(-1, smallest)
    total = gain.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)  # 0 where a row sees nothing
    centred = grad - (gain * grad).sum(-1, keepdim=True) / total
    d_alpha = None
    if wants_alpha:
        assert isinstance(alpha, Tensor)
        d_alpha = (_alpha_derivative(p, alpha, gain) * centred).sum(-1, keepdim=True).sum_to_size(alpha.shape)
    return gain * centred, d_alpha


def _gain(p: Tensor, alpha: Alpha, bounds: AlphaRange) -> Tensor:
    """``p ** (2 - alpha)`` on the support, 0 off it: the derivative of a weight in its own score, tau held."""
    if not isinstance(alpha, Tensor):
        if alpha == 1:
            return p
        if alpha == 2:
            return p.sign()
        if alpha < 2 and not torch.is_grad_enabled():  # 0 stays 0, and no derivative of the power at 0 is asked for
            return p.sqrt() if alpha == 1.5 else p.pow(2 - alpha)
    support = p > 0
    gain = torch.where(support, p, 1) ** (2 - alpha)
    if bounds.high > 2:
        gain = gain.clamp_max(torch.finfo(p.dtype).max ** 0.5)  # p ** -14 leaves float32's range
    return torch.where(support, gain, 0)


def _alpha_derivative(p: Tensor, alpha: Tensor, gain: Tensor) -> Tensor:
    """h of the module's docstring: ``p log(p)^2 phi((alpha-1) log p)``."""
    a = alpha - 1
    log_p = torch.where(p > 0, p, 1).log()
    y = a * log_p
    near = y.abs() < 0.5  # no constant of the module: compilers stumble, see `threshold._tiny`
    series = torch.zeros_like(y)
    y_near = torch.where(near, y, 0)
    for k in reversed(range(_SERIES_TERMS)):
        series = series * y_near - (-1) ** k / math.factorial(k + 2)
    far_a = torch.where(near, 1, a)
    # phi in terms of the gain, because exp(-y) alone overflows where p * exp(-y) = gain does not.
    return torch.where(near, p * log_p**2 * series, (p - gain - y * p) / far_a**2)


def _as_rows(scores: Tensor, alpha: Alpha, dim: int) -> tuple[Tensor, Alpha, int]:
    """Check the arguments; move `dim` last; raise half precisions to float32."""
    if not scores.is_floating_point():
        raise TypeError(f"scores must be a floating-point tensor, got {scores.dtype}")
    if scores.ndim == 0:
        raise ValueError("scores must have at least one dimension")
    if not -scores.ndim <= dim < scores.ndim:
        raise IndexError(f"dim {dim} is out of range for scores of shape {tuple(scores.shape)}")
    dim %= scores.ndim
    dtype = torch.promote_types(scores.dtype, torch.float32)
    rows = scores.movedim(dim, -1).to(dtype)
    if not isinstance(alpha, Tensor):
        return rows, float(alpha), dim
    reduced = (*scores.shape[:dim], 1, *scores.shape[dim + 1 :])
    padded = alpha.reshape((1,) * (scores.ndim - alpha.ndim) + alpha.shape)
    fits = padded.ndim == scores.ndim and all(
        size in (1, full) for size, full in zip(padded.shape, reduced, strict=True)
    )
    if not fits:
        raise ValueError(
            f"alpha of shape {tuple(alpha.shape)} does not broadcast against scores of shape "
            f"{tuple(scores.shape)} with dim {dim} reduced to 1"
        )
    return rows, padded.movedim(dim, -1).to(dtype), dim
