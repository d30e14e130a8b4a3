"""A tokenizer: any file of the `tokenizers` package, or a byte-level BPE trained on the spot.

Every text becomes ``begin, text, end``: with a token before the first word, the first word too is predicted.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.text.documents import CorpusError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

BEGIN, END = "<|begin|>", "<|end|>"

# The marks of common tokenizers, ours first; where one mark serves for both, it stands twice.
_MARKS = (
    (BEGIN, END),
    ("<|begin_of_text|>", "<|end_of_text|>"),
    ("<s>", "</s>"),
    ("<bos>", "<eos>"),
    ("<|endoftext|>", "<|endoftext|>"),
)
_SMALLEST = 256 + 2  # every byte and the two marks
_LONGEST_WORD = 10_000  # characters; the trainer of the package takes the square of them
_UNBROKEN = re.compile(rf"(?<!\S)\S{{{_LONGEST_WORD + 1},}}|(?<!\s)\s{{{_LONGEST_WORD + 1},}}")


@dataclass(frozen=True)
class Tokenizer:
    """Texts to ids and back; `begin` and `end` mark a document."""

    backend: "Backend"
    begin: int
    end: int

    @functools.cached_property
    def vocabulary(self) -> int:
        """One more than the largest id: of ids with gaps there are fewer."""
        return max(self.backend.get_vocab().values()) + 1

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without marks."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts, without marks; other threads run meanwhile."""
        return [encoded.ids for encoded in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of whole documents, with their marks."""
        return [[self.begin, *ids, self.end] for ids in self.encode_all(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, marks left out."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def save(self, path: Path) -> None:
        self.backend.save(str(path))


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of up to `vocabulary` tokens: no text is unknown to it, and decoding gives back every byte.

    Every digit is a token of its own, so that a number is spelt the same wherever it stands.
    """
    tokenizers = _tokenizers()
    if vocabulary < _SMALLEST:
        raise CorpusError(f"a byte-level vocabulary has at least {_SMALLEST} tokens, got {vocabulary}")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BEGIN, END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(in_pieces(texts), trainer)
    return _marked(backend, "the trained tokenizer")


def in_pieces(texts: Iterable[str]) -> Iterator[str]:
    """The texts, cut where a word or a gap is longer than a trainer should meet."""
    for text in texts:
        start = 0
        for run in _UNBROKEN.finditer(text):
            for end in range(run.start() + _LONGEST_WORD, run.end(), _LONGEST_WORD):
                yield text[start:end]
                start = end
        if start < len(text):
            yield text[start:]


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer from a ``tokenizer.json``, or from the folder that holds one."""
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise CorpusError(f"there is no tokenizer {path}")
    try:
        backend = _tokenizers().Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exceptions
        if isinstance(error, CorpusError):
            raise
        raise CorpusError(f"{path} is not a file of the tokenizers package: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return _marked(backend, str(path))


def _marked(backend: "Backend", name: str) -> Tokenizer:
    for begin, end in _MARKS:
        first, last = backend.token_to_id(begin), backend.token_to_id(end)
        if first is not None and last is not None:
            backend.encode_special_tokens = True  # a mark that a text spells out is text
            return Tokenizer(backend, first, last)
    known = ", ".join(f"{begin} {end}" for begin, end in _MARKS)
    raise CorpusError(f"{name} has none of the pairs of marks that begin and end a document: {known}")


def _tokenizers():  # type: ignore[no-untyped-def]
    try:
        import tokenizers
    except ImportError as error:
        raise CorpusError("language models need tokenizers: pip install 'longspan[lm]'") from error
    # The package shows its rooms only once they are imported.
    import tokenizers.decoders
    import tokenizers.models
    import tokenizers.pre_tokenizers
    import tokenizers.trainers

    return tokenizers
