"""Figure 2: alpha-entmax(z / theta) against the inverse temperature, and where each weight becomes zero.

Element k of the sorted z leaves the support when the larger ones alone have their threshold on it:
``sum_{i<k} ((alpha-1) (z_i - z_k) / theta)^(1/(alpha-1)) = 1``. The left side is homogeneous in 1/theta, so for every
alpha > 1 there is a closed form, with r = 1/(alpha-1):

    1/theta_k = r / || (z_i - z_k)_{i<k} ||_r.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from longspan.functional import entmax
from longspan.probes.base import Probe, Report, Size, bisect
from longspan.results import Row

LOGITS = (2.0, 1.8, 1.6, 1.4, 1.2)
ALPHAS = (1.0, 1.25, 1.5, 2.0, 4.0)
INVERSE_TEMPERATURES = (1 / 128, 32.0)
POINTS: dict[Size, int] = {"small": 97, "paper": 769}


def cutoff(logits: Sequence[float], k: int, alpha: float) -> float | None:
    """The inverse temperature from which weight k of the descending `logits` is zero; None where it never is."""
    if alpha == 1 or k == 0:
        return None
    r = 1 / (alpha - 1)
    return float(r / sum((larger - logits[k]) ** r for larger in logits[:k]) ** (1 / r))


def measured_cutoff(logits: Sequence[float], k: int, alpha: float) -> float | None:
    """The same by bisection on the transformation itself."""
    z = torch.tensor(logits, dtype=torch.float64)
    low, high = INVERSE_TEMPERATURES

    def alive(inverse_temperature: float) -> bool:
        return bool(entmax(z * inverse_temperature, alpha)[k] > 0)

    return None if alive(high) else bisect(alive, low, high)


def _measure(size: Size, report: Report) -> Iterator[Row]:
    z = torch.tensor(LOGITS, dtype=torch.float64)
    low, high = (torch.tensor(end).log2().item() for end in INVERSE_TEMPERATURES)
    grid = torch.logspace(low, high, POINTS[size], base=2, dtype=torch.float64)
    for done, alpha in enumerate(ALPHAS):
        report(done, len(ALPHAS), f"alpha {alpha:g}")
        weights = entmax(grid[:, None] * z, alpha)
        for k, logit in enumerate(LOGITS):
            yield {
                "alpha": alpha,
                "logit": logit,
                "cutoff": cutoff(LOGITS, k, alpha),
                "measured_cutoff": measured_cutoff(LOGITS, k, alpha),
                "inverse_temperature": grid.tolist(),
                "weight": weights[:, k].tolist(),
            }
    report(len(ALPHAS), len(ALPHAS), "")


def _draw(rows: Sequence[Row], path: Path) -> None:
    from longspan.plots import PALETTE, Panel, draw

    panels = []
    for alpha in dict.fromkeys(row["alpha"] for row in rows):
        lines = [row for row in rows if row["alpha"] == alpha]
        names = [f"z = {row['logit']}" for row in lines]
        panels.append(
            Panel(
                f"α = {alpha:g}" + (", softmax" if alpha == 1 else ", sparsemax" if alpha == 2 else ""),
                "weight",
                {
                    n: dict(zip(r["inverse_temperature"], r["weight"], strict=True))
                    for n, r in zip(names, lines, strict=True)
                },
                y_limits=(-0.02, 1.02),
                x_label="inverse temperature 1/θ",
                marks={n: [r["cutoff"]] for n, r in zip(names, lines, strict=True) if r["cutoff"] is not None},
                colours=dict(zip(names, PALETTE, strict=False)),
                x_ticks=(0.01, 0.1, 1, 10),
                marker="",
            )
        )
    draw(panels, path, width=4.4, height=3.4, columns=3)


def _table(rows: Sequence[Row]) -> list[Row]:
    return [
        {"alpha": row["alpha"], "logit": row["logit"], "zero from": row["cutoff"], "measured": row["measured_cutoff"]}
        for row in rows
        if row["cutoff"] is not None
    ]


def _verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    agree = all((row["cutoff"] is None) == (row["measured_cutoff"] is None) for row in rows)
    cut = [row for row in rows if row["cutoff"] is not None and row["measured_cutoff"] is not None]
    error = max(abs(row["measured_cutoff"] / row["cutoff"] - 1) for row in cut)
    dense = all(min(row["weight"]) > 0 for row in rows if row["alpha"] == 1)
    said = (
        f"{len(cut)} weights become zero, each where the closed form says (relative error {error:.0e} at most); "
        f"softmax {'never reaches' if dense else 'reaches'} zero."
    )
    return agree and dense and error < 1e-6, said


PROBE = Probe(
    name="transformation",
    claim="alpha-entmax gives exact zeros once the temperature is low enough, sooner for larger alpha; softmax never.",
    measure=_measure,
    draw=_draw,
    table=_table,
    verdict=_verdict,
)
