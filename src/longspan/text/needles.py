"""Needles in haystacks, S-NIAH-1 and S-NIAH-2 of RULER (Hsieh et al. 2024): find the number that a text says.

    A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the
    number afterwards.
    The grass is green. ... One of the special magic numbers for quiet-harbor is: 4183027. ... The grass is green.
    What is the special magic number for quiet-harbor mentioned in the provided text? The special magic number for
    quiet-harbor mentioned in the provided text is

The haystack of S-NIAH-1 is one line of five short sentences over and over, that of S-NIAH-2 is essays. The haystack is
as long as fits: prompt and room for the answer together take at most the asked number of tokens, and one more
sentence would not fit. The depth is where between its sentences the needle stands, 0 before the first and 1 behind the
last. Samples take 40 evenly spaced depths in turn, in noise and in essays, so that all have about as many; RULER draws
one of these 40 at random in essays, and any line in noise. An answer is right when the number's digits are in it.
"""

import hashlib
import random
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from typing import Literal

from longspan.text.documents import CorpusError
from longspan.text.tokenizer import Tokenizer

Haystack = Literal["noise", "essay"]
HAYSTACKS: dict[str, Haystack] = {"s-niah-1": "noise", "s-niah-2": "essay"}
# In an order in which the first few already lie all over: 17 and 40 have no common divisor.
DEPTHS = tuple(index * 17 % 40 / 39 for index in range(40))

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_BEFORE = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
_NEEDLE = "One of the special magic numbers for {key} is: {value}."
_AFTER = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)

_ADJECTIVES = """
able amber ancient bitter blue bold brave brief bright calm careful clever cold crisp curious dark deep distant dry
early eager empty faint fair famous fast fierce firm fresh gentle glad golden grand green happy heavy hidden hollow
honest humble idle jolly keen kind large late lazy light lively lonely loud lucky mellow mild modern narrow neat noble
odd old open pale patient plain polite proud quick quiet rapid rare rough round royal rusty secret sharp shy silent
silver simple slow small smooth soft solid spare steady still strange strong sudden sweet swift tall tame tender thin
tidy tiny vast warm wide wild wise young
""".split()  # noqa: SIM905
_NOUNS = """
acorn anchor apple arrow autumn badge barrel basket beacon bell bench bottle branch bridge brook button candle canyon
carpet castle cedar chapel circle cliff clock cloud coast comet copper corner cottage creek desert diary drum eagle
engine falcon feather fence field forest fountain garden gate glacier hammer harbor hill horizon island jacket jewel
kettle ladder lantern leaf letter library lemon mantle maple market meadow mirror mountain needle oak ocean orchard
orbit palace paper path pebble pencil pilot planet pocket prairie quarry rabbit ribbon river road rocket saddle sail
shadow shell signal spoon spring stone storm summit table temple thread thunder tiger tower trail tunnel valley violin
wagon walnut water whistle willow window winter wolf yard
""".split()  # noqa: SIM905

# Words of a sentence and letters of a word; a listing without full stops, or what has no blanks, is cut there, so that
# haystacks fill up.
_LONGEST_SENTENCE, _LONGEST_WORD = 40, 100
_WORD = re.compile(rf"\S{{1,{_LONGEST_WORD}}}")
# A sentence ends in a full stop, question or exclamation mark, maybe closed by a quote, before a blank.
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+")


@dataclass(frozen=True)
class Needle:
    """A prompt, the number that answers it, and where it is hidden."""

    prompt: str
    answer: str
    depth: float
    ids: "array[int]"  # what the model reads, the mark at the beginning included

    @property
    def tokens(self) -> int:
        return len(self.ids)


def sentences(texts: Iterable[str]) -> Iterator[str]:
    """The sentences of texts, each on one line."""
    for text in texts:
        for sentence in _SENTENCE_END.split(" ".join(text.split())):
            words = _WORD.findall(sentence)
            for start in range(0, len(words), _LONGEST_SENTENCE):
                yield " ".join(words[start : start + _LONGEST_SENTENCE])


