"""The row solver in Triton.

With ``a = alpha - 1``, ``r = 1/a`` and ``z = a * score``, the weights are ``p = [z - max + height]_+ ^ r`` with the
height such that they sum to 1. For softmax, kind 0, z is the score and ``p = exp(z - max) height``.

For alpha <= 2 the norm ``||[z - max + height]_+||_r`` is convex in the height and the root is where it is 1. Newton's
method on the norm from height 1 falls to the root from above; for ties one step is exact, as it is for softmax's limit.
Over rows of 128 scores of any shape it takes at most 7 steps to 1e-5 (alpha = 2), mostly 3 to 5.
"""

import triton
import triton.language as tl


def powers_of(alpha: float) -> tuple[float, float]:
    """``a = alpha - 1`` and ``r = 1 / a``; softmax needs neither."""
    a = alpha - 1
    return a, 1 / a if a else 0.0


SOFTMAX, ENTMAX15, SPARSEMAX, GENERAL = range(4)


def kind_of(alpha: float) -> int:
    """Which of the closed forms serves an alpha."""
    return {1.0: SOFTMAX, 1.5: ENTMAX15, 2.0: SPARSEMAX}.get(alpha, GENERAL)


@triton.jit
def row_maximum(scores):
    """The maximum of every row, and 0 for a row that sees nothing, so that ``scores - maximum`` stays -inf there."""
    top = tl.max(scores, 1)
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def heights(gap, a, r, KIND: tl.constexpr):
    """The height of every row of ``gap = z - max``, alpha <= 2."""
    if KIND == 0:
        return 1.0 / tl.maximum(tl.sum(tl.exp(gap), 1), 1.0)
    height = tl.full([gap.shape[0]], 1.0, tl.float32)
    nothing = height * 0.0
    farthest = tl.max(height, 0)
    steps = 0
    while (farthest > 1e-5) & (steps < 16):
        u = tl.maximum(gap + height[:, None], 0.0)
        gain = gains(u, r, KIND)
        norm, slope = joined_norm(nothing, nothing, tl.sum(gain * u, 1), tl.sum(gain, 1), a, r, KIND)
        fall = tl.maximum((norm - 1.0) / slope, 0.0)
        height -= fall
        farthest = tl.max(fall, 0)
        steps += 1
    return height


@triton.jit
def weights_and_gains(z, maximum, height, r, KIND: tl.constexpr):
    """p, and the gain ``p ^ (2 - alpha)`` of each weight in its own score, both 0 off the support.

    `z` is ``a * score``, for softmax the score; `maximum` and `height` are shaped to lie along its rows.
    """
    if KIND == 0:
        p = tl.exp(z - maximum) * height
        return p, p
    u = tl.maximum(z + (height - maximum), 0.0)
    gain = gains(u, r, KIND)
    return gain * u, gain


@triton.jit
def gains(u, r, KIND: tl.constexpr):
    """``u ^ (r - 1)`` where u > 0, with r = 1/a: the gain of a weight ``u ^ r`` in its own score."""
    if KIND == 1:
        return u
    if KIND == 2:
        return tl.where(u > 0, 1.0, 0.0)
    return tl.where(u > 0, tl.exp2((r - 1.0) * tl.log2(tl.maximum(u, 1e-37))), 0.0)


@triton.jit
def joined_norm(line, slope, mass, gain, a, r, KIND: tl.constexpr):
    """The norm of two parts of a row together and its slope in the height.

    One part is known by its norm `line` and that norm's `slope`, the other by its sums ``mass = sum u^r`` and
    ``gain = sum u^(r-1)``.
    """
    if KIND == 1:
        norm = tl.sqrt(line * line + mass)
        return norm, tl.maximum((line * slope + gain) / tl.maximum(norm, 1e-20), 1e-20)
    if KIND == 2:
        return line + mass, tl.maximum(slope + gain, 1e-20)
    before = gains(line, r, KIND)  # line ^ (r - 1)
    norm = tl.exp2(a * tl.log2(tl.maximum(before * line + mass, 1e-37)))
    return norm, tl.maximum((before * slope + gain) * tl.exp2((1.0 - r) * tl.log2(tl.maximum(norm, 1e-37))), 1e-20)


@triton.jit
def last_fall(mass, gain, support, a, KIND: tl.constexpr):
    """How far the height falls to the root; exact for alpha 1.5 and 2 if the support stays the same on the way."""
    if KIND == 1:
        rest = tl.maximum(gain * gain - support * (mass - 1.0), 0.0)
        return (mass - 1.0) / tl.maximum(gain + tl.sqrt(rest), 1e-20)
    return (mass - 1.0) * a / tl.maximum(gain, 1e-20)


@triton.jit
def inside(height, low, high):
    """The height brought into the bracket: to its upper end, where the sum is at least 1, or to its middle."""
    return tl.where(height >= low, tl.minimum(height, high), 0.5 * (low + high))
