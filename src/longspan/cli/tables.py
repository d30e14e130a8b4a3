"""`longspan methods`, `tasks`, `recipes`, `table` and `figure`: what there is, and what was measured."""

import textwrap
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

import longspan
from longspan import report
from longspan.cli.console import console, fail, print_whole
from longspan.cli.lm_tables import show_language
from longspan.paper.language import LANGUAGE_TABLES
from longspan.paper.recipes import recipe_names
from longspan.paper.tables import RowKey, get_table
from longspan.publish import reported_rows
from longspan.selection import choose
from longspan.tasks import all_tasks, get_task, stream_seed
from longspan.tasks.max_retrieval import MaxRetrieval

tasks_app = typer.Typer(help="List the synthetic tasks, or show a sample of one.", invoke_without_command=True)
figure_app = typer.Typer(help="Draw figures from result rows.", no_args_is_help=True)

Sources = Annotated[
    list[Path] | None, typer.Option("--rows", help="Folders or files with result rows, `runs` by default.", exists=True)
]
RUNS = [Path("runs")]


def methods() -> None:
    """List the attention methods."""
    _listing("method", longspan.methods())


@tasks_app.callback()
def tasks(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        summaries = {task.name: task.summary for task in all_tasks()} | {MaxRetrieval.name: MaxRetrieval.summary}
        _listing("task", dict(sorted(summaries.items())))


@tasks_app.command()
def show(
    name: Annotated[str, typer.Argument(help="A task, see `longspan tasks`.")],
    length: Annotated[int, typer.Option(help="Tokens of the source.")] = 32,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Print one sample of a task for a person to read."""
    generator = torch.Generator().manual_seed(stream_seed("train", seed))
    if name == MaxRetrieval.name:
        _show_sample(MaxRetrieval.name, MaxRetrieval.summary, f"{length} items", *_of_items(length, generator))
        return
    task = get_task(name)
    tokens, targets, mask = (part[0].tolist() for part in task.sample(1, length, generator=generator))
    shown = [task.symbol(target) if counts else "." for target, counts in zip(targets, mask, strict=True)]
    _show_sample(task.name, task.summary, f"{len(tokens)} tokens", task.render(tokens), " ".join(shown))


def _of_items(length: int, generator: torch.Generator) -> tuple[str, str]:
    """A sample of Max Retrieval, items as priorities with their classes, and its answer."""
    batch = MaxRetrieval().sample(1, length, generator=generator)
    items = [f"{item[0]:.2f} c{int(item[1:].argmax())}" for item in batch.items[0]]
    return ", ".join(items), f"c{int(batch.target)}"


def _show_sample(name: str, summary: str, size: str, reads: str, wanted: str) -> None:
    console.print(f"[bold]{name}[/bold]: {summary}; {size}", highlight=False, soft_wrap=True)
    console.print(f"[bold]reads [/bold] {reads}", highlight=False, soft_wrap=True)
    console.print(f"[bold]wanted[/bold] {wanted}", highlight=False, soft_wrap=True)


def recipes(contains: Annotated[str, typer.Argument(help="Only those that contain this.")] = "") -> None:
    """List the recipes, one for every cell of the paper's synthetic tables."""
    for name in recipe_names():
        if contains in name:
            console.print(name, highlight=False, soft_wrap=True)


def table(
    name: Annotated[
        str, typer.Argument(help="A task, main/<task> as in the main text, or lm-perplexity, lm-needles, lm-short.")
    ],
    rows: Sources = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV, one line a cell.")] = False,
    chosen: Annotated[bool, typer.Option("--chosen", help="Only the rates that validation chose.")] = False,
) -> None:
    """Print our results beside the paper's: mean ± spread (best) over seeds."""
    if name in LANGUAGE_TABLES:
        show_language(
            name, list(report.rows_under(rows or RUNS)), "markdown" if markdown else "csv" if csv else "drawn"
        )
        return
    paper = get_table(name)
    found = list(report.rows_under(rows or RUNS))
    lines = report.table_lines(reported_rows(found, choose(found)) if chosen else found, paper)
    if markdown or csv:
        typer.echo(report.as_markdown(lines) if markdown else report.as_csv(lines))
        return
    for heading, part in report.sections(lines).items():
        print_whole(_drawn(heading or f"{paper.caption}; in grey: the paper's", part))
    for note in paper.notes:
        console.print(f"[bright_black]note: {note.text}[/bright_black]", highlight=False)


def _drawn(title: str, lines: list[report.Line]) -> Table:
    drawn = Table(title=title, box=None, header_style="bold", title_justify="left")
    drawn.add_column("position", no_wrap=True)
    drawn.add_column("method", no_wrap=True)
    drawn.add_column("recipe", overflow="fold")
    lengths = report.table_lengths(lines)
    for length in lengths:
        drawn.add_column(str(length), justify="right", no_wrap=True)
    for line in lines:
        theirs = line.source == report.PUBLISHED
        cells = [str(line.cells[length]) if length in line.cells else "-" for length in lengths]
        drawn.add_row(line.position, line.method, line.source, *cells, style="bright_black" if theirs else None)
    return drawn


@figure_app.command()
def ladder(
    name: Annotated[str, typer.Argument(help="A task.")],
    rows: Sources = None,
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("ladder.png"),
) -> None:
    """Draw accuracy against length: ours solid, the paper's of the same methods dotted."""
    from longspan.plots import Panel, draw

    paper = get_table(name)
    lines = report.table_lines(report.rows_under(rows or RUNS), paper)
    ours = [line for line in lines if line.source != report.PUBLISHED]
    if not ours:
        fail(f"there are no result rows of {name} under {', '.join(map(str, rows or RUNS))}")
    measured = {_label(line): {length: cell.mean for length, cell in line.cells.items()} for line in ours}
    # Under our line's label, which gives it our line's colour.
    dotted = {_label(line): paper.rows[peer] for line in ours if (peer := RowKey(*line[:2])) in paper.rows}
    draw([Panel(paper.caption, "%", measured, dotted, "the paper", y_limits=(0, 103), x_label="length")], out)
    console.print(f"written: {out}")


def _label(line: report.Line) -> str:
    return textwrap.fill(f"{line.method}, {line.position}, {line.source}", 48)  # a legend that fits


def _listing(heading: str, lines: dict[str, str]) -> None:
    listing = Table(heading, "what it is", box=None)
    for name, line in lines.items():
        listing.add_row(f"[bold]{name}[/bold]", line)
    console.print(listing)
