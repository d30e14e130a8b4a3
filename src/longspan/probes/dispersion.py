"""Definition 1 and Proposition 1: normalised entropy H / log n and support against the context length n.

Three families of logits: bounded (uniform on [-1, 1]), Gaussian, and two-level (4 tokens 1.5 above the others). What
the paper leaves open is how fast the support grows. For uniform logits the top of the distribution is flat, the
threshold lies n^(-(alpha-1)/alpha) below the maximum and the support is of order n^(1/alpha), so that H / log n goes
to 1/alpha: 2/3 at alpha = 1.5, 1/2 at alpha = 2, 1 for softmax.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.functional import entmax
from longspan.probes.base import Probe, Report, Size
from longspan.results import Row

FOCUS, GAP = 4, 1.5  # the two-level logits: so many tokens, so much above the others
LENGTHS: dict[Size, tuple[int, ...]] = {
    "small": tuple(2**k for k in range(4, 17, 2)),
    "paper": tuple(2**k for k in range(4, 21, 2)),
}


def _draws(n: int) -> int:
    return max(8, min(256, 2**20 // n))


class Method(NamedTuple):
    alpha: float
    gamma: float = 0.0  # scores are multiplied by beta (log n)^gamma, beta = 1


METHODS = {
    "softmax": Method(1.0),
    "ssmax": Method(1.0, 1.0),
    "entmax 1.5": Method(1.5),
    "entmax 2": Method(2.0),
    "asentmax, γ = -0.5": Method(1.5, -0.5),
    "asentmax, γ = 1": Method(1.5, 1.0),
    "asentmax, γ = 2": Method(1.5, 2.0),
}


def two_level(n: int) -> Tensor:
    logits = torch.zeros(1, n, dtype=torch.float64)
    logits[:, :FOCUS] = GAP
    return logits


def _uniform(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return 2 * torch.rand(_draws(n), n, generator=generator, dtype=torch.float64) - 1


def _gaussian(n: int) -> Tensor:
    return torch.randn(_draws(n), n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


FAMILIES: dict[str, Callable[[int], Tensor]] = {"bounded": _uniform, "gaussian": _gaussian, "two-level": two_level}


def entropy_and_support(logits: Tensor, method: Method) -> tuple[float, float]:
    """H / log n and the number of weights above zero, means over the rows of `logits`."""
    n = logits.shape[-1]
    weights = entmax(logits * math.log(n) ** method.gamma, method.alpha)
    entropy = torch.special.entr(weights).sum(-1).mean().item()
    return entropy / math.log(n), (weights > 0).double().sum(-1).mean().item()


def _measure(size: Size, report: Report) -> Iterator[Row]:
    cells = [(family, n) for family in FAMILIES for n in LENGTHS[size]]
    for done, (family, n) in enumerate(cells):
        report(done, len(cells), f"{family}, n = {n}")
        logits = FAMILIES[family](n)
        for name, method in METHODS.items():
            entropy, support = entropy_and_support(logits, method)
            yield {"logits": family, "method": name, "n": n, "entropy": entropy, "support": support}
    report(len(cells), len(cells), "")


def _curve(rows: Sequence[Row], family: str, method: str, what: str) -> dict[int, float]:
    return {row["n"]: row[what] for row in rows if row["logits"] == family and row["method"] == method}


def support_exponent(rows: Sequence[Row], family: str, method: str) -> float:
    """The slope of log support in log n over the last three lengths."""
    (n, support), (far_n, far_support) = [*_curve(rows, family, method, "support").items()][-3::2]
    return math.log(far_support / support) / math.log(far_n / n)


def _draw(rows: Sequence[Row], path: Path) -> None:
    from longspan.plots import Panel, draw

    lengths = sorted({row["n"] for row in rows})
    panels = [
        Panel(
            f"{family} logits",
            "normalised entropy H / log n" if what == "entropy" else "support (weights above zero)",
            {method: _curve(rows, family, method, what) for method in METHODS},
            x_label="context length n",
            y_scale="linear" if what == "entropy" else "log",
            y_limits=(-0.02, 1.04) if what == "entropy" else None,
            x_ticks=lengths[::2],
        )
        for what in ("entropy", "support")
        for family in FAMILIES
    ]
    draw(panels, path, width=5.2, height=3.9, columns=3)


def _table(rows: Sequence[Row]) -> list[Row]:
    n = max(row["n"] for row in rows)
    table: list[Row] = []
    for method in METHODS:
        line: Row = {"method": method}
        for family in FAMILIES:
            line[f"{family}, H/log n"] = _curve(rows, family, method, "entropy")[n]
            line[f"{family}, support"] = round(_curve(rows, family, method, "support")[n], 1)
        table.append(line)
    return table


def _verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    n = max(row["n"] for row in rows)
    softmax = _curve(rows, "bounded", "softmax", "entropy")
    rising = list(softmax.values()) == sorted(softmax.values())
    alphas = {"entmax 1.5": 1.5, "entmax 2": 2.0}
    exponents = {name: support_exponent(rows, "bounded", name) for name in alphas}
    sublinear = all(abs(exponents[name] - 1 / alpha) < 0.05 for name, alpha in alphas.items())
    # Entropy is at most the log of the support, of its mean too as the log is concave.
    bounded = all(row["entropy"] <= math.log(row["support"]) / math.log(row["n"]) + 1e-9 for row in rows)
    focused = all(
        row["support"] == FOCUS and abs(row["entropy"] * math.log(row["n"]) - math.log(FOCUS)) < 1e-9
        for row in rows
        if row["logits"] == "two-level" and row["method"] in alphas
    )
    leaked = _curve(rows, "two-level", "softmax", "entropy")[n]
    said = (
        f"At n = {n}, bounded logits, H/log n is {softmax[n]:.3f} under softmax and rising; the support of entmax 1.5 "
        f"grows as n^{exponents['entmax 1.5']:.2f}, of entmax 2 as n^{exponents['entmax 2']:.2f} (n^(1/α) expected). "
        f"Two-level logits: entmax {'keeps' if focused else 'does not keep'} the {FOCUS} tokens at every n, "
        f"softmax has H/log n = {leaked:.3f}."
    )
    return rising and softmax[n] > 0.95 and leaked > 0.95 and sublinear and bounded and focused, said


PROBE = Probe(
    name="dispersion",
    claim="Softmax over bounded logits disperses completely, H/log n goes to 1; alpha-entmax with a support of order "
    "n^b has a limit of at most b (Proposition 1).",
    measure=_measure,
    draw=_draw,
    table=_table,
    verdict=_verdict,
)
