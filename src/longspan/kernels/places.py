"""Which scores of a row are among its highest: the k highest have a place, and those that tie for the last share it."""

import triton
import triton.language as tl


@triton.jit
def _ordered(bits):
    """Whole numbers ordered as the floats whose bits they are; applied again, the bits."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def kth_highest(z, k):
    """The k-th highest score of every row of z (rows, columns), found bit by bit; k is at most the columns."""
    order = _ordered(z.to(tl.int32, bitcast=True))
    found = tl.max(order, 1) * 0 - 0x7FFFFFFF - 1
    step = 0x40000000
    # The first bit is the sign: from the lowest number there is to 0.
    found = tl.where(tl.sum((order >= 0).to(tl.int32), 1) >= k, 0, found)
    while step > 0:
        enough = tl.sum((order >= (found + step)[:, None]).to(tl.int32), 1) >= k
        found = tl.where(enough, found + step, found)
        step = step // 2
    return _ordered(found).to(tl.float32, bitcast=True)


@triton.jit
def bounds_of_places(z, k, N: tl.constexpr):
    """Of every row: scores above `low` have a place, those above `high` one of their own, and the others the
    logarithm of the part that each has of one.

    The bounds lie between scores, so that a score that is made again in another order is on the same side.
    """
    k = tl.minimum(k, N)
    edge = kth_highest(z, k)
    few = edge == float("-inf")  # it sees no more than it has places
    edge = tl.where(few, 0.0, edge)
    above, tied = z > edge[:, None], z == edge[:, None]
    own = tl.sum(above.to(tl.int32), 1)
    part = tl.maximum(k - own, 1).to(tl.float32) / tl.maximum(tl.sum(tied.to(tl.int32), 1), 1).to(tl.float32)
    lower = tl.max(tl.where(above | tied, float("-inf"), z), 1)
    higher = tl.min(tl.where(above, z, float("inf")), 1)
    low, high = 0.5 * (edge + lower), 0.5 * (edge + higher)
    low = tl.where(low < edge, low, lower)
    high = tl.where((high >= edge) & ((high < higher) | (own == 0)), high, edge)  # inf where nothing is above the edge
    return tl.where(few, float("-inf"), low), tl.where(few, float("-inf"), high), tl.where(few, 0.0, tl.log(part))


@triton.jit
def with_places(z, low, high, part):
    """The scores whose softmax is that of the places; what has none is -inf."""
    return tl.where(z > low, z + tl.where(z > high, 0.0, part), float("-inf"))
