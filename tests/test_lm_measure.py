"""Perplexity and retrieval against length, on models whose answers are known."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_lm_model import model
from tiny_text import tiny_corpus
from torch import Tensor, nn

from longspan.evaluate import perplexity as measuring
from longspan.evaluate.continuation import batches_by_length, continuations
from longspan.evaluate.needles import retrieval
from longspan.evaluate.perplexity import Perplexity, change, long_documents, perplexity, token_losses
from longspan.nn.cache import KVCache
from longspan.nn.llama import Llama
from longspan.text.corpora import Corpus
from longspan.text.documents import CorpusError
from longspan.text.needles import Needle, NeedleMaker


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.mktemp("tiny"))


def uniform(vocabulary: int) -> Llama:
    flat = model("asentmax", vocabulary=vocabulary)
    nn.init.zeros_(flat.output.weight)
    return flat


@pytest.mark.parametrize("scoring", ["same", "all"])
@pytest.mark.parametrize("length", [8, 32, 200])
def test_the_perplexity_of_a_uniform_model_is_its_vocabulary(corpus: Corpus, scoring: Any, length: int) -> None:
    documents = long_documents(corpus.split("validation"), 200)
    found = perplexity(uniform(300), documents, length, longest=200, scored=4, scoring=scoring)
    assert found[:3] == pytest.approx((300, 300, 300))
    assert found.documents == len(documents) > 3
    assert found.tokens == len(documents) * (4 if scoring == "same" else length)


def test_the_same_tokens_are_scored_at_every_length(monkeypatch: pytest.MonkeyPatch, corpus: Corpus) -> None:
    documents = long_documents(corpus.split("validation"), 200)
    seen: dict[int, Tensor] = {}

    def spy(llama: Llama, windows: Tensor, scored: int) -> Tensor:
        seen[windows.shape[1] - 1] = windows
        return torch.zeros(len(windows), scored)

    monkeypatch.setattr(measuring, "token_losses", spy)
    for length in (16, 50, 200):
        perplexity(uniform(300), documents, length, longest=200, scored=10)
    assert set(seen) == {16, 50, 200}
    assert all(torch.equal(windows[:, -10:], seen[200][:, -10:]) for windows in seen.values())
    assert torch.equal(seen[200], torch.stack([document[:201] for document in documents]))
    perplexity(uniform(300), documents, 50, longest=200, scored=10, scoring="all")
    assert torch.equal(seen[50], torch.stack([document[:51] for document in documents]))


def test_losses_in_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = model("entmax")
    windows = torch.randint(50, (2, 30), generator=torch.Generator().manual_seed(0))
    expected = nn.functional.cross_entropy(
        llama(windows[:, :-1])[:, -20:].mT.float(), windows[:, -20:], reduction="none"
    )
    assert torch.allclose(token_losses(llama, windows, 20), expected, atol=1e-5)
    monkeypatch.setattr(measuring, "_LOGITS", 50 * 2 * 7)
    assert torch.allclose(token_losses(llama, windows, 20), expected, atol=1e-5)


def test_perplexity_is_that_of_the_documents_one_by_one(corpus: Corpus) -> None:
    documents = long_documents(corpus.split("validation"), 64, most=4)
    llama = model("asentmax", vocabulary=300).float()
    found = perplexity(llama, documents, 64, longest=64, scored=64, scoring="all")
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(llama(each[None, :64])[0], each[1:65]).item() for each in documents]
    assert found.value == pytest.approx(math.exp(sum(losses) / 4), rel=1e-4)
    assert found.low < found.value < found.high


def test_a_change_is_counted_document_by_document() -> None:
    def measured(*losses: float) -> Perplexity:
        return Perplexity(0, 0, 0, 0, len(losses), list(losses), 0)

    found = change(measured(1.0, 5.0, 9.0), measured(1.1, 5.1, 9.1))
    assert found == pytest.approx((0.1, 0.1, 0.1), abs=1e-5)
    wide = change(measured(1.0, 5.0, 9.0), measured(1.0, 5.3, 9.0))
    assert wide.low < 0 < wide.value < wide.high
    with pytest.raises(ValueError, match="not the same"):
        change(measured(1.0), measured(1.0, 2.0))


def test_a_document_too_short_is_an_error_and_never_cut(corpus: Corpus) -> None:
    stream = corpus.split("validation")
    longest = int(stream.document_lengths().max())
    assert len(long_documents(stream, longest - 1)) >= 1
    with pytest.raises(CorpusError, match=f"no document has {longest} tokens.*has {longest}"):
        long_documents(stream, longest)
    with pytest.raises(CorpusError, match="does not hold 100"):
        perplexity(uniform(300), [torch.zeros(100, dtype=torch.long)], 8, longest=100, scored=4)
    with pytest.raises(ValueError, match="must not fall"):
        perplexity(uniform(300), [torch.zeros(200, dtype=torch.long)], 8, longest=100, scored=9)


class Oracle(nn.Module):
    """Says what `answers` knows for a prompt, token by token, whatever it has read since."""

    def __init__(self, answers: Callable[[Tensor], Tensor], vocabulary: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.answers, self.vocabulary = answers, vocabulary
        self.said = 0

    def new_caches(self) -> list[KVCache]:
        self.said = -1
        return []

    def forward(self, tokens: Tensor, *, caches: list[KVCache], last: int, documents: Tensor | None = None) -> Tensor:
        assert last == 1
        self.said += 1
        if self.said == 0:
            self.reply = self.answers(tokens)
        return nn.functional.one_hot(self.reply[:, self.said : self.said + 1], self.vocabulary).float()


@pytest.mark.parametrize("task", ["s-niah-1", "s-niah-2"])
def test_found_needles_are_counted_by_the_exact_string(corpus: Corpus, task: str) -> None:
    tokenizer = corpus.tokenizer
    maker = NeedleMaker(task, tokenizer, essays=["The river sings. Old stones walk."], answer_tokens=12)
    made = maker.samples(600, 40)
    known = {tuple(needle.ids): needle for needle in made}

    def answers(tokens: Tensor) -> Tensor:
        replies = [reply(known[tuple(prompt)]) for prompt in map(unpadded, tokens.tolist())]
        return torch.tensor([ids + [tokenizer.end] * (13 - len(ids)) for ids in replies])

    def unpadded(prompt: list[int]) -> list[int]:
        return prompt[prompt.index(tokenizer.begin) :]

    def reply(needle: Needle) -> list[int]:
        wrong = needle.answer[:-1] + str((int(needle.answer[-1]) + 1) % 10)
        return tokenizer.encode(f" {needle.answer if needle.depth < 0.5 else wrong}.")

    found = retrieval(Oracle(answers, tokenizer.vocabulary), maker, made)  # type: ignore[arg-type]
    assert (found.value, found.samples) == (50.0, 40)
    assert found.low < 50 < found.high
    assert found.by_depth == [100, 100, 50, 0, 0]


def test_batches_hold_prompts_of_like_lengths() -> None:
    assert list(batches_by_length([5, 7, 5, 5, 7, 9], 14)) == [[5], [1, 4], [0, 2], [3]]


@pytest.mark.parametrize("position", ["nape", "rope"])
@pytest.mark.parametrize("method", ["softmax", "asentmax"])
def test_a_padded_prompt_continues_as_it_does_alone(method: str, position: str) -> None:
    torch.manual_seed(0)
    llama = model(method, vocabulary=51, position=position)
    prompts = [torch.randint(50, (length,)).tolist() for length in (9, 30, 1)]
    together = continuations(llama, prompts, 12, stop=50, device="cpu")
    assert together == [continuations(llama, [prompt], 12, stop=50, device="cpu")[0] for prompt in prompts]
    assert max(map(len, together)) == 12


def test_an_untrained_model_finds_nothing(corpus: Corpus) -> None:
    maker = NeedleMaker("s-niah-1", corpus.tokenizer, answer_tokens=8)
    llama = model("asentmax", vocabulary=300).float()
    assert retrieval(llama, maker, maker.samples(500, 3)).value == 0


def test_intervals_are_of_95_percent() -> None:
    """1.96 standard errors: of 1, 2, 3 and 4 a standard deviation of sqrt(5 / 3) over 2."""
    flat, steep = (Perplexity(0, 0, 0, 0, 4, losses, 0) for losses in ([0.0] * 4, [1.0, 2.0, 3.0, 4.0]))
    half = 1.96 * math.sqrt(5 / 3) / 2
    assert change(flat, steep) == pytest.approx((2.5, 2.5 - half, 2.5 + half))
