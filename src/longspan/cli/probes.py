"""`longspan probe` and `longspan figure probe`: the claims of the theory, measured."""

import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from longspan.cli.console import console, fail, print_whole
from longspan.probes import Probe, Size, all_probes, get_probe
from longspan.results import Row


class SizeName(StrEnum):
    small = "small"
    paper = "paper"


class Format(StrEnum):
    png = "png"
    pdf = "pdf"
    svg = "svg"


KEEP, TELL = 5.0, 20.0  # seconds between two writes, and two lines where there is no terminal for a bar

SIZES: dict[SizeName, Size] = {SizeName.small: "small", SizeName.paper: "paper"}


def probe(
    name: Annotated[str | None, typer.Argument(help="A probe; without one, they are listed.")] = None,
    size: Annotated[SizeName, typer.Option(help="Seconds on a CPU, or the paper's lengths.")] = SizeName.small,
    out: Annotated[Path, typer.Option(help="Folder for the rows and the figure.")] = Path("probes"),
    format: Annotated[Format, typer.Option(help="Of the figure.")] = Format.png,
) -> None:
    """Measure one claim of the theory: rows, a figure, a table and whether it agrees with the paper."""
    from longspan.results import append_rows, provenance, replace_rows

    if name is None:
        _list()
        return
    import matplotlib  # noqa: F401  (missing, it is missed now and not when everything is measured)

    chosen = get_probe(name)
    name_and_size = {"probe": chosen.name, "size": size.value}
    origins = {device: name_and_size | provenance(device) for device in _devices()}
    path, figure = out / f"{chosen.name}.jsonl", out / f"{chosen.name}.{format.value}"
    write = replace_rows  # the rows of last time stay until there are new ones

    def keep(new: list[Row]) -> None:
        nonlocal write
        if new:
            write(path, [row | origins[row.get("trained_on", "cpu")] for row in new])
            write = append_rows

    rows = _measured(chosen, SIZES[size], keep)
    chosen.draw(rows, figure)
    print_whole(_table(chosen.table(rows)))
    console.print(f"[bold]claim[/bold]   {escape(chosen.claim)}", highlight=False)
    agrees, said = chosen.verdict(rows)
    word = "[bold green]agrees[/bold green] " if agrees else "[bold red]differs[/bold red]"
    console.print(f"{word} {escape(said)}", highlight=False)
    console.print(f"Written: {path}, {figure}", soft_wrap=True)


def redraw(
    name: Annotated[str, typer.Argument(help="A probe, see `longspan probe`.")],
    rows: Annotated[Path, typer.Option(help="The rows that `longspan probe` wrote.", exists=True, dir_okay=False)],
    out: Annotated[Path | None, typer.Option(help="A .png, .pdf or .svg; beside the rows by default.")] = None,
) -> None:
    """Draw a probe's figure from its rows."""
    from longspan.results import read_rows

    chosen = get_probe(name)
    measured = list(read_rows(rows))
    if not measured or any(row.get("probe") != chosen.name for row in measured):
        fail(f"{rows} does not hold rows of the probe {name}")
    figure = out or rows.with_suffix(".png")
    if figure.suffix.lstrip(".") not in list(Format):
        fail(f"a figure is one of {', '.join(Format)}, got {figure}")
    chosen.draw(measured, figure)
    console.print(f"written: {figure}", soft_wrap=True)


def _devices() -> list[str]:
    """Where rows may come from: what is not trained is computed on the CPU."""
    import torch

    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def _list() -> None:
    listing = Table("probe", "what the paper says", box=None)
    for each in all_probes():
        listing.add_row(f"[bold]{each.name}[/bold]", escape(each.claim))
    console.print(listing)


def _measured(chosen: Probe, size: Size, keep: Callable[[list[Row]], None]) -> list[Row]:
    """The rows, handed to `keep` as they come: a long measurement that is stopped has them up to there."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    began = told = kept_at = time.monotonic()
    rows: list[Row] = []
    kept = 0
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        bar = progress.add_task(chosen.name, total=None, note="")

        def report(done: int, total: int, note: str) -> None:
            nonlocal told
            progress.update(bar, completed=done, total=total, note=note)
            if not console.is_terminal and time.monotonic() - told > TELL:
                told = time.monotonic()
                console.print(f"{told - began:.0f} s: {done} of {total}, {note}", highlight=False)

        try:
            for row in chosen.measure(size, report):
                rows.append(row)
                if time.monotonic() - kept_at > KEEP:
                    keep(rows[kept:])
                    kept, kept_at = len(rows), time.monotonic()
        finally:
            keep(rows[kept:])
    return rows


def _table(lines: list[dict[str, Any]]) -> Table:
    drawn = Table(box=None, header_style="bold")
    for column, value in lines[0].items():
        drawn.add_column(column, justify="left" if isinstance(value, str) else "right", no_wrap=True)
    for line in lines:
        drawn.add_row(*(_cell(value) for value in line.values()))
    return drawn


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else escape(str(value))
