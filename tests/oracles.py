"""Slow oracles in float64 or better, sharing nothing with the library but the definitions.

With ``a = alpha - 1`` and ``z = a * scores``, entmax is ``p_i = [z_i - tau]_+ ** (1/a)`` with ``sum p = 1``.
"""

import math
from collections.abc import Callable, Sequence

import torch
from mpmath import mp, mpf  # type: ignore[import-untyped]
from torch import Tensor

Row = Sequence[float]


def sparsemax_by_sorting(row: Row) -> list[float]:
    """On a support of size k, ``sum (z - tau) = 1`` gives ``tau = (sum z - 1) / k``."""

    def tau_of(kept: Row) -> float:
        return (math.fsum(kept) - 1) / len(kept)

    z, tau = _cut(row, 1.0, tau_of)
    return [max(value - tau, 0.0) for value in z]


def entmax15_by_sorting(row: Row) -> list[float]:
    """On a support of size k with mean m, ``sum (z - tau)^2 = 1`` gives ``(m - tau)^2 = (1 - sum (z - m)^2) / k``."""

    def tau_of(kept: Row) -> float:
        mean = math.fsum(kept) / len(kept)
        spread = math.fsum((value - mean) ** 2 for value in kept)
        return mean - math.sqrt(max(1 - spread, 0.0) / len(kept))

    z, tau = _cut(row, 0.5, tau_of)
    return [max(value - tau, 0.0) ** 2 for value in z]


def _cut(row: Row, a: float, tau_of: Callable[[Row], float]) -> tuple[list[float], float]:
    """``a * (row - max)`` and its threshold, with the support found by asking every element of the sorted row.

    The k-th largest survives exactly when a threshold at it would leave less than the whole mass to the larger ones.
    Those masses come from running sums of powers, because ``1/a`` is an integer here.
    """
    top = max(row)
    z = [a * (value - top) for value in row]
    size, first, second = 0, 0.0, 0.0
    for edge in sorted(z, reverse=True):
        mass = first - size * edge if a == 1 else second - 2 * edge * first + size * edge**2
        if not mass < 1:  # -inf makes NaN
            break
        size, first, second = size + 1, first + edge, second + edge**2
    return z, tau_of(sorted(z, reverse=True)[:size])


def entmax_by_bisection(row: Row, alpha: float) -> list[float]:
    """Any alpha > 1, to about 25 digits: tau bisected in arithmetic precise enough for its own power.

    At alpha = 64 a weight of 0.1 hangs on the 63rd digit of tau, so the working precision doubles until both ends of
    the bracket give the same mass.
    """
    finite = [value for value in row if value != -math.inf]
    if not finite:
        return [0.0] * len(row)
    bits = 256
    while True:
        with mp.workprec(bits):
            a = mpf(alpha) - 1
            top = max(finite)
            # Nothing 1/a or more below the maximum survives.
            z = [a * (mpf(value) - top) for value in row if value > -math.inf]
            near = [value for value in z if value > -1]
            low, high = mpf(-1), -(mpf(len(row)) ** -a)

            def mass(tau: mpf, near: list[mpf] = near, a: mpf = a) -> mpf:
                return mp.fsum((value - tau) ** (1 / a) for value in near if value > tau)

            for _ in range(bits - 16):
                middle = (low + high) / 2
                if mass(middle) > 1:
                    low = middle
                else:
                    high = middle
            if abs(mass(low) - mass(high)) < mpf(10) ** -25:
                tau = (low + high) / 2
                scores = [a * (mpf(value) - top) - tau for value in row]
                return [float(value ** (1 / a)) if value > 0 else 0.0 for value in scores]
        bits *= 2


def softmax_by_definition(row: Row) -> list[float]:
    exponentials = [math.exp(value - max(row)) for value in row]
    return [value / math.fsum(exponentials) for value in exponentials]


def entmax_row(row: Row, alpha: float) -> list[float]:
    """The most direct oracle for this alpha; -inf gets 0 and a row of nothing else gives zeros."""
    if all(value == -math.inf for value in row):
        return [0.0] * len(row)
    by_alpha = {1.0: softmax_by_definition, 1.5: entmax15_by_sorting, 2.0: sparsemax_by_sorting}
    return by_alpha[alpha](row) if alpha in by_alpha else entmax_by_bisection(row, alpha)


def entmax_oracle(scores: Tensor, alpha: float) -> Tensor:
    """`entmax_row` over the last dimension, as float64."""
    rows = scores.detach().double().cpu().reshape(-1, scores.shape[-1]).tolist()
    p = torch.tensor([entmax_row(row, alpha) for row in rows], dtype=torch.float64)
    return p.reshape(scores.shape).to(scores.device)


def attention_map_oracle(
    q: Tensor,
    k: Tensor,
    *,
    alpha: Sequence[float],
    slopes: Sequence[float] | None = None,
    scale: float | None = None,
    causal: bool = True,
    lengths: Sequence[int] | None = None,
    documents: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """The dense map (batch, heads, query_time, key_time) by loops, with one alpha per head."""
    batch, heads, query_time, dim = q.shape
    kv_heads, key_time = k.shape[1:3]
    scale = 1 / math.sqrt(dim) if scale is None else scale
    queries, keys = q.double().tolist(), k.double().tolist()
    weights = torch.zeros(batch, heads, query_time, key_time, dtype=torch.float64)

    def sees(item: int, position: int, j: int) -> bool:
        if causal and j > position:
            return False
        if lengths is not None and (j >= lengths[item] or position >= lengths[item]):
            return False
        if documents is None:
            return True
        return position >= 0 and documents[item][position] == documents[item][j]

    for item in range(batch):
        for head in range(heads):
            slope = 0.0 if slopes is None else slopes[head]
            for i in range(query_time):
                position = i + key_time - query_time
                row = []
                for j in range(key_time):
                    products = zip(queries[item][head][i], keys[item][head * kv_heads // heads][j], strict=True)
                    score = scale * math.fsum(x * y for x, y in products) - slope * abs(position - j)
                    row.append(score if sees(item, position, j) else -math.inf)
                weights[item, head, i] = torch.tensor(entmax_row(row, alpha[head]), dtype=torch.float64)
    return weights


def attend_oracle(weights: Tensor, v: Tensor) -> Tensor:
    """``weights @ v`` in float64, each value head serving a run of the map's heads, by loops."""
    heads, kv_heads = weights.shape[1], v.shape[1]
    values = v.double()
    by_head = [weights[:, head] @ values[:, head * kv_heads // heads] for head in range(heads)]
    return torch.stack(by_head, dim=1)
