"""`longspan train` and `longspan evaluate`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from longspan.cli.console import console, device_named, fail
from longspan.cli.events import Events
from longspan.results import Row, append_rows
from longspan.retrieval_rows import TASK as MAX_RETRIEVAL

if TYPE_CHECKING:
    from longspan.evaluate.ladder import Purpose
    from longspan.train.config import RunConfig
    from longspan.train.lm import LanguageConfig

_LONGEST_NAME = 255  # bytes of a file's name


def config_of(recipe: str, seed: int, smoke: bool, edits: Sequence[str]) -> "RunConfig":
    """A recipe with the edits of its name, as rows of results have them, and of the command line."""
    from longspan.paper.names import config_named, parse_name

    for edit in edits:
        if "=" not in edit:
            fail(f"--set takes field=value, got {edit!r}")
    name = parse_name(recipe)
    if name is None:
        fail(f"there is no recipe {recipe!r}; `longspan recipes` lists them, such as paper/copy/nape/asentmax")
    if name.task == MAX_RETRIEVAL:
        fail("Max Retrieval is no task of the decoder: `longspan demo` trains and measures it")
    return config_named(name._replace(size="smoke" if smoke else name.size, edits=(*name.edits, *edits)), seed)


def folder_of(config: "RunConfig | LanguageConfig", runs: Path) -> Path:
    """Where a run lies unless it is told otherwise: a name that is too long for a file system ends in a hash of it."""
    name = config.name.replace("/", "-")
    if len(f"{name}-s{config.seed}".encode()) > _LONGEST_NAME:
        name = f"{name.encode()[:180].decode(errors='ignore')}-{blake2b(name.encode(), digest_size=6).hexdigest()}"
    return runs / f"{name}-s{config.seed}"


def refuse_language(config: Mapping[str, Any], folder: Path, instead: str) -> None:
    """End where the config of a checkpoint is that of a language model."""
    if "corpus" in config:
        fail(f"{folder} is the run of a language model; {instead}")


def train(
    what: Annotated[str, typer.Argument(help="A task (see `longspan tasks`) or a whole recipe, with its edits.")],
    method: Annotated[str | None, typer.Option(help="See `longspan recipes`; asentmax by default.")] = None,
    position: Annotated[str | None, typer.Option(help="nope, alibi, nape or rope; nape by default.")] = None,
    recipe: Annotated[str | None, typer.Option(help="`paper`, or `longspan` for ours, the default.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    smoke: Annotated[bool, typer.Option("--smoke", help="A size that trains in seconds on a CPU.")] = False,
    edits: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a field: --set steps=1000 --set model.attention.alpha=1.75"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run, runs/<recipe>-s<seed> by default.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write events beside the log.")] = False,
) -> None:
    """Train a model; Ctrl-C saves and stops, the same command goes on."""
    from longspan.train.loop import run, stop_on_signals

    if "/" in what and (method or position or recipe):
        fail(f"{what!r} is a whole recipe: it says its method, position and author itself")
    name = what if "/" in what else f"{recipe or 'longspan'}/{what}/{position or 'nape'}/{method or 'asentmax'}"
    config = config_of(name, seed, smoke, edits or [])
    folder = out or folder_of(config, Path("runs"))
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with stop_on_signals() as stop, Events(folder, tensorboard) as record, Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=config.steps, note="starting")

        def show(row: Row) -> None:
            record(row)
            if row["event"] == "train":
                note = (
                    f"loss {row['loss']:.4f}  accuracy {100 * row['token_accuracy']:.1f} %  "
                    f"rate {row['rate']:.3f}  {row['steps_per_second']:.1f} steps/s"
                )
                bar.update(task, completed=row["step"], note=note)
            elif row["event"] == "validate":
                scores = "  ".join(f"{length}: {score:.1f} %" for length, score in row["scores"].items())
                bar.console.print(f"step {row['step']}: {scores}", highlight=False)
            elif row["event"] == "start" and row["step"]:
                bar.update(task, completed=row["step"])
                bar.console.print(f"going on from step {row['step']}", highlight=False)

        outcome = run(config, folder, device_named(device), show, stop)
    console.print(f"{outcome.ending} at step {outcome.step}: {folder}", highlight=False, soft_wrap=True)
    if outcome.ending == "stopped":
        raise typer.Exit(130)


def evaluate(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.", exists=True, file_okay=False)],
    lengths: Annotated[list[int] | None, typer.Option("--length", help="Instead of the recipe's lengths.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's number.")] = None,
    checkpoint: Annotated[Literal["best", "last"], typer.Option(help="By validation, or the last one.")] = "best",
    purpose: Annotated[
        Literal["test", "validation", "both"],
        typer.Option(help="Test samples, or those that rates are chosen by, up to 8 times the training length."),
    ] = "test",
    again: Annotated[bool, typer.Option("--again", help="Measure lengths that have a row already.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Measure a trained model at a ladder of lengths; rows go to RUN/results.jsonl as they come."""
    from longspan.evaluate.ladder import lengths_measured, measure, row_of
    from longspan.tasks import get_task
    from longspan.train import checkpoint as checkpoints
    from longspan.train.trainer import model_of

    place = device_named(device)
    loaded = checkpoints.load(checkpoints.of_run(folder, checkpoint))
    refuse_language(loaded.config, folder, "`longspan lm perplexity` and `longspan lm needle` measure it")
    model, config = model_of(loaded, place)
    task = get_task(config.task, **config.task_options)
    path = folder / "results.jsonl"
    purposes: list[Purpose] = ["validation", "test"] if purpose == "both" else [purpose]
    plan = {each: _wanted(config, each, lengths, samples) for each in purposes}
    for length in {length for wanted in plan.values() for length in wanted}:  # all of them before the first is measured
        task.check_length(length)
    stopped = False
    shown = Table("length", config.model.attention.method, "95 %", "by token", "samples", "seconds", box=None)
    try:
        for each, wanted in plan.items():
            done = set() if again else lengths_measured(path, loaded.step, wanted, each)
            for length, number in wanted.items():
                if length in done:
                    continue
                with console.status(f"{each}, length {length}"):
                    result = measure(model, task, length, number, purpose=each, precision=config.precision)
                append_rows(path, [row_of(config, loaded.step, length, result, place, each)])
                interval = f"{result.low:.1f} to {result.high:.1f}"
                numbers = (f"{result.value:.1f}", interval, f"{result.token_accuracy:.1f}", str(number))
                words = f"{length}" if each == "test" else f"{length} (validation)"
                shown.add_row(words, *numbers, f"{result.seconds:.1f}")
    except KeyboardInterrupt:
        stopped = True
        console.print("[yellow]Stopped.[/yellow] What was measured is kept.")
    if shown.row_count:
        console.print(shown)
    console.print(f"rows: {path}", highlight=False, soft_wrap=True)
    if stopped:
        raise typer.Exit(130)


def _wanted(
    config: "RunConfig", purpose: "Purpose", lengths: Sequence[int] | None, samples: int | None
) -> dict[int, int]:
    """Samples by length: the recipe's, or those of the command line."""
    from longspan.evaluate.ladder import VALIDATION_MULTIPLES, samples_at

    wanted = samples_at(config, purpose)
    longest = VALIDATION_MULTIPLES[-1] * config.longest
    for length in lengths or []:
        if purpose == "validation" and length > longest:
            fail(f"validation ends at 8 times the training length, {longest}; {length} is for the test")
    if lengths:
        wanted = samples_at(replace(config, test_lengths=tuple(lengths)), "test")
    return {length: samples or number for length, number in wanted.items()}
