"""`longspan collect`, `choose` and `report`: from runs to rows, from rows to rates, and to the page of results."""

from pathlib import Path
from typing import Annotated

import typer

from longspan.cli.console import console, fail

RESULTS = Path("results")


def collect(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or files of collected rows.", exists=True)],
    into: Annotated[Path, typer.Option(help="Folder of results, a file for each task.")] = RESULTS,
) -> None:
    """Append the rows of runs to the results, failed runs too; rows that are there already are left out."""
    from longspan import collect as collecting

    for task, number in collecting.collect(runs, into).items():
        console.print(f"{into / task}.jsonl: {number} new rows", highlight=False, soft_wrap=True)


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of results.", exists=True, file_okay=False)] = RESULTS,
    front: Annotated[
        Path | None, typer.Option(help="A page whose table between the marks is written anew, README.md.", exists=True)
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a page is out of date.")] = False,
) -> None:
    """Write FOLDER/README.md and its figures from the rows under FOLDER."""
    from longspan import publish
    from longspan.report import rows_under
    from longspan.results import write_whole

    rows = list(rows_under([folder]))
    pages = {folder / publish.PAGE: publish.page(rows, folder.resolve().name)}
    if front is not None:
        pages[front] = publish.put_between(front.read_text(encoding="utf-8"), publish.front(rows))
    if check:
        old = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
        if old:
            fail(f"not what the rows give: {', '.join(map(str, old))}; run `longspan report {folder}`")
        return
    for path, text in pages.items():
        write_whole(path, text)
    for path in [*pages, *publish.draw(rows, folder)]:
        console.print(f"written: {path}", highlight=False, soft_wrap=True)


def choose(
    rows: Annotated[list[Path] | None, typer.Option("--rows", help="Folders or files with rows.", exists=True)] = None,
    contains: Annotated[str, typer.Argument(help="Only recipes that contain this.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds the plan asks for: 0, 1, ...")] = 3,
) -> None:
    """Print the learning rate that validation chooses for every method, and why: a plan for `longspan sweep --plan`."""
    from longspan import selection
    from longspan.paper.names import parse_name
    from longspan.report import rows_under

    for choice in selection.choose(list(rows_under(rows or [RESULTS]))):
        if contains in choice.chosen.recipe:
            numbers = " ".join(map(str, range(seeds)))
            plan = f"{parse_name(choice.chosen.recipe)} {numbers}  # {choice.chosen.rates}: {choice.reason}"
            typer.echo(_not_of_a_sweep(choice.chosen.recipe) + plan)


def _not_of_a_sweep(recipe: str) -> str:
    """What makes a comment of a line that `longspan sweep` has no recipe for, and says which command trains it."""
    from longspan.retrieval_rows import TASK

    author, task, *_ = recipe.split("/")
    return "# longspan lm, " if author == "lm" else "# longspan demo, " if task == TASK else ""
