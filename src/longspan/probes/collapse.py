"""Proposition 2, first part: does the last token's representation notice that the last token is repeated?

The paper's counterexample in one dimension: n - 1 tokens ``v_i = b_i / sqrt(phi)``, then ``v_a = sqrt(phi)`` once or
twice, identity projections, causal attention and residuals, so that the last token scores the others b_i and itself
phi. Measured is ``|v_n - v*_{n+1}|`` after the last layer. Causality makes the prefix and the first v_a the same in
both sequences and in every longer one, so only the last rows are computed per n.

The limit for a constant prefix is exact: an infinite prefix holds the threshold at its own score until the tokens
after it fill the simplex alone. In one layer, alpha = 2, phi = 0.5, b = 0: (1 - 0.5) sqrt(0.5) = 0.354.

The paper adds that a larger alpha preserves more. That holds in its scenarios, not in general: once phi - b reaches
1/(alpha-1) the last token sees only itself, repeated or not, and the gap is exactly zero. "distant prefix" shows it.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.functional import attention, entmax
from longspan.probes.base import Probe, Report, Size, method_name
from longspan.results import Row

ALPHAS = (1.0, 1.5, 1.75, 2.0)


class Scenario(NamedTuple):
    layers: int
    phi: float
    b: float | None  # None draws b_i uniformly from [0, 1]
    longest: dict[Size, int]


SCENARIOS = {
    "closed form": Scenario(1, 0.5, 0.0, {"small": 8192, "paper": 131_072}),
    "constant prefix": Scenario(6, 1.2, 1.0, {"small": 8192, "paper": 131_072}),
    "random prefix": Scenario(6, 1.2, None, {"small": 1024, "paper": 16_384}),
}
PAPER_SCENARIOS = tuple(SCENARIOS)
SCENARIOS["distant prefix"] = Scenario(1, 1.2, 0.0, {"small": 8192, "paper": 131_072})
DRAWS = 4


def prefix_states(scenario: Scenario, n: int, alpha: float) -> list[Tensor]:
    """The prefix of n - 1 tokens as the input of every layer, each (draws, n - 1)."""
    if scenario.b is not None:  # equal tokens attend to their own value: every layer doubles it
        first = torch.full((1, n - 1), scenario.b / math.sqrt(scenario.phi), dtype=torch.float64)
        return [first * 2**layer for layer in range(scenario.layers)]
    b = torch.rand(DRAWS, n - 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    states = [b / math.sqrt(scenario.phi)]
    while len(states) < scenario.layers:
        x = states[-1][:, None, :, None]  # (B, 1, T, 1)
        states.append((x + attention(x, x, x, alpha=alpha, scale=1.0))[:, 0, :, 0])
    return states


def gap(states: Sequence[Tensor], phi: float, alpha: float) -> float:
    """|v_n - v*_{n+1}| after as many layers as there are states of the prefix, mean over the draws."""
    last = repeated = torch.full((states[0].shape[0], 1), math.sqrt(phi), dtype=torch.float64)
    for prefix in states:
        once, twice = torch.cat([prefix, last], -1), torch.cat([prefix, last, repeated], -1)
        last, repeated = last + _attend(last, once, alpha), repeated + _attend(repeated, twice, alpha)
    return (last - repeated).abs().mean().item()


def _attend(query: Tensor, tokens: Tensor, alpha: float) -> Tensor:
    return (entmax(query * tokens, alpha) * tokens).sum(-1, keepdim=True)


def limit(scenario: Scenario, alpha: float) -> float | None:
    """The gap as n goes to infinity; known for a constant prefix."""
    if scenario.b is None:
        return None
    prefix = scenario.b / math.sqrt(scenario.phi)
    last = repeated = math.sqrt(scenario.phi)
    for _ in range(scenario.layers):
        last, repeated = (
            last + _attend_infinite(last, prefix, [last], alpha),
            repeated + _attend_infinite(repeated, prefix, [last, repeated], alpha),
        )
        prefix *= 2
    return abs(last - repeated)


def _attend_infinite(query: float, prefix: float, others: list[float], alpha: float) -> float:
    """Attention over infinitely many tokens of value `prefix` and, with larger scores, `others`."""
    if alpha == 1:
        return prefix
    weights = [((alpha - 1) * query * (other - prefix)) ** (1 / (alpha - 1)) for other in others]
    if sum(weights) >= 1:
        weights = entmax(query * torch.tensor(others, dtype=torch.float64), alpha).tolist()
    return prefix * (1 - sum(weights)) + sum(w * other for w, other in zip(weights, others, strict=True))


def _measure(size: Size, report: Report) -> Iterator[Row]:
    cells = [(name, alpha) for name in SCENARIOS for alpha in ALPHAS]
    for done, (name, alpha) in enumerate(cells):
        report(done, len(cells), f"{name}, alpha {alpha:g}")
        scenario = SCENARIOS[name]
        states = prefix_states(scenario, scenario.longest[size], alpha)
        n = 128
        while n <= scenario.longest[size]:
            measured = gap([state[:, : n - 1] for state in states], scenario.phi, alpha)
            yield {"scenario": name, "alpha": alpha, "n": n, "gap": measured, "limit": limit(scenario, alpha)}
            n *= 2
    report(len(cells), len(cells), "")


def _curve(rows: Sequence[Row], scenario: str, alpha: float, what: str = "gap") -> dict[int, Any]:
    return {row["n"]: row[what] for row in rows if row["scenario"] == scenario and row["alpha"] == alpha}


def _draw(rows: Sequence[Row], path: Path) -> None:
    from longspan.plots import Panel, draw

    panels = []
    for name, scenario in SCENARIOS.items():
        lengths = sorted({row["n"] for row in rows if row["scenario"] == name})
        limits = {alpha: _curve(rows, name, alpha, "limit") for alpha in ALPHAS if alpha > 1}
        prefix = "b random" if scenario.b is None else f"b = {scenario.b:g}"
        title = f"{name}, {prefix}, φ = {scenario.phi}, {scenario.layers} layer{'s' if scenario.layers > 1 else ''}"
        zero = [method_name(alpha) for alpha in ALPHAS if not any(_curve(rows, name, alpha).values())]
        panels.append(
            Panel(
                title + (f"; {', '.join(zero)}: exactly 0" if zero else ""),
                "$|v_n - v^*_{n+1}|$",
                {method_name(alpha): _curve(rows, name, alpha) for alpha in ALPHAS},
                {method_name(alpha): curve for alpha, curve in limits.items() if None not in curve.values()},
                "limit for n → ∞",
                x_label="n",
                y_scale="log",
                x_ticks=lengths[::2],
            )
        )
    draw(panels, path, width=5.4, height=4.2, columns=2)


def _table(rows: Sequence[Row]) -> list[Row]:
    table: list[Row] = []
    for name in SCENARIOS:
        for alpha in ALPHAS:
            curve = _curve(rows, name, alpha)
            first, last = min(curve), max(curve)
            known = _curve(rows, name, alpha, "limit")[last]
            line = {"prefix": name, "method": method_name(alpha), "n = 128": curve[first]}
            table.append(line | {"longest n": last, "gap there": curve[last], "limit": known})
    return table


def _verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    closed = _curve(rows, "closed form", 2.0)
    n, value = max(closed), closed[max(closed)]
    agree = abs(value - 0.5 * math.sqrt(0.5)) < 1 / n
    ends = {(name, alpha): [*_curve(rows, name, alpha).values()] for name in SCENARIOS for alpha in ALPHAS}
    limits = {(row["scenario"], row["alpha"]): row["limit"] for row in rows if row["limit"]}
    agree &= all(abs(ends[cell][-1] / known - 1) < 0.1 for cell, known in limits.items())
    for name in PAPER_SCENARIOS:
        agree &= ends[name, 1.0][-1] < ends[name, 1.0][0] / 4
        agree &= all(ends[name, alpha][-1] > 10 * ends[name, 1.0][-1] for alpha in ALPHAS if alpha > 1)
    said = (
        f"α = 2, φ = 0.5: the gap is {value:.4f} at n = {n}, the limit {0.5 * math.sqrt(0.5):.4f}. At the longest n, "
        + "; ".join(
            f"{name}: " + ", ".join(f"{ends[name, alpha][-1]:.2g} for α = {alpha:g}" for alpha in ALPHAS)
            for name in ("constant prefix", "random prefix", "distant prefix")
        )
        + ". The last one contradicts that a larger α always preserves more."
    )
    return agree, said


PROBE = Probe(
    name="collapse",
    claim="Under softmax the last token forgets whether it is repeated as the context grows; under alpha-entmax the "
    "difference can stay above a constant, 0.354 for alpha = 2 and phi = 0.5 (Proposition 2).",
    measure=_measure,
    draw=_draw,
    table=_table,
    verdict=_verdict,
)
