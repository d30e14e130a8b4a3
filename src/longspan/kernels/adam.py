"""AdamW over flat memory: the norm of all gradients in one launch, and in a second one everything that follows from it.

PyTorch's kernel for many tensors gives a block of threads 65,536 numbers, so that a small model keeps a sixth of a GPU
busy, and clipping, the average and the copies in half precision are further launches of the same kind.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers of a program that moves weights
PARTS = 256  # programs that square gradients, and their sums


@triton.jit
def squares_kernel(LowGradients, Gradients, Sums, Count, LOW, FULL, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of the squares of two sets of gradients, PARTS of them; the count of steps goes up by one."""
    first = tl.program_id(0) * BLOCK
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(first, LOW, PARTS * BLOCK):
        places = start + tl.arange(0, BLOCK)
        gradient = tl.load(LowGradients + places, mask=places < LOW, other=0.0).to(tl.float32)
        total += gradient * gradient
    for start in range(first, FULL, PARTS * BLOCK):
        places = start + tl.arange(0, BLOCK)
        gradient = tl.load(Gradients + places, mask=places < FULL, other=0.0)
        total += gradient * gradient
    tl.store(Sums + tl.program_id(0), tl.sum(total, 0))
    if tl.program_id(0) == 0:
        tl.store(Count, tl.load(Count) + 1.0)


@triton.jit
def missing_from_one(exponent):
    """``1 - exp(exponent)`` for exponents up to 0; by its series where the two are nearly equal."""
    series = -exponent * (1.0 + exponent / 2 * (1.0 + exponent / 3 * (1.0 + exponent / 4 * (1.0 + exponent / 5))))
    return tl.where(exponent > -0.1, series, 1.0 - tl.exp(exponent))


@triton.jit
def adam_kernel(Weights, LowCopies, Average, First, Second, LowGradients, Gradients, Sums, Count, Rate, Norm, Shrink,
                learning_rate, rise_1, rise_2, log_1, log_2, weight_decay, epsilon, clip, share, LOW, TOTAL,
                CLIP: tl.constexpr, AVERAGE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Move BLOCK weights, average them, copy them. The first LOW, whole blocks, have gradients and copies of their own
    in half precision; the others have gradients in `Gradients` and no copies. A moment takes in `rise`, 1 - beta, of
    what is new; `log` is log beta, as float32 has too few digits near 1 for either to be made here."""
    norm = tl.sqrt(tl.sum(tl.load(Sums + tl.arange(0, PARTS)), 0))
    shrink = tl.full([], 1.0, tl.float32)
    if CLIP:
        shrink = tl.maximum(norm / clip, 1.0)
    if tl.program_id(0) == 0:
        tl.store(Norm, norm)
        tl.store(Shrink, shrink)
    first = tl.program_id(0) * BLOCK
    places = first + tl.arange(0, BLOCK)
    inside = places < TOTAL
    if first < LOW:
        gradient = tl.load(LowGradients + places).to(tl.float32)
    else:
        gradient = tl.load(Gradients + places - LOW, mask=inside, other=0.0)
    gradient /= shrink
    count = tl.load(Count)
    rate = tl.load(Rate) * learning_rate
    mean = tl.load(First + places, mask=inside, other=0.0)
    mean += (gradient - mean) * rise_1
    square = tl.load(Second + places, mask=inside, other=0.0)
    square += (gradient * gradient - square) * rise_2
    tl.store(First + places, mean, mask=inside)
    tl.store(Second + places, square, mask=inside)
    size = tl.sqrt(square / missing_from_one(count * log_2)) + epsilon
    weight = tl.load(Weights + places, mask=inside, other=0.0)
    weight = weight * (1.0 - rate * weight_decay) - rate / missing_from_one(count * log_1) * mean / size
    tl.store(Weights + places, weight, mask=inside)
    if AVERAGE:
        average = tl.load(Average + places, mask=inside, other=0.0)
        tl.store(Average + places, average + (weight - average) * share, mask=inside)
    if first < LOW:
        tl.store(LowCopies + places, weight.to(LowCopies.dtype.element_ty))


def _logarithm(beta: float) -> float:
    return math.log(beta) if beta else -math.inf  # a moment that keeps nothing


def adam_step(
    weights: Tensor,
    copies: Tensor,
    average: Tensor | None,
    moments: tuple[Tensor, Tensor],
    low: Tensor,
    full: Tensor,
    count: Tensor,
    rate: Tensor,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    clip: float | None,
    share: float,
) -> tuple[Tensor, Tensor]:
    """Take a step of AdamW in place; the norm of all gradients, and what they were divided by to clip them.

    Args:
        weights: flat, float32; the first ``len(copies)`` of them, a multiple of BLOCK, have copies in half precision.
        average, share: a running mean of the weights, which takes in `share` of them.
        low: gradients of the weights that have copies; more may follow that count for the norm alone.
        full: those of the other weights.
        count: steps so far. rate: a factor of the learning rate.
    """
    if len(copies) % BLOCK or len(low) < len(copies) or len(full) != len(weights) - len(copies):
        raise ValueError(f"{len(weights)} weights, {len(copies)} copies, {len(low)} and {len(full)} gradients")
    sums = weights.new_empty(PARTS)
    norm, shrink = weights.new_empty(()), weights.new_empty(())
    with torch.cuda.device_of(weights):
        squares_kernel[(PARTS,)](low, full, sums, count, len(low), len(full), PARTS=PARTS, BLOCK=BLOCK, num_warps=4)
        adam_kernel[(triton.cdiv(len(weights), BLOCK),)](
            weights, copies, average, *moments, low, full, sums, count, rate, norm, shrink,
            learning_rate, *(1 - beta for beta in betas), *map(_logarithm, betas), weight_decay, 1e-8,
            1.0 if clip is None else clip, share, len(copies), len(weights),
            CLIP=clip is not None, AVERAGE=average is not None, PARTS=PARTS, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return norm, shrink