class NeedleMaker:
    """Makes samples of one task for one tokenizer.

    Args:
        task: "s-niah-1" or "s-niah-2".
        essays: the texts of the second's haystack; repeated if they are too short for a length.
        answer_tokens: room for the answer, part of a sample's length; RULER's is 128.
    """

    def __init__(self, task: str, tokenizer: Tokenizer, *, essays: Iterable[str] = (), answer_tokens: int = 128):
        if task not in HAYSTACKS:
            raise CorpusError(f"there is no needle task {task!r}; there are {', '.join(HAYSTACKS)}")
        self.task, self.tokenizer, self.answer_tokens = task, tokenizer, answer_tokens
        self.separator = "\n" if HAYSTACKS[task] == "noise" else " "
        self._hay = [NOISE] if HAYSTACKS[task] == "noise" else list(sentences(essays))
        if not self._hay:
            raise CorpusError(f"{task} hides its needle in essays, and there are none")
        self._sizes = list(map(len, tokenizer.encode_all([self.separator + line for line in self._hay])))

    @property
    def checksum(self) -> str:
        """Twelve hex digits that tell this haystack from any other."""
        return hashlib.blake2b("\n".join(self._hay).encode(errors="replace"), digest_size=6).hexdigest()

    def make(self, length: int, depth: float, seed: int) -> Needle:
        """The sample of a seed with `length` tokens, the answer's room included, and its needle at `depth`."""
        if not 0 <= depth <= 1:
            raise CorpusError(f"a depth is between 0 and 1, got {depth}")
        draw = random.Random(f"{self.task} {length} {seed}")
        key = f"{draw.choice(_ADJECTIVES)}-{draw.choice(_NOUNS)}"
        value = str(draw.randrange(1_000_000, 10_000_000))
        first = draw.randrange(len(self._hay))  # essays begin at another sentence in every sample
        room = length - self.answer_tokens
        least = len(self._ids(self._prompt([], key, value, depth)))
        if least > room:
            raise CorpusError(
                f"{length} tokens are too few: the question takes {least} and the answer {self.answer_tokens}"
            )
        # Sentences are counted alone first; where merges cross their borders the guess is put right by the whole.
        lines = self._guess(first, room - least)
        while len(ids := self._ids(self._prompt(lines, key, value, depth))) > room:
            lines = lines[:-1]
        while (
            len(wider := self._ids(self._prompt(more := self._lines(first, len(lines) + 1), key, value, depth))) <= room
        ):
            lines, ids = more, wider
        return Needle(self._prompt(lines, key, value, depth), value, depth, array("i", ids))

    def samples(self, length: int, count: int, seed: int = 0) -> list[Needle]:
        """`count` samples of a length, at the 40 depths in turn."""

        def sample(number: int) -> Needle:
            return self.make(length, DEPTHS[number % len(DEPTHS)], seed * 1_000_003 + number)

        with ThreadPoolExecutor() as pool:  # most of the time is the tokenizer's, which threads share out
            return list(pool.map(sample, range(count)))

    def _lines(self, first: int, count: int) -> list[str]:
        return list(islice(cycle(self._hay), first, first + count))

    def _guess(self, first: int, room: int) -> list[str]:
        sizes = accumulate(islice(cycle(self._sizes), first, None))
        return self._lines(first, next(number for number, total in enumerate(sizes) if total > room))

    def _prompt(self, lines: Sequence[str], key: str, value: str, depth: float) -> str:
        place = round(depth * len(lines))
        hay = [*lines[:place], _NEEDLE.format(key=key, value=value), *lines[place:]]
        return _BEFORE + self.separator.join(hay) + _AFTER.format(key=key)

    def _ids(self, prompt: str) -> list[int]:
        return [self.tokenizer.begin, *self.tokenizer.encode(prompt)]


def is_right(answer: str, said: str) -> bool:
    """Whether the number is in what was said, as one string."""
    return answer in said
