"""Tables of results: ours beside the paper's, from result rows and nothing else."""

import csv
import io
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from longspan.paper.tables import PaperTable
from longspan.results import Row, read_rows


class Cell(NamedTuple):
    """Percent over seeds."""

    mean: float
    spread: float | None  # standard deviation; None for one seed
    best: float
    seeds: int

    def __str__(self) -> str:
        if self.spread is None:
            return f"{self.mean:.1f}"
        return f"{self.mean:.1f}±{self.spread:.1f} ({self.best:.1f})"


class Line(NamedTuple):
    """A line of a table: where the numbers come from, and percent by length."""

    position: str
    method: str
    source: str  # "paper", or the recipe that made ours
    cells: dict[int, Cell]

    @property
    def smoke(self) -> bool:
        """Whether it is a small run, whose lengths are not the table's."""
        return self.source.partition("+")[0].endswith("/smoke")


_Origin = tuple[str, str, str]  # position, method, source


def rows_under(folders: Iterable[Path]) -> Iterator[Row]:
    """Every row of the files, and of the ``*.jsonl`` under the folders that are not logs."""
    for folder in folders:
        if folder.is_file():
            yield from read_rows(folder)
        else:
            for path in sorted(folder.rglob("*.jsonl")):
                if path.name != "log.jsonl":
                    yield from read_rows(path)


def table_lines(rows: Iterable[Row], table: PaperTable) -> list[Line]:
    """The paper's lines of a table, each followed by ours of the same position and method, then ours without a peer."""
    task = table.name.removeprefix("main/")
    ours = _our_lines(row for row in rows if row.get("task") == task and "recipe" in row)
    lines: list[Line] = []
    for (position, method), cells in table.rows.items():
        paper = {length: Cell(value, None, value, 1) for length, value in cells.items()}
        lines.append(Line(position, method, "paper", paper))
        lines += [line for line in ours if (line.position, line.method) == (position, method)]
    return lines + [line for line in ours if (line.position, line.method) not in table.rows]


def table_lengths(lines: Iterable[Line]) -> list[int]:
    return sorted({length for line in lines for length in line.cells})


def sections(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines of the table itself, and those of smoke runs, by heading."""
    parts = {"": [line for line in lines if not line.smoke], "Smoke runs": [line for line in lines if line.smoke]}
    return {heading: part for heading, part in parts.items() if part}


def as_markdown(lines: Sequence[Line]) -> str:
    """A table, and below it one of smoke runs under a heading, where there are any."""
    pieces = [piece for heading, part in sections(lines).items() for piece in (heading, _markdown_table(part)) if piece]
    return "\n\n".join(pieces)


def _markdown_table(lines: Sequence[Line]) -> str:
    lengths = table_lengths(lines)
    table = [["position", "method", "source", *map(str, lengths)], ["---"] * 3 + ["---:"] * len(lengths)]
    table += [_texts(line, lengths, missing="") for line in lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in table)


def as_csv(lines: Sequence[Line]) -> str:
    """One line a cell: position, method, source, length, mean, spread, best, seeds."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["position", "method", "source", "length", "mean", "spread", "best", "seeds"])
    for line in lines:
        for length, cell in sorted(line.cells.items()):
            spread = "" if cell.spread is None else f"{cell.spread:.2f}"
            numbers = [f"{cell.mean:.2f}", spread, f"{cell.best:.2f}", cell.seeds]
            writer.writerow([line.position, line.method, line.source, length, *numbers])
    return out.getvalue()


def _texts(line: Line, lengths: Sequence[int], missing: str) -> list[str]:
    cells = [str(line.cells[length]) if length in line.cells else missing for length in lengths]
    return [line.position, line.method, line.source, *cells]


def _our_lines(rows: Iterable[Row]) -> list[Line]:
    """Rows by recipe; a seed measured twice at a length counts once, by its latest row."""
    latest: dict[tuple[_Origin, int], dict[int, Row]] = defaultdict(dict)  # (origin, length) -> seed -> row
    for row in sorted(rows, key=lambda row: row["time"]):
        latest[_origin(row), row["length"]][row["seed"]] = row
    found: dict[_Origin, dict[int, Cell]] = defaultdict(dict)
    for (origin, length), by_seed in latest.items():
        values = [row["value"] for row in by_seed.values()]
        spread = statistics.stdev(values) if len(values) > 1 else None
        found[origin][length] = Cell(statistics.mean(values), spread, max(values), len(values))
    return [Line(*origin, cells) for origin, cells in sorted(found.items())]


def _origin(row: Row) -> _Origin:
    """A recipe's name tells more than the row, `topk_16` for instance; a run without one has its row's words."""
    base, plus, edits = row["recipe"].partition("+")
    parts = base.split("/")
    if len(parts) < 4:
        return row["position"], row["method"], row["recipe"] or "unnamed"
    author, _, position, method, *rest = parts
    return position, method, "/".join([author, *rest]) + plus + edits
