"""The ALiBi window: how far back alpha-entmax can see when every step costs a slope m.

Contents in [z_min, z_max], scores ``z_d - m d`` at distance d. The paper bounds the distance by
``floor((z_max - z_min + 1/(alpha-1)) / m + 1)``. That holds, but not by its proof, which sets
``tau = z_max - 1/(alpha-1)``, the value of tau/(alpha-1), assumes z_max >= z_min + m, false where all contents are
equal, and changes the sign of m on the way; with the sign kept it would end at ``floor(... - 1)``, which is wrong.

A token is in the support iff ``sum_j [(alpha-1) (s_j - s)]_+^r < 1``, r = 1/(alpha-1), over the scores above its own.
The other tokens have at least the scores z_min - m d, so with x the slack ``m d - (z_max - z_min)``

    d survives for some contents  iff  sum_{t >= 0} [(alpha-1) (x - m t)]_+^r < 1.

The root x* is -tau/(alpha-1) of the bias alone, [0, -m, -2m, ...]. It is at most r, with equality from m = r on, which
gives the simple bound d < (z_max - z_min + r) / m; for small slopes it goes down to ((r+1) r^r m)^(1/(r+1)).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from longspan.functional import entmax, threshold
from longspan.probes.base import Probe, Report, Size, method_name
from longspan.results import Row

ALPHAS = (1.25, 1.5, 2.0, 4.0)
SPREADS = (0.0, 2.0)  # z_max - z_min
STEEPEST = 1  # slopes are 2^1, 2^0, 2^-1, ...
GENTLEST: dict[Size, int] = {"small": -8, "paper": -12}
DRAWS: dict[Size, int] = {"small": 64, "paper": 256}


def paper_bound(spread: float, slope: float, alpha: float) -> int:
    """The proposition's d_max."""
    return math.floor((spread + 1 / (alpha - 1)) / slope + 1)


def kept_sign_bound(spread: float, slope: float, alpha: float) -> int:
    """What the proposition's proof gives when the sign of m is kept; not a bound."""
    return math.floor((spread + 1 / (alpha - 1)) / slope - 1)


def simple_bound(spread: float, slope: float, alpha: float) -> int:
    """The farthest distance that one token of the support alone allows: the largest d < (spread + r) / m."""
    return math.ceil((spread + 1 / (alpha - 1)) / slope) - 1


def sharp_bound(spread: float, slope: float, alpha: float) -> int:
    """The farthest distance that any contents allow: the largest d < (spread + x*) / m."""
    distances = torch.arange(simple_bound(0.0, slope, alpha) + 2, dtype=torch.float64)
    slack = -threshold(-slope * distances, alpha).tau.item() / (alpha - 1)
    return math.ceil((spread + slack) / slope - 1e-9) - 1  # a survivor is strictly nearer: rounding must not add one


def farthest(contents: Tensor, slope: float, alpha: float) -> int:
    """The largest distance with a weight in any row; `contents` (..., n) are ordered by distance from the query."""
    distances = torch.arange(contents.shape[-1], dtype=torch.float64)
    weights = entmax(contents - slope * distances, alpha)
    return int((weights > 0).nonzero()[:, -1].max())


def adversarial(spread: float, slope: float, alpha: float) -> int:
    """The farthest survivor over contents that are z_min everywhere but z_max at one distance."""

    def survives(distance: int) -> bool:
        contents = torch.zeros(1, distance + 1, dtype=torch.float64)
        contents[0, distance] = spread
        return farthest(contents, slope, alpha) == distance

    low, high = 0, paper_bound(spread, slope, alpha) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if survives(middle) else (low, middle)
    return low


