"""Lemma 1: what the last token keeps of its weight when a token with logit b joins the context.

Up to ``b_max = tau(x) / (alpha-1)`` the newcomer is below the threshold and nothing changes; above it everybody in the
support loses, and the last token's weight goes down to zero continuously. The paper's proof ends with "b <= b_max"
for the second part; there the difference is zero, and it takes every value of [0, p] for b >= b_max.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from longspan.functional import entmax, threshold
from longspan.probes.base import Probe, Report, Size, bisect, method_name
from longspan.results import Row

CONTEXT = (0.9, -0.7, 0.3, 1.1, -1.6, 0.1, 1.0)  # the paper's x: the last of them is c
ALPHAS = (1.0, 1.25, 1.5, 2.0, 4.0)
LOGITS = (-5.0, 5.0)
POINTS: dict[Size, int] = {"small": 401, "paper": 4001}


def with_newcomer(context: Sequence[float], b: Tensor, alpha: float) -> Tensor:
    """The weights of `context` with a token of logit b, each of `b`, put before the last: (len(b), n + 1)."""
    x = torch.tensor(context, dtype=torch.float64).expand(len(b), -1)
    return entmax(torch.cat([x[:, :-1], b[:, None], x[:, -1:]], -1), alpha)


def b_max(context: Sequence[float], alpha: float) -> float | None:
    """The largest logit that changes nothing; softmax has none."""
    if alpha == 1:
        return None
    return threshold(torch.tensor(context, dtype=torch.float64), alpha).tau.item() / (alpha - 1)


def _measure(size: Size, report: Report) -> Iterator[Row]:
    grid = torch.linspace(*LOGITS, POINTS[size], dtype=torch.float64)
    for done, alpha in enumerate(ALPHAS):
        report(done, len(ALPHAS), f"alpha {alpha:g}")

        def ignored(b: float, alpha: float = alpha) -> bool:
            return bool(with_newcomer(CONTEXT, torch.tensor([b], dtype=torch.float64), alpha)[0, -2] == 0)

        yield {
            "alpha": alpha,
            "alone": entmax(torch.tensor(CONTEXT, dtype=torch.float64), alpha)[-1].item(),
            "b_max": b_max(CONTEXT, alpha),
            "measured_b_max": bisect(ignored, *LOGITS) if ignored(LOGITS[0]) else None,
            "b": grid.tolist(),
            "weight": with_newcomer(CONTEXT, grid, alpha)[:, -1].tolist(),
        }
    report(len(ALPHAS), len(ALPHAS), "")


def _draw(rows: Sequence[Row], path: Path) -> None:
    from longspan.plots import Panel, draw

    kept = {
        method_name(row["alpha"]): {b: weight / row["alone"] for b, weight in zip(row["b"], row["weight"], strict=True)}
        for row in rows
    }
    panel = Panel(
        "Weight the last token keeps when a token joins (dashed: $b_{max} = \\tau/(\\alpha-1)$)",
        "weight with the new token / weight without",
        kept,
        x_label="logit b of the new token",
        y_limits=(-0.02, 1.05),
        marks={method_name(row["alpha"]): [row["b_max"]] for row in rows if row["b_max"] is not None},
        x_scale="linear",
        marker="",
    )
    draw([panel], path)


def _table(rows: Sequence[Row]) -> list[Row]:
    def kept(row: Row, b: float) -> float:
        nearest = min(range(len(row["b"])), key=lambda index: abs(row["b"][index] - b))
        return float(row["weight"][nearest] / row["alone"])

    return [
        {
            "method": method_name(row["alpha"]),
            "weight alone": row["alone"],
            "b_max": row["b_max"],
            "measured": row["measured_b_max"],
            "kept at b = -5": kept(row, -5.0),
            "kept at b = 0": kept(row, 0.0),
            "kept at b = 5": kept(row, 5.0),
        }
        for row in rows
    ]


def _verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    agree, errors, largest_loss = True, [0.0], 0.0
    for row in rows:
        pairs = list(zip(row["b"], row["weight"], strict=True))
        if row["b_max"] is None:
            agree &= row["measured_b_max"] is None and all(weight < row["alone"] for _, weight in pairs)
            continue
        below = [abs(weight - row["alone"]) for b, weight in pairs if b <= row["b_max"]]
        above = [row["alone"] - weight for b, weight in pairs if b > row["b_max"] + 1e-6]
        largest_loss = max(largest_loss, *below)
        agree &= max(below) < 1e-12 and min(above) > 0 and pairs[-1][1] == 0 and row["measured_b_max"] is not None
        errors.append(abs((row["measured_b_max"] or 0.0) - row["b_max"]))
    agree &= max(errors) < 1e-6
    softmax = next(row for row in rows if row["alpha"] == 1)
    least = 1 - max(softmax["weight"]) / softmax["alone"]
    said = (
        f"Up to b_max the weight moves by at most {largest_loss:.0e}, beyond it falls to 0; the measured b_max is the "
        f"closed form's to {max(errors):.0e}. Softmax loses at every b, {100 * least:.2g} % at the least."
    )
    return agree, said


PROBE = Probe(
    name="non-vanishing",
    claim="A token with a logit up to b_max = tau/(alpha-1) joins without taking weight from anyone; under softmax "
    "every token takes some (Lemma 1).",
    measure=_measure,
    draw=_draw,
    table=_table,
    verdict=_verdict,
)
