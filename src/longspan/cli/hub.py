"""`longspan export` and `longspan import`: a run to the format of Hugging Face's hub, and back."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from longspan.cli.console import console, fail_without


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run, of either kind.", exists=True, file_okay=False)],
    out: Annotated[Path, typer.Argument(help="The folder that `from_pretrained` reads.")],
    checkpoint: Annotated[Literal["best", "last"], typer.Option(help="By validation, or the last one.")] = "best",
) -> None:
    """Write the model of a run, and its tokenizer if it has one, for Hugging Face transformers."""
    try:
        from longspan.integrations.transformers.runs import export_run
    except ModuleNotFoundError as error:
        fail_without(error, "transformers")
    missing = export_run(run, out, checkpoint)
    if missing is not None:
        console.print(f"[yellow]without a tokenizer:[/yellow] {missing}", highlight=False, soft_wrap=True)
    console.print(f"written: {out}", highlight=False, soft_wrap=True)


def import_(
    source: Annotated[Path, typer.Argument(help="A folder of `longspan export`, or trained on from one.")],
    run: Annotated[Path, typer.Argument(help="The folder of the run to write.")],
) -> None:
    """Write a model from Hugging Face transformers as a run, to be measured like any other."""
    try:
        from longspan.integrations.transformers.runs import import_run
    except ModuleNotFoundError as error:
        fail_without(error, "transformers")
    console.print(f"written: {import_run(source, run)}", highlight=False, soft_wrap=True)
