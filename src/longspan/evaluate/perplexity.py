"""Perplexity of whole documents against the number of tokens that a language model reads.

Two questions, two ways to score. With documents of at least 8 tokens and lengths 2, 4 and 8:

    same    the last tokens of a window that ends where all windows end: does a longer past help, on the same tokens?

            length 2   . . . . . . r S
            length 4   . . . . r r r S
            length 8   r r r r r r r S

    all     every token of a document's first ones: what a reader from the start meets, as perplexity against length is
            usually told. Other tokens at every length, so it falls even for a model that only profits from the past it
            was trained with.

            length 2   S S
            length 4   S S S S
            length 8   S S S S S S S S
"""

import math
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from longspan.nn.llama import Llama
from longspan.text.documents import CorpusError
from longspan.text.shards import TokenStream
from longspan.train.config import Precision

Scoring = Literal["same", "all"]
_LOGITS = 1 << 26  # at once: 256 MiB of float32
_TOKENS = {"cpu": 1 << 14, "cuda": 1 << 17}  # read at once


class Perplexity(NamedTuple):
    """exp of the mean loss with its 95 % interval over documents, and what it was measured on."""

    value: float
    low: float
    high: float
    tokens: int  # scored
    documents: int
    by_document: list[float]  # mean losses: what another length or another model is to be compared with
    seconds: float


class Change(NamedTuple):
    """How much more loss, in nats a token, with its 95 % interval."""

    value: float
    low: float
    high: float


def change(before: Perplexity, after: Perplexity) -> Change:
    """From one measurement to another of the same tokens, document by document.

    Documents differ far more from each other than a document does between two lengths or two models, so the interval
    is far narrower than those of the two perplexities.
    """
    if len(before.by_document) != len(after.by_document):
        raise ValueError(f"{len(before.by_document)} documents and {len(after.by_document)} are not the same ones")
    mean, half = _mean_and_half_width(torch.tensor(after.by_document) - torch.tensor(before.by_document))
    return Change(mean, mean - half, mean + half)


def long_documents(stream: TokenStream, length: int, most: int | None = None) -> list[Tensor]:
    """The first `most` documents with `length` tokens and one to predict after them, whole."""
    lengths = stream.document_lengths()
    enough = (lengths > length).nonzero().squeeze(1).tolist()
    if not enough:
        raise CorpusError(
            f"no document has {length} tokens and one to predict: "
            f"the longest of {len(lengths)} has {int(lengths.max())}. Choose shorter lengths."
        )
    return [stream.document(number) for number in enough[:most]]


@torch.no_grad()
def perplexity(
    model: Llama,
    documents: Sequence[Tensor],
    length: int,
    *,
    longest: int,
    scored: int,
    scoring: Scoring = "same",
    precision: Precision = "float32",
) -> Perplexity:
    """Perplexity of `model` when it reads `length` tokens of each document.

    Args:
        documents: each with more than `longest` tokens, so that every length up to it reads all of them.
        scored: tokens to score in each under "same", at most the shortest length; "all" scores `length`.
    """
    scored = length if scoring == "all" else scored
    if not 0 < scored <= length <= longest:
        raise ValueError(f"scored ({scored}), length ({length}) and longest ({longest}) must not fall in this order")
    if short := [len(document) for document in documents if len(document) <= longest]:
        raise CorpusError(f"a document of {min(short)} tokens does not hold {longest} and one to predict")
    started = time.monotonic()
    first = 0 if scoring == "all" else longest - length
    windows = torch.stack([document[first : first + length + 1] for document in documents])
    losses = _document_losses(model, windows, scored, precision)
    mean, half = _mean_and_half_width(losses)
    return Perplexity(
        math.exp(mean),
        math.exp(mean - half),
        math.exp(mean + half),
        scored * len(losses),
        len(losses),
        [round(loss, 6) for loss in losses.tolist()],
        time.monotonic() - started,
    )


def _mean_and_half_width(values: Tensor) -> tuple[float, float]:
    """The mean and half the width of its 95 % interval, 0 for a single value."""
    half = 1.96 * float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return float(values.mean()), half


def _document_losses(model: Llama, windows: Tensor, scored: int, precision: Precision) -> Tensor:
    """The mean loss of the last `scored` targets of every window, float64."""
    device = next(model.parameters()).device
    half = precision == "bfloat16" and device.type == "cuda"
    rows = max(1, _TOKENS.get(device.type, 1 << 14) // windows.shape[1])
    losses = []
    for group in windows.split(rows):
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            losses.append(token_losses(model, group.to(device), scored).double().mean(1).cpu())
    return torch.cat(losses)


def token_losses(model: Llama, windows: Tensor, scored: int) -> Tensor:
    """The losses of the last `scored` tokens of windows (batch, time), (batch, scored) float32.

    The logits are made piece by piece: those of a long text with a large vocabulary would not fit.
    """
    features = model.features(windows[:, :-1])[:, -scored:]  # (B, S, D)
    targets = windows[:, -scored:]
    piece = max(1, _LOGITS // (model.config.vocabulary * len(windows)))
    parts = [
        nn.functional.cross_entropy(model.output(x).float().transpose(1, 2), target, reduction="none")
        for x, target in zip(features.split(piece, dim=1), targets.split(piece, dim=1), strict=True)
    ]
    return torch.cat(parts, dim=1)
