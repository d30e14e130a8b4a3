"""The scaling law of logits: how far apart the largest and the smallest of n Gaussian logits lie.

The paper takes ``2 sigma sqrt(2 log n)`` for the expected range and concludes that (log n)^(-1/2) undoes its growth.
That is the limit; the exact expectation (Tippett 1925) is

    E[range] = sigma * integral of 1 - Phi(x)^n - (1 - Phi(x))^n,

which lies below at every n and catches up as log log n / log n, so slowly that at any length in use the range grows
as a larger power of log n than 1/2.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from longspan.probes.base import Probe, Report, Size
from longspan.results import Row

SIGMAS = (0.5, 1.0, 2.0)
LENGTHS: dict[Size, tuple[int, ...]] = {
    "small": tuple(2**k for k in range(4, 21, 2)),
    "paper": tuple(2**k for k in range(4, 27, 2)),
}
BLOCK = 2**20  # drawn at once
MOST_DRAWS = 4096


def law(n: int, sigma: float) -> float:
    """The paper's expected range."""
    return 2 * sigma * math.sqrt(2 * math.log(n))


def exact(n: int, sigma: float) -> float:
    """The expected range by quadrature."""
    x = torch.linspace(-12, 12, 24_001, dtype=torch.float64)
    below, above = (n * torch.special.log_ndtr(x)).exp(), (n * torch.special.log_ndtr(-x)).exp()
    return sigma * float(torch.trapezoid(1 - below - above, x))


def _draws(n: int, size: Size) -> int:
    numbers = 2**26 if size == "small" else 2**30
    return max(8, min(MOST_DRAWS, numbers // n))


def measured_ranges(n: int, draws: int) -> torch.Tensor:
    """The range of n standard Gaussians, `draws` times; long rows are drawn in blocks."""
    generator = torch.Generator().manual_seed(n)
    width, height = min(n, BLOCK), min(draws, max(1, BLOCK // n))
    ranges = []
    for start in range(0, draws, height):
        rows = min(height, draws - start)
        low, high = torch.full((rows,), math.inf).double(), torch.full((rows,), -math.inf).double()
        for _ in range(n // width):
            logits = torch.randn(rows, width, generator=generator, dtype=torch.float64)
            low, high = torch.minimum(low, logits.amin(-1)), torch.maximum(high, logits.amax(-1))
        ranges.append(high - low)
    return torch.cat(ranges)


def growth(n: int, far: int) -> float:
    """The power of log n as which the expected range grows between two lengths."""
    return math.log(exact(far, 1) / exact(n, 1)) / math.log(math.log(far) / math.log(n))


def _measure(size: Size, report: Report) -> Iterator[Row]:
    lengths = LENGTHS[size]
    for done, n in enumerate(lengths):
        report(done, len(lengths), f"n = {n}")
        ranges = measured_ranges(n, _draws(n, size))
        mean, error = ranges.mean().item(), ranges.std().item() / math.sqrt(len(ranges))
        for sigma in SIGMAS:  # a range is proportional to sigma, so one set of draws serves all
            row = {"n": n, "sigma": sigma, "draws": len(ranges), "range": sigma * mean, "error": sigma * error}
            yield row | {"exact": exact(n, sigma), "law": law(n, sigma)}
    report(len(lengths), len(lengths), "")


def _curve(rows: Sequence[Row], what: str, sigma: float = 1.0) -> dict[int, float]:
    return {row["n"]: row[what] for row in rows if row["sigma"] == sigma}


def _scaled(curve: dict[int, float], power: float) -> dict[int, float]:
    """The curve times (log n)^power, relative to its first value."""
    first = min(curve)
    unit = curve[first] * math.log(first) ** power
    return {n: value * math.log(n) ** power / unit for n, value in curve.items()}


def _draw(rows: Sequence[Row], path: Path) -> None:
    from longspan.plots import PALETTE, Panel, draw

    lengths = sorted({row["n"] for row in rows})
    ticks = lengths[::2] if len(lengths) < 10 else lengths[::4]
    names = {sigma: f"σ = {sigma:g}" for sigma in SIGMAS}
    laws = {names[sigma]: _curve(rows, "law", sigma) for sigma in SIGMAS}
    powers = {f"γ = {power:g}": _scaled(_curve(rows, "exact"), power) for power in (0, -0.5, -0.6, -0.7)}
    panels = [
        Panel(
            "Range of n Gaussian logits",
            "largest − smallest logit",
            {names[sigma]: _curve(rows, "range", sigma) for sigma in SIGMAS},
            laws,
            "$2\\sigma\\sqrt{2\\,\\log\\,n}$",
            x_label="n",
            x_ticks=ticks,
            colours=dict(zip(names.values(), PALETTE, strict=False)),
        ),
        Panel(
            "What is left of the growth after $(\\log\\,n)^\\gamma$",
            "expected range × $(\\log\\,n)^\\gamma$, first = 1",
            powers,
            x_label="n",
            x_ticks=ticks,
            colours=dict(zip(powers, ("#000000", *PALETTE[1:]), strict=False)),
        ),
    ]
    draw(panels, path, width=5.6, height=4.2)


def _table(rows: Sequence[Row]) -> list[Row]:
    return [
        {
            "n": row["n"],
            "draws": row["draws"],
            "range": row["range"],
            "± error": row["error"],
            "exact": row["exact"],
            "law": row["law"],
            "range / law": row["range"] / row["law"],
        }
        for row in rows
        if row["sigma"] == 1
    ]


def _verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    deviation = max(abs(row["range"] - row["exact"]) / row["error"] for row in rows)
    below = all(row["range"] < row["law"] for row in rows)
    shares = [row["exact"] / row["law"] for row in rows if row["sigma"] == 1]
    first, last = rows[0]["n"], rows[-1]["n"]
    scaled = _scaled(_curve(rows, "exact"), -0.5)[last]
    said = (
        f"The measured range is the exact expectation within {deviation:.1f} standard errors, which is {shares[0]:.3f} "
        f"of the law at n = {first} and {shares[-1]:.3f} at n = {last}. So (log n)^-0.5 leaves a growth by "
        f"{scaled - 1:.0%} between the two; there the range grows as (log n)^{growth(first, last):.2f}."
    )
    return deviation < 5 and below and shares == sorted(shares) and shares[-1] > 0.9, said


PROBE = Probe(
    name="logit-range",
    claim="The range of n Gaussian logits grows as 2 sigma sqrt(2 log n) and never exceeds it on average, so gamma = "
    "-0.5 undoes its growth in the limit (section on ASEntmax).",
    measure=_measure,
    draw=_draw,
    table=_table,
    verdict=_verdict,
)
