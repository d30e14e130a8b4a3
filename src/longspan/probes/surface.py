"""The appendix's figure: the weight p_0 over z = [0, z_1, z_2], and where it is exactly 0 or 1.

The first weight is ``[-tau]_+^r`` with r = 1/(alpha-1), so it is zero as soon as the others fill the simplex with the
threshold on its own logit, ``sum_i [(alpha-1) z_i]_+^r >= 1``, and it is one as soon as they all lie r below it:

    p_0 = 0  iff  || [z]_+ ||_r >= r,        p_0 = 1  iff  max_i z_i <= -r.

The region left by p_0 = 0 is the ball of l_r with radius r: a quarter of a circle for alpha = 1.5, a triangle for
sparsemax, and not convex for alpha > 2. Top-k is zero on a whole quadrant and gets there by a jump.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from longspan.functional import entmax
from longspan.nn.normalizers import TopK
from longspan.probes.base import Probe, Report, Size, bisect, method_name
from longspan.results import Row

ALPHAS = (1.0, 1.25, 1.5, 2.0, 4.0)
TOP = 2
EDGE = 5.0  # z_1 and z_2 run from -EDGE to EDGE
POINTS: dict[Size, int] = {"small": 101, "paper": 401}
RAYS: dict[Size, int] = {"small": 23, "paper": 95}
METHODS = (*(method_name(alpha) for alpha in ALPHAS), f"top-{TOP}")

Weights = Callable[[Tensor], Tensor]


def weights_of(alpha: float | None) -> Weights:
    """All weights, first p_0, as a function of the (..., 2) logits of the others; None is top-k."""
    normalise: Weights = TopK(k=TOP) if alpha is None else lambda z: entmax(z, alpha)
    return lambda others: normalise(torch.cat([torch.zeros_like(others[..., :1]), others], -1))


def zero_radius(direction: Sequence[float], alpha: float) -> float:
    """How far along `direction`, which has a positive component, p_0 becomes zero."""
    r = 1 / (alpha - 1)
    return float(r / sum(max(part, 0.0) ** r for part in direction) ** (1 / r))


def one_radius(direction: Sequence[float], alpha: float) -> float:
    """How far along `direction`, whose components are all negative, p_0 becomes one."""
    return 1 / (alpha - 1) / -max(direction)


def jump(weights: Weights, starts: Tensor) -> float:
    """The largest step of p_0 along z_2 that is left when the interval holding it is halved again and again."""
    # Not the middle of the axis, which halving would land on: there z_2 ties with 0, and ties take a jump in two steps.
    low, high = torch.full_like(starts, -EDGE), torch.full_like(starts, EDGE - 1 / 3)

    def at(z2: Tensor) -> Tensor:
        return weights(torch.stack([starts, z2], -1))[..., 0]

    for _ in range(44):  # to 1e-13 of where it began
        middle = (low + high) / 2
        lower = (at(low) - at(middle)).abs() >= (at(middle) - at(high)).abs()
        low, high = torch.where(lower, low, middle), torch.where(lower, middle, high)
    return float((at(low) - at(high)).abs().max())


def _boundary(weights: Weights, alpha: float, rays: int) -> list[Row]:
    """Where p_0 becomes 0 and 1 along rays from the origin: closed form and bisection."""
    # That p_0 = 1 is read off the others: their first 1e-16 is lost in a sum with p_0.
    found: list[Row] = []
    for k in range(rays):
        angle = 2 * math.pi * (k + 0.5) / rays
        direction = [math.cos(angle), math.sin(angle)]
        ray = torch.tensor(direction, dtype=torch.float64)
        value = 0 if max(direction) > 0 else 1
        radius = (zero_radius if value == 0 else one_radius)(direction, alpha)
        watched = slice(0, 1) if value == 0 else slice(1, None)

        def inside(distance: float, ray: Tensor = ray, watched: slice = watched) -> bool:
            return bool((weights(distance * ray)[watched] > 0).any())

        measured = bisect(inside, 0.0, 2 * radius)
        found.append({"value": value, "direction": direction, "closed_form": radius, "measured": measured})
    return found


def _measure(size: Size, report: Report) -> Iterator[Row]:
    axis = torch.linspace(-EDGE, EDGE, POINTS[size], dtype=torch.float64)
    others = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)  # (z_2, z_1, 2)
    starts = torch.linspace(-EDGE, EDGE, 998, dtype=torch.float64)
    for done, (name, alpha) in enumerate(zip(METHODS, (*ALPHAS, None), strict=True)):
        report(done, len(METHODS), name)
        weights = weights_of(alpha)
        values = weights(others)  # (z_2, z_1, 3)
        yield {
            "method": name,
            "alpha": alpha,
            "weight": values[..., 0].tolist(),
            "zeros": (values[..., 0] == 0).double().mean().item(),
            "ones": (values[..., 1:] == 0).all(-1).double().mean().item(),
            "jump": jump(weights, starts),
            "boundary": _boundary(weights, alpha, RAYS[size]) if alpha is not None and alpha > 1 else [],
        }
    report(len(METHODS), len(METHODS), "")


def _outline(alpha: float) -> dict[str, list[tuple[float, float]]]:
    r = 1 / (alpha - 1)
    # In the quadrant of two positive logits z = r (t, (1 - t^r)^(1/r)), spaced by angle.
    turns = [math.pi / 2 * k / 400 for k in range(401)]
    arc = [(zero_radius((math.cos(t), math.sin(t)), alpha), t) for t in turns]
    zero = [(r, -2 * EDGE), *((d * math.cos(t), d * math.sin(t)) for d, t in arc), (-2 * EDGE, r)]
    return {"p₀ = 0 beyond": zero, "p₀ = 1 beyond": [(-r, -2 * EDGE), (-r, -r), (-2 * EDGE, -r)]}


def _draw(rows: Sequence[Row], path: Path) -> None:
    from longspan.plots import PALETTE, Map, draw

    colours = {"p₀ = 0 beyond": PALETTE[5], "p₀ = 1 beyond": PALETTE[4], "measured": "white"}
    panels = []
    for row in rows:
        dots = [
            (end["measured"] * end["direction"][0], end["measured"] * end["direction"][1]) for end in row["boundary"]
        ]
        panels.append(
            Map(
                row["method"],
                "$z_1$",
                "$z_2$",
                (-EDGE, -EDGE / 2, 0, EDGE / 2, EDGE),
                row["weight"],
                "$p_0$",
                _outline(row["alpha"]) if row["boundary"] else {},
                {"measured": dots} if row["boundary"] else {},
                colours,
            )
        )
    draw(panels, path, width=4.1, height=3.5, columns=3)


def _errors(row: Row) -> list[float]:
    return [abs(end["measured"] / end["closed_form"] - 1) for end in row["boundary"]]


def _table(rows: Sequence[Row]) -> list[Row]:
    return [
        {
            "method": row["method"],
            "p_0 = 0 on": f"{row['zeros']:.1%}",
            "p_0 = 1 on": f"{row['ones']:.1%}",
            "largest jump": row["jump"],
            "error of the boundary": max(_errors(row), default=None),
        }
        for row in rows
    ]


def _verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    by_name = {row["method"]: row for row in rows}
    softmax, top = by_name["softmax"], by_name[f"top-{TOP}"]
    sparse = [row for row in rows if row["boundary"]]
    error = max(max(_errors(row)) for row in sparse)
    entmax_jump = max(row["jump"] for row in sparse)
    least = min(min(line) for line in softmax["weight"])
    agree = len(sparse) == len(ALPHAS) - 1 and error < 1e-6
    agree &= softmax["zeros"] == softmax["ones"] == 0 and all(row["zeros"] > 0 for row in sparse)
    agree &= top["jump"] > 0.49 and entmax_jump < 1e-3 and softmax["jump"] < 1e-3
    said = (
        f"For every α > 1 p_0 becomes 0 and 1 where the closed form says, on {sum(len(r['boundary']) for r in sparse)} "
        f"rays to a relative {error:.0e}; softmax stays at {least:.0e} or more. Top-{TOP} jumps by {top['jump']:.2f}; "
        f"the largest step of entmax shrinks to {entmax_jump:.0e} with its interval."
    )
    return agree, said


PROBE = Probe(
    name="surface",
    claim="alpha-entmax of [0, z_1, z_2] is continuous and exactly zero on a region that grows with alpha; softmax is "
    "never zero and top-k jumps (appendix, visualisation of p_0).",
    measure=_measure,
    draw=_draw,
    table=_table,
    verdict=_verdict,
)
