"""`longspan table lm-perplexity`, `lm-needles` and `lm-short`: our language models beside the paper's."""

import csv
import io
from collections.abc import Sequence
from typing import Literal

import typer
from rich.table import Table

from longspan.cli.console import console, print_whole
from longspan.language_report import PAPER, Line, as_markdown, cell_text, columns_of, language_lines
from longspan.paper.language import LANGUAGE_TABLES, LanguageTable
from longspan.results import Row


def show_language(name: str, rows: Sequence[Row], form: Literal["drawn", "markdown", "csv"]) -> None:
    """Print the tables called `name`; one without a line is left out."""
    parts = {table: lines for table in LANGUAGE_TABLES[name] if (lines := language_lines(rows, table))}
    if form == "csv":
        typer.echo(_as_csv(parts))
        return
    if form == "markdown":
        typer.echo("\n\n".join(f"{table.caption}\n\n{as_markdown(table, lines)}" for table, lines in parts.items()))
        return
    for table, lines in parts.items():
        print_whole(_drawn(table, lines))
        for note in table.notes:
            console.print(f"[bright_black]note: {note.text}[/bright_black]", highlight=False)


def _drawn(table: LanguageTable, lines: Sequence[Line]) -> Table:
    said = f"{table.caption}; in grey: the paper's" if table.rows else table.caption
    drawn = Table(title=said, box=None, header_style="bold", title_justify="left")
    drawn.add_column("position", no_wrap=True)
    drawn.add_column("method", no_wrap=True)
    drawn.add_column("recipe", overflow="fold")
    columns = columns_of(table, lines)
    for column in columns:
        drawn.add_column(str(column), justify="right", no_wrap=True)
    for line in lines:
        cells = [cell_text(line.cells.get(column), table.digits, "-") for column in columns]
        drawn.add_row(*line[:3], *cells, style="bright_black" if line.source == PAPER else None)
    return drawn


def _as_csv(parts: dict[LanguageTable, list[Line]]) -> str:
    """One line a cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "position", "method", "source", "column", "mean", "spread", "best", "seeds"])
    for table, lines in parts.items():
        for line in lines:
            for column in columns_of(table, [line]):
                if cell := line.cells.get(column):
                    spread = "" if cell.spread is None else f"{cell.spread:.2f}"
                    numbers = [f"{cell.mean:.2f}", spread, f"{cell.best:.2f}", cell.seeds]
                    writer.writerow([table.task, *line[:3], column, *numbers])
    return out.getvalue()
