"""Greedy decoding, and that one teacher-forced forward decides whether it would match."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from longspan.evaluate.ladder import measure
from longspan.nn.decoder import AttentionConfig, Decoder, DecoderConfig
from longspan.nn.generate import generate
from longspan.tasks.base import BOS, FIRST_SYMBOL, SEP, Batch, Device, Generative

SYMBOLS = 6
METHODS = ["softmax", "asentmax", "stick_breaking"]


def model(method: str, seed: int = 0, position: str = "nape") -> Decoder:
    """Far from the start, so that what it says next depends on what it read."""
    torch.manual_seed(seed)
    position = "nope" if method == "stick_breaking" else position
    attention = AttentionConfig(method=method, position=position)
    decoder = Decoder(DecoderConfig(FIRST_SYMBOL + SYMBOLS, layers=2, dim=32, hidden=48, heads=4, attention=attention))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return decoder


def prompt(rows: int = 5, time: int = 7) -> Tensor:
    return torch.randint(FIRST_SYMBOL + SYMBOLS, (rows, time), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("position", ["nope", "alibi", "nape", "rope"])
@pytest.mark.parametrize("method", METHODS)
def test_every_token_is_the_most_likely_after_all_before_it(method: str, position: str) -> None:
    decoder, start = model(method, position=position), prompt()
    found = generate(decoder, start, 12)
    assert found.shape == (5, 19)
    expected = start
    with torch.no_grad():
        for _ in range(12):
            expected = torch.cat([expected, decoder(expected)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, expected)
    assert len(found[:, 7:].unique()) > 2, "the model says one thing whatever it reads"


def test_a_row_that_has_said_stop_keeps_saying_it() -> None:
    decoder, start = model("asentmax"), prompt(rows=40)
    free = generate(decoder, start, 12)[:, 7:]
    stop = int(free[0, 3])
    ended = generate(decoder, start, 12, stop=stop)[:, 7:]
    for row, stopped in zip(free.tolist(), ended.tolist(), strict=True):
        said = row.index(stop) if stop in row else len(row)
        assert stopped[: said + 1] == row[: said + 1][: len(stopped)]
        assert set(stopped[said:]) <= {stop}


def test_decoding_ends_when_every_row_has_stopped() -> None:
    decoder, start = model("asentmax"), prompt(rows=1)
    free = generate(decoder, start, 12)[0, 7:].tolist()
    stop = free[4]
    assert generate(decoder, start, 12, stop=stop)[0, 7:].tolist() == free[: free.index(stop) + 1]


@pytest.mark.parametrize("shape", [(4,), (2, 0), (1, 2, 3)], ids=str)
def test_a_prompt_is_a_batch_of_at_least_one_token(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        generate(model("softmax"), torch.zeros(shape, dtype=torch.long), 3)


def test_no_tokens_wanted_gives_the_prompt() -> None:
    assert torch.equal(generate(model("softmax"), prompt(), 0), prompt())


@dataclass(frozen=True)
class Echo(Generative):
    """The answer is what the model itself says, whole in one row of three, off by one token in the others.

    The wrong token may be anywhere: at the first place, where teacher forcing and decoding have read the same, or at
    the last; after it the model reads another past when it is forced than when it decodes.
    """

    name = "echo"
    summary = "say what you would say"

    decoder: Decoder
    answer: int
    drawn: list[Batch] = field(default_factory=list)

    @property
    def vocabulary(self) -> int:
        return FIRST_SYMBOL + SYMBOLS

    def time(self, length: int) -> int:
        return length + 1 + self.answer

    def draw(self, batch: int, length: int, generator: torch.Generator | None, device: Device) -> Batch:
        source = torch.randint(FIRST_SYMBOL, self.vocabulary, (batch, length), generator=generator)
        start = torch.cat([torch.full((batch, 1), BOS), source, torch.full((batch, 1), SEP)], dim=1)
        said = generate(self.decoder, start, self.answer)
        wrong = torch.arange(batch) % 3 > 0
        place = length + 2 + torch.randint(self.answer, (batch, 1), generator=generator)
        other = (said.gather(1, place) + 1) % self.vocabulary
        said = torch.where(wrong[:, None], said.scatter(1, place, other), said)
        mask = torch.arange(self.time(length)).expand(batch, -1) > length
        whole = Batch(said[:, :-1], said[:, 1:] * mask, mask)
        self.drawn.append(whole)
        return whole


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_teacher_forced_exact_match_is_that_of_greedy_decoding(method: str, seed: int) -> None:
    decoder = model(method, seed)
    task, length, samples = Echo(decoder, answer=9), 8, 150
    value = measure(decoder, task, length, samples).value
    batch = Batch(*(torch.cat(parts)[:samples] for parts in zip(*task.drawn, strict=True)))
    start, wanted = batch.tokens[:, : length + 2], batch.targets[:, length + 1 :]
    matches = (generate(decoder, start, task.answer)[:, length + 2 :] == wanted).all(1)
    assert value == pytest.approx(100 * float(matches.float().mean()))
    assert torch.equal(matches, torch.arange(samples) % 64 % 3 == 0)  # 64 rows are drawn at a time
