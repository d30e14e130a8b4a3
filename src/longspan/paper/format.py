"""The form of a table of the paper, and how its rows are written down in this folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

Column = TypeVar("Column", bound=int | str)


class RowKey(NamedTuple):
    position: str
    method: str


class Note(NamedTuple):
    """What a reader of a table must know; `cells` are those it is about, (position, method, length), if any."""

    text: str
    cells: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True)
class PaperTable:
    """A table: percent by row and length.

    Attributes:
        name: What `get_table` calls it.
        caption: The paper's.
        metric: What the percentages count.
        lengths: The columns; the first is the longest training length.
        rows: By (position, method), percent by length. A cell that the paper leaves empty is absent.
        notes: Slips of the paper that are known, and readings that are ours.
    """

    name: str
    caption: str
    metric: Literal["exact_match", "accuracy"]
    lengths: tuple[int, ...]
    rows: Mapping[RowKey, Mapping[int, float]]
    notes: tuple[Note, ...] = ()

    def cell(self, position: str, method: str, length: int) -> float | None:
        """None where the paper has no number."""
        return self.rows.get(RowKey(position, method), {}).get(length)


def doubling(first: int, last: int) -> tuple[int, ...]:
    """first, 2 first, 4 first, ..., last."""
    lengths = [first]
    while lengths[-1] < last:
        lengths.append(2 * lengths[-1])
    return tuple(lengths)


def parse_rows(text: str, lengths: tuple[Column, ...]) -> dict[RowKey, dict[Column, float]]:
    """Reads lines of `position method percent percent ...`, one number for every length, `-` for an empty cell."""
    rows: dict[RowKey, dict[Column, float]] = {}
    for line in text.strip().splitlines():
        position, method, *cells = line.split()
        key = RowKey(position, method)
        if key in rows:
            raise ValueError(f"two rows for {position} {method}")
        if len(cells) != len(lengths):
            raise ValueError(f"{position} {method}: {len(cells)} cells for {len(lengths)} lengths")
        rows[key] = {length: float(cell) for length, cell in zip(lengths, cells, strict=True) if cell != "-"}
    return rows
