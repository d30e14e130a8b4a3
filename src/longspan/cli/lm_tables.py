"""`longspan table lm-perplexity`, `lm-needles` and `lm-short`: our language models beside the paper's, from rows alone.

A result row goes to the table of its `task`, under its `length`; a row of `lm-short` under its `benchmark`.
"""

import csv
import io
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import typer
from rich.table import Table

from longspan.cli.console import console, print_whole
from longspan.paper.language import LANGUAGE_TABLES, Column, LanguageTable
from longspan.report import Cell
from longspan.results import Row

_TRAINED_BASE, _ADJUSTED_BASE = 10_000, 500_000  # of RoPE


class Line(NamedTuple):
    position: str
    method: str
    source: str  # "paper", or the recipe that made ours
    cells: dict[Column, Cell]


def show_language(name: str, rows: Sequence[Row], form: Literal["drawn", "markdown", "csv"]) -> None:
    """Print the tables called `name`; one without a line is left out."""
    parts = {table: lines for table in LANGUAGE_TABLES[name] if (lines := language_lines(rows, table))}
    if form == "csv":
        typer.echo(_as_csv(parts))
        return
    if form == "markdown":
        typer.echo("\n\n".join(f"{table.caption}\n\n{_as_markdown(table, lines)}" for table, lines in parts.items()))
        return
    for table, lines in parts.items():
        print_whole(_drawn(table, lines))
        for note in table.notes:
            console.print(f"[bright_black]note: {note.text}[/bright_black]", highlight=False)


def language_lines(rows: Iterable[Row], table: LanguageTable) -> list[Line]:
    """The paper's lines, each followed by ours of the same position and method, then ours without a peer."""
    ours = _our_lines([row for row in rows if row.get("task") == table.task and "recipe" in row])
    lines: list[Line] = []
    for (position, method), values in table.rows.items():
        lines.append(
            Line(position, method, "paper", {column: Cell(value, None, value, 1) for column, value in values.items()})
        )
        lines += [line for line in ours if line[:2] == (position, method)]
    return lines + [line for line in ours if line[:2] not in table.rows]


def _our_lines(rows: Iterable[Row]) -> list[Line]:
    """Rows by recipe; a seed measured twice counts once, by its latest row."""
    latest: dict[tuple[tuple[str, str, str], Column], dict[int, Row]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: row["time"]):
        column = row["benchmark"] if row["task"] == "lm-short" else row["length"]
        latest[_origin(row), column][row["seed"]] = row
    found: dict[tuple[str, str, str], dict[Column, Cell]] = defaultdict(dict)
    for (origin, column), by_seed in latest.items():
        values = [row["value"] for row in by_seed.values()]
        spread = statistics.stdev(values) if len(values) > 1 else None
        best = min(values) if any(row["metric"] == "perplexity" for row in by_seed.values()) else max(values)
        found[origin][column] = Cell(statistics.mean(values), spread, best, len(values))
    return [Line(*origin, cells) for origin, cells in sorted(found.items())]


def _origin(row: Row) -> tuple[str, str, str]:
    """Position, method, and the recipe without them: a size and the edits of the command line."""
    base, plus, edits = row["recipe"].partition("+")
    size = base.removesuffix(f"/{row['position']}/{row['method']}")
    source = size + plus + edits + _otherwise_trained(size, row)
    if row.get("scoring"):
        source += {"same": ", same tokens", "all": ", all tokens"}[row["scoring"]]
    position = row["position"]
    if "rope_base=" not in edits and (rope := row.get("rope_base")) not in (None, _TRAINED_BASE):
        position += "+abf" if rope == _ADJUSTED_BASE else f"+abf={rope:g}"
    return position, row["method"], source or "unnamed"


def _otherwise_trained(size: str, row: Row) -> str:
    """Steps and tokens that are not those of the preset: the recipe does not tell them."""
    from longspan.train.lm import RECIPES

    preset = RECIPES.get(size.removeprefix("lm/"))
    if preset is None or "step" not in row or (row["step"], row["context"]) == (preset.steps, preset.context):
        return ""
    tokens = "" if row["context"] == preset.context else f" of {row['context']:,} tokens"
    return f", {row['step']:,} steps{tokens}"


def _columns(table: LanguageTable, lines: Sequence[Line]) -> list[Column]:
    """Lengths in order, the paper's and ours; benchmarks as the paper has them, then the others."""
    found = dict.fromkeys([*table.columns, *(column for line in lines for column in line.cells)])
    return list(found) if any(isinstance(column, str) for column in found) else sorted(found, key=int)


def _text(cell: Cell | None, digits: int, missing: str) -> str:
    if cell is None:
        return missing
    mean = f"{cell.mean:.{digits}f}"
    return mean if cell.spread is None else f"{mean}±{cell.spread:.{digits}f} ({cell.best:.{digits}f})"


def _drawn(table: LanguageTable, lines: Sequence[Line]) -> Table:
    said = f"{table.caption}; in grey: the paper's" if table.rows else table.caption
    drawn = Table(title=said, box=None, header_style="bold", title_justify="left")
    drawn.add_column("position", no_wrap=True)
    drawn.add_column("method", no_wrap=True)
    drawn.add_column("recipe", overflow="fold")
    columns = _columns(table, lines)
    for column in columns:
        drawn.add_column(str(column), justify="right", no_wrap=True)
    for line in lines:
        cells = [_text(line.cells.get(column), table.digits, "-") for column in columns]
        drawn.add_row(*line[:3], *cells, style="bright_black" if line.source == "paper" else None)
    return drawn


def _as_markdown(table: LanguageTable, lines: Sequence[Line]) -> str:
    columns = _columns(table, lines)
    texts = [["position", "method", "source", *map(str, columns)], ["---"] * 3 + ["---:"] * len(columns)]
    texts += [[*line[:3], *(_text(line.cells.get(column), table.digits, "") for column in columns)] for line in lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in texts)


def _as_csv(parts: dict[LanguageTable, list[Line]]) -> str:
    """One line a cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "position", "method", "source", "column", "mean", "spread", "best", "seeds"])
    for table, lines in parts.items():
        for line in lines:
            for column in _columns(table, [line]):
                if cell := line.cells.get(column):
                    spread = "" if cell.spread is None else f"{cell.spread:.2f}"
                    numbers = [f"{cell.mean:.2f}", spread, f"{cell.best:.2f}", cell.seeds]
                    writer.writerow([table.task, *line[:3], column, *numbers])
    return out.getvalue()
