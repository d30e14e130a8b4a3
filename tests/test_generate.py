"""Decoding, greedy and sampled, and that one teacher-forced forward decides whether the greedy would match."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from longspan.evaluate.ladder import measure
from longspan.nn.decoder import AttentionConfig, Decoder, DecoderConfig
from longspan.nn.generate import Sampling, generate
from longspan.nn.llama import Llama
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


def prompt(rows: int = 5) -> Tensor:
    return torch.randint(FIRST_SYMBOL + SYMBOLS, (rows, 7), generator=torch.Generator().manual_seed(2))


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


LENGTHS = torch.tensor([7, 1, 4, 6, 2])


def alone(decoder: Decoder | Llama, start: Tensor, most: int) -> list[list[int]]:
    """What is said to every prompt of LENGTHS by itself."""
    rows = [generate(decoder, row[-length:][None], most) for row, length in zip(start, LENGTHS, strict=True)]
    return [row[0, -most:].tolist() for row in rows]


@pytest.mark.parametrize("kind", [Decoder, Llama])
@pytest.mark.parametrize("position", ["nape", "rope"])
@pytest.mark.parametrize("method", [*METHODS, "ssmax", "topk"])
def test_padded_prompts_get_what_each_gets_alone(method: str, position: str, kind: type[Decoder | Llama]) -> None:
    decoder = kind(model(method, position=position).config).double()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    start = prompt()
    found = generate(decoder, start, 10, lengths=LENGTHS)
    assert torch.equal(found[:, :7], start)
    assert found[:, 7:].tolist() == alone(decoder, start, 10)
    other = torch.where(torch.arange(7) < 7 - LENGTHS[:, None], (start + 1) % FIRST_SYMBOL, start)
    assert torch.equal(generate(decoder, other, 10, lengths=LENGTHS)[:, 7:], found[:, 7:])
    assert not torch.equal(generate(decoder, start, 10), found), "nothing hangs on the padding"


def test_padded_prompts_stop_each_at_its_own_time() -> None:
    decoder = model("asentmax").double()
    free = generate(decoder, prompt(), 10, lengths=LENGTHS)[:, 7:].tolist()
    stop = free[0][2]
    ended = generate(decoder, prompt(), 10, lengths=LENGTHS, stop=stop)[:, 7:].tolist()
    for row, stopped in zip(free, ended, strict=True):
        said = row.index(stop) if stop in row else len(row)
        assert stopped[: said + 1] == row[: said + 1][: len(stopped)]
        assert set(stopped[said:]) <= {stop}


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([1, 2]), "shape"),
        (torch.ones(5), "integers"),
        (torch.tensor([7, 8, 1, 1, 1]), "between 1 and 7"),
        (torch.tensor([0, 1, 1, 1, 1]), "between 1 and 7"),
    ],
    ids=["shape", "dtype", "long", "empty"],
)
def test_wrong_lengths_are_refused(lengths: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model("softmax"), prompt(), 3, lengths=lengths)


def drawn_by(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("method", ["softmax", "asentmax"])
def test_a_sampled_token_is_drawn_from_what_all_before_it_say(method: str) -> None:
    decoder, sampling, generator = model(method).double(), Sampling(temperature=0.7, top_k=5, top_p=0.9), drawn_by(3)
    expected = prompt()
    with torch.no_grad():
        for _ in range(12):
            new = sampling.draw(decoder(expected)[:, -1], generator)
            expected = torch.cat([expected, new], dim=1)
    assert torch.equal(generate(decoder, prompt(), 12, sampling=sampling, generator=drawn_by(3)), expected)
    assert not torch.equal(generate(decoder, prompt(), 12, sampling=sampling, generator=drawn_by(4)), expected)


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(temperature=1e-6)], ids=str)
def test_sampling_without_a_choice_is_greedy(sampling: Sampling) -> None:
    decoder = model("asentmax").double()
    found = generate(decoder, prompt(), 8, sampling=sampling, generator=drawn_by(0))
    assert torch.equal(found, generate(decoder, prompt(), 8))


def slowly(logits: list[float], sampling: Sampling) -> list[float]:
    """The definition of `Sampling`, one number at a time."""
    likely = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if sampling.top_k is not None:
        least = logits[likely[min(sampling.top_k, len(likely)) - 1]]
        likely = [token for token in likely if logits[token] >= least]
    weight = {token: math.exp(logits[token] / sampling.temperature) for token in likely}
    total = math.fsum(weight.values())
    kept, together = [], 0.0
    for token in likely:
        if sampling.top_p is not None and together >= sampling.top_p:
            break
        kept.append(token)
        together += weight[token] / total
    total = math.fsum(weight[token] for token in kept)
    return [weight[token] / total if token in kept else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_k=3),
        Sampling(top_k=99),
        Sampling(top_p=0.6),
        Sampling(top_p=1.0),
        Sampling(temperature=2.0, top_k=6, top_p=0.8),
    ],
    ids=str,
)
def test_probabilities_are_those_of_the_definition(sampling: Sampling) -> None:
    logits = torch.randn(20, 9, dtype=torch.float64, generator=drawn_by(1)) * 2
    logits[0, 4] = logits[0].topk(3).values[-1]  # a tie at the cut of 3
    expected = torch.tensor([slowly(row, sampling) for row in logits.tolist()], dtype=torch.float64)
    torch.testing.assert_close(sampling.probabilities(logits), expected, rtol=0, atol=1e-12)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    sampling = Sampling(temperature=0.8, top_k=4)
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5])
    drawn = sampling.draw(logits.expand(20_000, -1), drawn_by(5))
    often = torch.bincount(drawn[:, 0], minlength=5) / len(drawn)
    assert torch.allclose(often, sampling.probabilities(logits), atol=0.015)
    assert often[3] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"temperature": 0.0}, "positive"), ({"top_k": 0}, "at least 1"), ({"top_p": 0.0}, "in"), ({"top_p": 1.5}, "in")],
    ids=str,
)
def test_wrong_sampling_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)  # type: ignore[arg-type]


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


def test_of_tokens_as_likely_the_first_are_kept_and_no_more_than_it_takes() -> None:
    p = Sampling(top_p=0.25).probabilities(torch.zeros(2, 1024))
    assert torch.equal(p, (torch.arange(1024) < 256).expand(2, -1) / 256)
