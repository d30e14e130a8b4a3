"""RoPE's cut-offs: how far alpha-entmax sees along a cosine, and where it sees again.

Aligned queries and keys score ``z_d = sum_k A_k cos(g_k d)`` at distance d, with A_k = |q_k| |k_k|. The paper replaces
the cosine by 1 - x^2/2 for d <= pi / (2 g_max) and cuts at ``sqrt((z_0 - tau') / sum c_k g_k^2)``, c_k = A_k / 2 and
tau' = tau/(alpha-1). But 1 - x^2/2 lies *below* the cosine, so tokens beyond that distance can have weight; from above
``cos x <= 1 - 4 x^2 / pi^2`` for |x| <= pi/2 gives the true bound, the same with a factor:

    d < pi / (2 sqrt(2)) * sqrt((z_0 - tau') / sum c_k g_k^2),      pi / (2 sqrt(2)) = 1.11.

RoPE's first frequency is g = 1 whatever the head, so this domain holds the distances 0 and 1; it is wider only for
heads that put no weight on the fast chunks. One chunk alone has weight where ``cos(g d) > tau' / A``: within
arccos(tau'/A) / g of the multiples of 2 pi / g. (The paper writes (2 pi n +- d_0) / g, dividing d_0 by g twice.) With
more chunks only the sum counts: every single A_k can be below tau'.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from longspan.functional import entmax, threshold
from longspan.nn.positions import RoPE
from longspan.probes.base import Probe, Report, Size, method_name
from longspan.results import Row

ALPHAS = (1.5, 2.0)
FACTOR = math.pi / (2 * math.sqrt(2))
HEAD_DIM = 64
CHUNKS = (8, 11)  # single chunks, with the rates 0.1 and 0.042
AMPLITUDE = 2.0
ANGLES = 8  # bins of the figure
LENGTH: dict[Size, int] = {"small": 512, "paper": 4096}
HEADS: dict[Size, int] = {"small": 400, "paper": 4000}


def frequencies() -> Tensor:
    """g_k of a head of 64 channels, from 1 down to 10,000^(-31/32)."""
    return RoPE(1, HEAD_DIM).frequencies.double()


def scores(amplitudes: Tensor, rates: Tensor, length: int) -> Tensor:
    """z_d of the last query, for d = 0, 1, ... length - 1."""
    distances = torch.arange(length, dtype=torch.float64)
    return (amplitudes[:, None] * (rates[:, None] * distances).cos()).sum(0)


def cut(z: Tensor, alpha: float) -> float:
    """tau / (alpha-1), above which a score has weight."""
    return threshold(z, alpha).tau.item() / (alpha - 1)


def reach(z: Tensor, amplitudes: Tensor, rates: Tensor, alpha: float) -> float:
    """The paper's d_max before its floor; times FACTOR, a bound within the small-angle domain."""
    return math.sqrt((z[0].item() - cut(z, alpha)) / (amplitudes * rates.square()).sum().item() * 2)


def domain(amplitudes: Tensor, rates: Tensor) -> int:
    """The largest distance at which no chunk in use has turned by more than a right angle."""
    return math.floor(math.pi / 2 / rates[amplitudes > 0].max().item())


def windows(z: Tensor, alpha: float) -> list[tuple[int, int]]:
    """The runs of distances with weight, first and last."""
    alive = {d for d, weight in enumerate(entmax(z, alpha).tolist()) if weight > 0}
    starts, ends = ({d for d in alive if d + side not in alive} for side in (-1, 1))
    return list(zip(sorted(starts), sorted(ends), strict=True))


def predicted_windows(rate: float, share: float, length: int) -> list[tuple[int, int]]:
    """The same for one chunk whose cut is at `share` of its amplitude: all d with cos(rate d) > share."""
    half, period = math.acos(share) / rate, 2 * math.pi / rate
    centres = [n * period for n in range(int(length / period) + 2)]
    runs = [(max(0, math.floor(c - half) + 1), min(length, math.ceil(c + half)) - 1) for c in centres]
    return [run for run in runs if run[0] <= run[1]]


