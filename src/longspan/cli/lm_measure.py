"""`longspan lm perplexity`, `needle` and `generate`: what a trained language model does."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
import typer
from rich.table import Table

from longspan.cli.console import console, device_named, print_whole
from longspan.results import Row, append_rows, now, provenance

if TYPE_CHECKING:
    from longspan.nn.llama import Llama
    from longspan.text.corpora import Corpus
    from longspan.text.needles import Needle, NeedleMaker
    from longspan.train.lm import LanguageConfig

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", exists=True, file_okay=False)]
Lengths = Annotated[
    list[int] | None, typer.Option("--length", min=1, help="Tokens, instead of 1, 2, 4, 8 and 16 times the context.")
]
CorpusFolder = Annotated[
    Path | None, typer.Option("--corpus", help="Instead of the run's own.", exists=True, file_okay=False)
]
RopeBase = Annotated[float | None, typer.Option(help="Adjust a RoPE model's base; the paper's is 500000.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]


class Opened(NamedTuple):
    """A trained model with all that it takes to measure it."""

    folder: Path
    model: "Llama"
    config: "LanguageConfig"
    corpus: "Corpus"
    step: int
    device: torch.device

    def record(self, task: str, length: int, values: dict[str, Any]) -> None:
        """Append a result row."""
        from longspan.train.lm import fingerprint

        attention = self.model.config.attention
        row = {
            "task": task,
            "method": attention.method,
            "position": attention.position,
            "length": length,
            **values,
            "context": self.config.context,
            "rope_base": attention.rope_base if attention.position == "rope" else None,
            "recipe": self.config.name,
            "seed": self.config.seed,
            "step": self.step,
            "config": fingerprint(self.config),
            "variant": fingerprint(replace(self.config, seed=0)),
            "time": now(),
            **provenance(self.device),
        }
        append_rows(self.folder / "results.jsonl", [row])


def opened(folder: Path, corpus: Path | None, rope_base: float | None, device: str) -> Opened:
    """The last checkpoint of a run, its corpus, and the base it is asked to have."""
    from longspan.nn.llama import rebase
    from longspan.text.corpora import open_corpus
    from longspan.text.documents import CorpusError
    from longspan.train import checkpoint as checkpoints
    from longspan.train.lm import language_model_of

    place = device_named(device)
    loaded = checkpoints.load(checkpoints.of_run(folder, "last"))
    model, config = language_model_of(loaded, place)
    text = open_corpus(Path(config.corpus) if corpus is None else corpus)
    if text.tokenizer.vocabulary != config.model.vocabulary:
        raise CorpusError(
            f"{text.folder} has {text.tokenizer.vocabulary} tokens, the model's vocabulary is {config.model.vocabulary}"
        )
    _refuse_other_tokens(text, config, own=corpus is None)
    if rope_base is not None:
        rebase(model, rope_base)
    return Opened(folder, model, config, text, loaded.step, place)


def _refuse_other_tokens(text: "Corpus", config: "LanguageConfig", own: bool) -> None:
    """Raises CorpusError where ids mean other words than in training: two vocabularies may be of one size.

    The run's own corpus must still hold the tokens it was trained on; another one must have its tokenizer, which can
    be seen where the run's own is at hand.
    """
    from longspan.text.corpora import open_corpus
    from longspan.text.documents import CorpusError

    if own and text.checksum != config.data:
        raise CorpusError(f"{text.folder} holds other tokens ({text.checksum}) than the run's ({config.data})")
    trained_on = Path(config.corpus)
    if not own and (trained_on / "corpus.json").is_file():
        theirs = open_corpus(trained_on)
        if theirs.checksum == config.data and theirs.tokenizer.backend.to_str() != text.tokenizer.backend.to_str():
            raise CorpusError(
                f"{text.folder} has another tokenizer than the run's: build it with --tokenizer {trained_on}"
            )


def perplexity(
    run: Run,
    lengths: Lengths = None,
    scoring: Annotated[
        Literal["same", "all"], typer.Option(help="The same last tokens at every length, or all of the first ones.")
    ] = "same",
    documents: Annotated[int, typer.Option(min=1, help="At most; all have more than the longest length.")] = 500,
    corpus: CorpusFolder = None,
    rope_base: RopeBase = None,
    device: Device = "auto",
) -> None:
    """Measure perplexity against length on whole validation documents; rows go to RUN/results.jsonl."""
    from longspan.evaluate import perplexity as measuring

    of = opened(run, corpus, rope_base, device)
    ladder = sorted(lengths or _ladder(of.config.context))
    stream = of.corpus.split("validation")
    chosen = measuring.long_documents(stream, ladder[-1], documents)
    scored = max(1, ladder[0] // 2)
    measured: Row = {"metric": "perplexity", "scoring": scoring, "data": stream.checksum, "longest": ladder[-1]}
    measured |= {"scored": scored if scoring == "same" else None}
    shown = Table("length", "perplexity", "95 %", "nats a token more", "tokens", "documents", "seconds", box=None)
    first: measuring.Perplexity | None = None
    for length in ladder:
        with console.status(f"length {length}"):
            found = measuring.perplexity(
                of.model,
                chosen,
                length,
                longest=ladder[-1],
                scored=scored,
                scoring=scoring,
                precision=of.config.precision,
            )
        of.record("lm-perplexity", length, measured | found._asdict())
        first = first or found
        more = measuring.change(first, found)
        change = f"{more.value:+.4f} ({more.low:+.4f} to {more.high:+.4f})" if scoring == "same" else "-"
        numbers = (f"{found.value:.2f}", f"{found.low:.2f} to {found.high:.2f}", change, f"{found.tokens:,}")
        shown.add_row(str(length), *numbers, str(found.documents), f"{found.seconds:.1f}")
    print_whole(shown)
    console.print(f"rows: {run / 'results.jsonl'}", highlight=False, soft_wrap=True)


def needle(
    run: Run,
    task: Annotated[Literal["s-niah-1", "s-niah-2"], typer.Option(help="Noise, or essays.")] = "s-niah-1",
    lengths: Lengths = None,
    samples: Annotated[int, typer.Option(min=1, help="At each length; RULER's number is 500.")] = 500,
    depth: Annotated[float | None, typer.Option(help="0 to 1; spread over 40 depths by default.")] = None,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Room for the answer, part of the length.")] = 128,
    essays: Annotated[
        Path | None, typer.Option(help="Text files for S-NIAH-2, instead of the validation documents.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    corpus: CorpusFolder = None,
    rope_base: RopeBase = None,
    device: Device = "auto",
) -> None:
    """Measure retrieval against length, by the exact string; rows go to RUN/results.jsonl."""
    from longspan.evaluate.needles import retrieval

    of = opened(run, corpus, rope_base, device)
    maker = _maker(of.corpus.folder, essays, task, answer_tokens)
    measured: Row = {"metric": "exact_string", "answer_tokens": answer_tokens, "data": maker.checksum}
    measured |= {"depth": depth, "needle_seed": seed}
    shown = Table("length", f"{task}, %", "95 %", "by fifths of depth", "samples", "seconds", box=None)
    for length in lengths or _ladder(of.config.context):
        with console.status(f"length {length}"):
            made = _needles(maker, length, samples, depth, seed)
            found = retrieval(of.model, maker, made, of.config.precision)
        of.record(task, length, measured | found._asdict())
        depths = " ".join("-" if value is None else f"{value:.0f}" for value in found.by_depth)
        numbers = (f"{found.value:.1f}", f"{found.low:.1f} to {found.high:.1f}", depths)
        shown.add_row(str(length), *numbers, str(found.samples), f"{found.seconds:.1f}")
    print_whole(shown)
    console.print(f"rows: {run / 'results.jsonl'}", highlight=False, soft_wrap=True)


def generate(
    run: Run,
    prompt: Annotated[str, typer.Argument(help="What the text begins with.")],
    tokens: Annotated[int, typer.Option(min=1, help="At most.")] = 64,
    corpus: CorpusFolder = None,
    rope_base: RopeBase = None,
    device: Device = "auto",
) -> None:
    """Go on from a prompt, greedily."""
    from longspan.nn.generate import generate as decode

    of = opened(run, corpus, rope_base, device)
    tokenizer = of.corpus.tokenizer
    start = torch.tensor([[tokenizer.begin, *tokenizer.encode(prompt)]], device=of.device)
    said = decode(of.model, start, tokens, stop=tokenizer.end)
    typer.echo(tokenizer.decode(said[0].tolist()))


def _ladder(context: int) -> list[int]:
    return [context * times for times in (1, 2, 4, 8, 16)]


@functools.lru_cache(maxsize=2)
def _maker(corpus: Path, essays: Path | None, task: str, answer_tokens: int) -> "NeedleMaker":
    """Made once where several models are measured in turn."""
    from longspan.text.corpora import open_corpus
    from longspan.text.needles import NeedleMaker

    opened_corpus = open_corpus(corpus)
    texts = _essays(opened_corpus, essays) if task == "s-niah-2" else []
    return NeedleMaker(task, opened_corpus.tokenizer, essays=texts, answer_tokens=answer_tokens)


@functools.lru_cache(maxsize=16)
def _needles(maker: "NeedleMaker", length: int, samples: int, depth: float | None, seed: int) -> "list[Needle]":
    """Likewise: at 16K tokens two hundred take as long to make as to answer."""
    if depth is None:
        return maker.samples(length, samples, seed)
    return [maker.make(length, depth, seed * 1_000_003 + number) for number in range(samples)]


def _essays(corpus: "Corpus", folder: Path | None) -> list[str]:
    """The texts of a folder, or of the validation documents."""
    from collections import Counter

    from longspan.text.documents import from_folder

    if folder is not None:
        return list(from_folder(folder)(Counter()))
    stream = corpus.split("validation")
    return [corpus.tokenizer.decode(stream.document(number).tolist()) for number in range(stream.documents)]
