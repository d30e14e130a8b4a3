"""What a probe is: a claim of the paper, how it is measured, drawn and judged."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longspan.results import Row

Size = Literal["small", "paper"]
Report = Callable[[int, int, str], None]  # steps done, steps in all, what is measured now


@dataclass(frozen=True)
class Probe:
    """One claim of the theory. Everything after `measure` reads rows and nothing else.

    Args:
        name: what the command line calls it.
        claim: what the paper says, in one sentence.
        measure: yields rows, at a size for seconds or at the paper's, and reports its progress.
        draw: draws the figure of the rows into a file.
        table: the rows boiled down to a few lines with the same columns.
        verdict: whether the rows agree with the claim, and a sentence with the measured numbers.
    """

    name: str
    claim: str
    measure: Callable[[Size, Report], Iterator[Row]]
    draw: Callable[[Sequence[Row], Path], None]
    table: Callable[[Sequence[Row]], list[Row]]
    verdict: Callable[[Sequence[Row]], tuple[bool, str]]


def method_name(alpha: float) -> str:
    """The name under which figures show alpha-entmax."""
    return "softmax" if alpha == 1 else f"entmax {alpha:g}"


def bisect(holds: Callable[[float], bool], low: float, high: float, steps: int = 60) -> float:
    """Where `holds`, true at `low` and false at `high`, stops to hold."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low + high) / 2
