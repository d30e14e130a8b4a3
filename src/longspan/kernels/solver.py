"""The row solver in Triton.

With ``a = alpha - 1``, ``r = 1/a`` and ``z = a * score``, the weights are ``p = [z - max + height]_+ ^ r`` with the
height such that they sum to 1. For softmax, kind 0, z is the score and ``p = exp(z - max) height``.

For alpha <= 2 the norm ``||[z - max + height]_+||_r`` is convex in the height and the root is where it is 1. Newton's
method on the norm from height 1 falls to the root from above; for ties one step is exact, as it is for softmax's limit.
Over rows of 128 scores of any shape it takes at most 7 steps to 1e-5 (alpha = 2), mostly 3 to 5.
"""

import math
import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from longspan.kernels.gpus import highest


def powers_of(alpha: float) -> tuple[float, float]:
    """``a = alpha - 1`` and ``r = 1 / a``; softmax needs neither."""
    a = alpha - 1
    return a, 1 / a if a else 0.0


def tau_and_largest(alpha: float, maximum: Tensor, height: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """The threshold and the largest weight of rows, alpha > 1, from what kernels know them by: their maximum and the
    height of the threshold below it, above alpha 2 the score and the weight of their edge. `top`: their maximum there.
    """
    a, r = powers_of(alpha)
    if alpha <= 2:
        return maximum - height, height**r
    above, gap = height**a, top - maximum
    return maximum - above, torch.where(gap > 0, (gap + above) ** r, height)


SOFTMAX, GENERAL, FINE, ABOVE_2, FINE_ABOVE_2 = 0, -1, -2, -3, -4
_MOST = 24  # above r = 12 a power takes more multiplications than its logarithm


def kind_of(alpha: float, fine: bool = False) -> int:
    """2r where that is a whole number, so that powers are products and roots: 4 for alpha 1.5, 2 for 2, 8 for 1.25.

    Else by logarithms, as good as float32 has them if `fine`, or else quick, with kinds of their own for alpha > 2,
    where the gain at 0 is not 0 by itself. So alpha > 2 is kind 1 or below -2.
    """
    if alpha == 1:
        return SOFTMAX
    twice = 2 / (alpha - 1)
    whole = round(twice)
    if 1 <= whole <= _MOST and abs(twice - whole) < 1e-9 * whole:
        return whole
    if alpha < 2:
        return FINE if fine else GENERAL
    return FINE_ABOVE_2 if fine else ABOVE_2


def survey_power(alpha: float) -> tuple[int, float]:
    """A kind and its r for the survey: whole, at least 2 and not below the true one.

    No u exceeds 1, so ``u^R <= u^r`` for R >= r: where the sum of the former is 1, that of the latter is at least 1,
    and a bound of the one threshold bounds the other. For R = 1 the tangents would be loose.
    """
    r = 1 / (alpha - 1)
    whole = max(2, math.ceil(r - 1e-9))
    return (2 * whole, float(whole)) if 2 * whole <= _MOST else (GENERAL, r)


if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def quick_power(x, exponent):
        """``x ^ exponent`` for x > 0, and 0 for x = 0."""
        return tl.where(x > 0, tl.exp2(exponent * tl.log2(tl.maximum(x, 1e-37))), 0.0)

    @triton.jit
    def exact_exp(x):
        """exp(x) to the last digit or two."""
        return tl.exp(x)

    @triton.jit
    def quotient(x, y):
        return x / y

    @triton.jit
    def positive(x):
        """1 where x > 0, else 0."""
        return tl.where(x > 0, 1.0, 0.0)

else:

    @triton.jit
    def quick_power(x, exponent):
        """``x ^ exponent`` for x > 0, and 0 for x = 0 if the exponent is positive: the logarithm there is -inf.

        Two instructions, good to 2^-22, and a product between; `tl.log2` alone takes twenty.
        """
        return tl.exp2(exponent * libdevice.fast_log2f(x))

    @triton.jit
    def exact_exp(x):
        """exp(x) to the last digit or two; `tl.exp` rounds x log2(e) first, and its error grows with x."""
        return libdevice.exp(x)

    @triton.jit
    def quotient(x, y):
        """``x / y`` to two digits in the last place for 2^-126 < y < 2^126; beyond, `/` costs three times as much."""
        return libdevice.fast_dividef(x, y)

    @triton.jit
    def positive(x):
        """1 where x > 0, else 0. One instruction, where a sum of comparisons is packed into bits and unpacked again."""
        return tl.inline_asm_elementwise(
            "set.gt.f32.f32 $0, $1, 0f00000000;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def row_maximum(scores):
    """The maximum of every row, and 0 for a row that sees nothing, so that ``scores - maximum`` stays -inf there."""
    top = tl.max(scores, 1)
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def exponential(x, PRECISION: tl.constexpr):
    return exact_exp(x) if PRECISION == "ieee" else tl.exp(x)


@triton.jit
def heights(gap, r, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """The height of every row of ``gap = z - max``, alpha <= 2."""
    if KIND == 0:
        return 1.0 / tl.maximum(tl.sum(exponential(gap, PRECISION), 1), 1.0)
    height = tl.full([gap.shape[0]], 1.0, tl.float32)
    nothing = height * 0.0
    farthest = highest(height)
    steps = 0
    while (farthest > 1e-5) & (steps < 16):
        u = tl.maximum(gap + height[:, None], 0.0)
        gain = gains(u, r, KIND)
        norm, slope = joined_norm(nothing, nothing, tl.sum(gain * u, 1), tl.sum(gain, 1), r, KIND)
        fall = tl.maximum((norm - 1.0) / slope, 0.0)
        height -= fall
        farthest = highest(fall)
        steps += 1
    return height


@triton.jit
def weights_and_gains(z, maximum, height, r, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """p, and the gain ``p ^ (2 - alpha)`` of each weight in its own score, both 0 off the support.

    `z` is ``a * score``, for softmax the score; `maximum` and `height` are shaped to lie along its rows. They stay two
    numbers: their difference would round the height to the last digit of a large maximum.
    """
    if KIND == 0:
        p = exponential(z - maximum, PRECISION) * height
        return p, p
    u = tl.maximum(z - maximum + height, 0.0)
    gain = gains(u, r, KIND)
    return gain * u, gain


@triton.jit
def gains(u, r, KIND: tl.constexpr):
    """``u ^ (r - 1)`` where u > 0, with r = 1/a: the gain of a weight ``u ^ r`` in its own score."""
    if KIND == -2 or KIND == -4:
        return tl.where(u > 0, tl.exp2((r - 1.0) * tl.log2(tl.maximum(u, 1e-37))), 0.0)
    if KIND == -1:
        return quick_power(u, r - 1.0)
    if KIND == -3:
        return tl.where(u > 0, quick_power(tl.maximum(u, 1e-37), r - 1.0), 0.0)
    if KIND == 1:
        return tl.where(u > 0, tl.rsqrt(tl.maximum(u, 1e-37)), 0.0)
    if KIND == 2:
        return tl.where(u > 0, 1.0, 0.0)
    if KIND == 3:
        return tl.sqrt(u)
    gain = u if KIND % 2 == 0 else u * tl.sqrt(u)
    for _ in tl.static_range(KIND // 2 - 2):
        gain *= u
    return gain


@triton.jit
def joined_norm(line, slope, mass, gain, r, KIND: tl.constexpr):
    """The norm of two parts of a row together and its slope in the height.

    One part is known by its norm `line` and that norm's `slope`, the other by its sums ``mass = sum u^r`` and
    ``gain = sum u^(r-1)``.
    """
    if KIND == 4:
        norm = tl.sqrt(line * line + mass)
        return norm, tl.maximum(quotient(line * slope + gain, tl.maximum(norm, 1e-20)), 1e-20)
    if KIND == 2:
        return line + mass, tl.maximum(slope + gain, 1e-20)
    before = gains(line, r, KIND)  # line ^ (r - 1)
    norm = tl.exp2(tl.log2(tl.maximum(before * line + mass, 1e-37)) / r)
    return norm, tl.maximum((before * slope + gain) * tl.exp2((1.0 - r) * tl.log2(tl.maximum(norm, 1e-37))), 1e-20)


@triton.jit
def curved_fall(mass, gain, support, aim):
    """How far the height falls for ``sum u^2`` to reach `aim`, alpha 1.5, from the sums of u^2, u and 1 on the support.

    The sum is taken for ``mass (1 - x/q)^q`` with the q that has its slope and its curvature: 2 for ties, infinite for
    an exponential tail. The error is a third of the distance cubed, where Newton's is half its square.
    """
    gain = tl.maximum(gain, 1e-20)
    share = tl.minimum(tl.maximum(0.5 * mass * support / (gain * gain), 0.5), 0.97)
    return 0.5 * mass / gain / (1.0 - share) * (1.0 - tl.exp2((share - 1.0) * tl.log2(tl.maximum(mass / aim, 1e-20))))


@triton.jit
def _power(mass, gain, height):
    """The q of the guess that ``sum u^2`` is ``mass (1 - x/w)^q`` when the threshold has risen by x, ``w = q mass / (2
    gain)`` by its slope now.

    Were the highest score, `height` above the threshold, where the mass ends, w would be the height: 2 for ties. It
    ends beyond it; half as much again above 2 fits noise and structure alike.
    """
    q = quotient(2.0 * gain * height, tl.maximum(mass, 1e-20))
    return tl.minimum(tl.maximum(2.0 + 1.5 * (q - 2.0), 2.0), 10.0)


@triton.jit
def thinned(mass, gain, height, rise):
    """What is left of ``sum u^2`` and ``sum u`` when the threshold has risen from `height` below the highest score, by
    that guess. Two rises one after the other leave what their sum does, if the highest score stays."""
    q = _power(mass, gain, height)
    left = tl.maximum(1.0 - quotient(2.0 * rise * gain, tl.maximum(q * mass, 1e-20)), 1e-20)
    less = quick_power(left, q - 1.0)
    return mass * less * left, gain * less


@triton.jit
def thinned_to_1(mass, gain, height):
    """How far the threshold rises, by the same guess, for ``sum u^2`` to be 1; from no more than 2, as a bound is."""
    q = _power(mass, gain, height)
    root = tl.exp2(quotient(tl.log2(tl.minimum(tl.maximum(mass, 1e-20), 2.0)), q))
    return 0.5 * q * quotient(mass, tl.maximum(gain, 1e-20)) * (1.0 - quotient(1.0, root))


@triton.jit
def inside(height, low, high):
    """The height brought into the bracket: to its upper end, where the sum is at least 1, or to its middle."""
    return tl.where(height >= low, tl.minimum(height, high), 0.5 * (low + high))


@triton.jit
def secant_step(norm, height, low, low_norm, high, high_norm):
    """Where the norm's secant over the bracket is 1, and the bracket with this height as one of its ends.

    The norm of an end that stays moves half way to 1, so that neither stays for long (Illinois); 0 at the upper end
    says that it was never measured.
    """
    above = norm >= 1.0
    low_norm = tl.where(above, tl.where(height < high, (low_norm + 1.0) * 0.5, low_norm), norm)
    high_norm = tl.where(above, norm, tl.where(high_norm > 0, (high_norm + 1.0) * 0.5, high_norm))
    low, high = tl.where(above, low, height), tl.where(above, height, high)
    share = (1.0 - low_norm) / tl.maximum(high_norm - low_norm, 1e-20)
    between = low + (high - low) * tl.minimum(tl.maximum(share, 0.02), 0.98)
    return between, low, low_norm, high, high_norm
