"""The row solver in Triton: the same anchor at the maximum and the same Newton steps as `functional.threshold`.

With ``a = alpha - 1``, ``u = a (s - max) + height`` and ``height = p_max ^ a``, the weights are ``p = [u]_+ ^ (1/a)``.
For softmax, kind 0, ``p = exp(s - max) height``.
"""

import triton
import triton.language as tl

SOFTMAX, ENTMAX15, SPARSEMAX, GENERAL = range(4)


def kind_of(alpha: float) -> int:
    """Which of the closed forms serves an alpha in [1, 2]."""
    return {1.0: SOFTMAX, 1.5: ENTMAX15, 2.0: SPARSEMAX}.get(alpha, GENERAL)


@triton.jit
def row_maximum(scores):
    """The maximum of every row, and 0 for a row that sees nothing, so that ``scores - maximum`` stays -inf there."""
    top = tl.max(scores, 1)
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def heights(gap, a, KIND: tl.constexpr, STEPS: tl.constexpr):
    """The height at the maximum of every row of ``gap = scores - maximum``, by Newton's method on the row sum."""
    if KIND == 0:
        return 1.0 / tl.maximum(tl.sum(tl.exp(gap), 1), 1.0)
    weight = tl.full([gap.shape[0]], 1.0, tl.float32)  # of the maximum; it only falls
    for _ in range(STEPS):
        height = _power(weight, a, KIND)
        u = tl.maximum(gap * a + height[:, None], 0.0)
        # d(sum p) / d weight = sum (p / weight)^(2 - alpha), at least the maximum's own 1
        if KIND == 1:
            mass, slope = tl.sum(u * u, 1), tl.sum(u, 1) / height
        elif KIND == 2:
            mass, slope = tl.sum(u, 1), tl.sum(tl.where(u > 0, 1.0, 0.0), 1)
        else:
            gain = _gain(u, a, KIND)
            mass, slope = tl.sum(gain * u, 1), tl.sum(gain, 1) * height / weight
        weight -= (mass - 1.0) / tl.maximum(slope, 1.0)
    return _power(weight, a, KIND)


@triton.jit
def weights_and_gains(gap, height, a, KIND: tl.constexpr):
    """p, and the gain ``p ^ (2 - alpha)`` of each weight in its own score, both 0 off the support."""
    if KIND == 0:
        p = tl.exp(gap) * height[:, None]
        return p, p
    u = tl.maximum(gap * a + height[:, None], 0.0)
    gain = _gain(u, a, KIND)
    if KIND == 2:
        return u, gain
    return gain * u, gain


@triton.jit
def _gain(u, a, KIND: tl.constexpr):
    """``u ^ (1/a - 1)`` where u > 0."""
    if KIND == 1:
        return u
    if KIND == 2:
        return tl.where(u > 0, 1.0, 0.0)
    return tl.where(u > 0, tl.exp2((1.0 / a - 1.0) * tl.log2(tl.maximum(u, 1e-37))), 0.0)


@triton.jit
def _power(weight, a, KIND: tl.constexpr):
    if KIND == 1:
        return tl.sqrt(weight)
    if KIND == 2:
        return weight
    return tl.exp2(a * tl.log2(weight))