def _uniform(draws: int, n: int) -> Tensor:
    return torch.rand(draws, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def _two_valued(draws: int, n: int) -> Tensor:
    """Few tokens at z_max: the random contents that come nearest to the bound."""
    return (_uniform(draws, n) < 4 / n).double()


CONTENTS: dict[str, Callable[[int, int], Tensor]] = {"uniform": _uniform, "few high": _two_valued}


def _measure(size: Size, report: Report) -> Iterator[Row]:
    slopes = [2.0**k for k in range(STEEPEST, GENTLEST[size] - 1, -1)]
    cells = [(alpha, spread, slope) for alpha in ALPHAS for spread in SPREADS for slope in slopes]
    for done, (alpha, spread, slope) in enumerate(cells):
        report(done, len(cells), f"alpha {alpha:g}, slope {slope:g}")
        n = paper_bound(spread, slope, alpha) + 16
        drawn = {name: farthest(spread * draw(DRAWS[size], n), slope, alpha) for name, draw in CONTENTS.items()}
        yield {
            "alpha": alpha,
            "spread": spread,
            "slope": slope,
            "paper": paper_bound(spread, slope, alpha),
            "sign_kept": kept_sign_bound(spread, slope, alpha),
            "simple": simple_bound(spread, slope, alpha),
            "sharp": sharp_bound(spread, slope, alpha),
            "adversarial": adversarial(spread, slope, alpha),
            **drawn,
        }
    report(len(cells), len(cells), "")


def _draw(rows: Sequence[Row], path: Path) -> None:
    from longspan.plots import PALETTE, Panel, draw

    shown = {"paper": "paper's d_max", "sharp": "sharp bound, attained", "uniform": "uniform random contents"}
    colours = dict(zip(shown.values(), (PALETTE[5], PALETTE[0], PALETTE[1]), strict=True))
    panels = []
    for spread in SPREADS:
        for alpha in ALPHAS:
            cells = [row for row in rows if (row["alpha"], row["spread"]) == (alpha, spread)]
            curves = {shown[what]: {1 / row["slope"]: row[what] + 1 for row in cells} for what in shown}
            if spread == 0:  # nothing is random there
                del curves[shown["uniform"]]
            panels.append(
                Panel(
                    f"{method_name(alpha)}, {f'contents within {spread:g}' if spread else 'equal contents'}",
                    "tokens in the window",
                    curves,
                    x_label="1 / slope",
                    y_scale="log",
                    y_limits=(0.8, 1.5 * max(row["paper"] for row in rows)),
                    x_ticks=[1, 4, 16, 64, 256],
                    colours=colours,
                )
            )
    draw(panels, path, width=3.6, height=3.2, columns=len(ALPHAS))


def _table(rows: Sequence[Row]) -> list[Row]:
    gentlest = min(row["slope"] for row in rows)
    return [
        {"method": method_name(row["alpha"]), "spread": row["spread"], "slope": row["slope"]}
        | {name: row[name] for name in ("paper", "simple", "sharp", "adversarial", *CONTENTS)}
        for row in rows
        if row["slope"] in (gentlest, 2**-4, 0.5)
    ]


def _verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    kept = all(row["sharp"] <= row["simple"] < row["paper"] for row in rows)
    never = all(row[name] <= row["sharp"] for row in rows for name in CONTENTS)
    attained = sum(row["adversarial"] == row["sharp"] for row in rows)
    wrong = sum(row["adversarial"] > row["sign_kept"] for row in rows)
    loosest = max(rows, key=lambda row: row["paper"] / max(row["sharp"], 1))
    said = (
        f"No token beyond the paper's d_max has weight in {len(rows)} cells; the sharp one is attained in {attained}. "
        f"The paper's is up to {loosest['paper'] / max(loosest['sharp'], 1):.1f} times too far (slope "
        f"{loosest['slope']:g}, α = {loosest['alpha']:g}, spread {loosest['spread']:g}: {loosest['paper']} against "
        f"{loosest['sharp']}). Its proof with the sign of m kept would be violated in {wrong} cells."
    )
    return kept and never and attained == len(rows) and wrong > 0, said


PROBE = Probe(
    name="alibi-window",
    claim="With ALiBi no token farther than d_max = floor((z_max - z_min + 1/(alpha-1)) / m + 1) has any weight "
    "(proposition on ALiBi with alpha-entmax).",
    measure=_measure,
    draw=_draw,
    table=_table,
    verdict=_verdict,
)
