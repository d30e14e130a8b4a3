"""The two-level Lemma: how far k tokens must stand above n - k others to hold the attention.

For softmax to give them the share c the gap must be ``log((n-k)/k * c/(1-c))``, which grows without end; alpha-entmax
gives them everything from ``k^(1-alpha) / (alpha-1)`` on, at any n.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from longspan.functional import entmax
from longspan.probes.base import Probe, Report, Size, bisect, method_name
from longspan.results import Row

FOCUS, SHARE = 4, 0.99  # k, and the c asked of softmax; of entmax the whole is asked
ALPHAS = (1.0, 1.25, 1.5, 2.0)
LENGTHS: dict[Size, tuple[int, ...]] = {
    "small": tuple(2**k for k in range(4, 15, 2)),
    "paper": tuple(2**k for k in range(4, 21, 2)),
}


def needed_gap(n: int, k: int, alpha: float) -> float:
    """The closed form."""
    if alpha == 1:
        return math.log((n - k) / k * SHARE / (1 - SHARE))
    return float(k ** (1 - alpha) / (alpha - 1))


def measured_gap(n: int, k: int, alpha: float) -> float:
    """The same by bisection on the transformation."""
    raised = (torch.arange(n) < k).double()

    def leaks(gap: float) -> bool:
        weights = entmax(gap * raised, alpha)
        return bool(weights[:k].sum() < SHARE if alpha == 1 else weights[-1] > 0)

    return bisect(leaks, 0.0, 64.0, steps=44)


def _measure(size: Size, report: Report) -> Iterator[Row]:
    cells = [(alpha, n) for alpha in ALPHAS for n in LENGTHS[size]]
    for done, (alpha, n) in enumerate(cells):
        report(done, len(cells), f"alpha {alpha:g}, n = {n}")
        gaps = {"gap": measured_gap(n, FOCUS, alpha), "closed_form": needed_gap(n, FOCUS, alpha)}
        yield {"alpha": alpha, "n": n, **gaps}
    report(len(cells), len(cells), "")


def _curve(rows: Sequence[Row], alpha: float, what: str) -> dict[int, float]:
    return {row["n"]: row[what] for row in rows if row["alpha"] == alpha}


def _draw(rows: Sequence[Row], path: Path) -> None:
    from longspan.plots import Panel, draw

    panel = Panel(
        f"Gap that {FOCUS} tokens need for the attention: {SHARE:.0%} under softmax, all of it under entmax",
        "logit gap",
        {method_name(alpha): _curve(rows, alpha, "gap") for alpha in ALPHAS},
        x_label="context length n",
    )
    draw([panel], path)


def _table(rows: Sequence[Row]) -> list[Row]:
    lengths = sorted({row["n"] for row in rows})
    return [
        {"method": method_name(alpha)} | {f"n = {n}": _curve(rows, alpha, "gap")[n] for n in lengths}
        for alpha in ALPHAS
    ]


def _verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    error = max(abs(row["gap"] - row["closed_form"]) for row in rows)
    first, last = min(row["n"] for row in rows), max(row["n"] for row in rows)
    softmax = _curve(rows, 1.0, "gap")
    constant = {alpha: _curve(rows, alpha, "gap")[last] for alpha in ALPHAS if alpha > 1}
    said = (
        f"From n = {first} to {last} the gap softmax needs grows from {softmax[first]:.2f} to {softmax[last]:.2f}; "
        "entmax needs "
        + ", ".join(f"{gap:.4g} at α = {alpha:g}" for alpha, gap in constant.items())
        + f" at every n. The closed forms hold to {error:.0e}."
    )
    return error < 1e-6 and softmax[last] > softmax[first], said


PROBE = Probe(
    name="two-level",
    claim="For k tokens to hold the attention softmax needs a logit gap that grows as log n; alpha-entmax needs "
    "k^(1-alpha)/(alpha-1) at any n (Lemma on two-level logits).",
    measure=_measure,
    draw=_draw,
    table=_table,
    verdict=_verdict,
)
