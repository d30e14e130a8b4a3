"""A folder of text made up on the spot, and the corpus of it, for the tests of language models."""

import random
from collections.abc import Sequence
from pathlib import Path

from longspan.text.corpora import Corpus, build_corpus, open_corpus
from longspan.text.documents import from_folder

WORDS = ["the", "a", "river", "stone", "walks", "under", "light", "of", "and", "old", "sings", "slowly", "42", "when"]


def write_texts(folder: Path, lengths: Sequence[int], seed: int = 0) -> list[str]:
    """One file for each number of words, sentences of made-up prose; returns the texts."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    texts = []
    for number, length in enumerate(lengths):
        words = [draw.choice(WORDS) + ("." if draw.random() < 0.1 else "") for _ in range(length)]
        texts.append(" ".join([f"Text {number}.", *words]))
        (folder / f"{number:03d}.txt").write_text(texts[-1])
    return texts


def tiny_corpus(folder: Path) -> Corpus:
    """Forty short texts and a few long ones, a fifth of them for validation."""
    write_texts(folder / "texts", [60 + 3 * number for number in range(40)] + [400] * 20)
    build_corpus(folder / "corpus", from_folder(folder / "texts"), tokenizer=300, validation=0.2)
    return open_corpus(folder / "corpus")
