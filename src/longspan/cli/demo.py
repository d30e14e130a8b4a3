"""`longspan demo`."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from longspan.cli.console import console


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the rows and the figures.")] = Path("demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each method.")] = 5000,
    samples: Annotated[int, typer.Option(min=1, help="Test samples at each length.")] = 1000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Train six methods on Max Retrieval with at most 16 items, and look at 4096. Minutes on a CPU."""
    from longspan import demo as story
    from longspan.results import append_rows, provenance

    config = story.DemoConfig(steps=steps, samples=samples, seed=seed)
    rows: list[dict[str, object]] = []
    path = out / "rows.jsonl"
    origin = provenance()  # before the old rows go: they may be part of the tree
    path.unlink(missing_ok=True)
    started = time.monotonic()
    interrupted = False
    try:
        with _progress() as progress:
            bars = {
                contestant.name: progress.add_task(contestant.name, total=steps, note="waiting")
                for contestant in story.CONTESTANTS
            }
            for event in story.run(config):
                if isinstance(event, story.Progress):
                    note = f"{event.stage}: {event.note}"
                    progress.update(bars[event.name], completed=event.done, total=event.total, note=note)
                else:
                    rows.append(event)
                    append_rows(path, [event | origin])
    except KeyboardInterrupt:
        interrupted = True
    if interrupted:
        console.print("\n[yellow]Stopped.[/yellow] What was measured until now:")
    if not rows:
        console.print("Nothing was measured.")
        raise typer.Exit(130)
    console.print(_accuracy_table(rows))
    figures = story.draw_figures(rows, config, out)
    console.print(f"{time.monotonic() - started:.0f} s, one seed. Written: {', '.join(map(str, [path, *figures]))}")
    if interrupted:
        raise typer.Exit(130)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<11}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def _accuracy_table(rows: list[dict[str, object]]) -> Table:
    """Each method's measured accuracies, the paper's below in grey."""
    from longspan import demo as story
    from longspan.paper.max_retrieval import ACCURACY, DEMO_ROWS, LENGTHS

    table = Table(title="Max Retrieval, accuracy (%); in grey: the paper's", box=None, header_style="bold")
    table.add_column("items", no_wrap=True)
    for length in LENGTHS:
        table.add_column(str(length), justify="right")
    for name, curve in story.curves(rows, "accuracy").items():
        table.add_row(name, *(f"{curve[length]:.1f}" if length in curve else "" for length in LENGTHS))
        paper = ACCURACY[DEMO_ROWS[name]]
        table.add_row("", *(f"{paper[length]:.1f}" for length in LENGTHS), style="bright_black")
    return table
