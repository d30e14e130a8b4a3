"""`longspan lm eval`: benchmarks of short contexts by lm-eval's harness."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from longspan.cli.console import console, print_whole
from longspan.cli.lm_measure import CorpusFolder, Device, RopeBase, Run, opened

SHORT = "lambada_openai,hellaswag,piqa,arc_challenge,winogrande,openbookqa"


def evaluate(
    run: Run,
    tasks: Annotated[str, typer.Option(help="Names of lm-eval, with commas between them.")] = SHORT,
    limit: Annotated[int | None, typer.Option(min=1, help="Samples of each task, all by default.")] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="Examples before a question; the task's by default.")] = None,
    longest: Annotated[
        int | None, typer.Option(min=2, help="Tokens a request may have; more is an error. Any by default.")
    ] = None,
    needle_lengths: Annotated[
        list[int] | None, typer.Option("--length", min=1, help="Of the niah tasks: 4096, 8192, ... tokens.")
    ] = None,
    include: Annotated[
        Path | None, typer.Option(help="A folder with tasks of one's own.", exists=True, file_okay=False)
    ] = None,
    corpus: CorpusFolder = None,
    rope_base: RopeBase = None,
    device: Device = "auto",
) -> None:
    """Run benchmarks of lm-eval; rows go to RUN/results.jsonl and to `longspan table lm-short`."""
    from longspan.evaluate.benchmarks import run_benchmarks

    of = opened(run, corpus, rope_base, device)
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    found = run_benchmarks(
        of.model,
        of.corpus,
        names,
        precision=of.config.precision,
        longest=longest,
        limit=limit,
        shots=shots,
        include=include,
        needle_lengths=needle_lengths or (),
    )
    shown = Table("benchmark", "metric", "value", "standard error", "samples", box=None)
    try:
        for score in found:
            values = {"benchmark": score.benchmark, "metric": score.metric, "value": score.value, "error": score.error}
            values |= {"samples": score.samples, "shots": shots, "limit": limit, "longest": longest}
            of.record(score.table, of.config.context if score.length is None else score.length, values)
            error = "-" if score.error is None else f"{score.error:.2f}"
            name = score.benchmark if score.length is None else f"{score.benchmark}, {score.length} tokens"
            shown.add_row(name, score.metric, f"{score.value:.2f}", error, str(score.samples))
    finally:  # where something is missing, it is told behind what there is
        print_whole(shown)
    console.print(f"rows: {run / 'results.jsonl'}", highlight=False, soft_wrap=True)
