"""`longspan lm inspect`: what the heads of a trained language model do."""

import statistics
from collections.abc import Sequence
from typing import Annotated

import torch
import typer
from rich.table import Table

from longspan.cli.console import console, print_whole
from longspan.cli.lm_measure import CorpusFolder, Device, Lengths, RopeBase, Run, opened
from longspan.results import Row

TASK = "lm-heads"


def inspect(
    run: Run,
    lengths: Lengths = None,
    samples: Annotated[int, typer.Option(min=1, help="Validation documents, at most.")] = 2,
    queries: Annotated[int, typer.Option(min=1, help="Query rows of each, evenly spaced.")] = 256,
    corpus: CorpusFolder = None,
    rope_base: RopeBase = None,
    device: Device = "auto",
) -> None:
    """Measure the heads on long validation documents: support, live tiles, entropy, scale; to RUN/results.jsonl."""
    from longspan.evaluate.inspect import rows_of_heads
    from longspan.evaluate.perplexity import long_documents

    of = opened(run, corpus, rope_base, device)
    ladder = sorted(lengths or [of.config.context, 16 * of.config.context])
    stream = of.corpus.split("validation")
    documents = long_documents(stream, ladder[-1], samples)
    measured = {"data": stream.checksum, "longest": ladder[-1]}
    found: list[Row] = []
    for length in ladder:
        with console.status(f"length {length}"):
            tokens = torch.stack([document[:length] for document in documents]).to(of.device)
            rows = rows_of_heads(of.model, tokens, length, queries)
        for row in rows:
            of.record(TASK, length, measured | {name: value for name, value in row.items() if name != "length"})
        found += rows
    print_whole(summary(found))
    console.print(f"rows: {run / 'results.jsonl'}", highlight=False, soft_wrap=True)


def summary(rows: Sequence[Row]) -> Table:
    """Means over the heads of every layer, those with slopes and those without apart."""
    groups: dict[tuple[int, int, bool], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["length"], row["layer"], bool(row["slope"])), []).append(row)
    table = Table("length", "layer", "heads", "kept", "live tiles, %", "H / log n", "largest weight", "scale", box=None)
    for (length, layer, sloped), heads in groups.items():
        mean = {
            name: statistics.mean(row[name] for row in heads) for name in ("support", "tiles", "entropy", "largest")
        }
        scales = [row["scale"] for row in heads if row["scale"] is not None]
        table.add_row(
            str(length), str(layer), f"{len(heads)} {'with' if sloped else 'without'} slopes", f"{mean['support']:.1f}",
            f"{100 * mean['tiles']:.0f}", f"{mean['entropy']:.2f}", f"{mean['largest']:.2f}",
            f"{statistics.mean(scales):.2f}" if scales else "-",
        )  # fmt: skip
    return table
