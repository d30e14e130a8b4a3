"""A corpus: documents cleaned, told apart, split and turned into tokens, in a folder that explains itself.

    CORPUS/corpus.json       what it is made of, and how much; written last
           tokenizer.json
           train/            shards
           validation/       shards; documents are whole, long ones too

A document goes to the validation split by a hash of its text, so the split does not depend on the order of documents
nor on what else is in the corpus. Of documents with equal text the first is kept.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from longspan.text.documents import CorpusError, Source, clean
from longspan.text.shards import ShardWriter, TokenStream
from longspan.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
Item = TypeVar("Item")

TOKENIZER_BYTES = 100_000_000  # of training text that a new tokenizer learns from
_ENCODED_AT_ONCE = 256


@dataclass(frozen=True)
class Corpus:
    """A built corpus, opened."""

    folder: Path
    tokenizer: Tokenizer
    facts: dict[str, Any]

    def split(self, name: Split) -> TokenStream:
        """The documents of a split; raises CorpusError where they are not as many as were written."""
        stream, told = TokenStream(self.folder / name), self.facts[name]
        if (stream.documents, len(stream)) != (told["documents"], told["tokens"]):
            raise CorpusError(
                f"{self.folder / name} has {stream.documents} documents and {len(stream)} tokens instead of "
                f"{told['documents']} and {told['tokens']}: a shard is missing. Build the corpus again."
            )
        return stream

    @property
    def checksum(self) -> str:
        """That of the training tokens, as their shards tell it; they are not read."""
        return TokenStream(self.folder / "train", verify=False).checksum


def open_corpus(folder: Path) -> Corpus:
    """A corpus that `build_corpus` finished."""
    facts = folder / "corpus.json"
    if not facts.is_file():
        raise CorpusError(
            f"{folder} is not a corpus, or one that was never finished: build it with `longspan lm corpus`"
        )
    try:
        told = json.loads(facts.read_text())
        for split in SPLITS:
            if not {"documents", "tokens"} <= told[split].keys():
                raise ValueError(f"it does not say how much the {split} split has")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorpusError(f"{facts} is damaged: {error!r}. Build the corpus again.") from error
    return Corpus(folder, load_tokenizer(folder), told)


def build_corpus(
    folder: Path,
    source: Source,
    *,
    tokenizer: Tokenizer | int,
    validation: float = 0.02,
    shortest: int = 200,
    description: str = "",
    report: Callable[[str, int], None] = lambda stage, documents: None,
) -> dict[str, Any]:
    """Build a corpus in `folder` and return its facts.

    Args:
        source: the documents, see `longspan.text.documents`; it is read once, and once more to train a tokenizer.
        tokenizer: one that exists, or the vocabulary of one to be trained on the training split.
        validation: share of the documents.
        shortest: characters; documents below are left out.
        report: called with the stage and the number of documents so far.
    """
    if not 0 < validation < 1:
        raise CorpusError(f"validation is a share between 0 and 1, got {validation}")
    if (folder / "corpus.json").exists():
        raise CorpusError(f"{folder} holds a corpus already; choose another folder or delete it")
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder)
    if isinstance(tokenizer, int):
        texts = (text for split, text in split_texts(source, validation, shortest, Counter()) if split == "train")
        tokenizer = train_tokenizer(_counted(_first_bytes(texts, TOKENIZER_BYTES), "tokenizer", report), tokenizer)
    tokenizer.save(folder / "tokenizer.json")
    counts: Counter[str] = Counter()
    writers = {split: ShardWriter(folder / split, tokenizer.vocabulary) for split in SPLITS}
    texts_of_all = _counted(split_texts(source, validation, shortest, counts), "tokens", report)
    characters = 0
    while group := list(islice(texts_of_all, _ENCODED_AT_ONCE)):
        characters += sum(len(text) for _, text in group)
        for (split, _), ids in zip(group, tokenizer.encode_documents([text for _, text in group]), strict=True):
            writers[split].add(ids)
    for split, writer in writers.items():
        if not writer.documents:
            raise CorpusError(f"the {split} split is empty: {counts['documents']} documents, {_told(counts)}")
        writer.close()
    facts: dict[str, Any] = {
        "source": description,
        "vocabulary": tokenizer.vocabulary,
        "characters": characters,
        "validation_share": validation,
        "shortest": shortest,
        "left_out": {reason: count for reason, count in counts.items() if reason != "documents"},
        **{split: {"documents": writer.documents, "tokens": writer.tokens} for split, writer in writers.items()},
    }
    _write_last(folder / "corpus.json", facts)
    return facts


def split_texts(source: Source, validation: float, shortest: int, counts: Counter[str]) -> Iterator[tuple[Split, str]]:
    """Every text of the source that is kept, cleaned, with its split; `counts` gets the reasons of the others."""
    seen: set[bytes] = set()
    for raw in source(counts):
        text = clean(raw)
        if len(text) < shortest:
            counts["too short"] += 1
            continue
        digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
        if digest in seen:
            counts["duplicates"] += 1
            continue
        seen.add(digest)
        counts["documents"] += 1
        yield split_of(digest, validation), text


def split_of(digest: bytes, validation: float) -> Split:
    """By the first eight bytes of a text's digest, read as a number between 0 and 1."""
    return "validation" if int.from_bytes(digest[:8], "big") / 2**64 < validation else "train"


def _first_bytes(texts: Iterable[str], most: int) -> Iterator[str]:
    for text in texts:
        yield text
        most -= len(text)
        if most <= 0:
            return


def _counted(items: Iterable[Item], stage: str, report: Callable[[str, int], None]) -> Iterator[Item]:
    for number, item in enumerate(items, start=1):
        report(stage, number)
        yield item


def _told(counts: Counter[str]) -> str:
    return (
        ", ".join(f"{count} {reason}" for reason, count in counts.items() if reason != "documents") or "none left out"
    )


def _clear(folder: Path) -> None:
    """Remove the shards of a build that was cut short."""
    for split in SPLITS:
        for path in (folder / split).glob("shard-*"):
            path.unlink()


def _write_last(path: Path, facts: dict[str, Any]) -> None:
    """The mark of a finished corpus appears whole or not at all."""
    draft = path.with_suffix(".part")
    with draft.open("w") as file:
        file.write(json.dumps(facts, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
