"""`longspan lm corpus` and `longspan lm train`: text to tokens to a language model."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from longspan.cli import lm_benchmarks, lm_inspect, lm_measure, lm_tune
from longspan.cli.console import console, device_named, fail
from longspan.cli.events import Events
from longspan.cli.training import folder_of
from longspan.results import Row

if TYPE_CHECKING:
    from longspan.text.documents import Source
    from longspan.train.lm import LanguageConfig
    from longspan.train.loop import Report

lm_app = typer.Typer(
    help="Language models: build a corpus, train, measure perplexity and retrieval.", no_args_is_help=True
)
_SPLITS = ("train", "validation")


@lm_app.command()
def corpus(
    out: Annotated[Path, typer.Argument(help="The folder to build it in.")],
    folders: Annotated[
        list[Path] | None, typer.Option("--folder", help="Text files: .txt, .md, .rst, also .gz.")
    ] = None,
    rfcs: Annotated[Path | None, typer.Option("--rfc", help="A folder of RFCs, read as prose.")] = None,
    installed: Annotated[bool, typer.Option("--installed", help="Documentation on this machine.")] = False,
    dataset: Annotated[str | None, typer.Option(help="A Hugging Face dataset, streamed; name:config.")] = None,
    field: Annotated[str, typer.Option(help="The dataset's field with the text.")] = "text",
    most: Annotated[int | None, typer.Option(min=1, help="Documents of the dataset.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json; trained on the spot by default.")] = None,
    vocabulary: Annotated[int, typer.Option(help="Of the tokenizer that is trained.")] = 16_384,
    validation: Annotated[float, typer.Option(help="Share of the documents that is held out.")] = 0.02,
    shortest: Annotated[int, typer.Option(help="Characters; shorter documents are left out.")] = 200,
) -> None:
    """Build a corpus: clean, deduplicate, split by document, tokenise."""
    from longspan.text.corpora import build_corpus
    from longspan.text.tokenizer import load_tokenizer

    source = _source(folders or [], rfcs, installed, dataset, field, most)
    chosen = vocabulary if tokenizer is None else load_tokenizer(tokenizer)
    names = [
        *map(str, folders or []),
        *([f"RFCs in {rfcs}"] if rfcs else []),
        *(["installed"] if installed else []),
        *([dataset] if dataset else []),
    ]
    with console.status("reading") as status:
        facts = build_corpus(
            out,
            source,
            tokenizer=chosen,
            validation=validation,
            shortest=shortest,
            description=", ".join(names),
            report=lambda stage, documents: status.update(f"{stage}: {documents:,} documents"),
        )
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in facts["left_out"].items()) or "none"
    lines = [f"{name}: {facts[name]['documents']:,} documents, {facts[name]['tokens']:,} tokens" for name in _SPLITS]
    lines += [f"vocabulary: {facts['vocabulary']:,}; {facts['characters']:,} characters", f"left out: {left_out}"]
    console.print("\n".join([*lines, f"written: {out}"]), highlight=False, soft_wrap=True)


@lm_app.command()
def train(
    corpus: Annotated[Path, typer.Argument(help="A corpus, see `longspan lm corpus`.", exists=True, file_okay=False)],
    preset: Annotated[str, typer.Option(help="420m, 120m, 50m, 10m or tiny.")] = "tiny",
    method: Annotated[str, typer.Option(help="softmax, ssmax, entmax or asentmax.")] = "asentmax",
    position: Annotated[str, typer.Option(help="nape or rope.")] = "nape",
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the preset's; the schedule follows.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a window, instead of the preset's.")] = None,
    documents: Annotated[
        Literal["separate", "joined"], typer.Option(help="Whether packed documents see each other.")
    ] = "separate",
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="auto: bfloat16 on a GPU.")
    ] = "auto",
    activations: Annotated[
        Literal["kept", "recomputed"], typer.Option(help="For the backward pass; recomputed takes less memory.")
    ] = "kept",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    edits: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a field: --set optimizer.learning_rate=1e-3 --set batch=32"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run, under runs/ by default.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write events beside the log.")] = False,
) -> None:
    """Train a language model; Ctrl-C saves and stops, the same command goes on, also under torchrun."""
    from longspan.nn.llama import parameter_count
    from longspan.train.distributed import joined
    from longspan.train.lm import language_recipe
    from longspan.train.lm_loop import run_language
    from longspan.train.loop import stop_on_signals

    with joined(device_named(device)) as (processes, place):
        config = language_recipe(corpus, preset, method, position, steps=steps, context=context)
        config = replace(config, seed=seed, activations=activations, precision=_precision("auto", place))
        asked = {"documents": documents, "precision": _precision(precision, place)}
        unusual = [f"{name}={value}" for name, value in asked.items() if value != getattr(config, name)]
        config = _edited(config, [*unusual, *(edits or [])])
        folder = out or folder_of(config, Path("runs"))
        screen = console if processes.first else Console(quiet=True)
        size = f"{parameter_count(config.model):,} parameters, {config.batch * config.context:,} tokens a step"
        screen.print(size if processes.size == 1 else f"{size}, {processes.size} processes", highlight=False)
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
        with (
            stop_on_signals() as stop,
            Events(folder, tensorboard and processes.first) as record,
            Progress(*columns, console=screen) as bar,
        ):
            show = _shown(bar, config.steps, record)
            outcome = run_language(config, folder, place, show, stop, processes)
        screen.print(f"{outcome.ending} at step {outcome.step}: {folder}", highlight=False, soft_wrap=True)
    if outcome.ending == "stopped":
        raise typer.Exit(130)


def _shown(bar: Progress, steps: int, record: "Report") -> "Report":
    """What a row of the log does to the screen."""
    task = bar.add_task("", total=steps, note="starting")

    def show(row: Row) -> None:
        record(row)
        if row["event"] == "train":
            note = f"loss {row['loss']:.4f}  rate {row['rate']:.3f}  {row['tokens_per_second']:,.0f} tokens/s"
            bar.update(task, completed=row["step"], note=note)
        elif row["event"] == "validate":
            said = f"step {row['step']}: validation loss {row['loss']:.4f}, perplexity {row['perplexity']:.2f}"
            bar.console.print(said, highlight=False)
        elif row["event"] == "start" and row["step"]:
            bar.update(task, completed=row["step"])
            bar.console.print(f"going on from step {row['step']}", highlight=False)

    return show


def _precision(wanted: Literal["auto", "float32", "bfloat16"], place: torch.device) -> Literal["float32", "bfloat16"]:
    if wanted == "auto":
        return "bfloat16" if place.type == "cuda" else "float32"
    return wanted


def _edited(config: "LanguageConfig", edits: Sequence[str]) -> "LanguageConfig":
    """The config with the edits of the command line, which its name tells."""
    from longspan.train.config import edited

    for edit in edits:
        path, equals, value = edit.partition("=")
        if not equals:
            fail(f"--set takes field=value, got {edit!r}")
        config = edited(config, path, value)
        config = replace(config, name=f"{config.name}+{edit}")
    return config


def _source(
    folders: Sequence[Path], rfcs: Path | None, installed: bool, dataset: str | None, field: str, most: int | None
) -> "Source":
    """The documents that the options name, one source after the other."""
    from longspan.text.documents import from_dataset, from_folder, from_installed
    from longspan.text.rfc import from_rfcs

    sources = [from_folder(folder) for folder in folders]
    if rfcs is not None:
        sources.append(from_rfcs(rfcs))
    if installed:
        sources.append(from_installed())
    if dataset is not None:
        sources.append(from_dataset(dataset, field=field, most=most))
    if not sources:
        fail("say where the text comes from: --folder, --rfc, --installed or --dataset")

    def read(counts: Counter[str]) -> Iterator[str]:
        return chain.from_iterable(source(counts) for source in sources)

    return read


lm_app.command()(lm_measure.perplexity)
lm_app.command()(lm_measure.needle)
lm_app.command()(lm_measure.generate)
lm_app.command()(lm_inspect.inspect)
lm_app.command()(lm_tune.tune)
lm_app.command("eval")(lm_benchmarks.evaluate)
