"""Tables of results: ours beside the paper's, from result rows and nothing else."""

import csv
import io
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from longspan.evaluate.ladder import purpose_of
from longspan.paper.names import parse_name
from longspan.paper.tables import PaperTable
from longspan.results import Row, read_rows
from longspan.retrieval_rows import in_common_words

PUBLISHED = "published"  # the source of the paper's own numbers; `paper` is its recipe, run by us
_ROPE_FACTOR = "model.attention.rope_factor="


class Cell(NamedTuple):
    """Percent over seeds."""

    mean: float
    spread: float | None  # standard deviation; None for one seed
    best: float
    seeds: int
    low: float | None = None  # the 95 % interval that the samples leave, mean over seeds, which share their samples
    high: float | None = None
    samples: int | None = None  # of the seed that has the fewest
    worst: float | None = None

    def __str__(self) -> str:
        if self.spread is None:
            return f"{self.mean:.1f}"
        return f"{self.mean:.1f}±{self.spread:.1f} ({self.best:.1f})"


class Line(NamedTuple):
    """A line of a table: where the numbers come from, and percent by length."""

    position: str
    method: str
    source: str  # "published", or the recipe that made ours
    cells: dict[int, Cell]

    @property
    def smoke(self) -> bool:
        """Whether it is a small run, whose lengths are not the table's."""
        return self.source.partition("+")[0].endswith("/smoke")


Origin = tuple[str, str, str]  # position, method, source


def rows_under(folders: Iterable[Path]) -> Iterator[Row]:
    """Every row of the files, and of the ``*.jsonl`` under the folders that are not logs, in common words."""
    return in_common_words(row for folder in folders for path in _files(folder) for row in read_rows(path))


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    return [path for path in sorted(folder.rglob("*.jsonl")) if path.name not in ("log.jsonl", "logs.jsonl")]


def table_lines(rows: Iterable[Row], table: PaperTable) -> list[Line]:
    """The paper's lines of a table, each followed by ours of the same position and method, then ours without a peer."""
    ours = _our_lines(table_rows(rows, table))
    lines: list[Line] = []
    for (position, method), cells in table.rows.items():
        published = {length: Cell(value, None, value, 1) for length, value in cells.items()}
        lines.append(Line(position, method, PUBLISHED, published))
        lines += [line for line in ours if (line.position, line.method) == (position, method)]
    return lines + [line for line in ours if (line.position, line.method) not in table.rows]


def task_of(table: PaperTable) -> str:
    """The task that a table is about."""
    return {"rope_factor": "flip_flop_sparse"}.get(table.name, table.name.removeprefix("main/"))


def table_rows(rows: Iterable[Row], table: PaperTable) -> dict[Origin, list[Row]]:
    """Our test rows of a table, by the line that they belong to."""
    task = task_of(table)
    found: dict[Origin, list[Row]] = defaultdict(list)
    for row in rows:
        if row.get("task") != task or "recipe" not in row or "value" not in row or purpose_of(row) != "test":
            continue
        position, method, source = origin_of(row)
        if table.name == "rope_factor":
            position = "rope_factor_16" if position == "rope" else position  # what every recipe has
        if position.startswith("rope_") == (table.name == "rope_factor"):
            found[position, method, source].append(row)
    return dict(sorted(found.items()))


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
    """One line a cell: position, method, source, length, mean, spread, best, seeds, the interval, samples a seed."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heading = ["position", "method", "source", "length", "mean", "spread", "best", "seeds", "low", "high", "samples"]
    writer.writerow(heading)
    for line in lines:
        for length, cell in sorted(line.cells.items()):
            spread, low, high = (
                "" if value is None else f"{value:.2f}" for value in (cell.spread, cell.low, cell.high)
            )
            numbers = [f"{cell.mean:.2f}", spread, f"{cell.best:.2f}", cell.seeds, low, high, cell.samples or ""]
            writer.writerow([line.position, line.method, line.source, length, *numbers])
    return out.getvalue()


def _texts(line: Line, lengths: Sequence[int], missing: str) -> list[str]:
    cells = [str(line.cells[length]) if length in line.cells else missing for length in lengths]
    return [line.position, line.method, line.source, *cells]


def _our_lines(rows: dict[Origin, list[Row]]) -> list[Line]:
    return [Line(*origin, cells_of(found)) for origin, found in rows.items()]


def cells_of(rows: Iterable[Row]) -> dict[int, Cell]:
    """The rows of one line by length; a seed measured twice at a length counts once, by its latest row."""
    latest: dict[int, dict[int, Row]] = defaultdict(dict)  # length -> seed -> row
    for row in sorted(rows, key=lambda row: row.get("time", "")):
        latest[row["length"]][row["seed"]] = row
    return {length: _cell(list(by_seed.values())) for length, by_seed in sorted(latest.items())}


def _cell(rows: Sequence[Row]) -> Cell:
    values = [row["value"] for row in rows]
    spread = statistics.stdev(values) if len(values) > 1 else None
    low, high = (_mean_of(key, rows) for key in ("low", "high"))
    samples = min((row["samples"] for row in rows), default=None) if all("samples" in row for row in rows) else None
    return Cell(statistics.mean(values), spread, max(values), len(values), low, high, samples, min(values))


def _mean_of(key: str, rows: Sequence[Row]) -> float | None:
    return statistics.mean(row[key] for row in rows) if all(key in row for row in rows) else None


def origin_of(row: Row) -> Origin:
    """A recipe's name tells more than the row, `topk_16` for instance; a run without one has its row's words.

    A change of RoPE's factor is a position of its own, as in the paper's ablation.
    """
    name = parse_name(row["recipe"] or "")
    if name is None:
        return row["position"], row["method"], row["recipe"] or "unnamed"
    position = name.position
    kept = tuple(edit for edit in name.edits if not edit.startswith(_ROPE_FACTOR))
    for edit in name.edits:
        if edit.startswith(_ROPE_FACTOR):
            value = edit.removeprefix(_ROPE_FACTOR)
            position = "rope_unscaled" if value in ("null", "None") else f"rope_factor_{float(value):g}"
    return position, name.method, "+".join(["/".join(filter(None, (name.author, name.size))), *kept])


def markdown(table: Sequence[Sequence[str]], names: int) -> str:
    """A table whose first line is its heading and whose first `names` columns are words; the others are numbers."""
    heading, *rest = table
    rules = ["---"] * names + ["---:"] * (len(heading) - names)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heading, rules, *rest])


def details(summary: str, text: str) -> str:
    """Text that a page shows when its summary is clicked."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>\n"
