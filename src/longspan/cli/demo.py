"""`longspan demo`."""

import math
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from longspan.cli.console import console, fail
from longspan.results import Row, append_rows, provenance, read_rows, replace_rows
from longspan.retrieval_rows import learning_rate_of

if TYPE_CHECKING:
    from longspan.demo import DemoConfig


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the rows and the figures.")] = Path("demo"),
    every: Annotated[bool, typer.Option("--every", help="Every row of the paper's table, not six.")] = False,
    methods: Annotated[list[str] | None, typer.Option("--method", help="Only this one, by the table's name.")] = None,
    training: Annotated[
        Literal["demo", "paper"], typer.Option(help="paper: 100,000 steps at a constant rate, ten minutes a method.")
    ] = "demo",
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each method, instead of 5,000.")] = None,
    rate: Annotated[float | None, typer.Option(help="Peak learning rate, instead of 2e-3 (the paper's: 1e-3).")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Test samples at each length.")] = 1000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows in the folder; train what is missing.")
    ] = False,
) -> None:
    """Train six methods on Max Retrieval with at most 16 items, and look at 4096. Minutes on a CPU."""
    import matplotlib  # noqa: F401  (missing, it is missed now and not when everything is measured)

    from longspan import demo as story

    names = _names(every, methods)
    if rate is not None and not 0 < rate < math.inf:
        fail(f"--rate is a learning rate above 0, 1e-3 for instance, got {rate:g}")
    config = story.PAPER_TRAINING if training == "paper" else story.DemoConfig()
    steps, rate = steps or config.steps, rate or config.learning_rate
    config = replace(config, steps=steps, learning_rate=rate, samples=samples, seed=seed)
    path = out / "rows.jsonl"
    origin = provenance()  # before the old rows go: they may be part of the tree
    kept = _kept(path, config)  # also to refuse rows of another run, which would be written over
    rows = kept if resume else []
    measured = {row["method"] for row in rows}
    missing = [name for name in names if name not in measured]
    started = time.monotonic()
    interrupted = begun = False
    try:
        with _progress() as progress:
            bars = {name: progress.add_task(name, total=config.steps, note="waiting") for name in missing}
            for event in story.run(config, missing) if missing else ():
                if isinstance(event, story.Progress):
                    note = f"{event.stage}: {event.note}"
                    progress.update(bars[event.name], completed=event.done, total=event.total, note=note)
                else:
                    rows.append(event | origin)
                    if begun:
                        append_rows(path, rows[-1:])
                    else:  # until now the old rows stayed
                        replace_rows(path, rows)
                        begun = True
    except KeyboardInterrupt:
        interrupted = True
    if interrupted:
        console.print("\n[yellow]Stopped.[/yellow] What was measured until now; --resume goes on:")
    if not rows:
        console.print("Nothing was measured.")
        raise typer.Exit(130)
    console.print(_accuracy_table(rows))
    figures = story.draw_figures(rows, config, out)
    console.print(f"{time.monotonic() - started:.0f} s, one seed. Written: {', '.join(map(str, [path, *figures]))}")
    if interrupted:
        raise typer.Exit(130)


def _names(every: bool, methods: list[str] | None) -> list[str]:
    """The methods to train, as they are listed, those of the demo first."""
    from longspan import demo as story

    known = [contestant.name for contestant in story.contestants()]
    if unknown := sorted(set(methods or ()) - set(known)):
        fail(f"no method is called {', '.join(map(repr, unknown))}; there are {', '.join(map(repr, known))}")
    if methods:
        return [name for name in known if name in methods]
    return known if every else [contestant.name for contestant in story.CONTESTANTS]


def _kept(path: Path, config: "DemoConfig") -> list[Row]:
    """The rows of an earlier run; those of a method that was not measured to the end are left out."""
    from longspan import demo as story

    rows = list(read_rows(path)) if path.exists() else []
    said: Row = {"training": config.training, "steps": config.steps, "learning_rate": config.learning_rate}
    said |= {"samples": config.samples, "seed": config.seed}
    for row in rows:
        told = {**row, "learning_rate": learning_rate_of(row)}
        for key, value in said.items():
            if told.get(key) != value:
                which = f"{key.replace('_', ' ')} {told.get(key)}, not {value}"
                fail(f"{path} has rows of another run ({which}); choose another folder by --out, or delete it")
    measured = Counter(row["method"] for row in rows)
    names = [each.measured_as for each in story.contestants()]
    whole = [each for each in names if all(measured[name] == len(config.lengths) for name in each)]
    return [row for row in rows if any(row["method"] in each for each in whole)]


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def _accuracy_table(rows: list[Row]) -> Table:
    """Each method's measured accuracies, the paper's below in grey."""
    from longspan import demo as story
    from longspan.paper.max_retrieval import ACCURACY, LENGTHS, paper_row

    table = Table(title="Max Retrieval, accuracy (%); in grey: the paper's", box=None, header_style="bold")
    table.add_column("items", no_wrap=True)
    for length in LENGTHS:
        table.add_column(str(length), justify="right")
    for name, curve in story.curves(rows, "accuracy").items():
        table.add_row(name, *(f"{curve[length]:.1f}" if length in curve else "" for length in LENGTHS))
        paper = ACCURACY[paper_row(name)]
        table.add_row("", *(f"{paper[length]:.1f}" for length in LENGTHS), style="bright_black")
    return table