def random_head(generator: torch.Generator) -> Tensor:
    """Amplitudes on the chunks from a random one on, summing to between 0.1 and 10."""
    first = int(torch.randint(0, 24, (), generator=generator))
    shares = torch.rand(HEAD_DIM // 2, generator=generator, dtype=torch.float64) ** 4
    shares[:first] = 0
    total = 10 ** (2 * torch.rand((), generator=generator, dtype=torch.float64) - 1)
    return shares / shares.sum() * total


def _measure(size: Size, report: Report) -> Iterator[Row]:
    rates, length = frequencies(), LENGTH[size]
    steps = len(ALPHAS) * 2
    for done, alpha in enumerate(ALPHAS):
        report(2 * done, steps, f"single chunks, alpha {alpha:g}")
        for k in CHUNKS:
            amplitude, rate = torch.tensor([AMPLITUDE]).double(), rates[k : k + 1]
            z = scores(amplitude, rate, length)
            share = cut(z, alpha) / AMPLITUDE
            yield {
                "kind": "chunk",
                "alpha": alpha,
                "rate": rate.item(),
                "share": share,
                "weight": entmax(z, alpha).tolist(),
                "windows": [list(run) for run in windows(z, alpha)],
                "predicted": [list(run) for run in predicted_windows(rate.item(), share, length)],
            }
        report(2 * done + 1, steps, f"random heads, alpha {alpha:g}")
        generator = torch.Generator().manual_seed(0)
        for _ in range(HEADS[size]):
            amplitudes = random_head(generator)
            inside = domain(amplitudes, rates)
            z = scores(amplitudes, rates, inside + 1)  # the keys are those of the domain
            farthest = windows(z, alpha)[-1][1]
            yield {
                "kind": "head",
                "alpha": alpha,
                "domain": inside,
                "farthest": farthest,
                "angle": farthest * rates[amplitudes > 0].max().item(),
                "reach": reach(z, amplitudes, rates, alpha),
                "seen_by_a_chunk": amplitudes.max().item() > cut(z, alpha),
            }
    report(steps, steps, "")


def _chunks(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["kind"] == "chunk"]


def _heads(rows: Sequence[Row]) -> list[Row]:
    """The heads whose domain does not end before the bound, so that there is something to see."""
    return [row for row in rows if row["kind"] == "head" and row["reach"] * FACTOR <= row["domain"]]


def _overshoot(rows: Sequence[Row], alpha: float) -> dict[float, float]:
    """By angle, the largest farthest / reach of a head."""
    bins: dict[int, tuple[float, float]] = {}
    for row in _heads(rows):
        if row["alpha"] == alpha:
            index = math.floor(row["angle"] / (math.pi / 2) * ANGLES)
            point = (row["farthest"] / row["reach"], row["angle"])
            bins[index] = max(bins.get(index, point), point)
    return {angle: ratio for _, (ratio, angle) in sorted(bins.items())}


def _edges(rate: float, share: float) -> list[float]:
    """Where the first window ends, the second begins and ends."""
    half, period = math.acos(share) / rate, 2 * math.pi / rate
    return [half, period - half, period + half]


def _draw(rows: Sequence[Row], path: Path) -> None:
    from longspan.plots import Panel, draw

    panels = []
    shown = 256
    for rate in dict.fromkeys(row["rate"] for row in _chunks(rows)):
        lines = {method_name(row["alpha"]): row for row in _chunks(rows) if row["rate"] == rate}
        panels.append(
            Panel(
                f"one chunk, g = {rate:.2g}, period {2 * math.pi / rate:.0f} (dashed: closed form)",
                "weight",
                {name: dict(enumerate(row["weight"][:shown])) for name, row in lines.items()},
                x_label="distance",
                x_scale="linear",
                y_limits=(0, 1.4 * max(max(row["weight"]) for row in lines.values())),
                marks={name: _edges(rate, row["share"]) for name, row in lines.items()},
                marker="",
            )
        )
    angles = [math.pi / 2 * k / 64 for k in range(1, 65)]
    single = {angle: angle / 2 / math.sin(angle / 2) for angle in angles}
    panels.append(
        Panel(
            "random heads in the small-angle domain",
            "farthest with weight / paper's $d_{max}$",
            {method_name(alpha): _overshoot(rows, alpha) for alpha in ALPHAS},
            {"bound": single, "paper": dict.fromkeys(angles, 1.0)},
            "at most: 1 (paper), (x/2) / sin(x/2) (exact)",
            x_label="angle x of the fastest chunk there",
            x_scale="linear",
            y_limits=(0.9, 1.2),
        )
    )
    draw(panels, path, width=5.0, height=3.8)


def _table(rows: Sequence[Row]) -> list[Row]:
    return [
        {
            "method": method_name(row["alpha"]),
            "g": row["rate"],
            "cut / amplitude": row["share"],
            "windows": len(row["windows"]),
            "first ends at": row["windows"][0][1],
            "second": "{} to {}".format(*row["windows"][1]),
        }
        for row in _chunks(rows)
    ]


def _verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    exact = all(row["windows"] == row["predicted"] for row in _chunks(rows))
    count = sum(len(row["windows"]) for row in _chunks(rows))
    heads = _heads(rows)
    beyond = sum(row["farthest"] > math.floor(row["reach"]) for row in heads)
    broken = sum(row["farthest"] >= row["reach"] * FACTOR for row in heads)
    unseen = sum(not row["seen_by_a_chunk"] for row in heads)
    said = (
        f"{count} windows of single chunks {'are' if exact else 'are not'} where arccos puts them. In {beyond} of "
        f"{len(heads)} random heads a token beyond the paper's d_max has weight; {broken} reach 1.11 times that far. "
        f"In {unseen} no single chunk reaches the threshold."
    )
    return exact and broken == 0 and len(heads) > 100, said


PROBE = Probe(
    name="rope",
    claim="With RoPE alpha-entmax sees windows: one chunk where its cosine is above the threshold, several no farther "
    "than a distance given by the curvature of their cosines (propositions on RoPE, with a factor of 1.11).",
    measure=_measure,
    draw=_draw,
    table=_table,
    verdict=_verdict,
)
