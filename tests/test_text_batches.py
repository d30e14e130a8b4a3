"""Packing, the order of a run, and needles in haystacks."""

from pathlib import Path

import pytest
import torch
from tiny_text import tiny_corpus

from longspan.text.corpora import Corpus
from longspan.text.documents import CorpusError
from longspan.text.needles import DEPTHS, HAYSTACKS, NOISE, NeedleMaker, is_right, sentences
from longspan.text.packing import Windows, evenly_spaced, window
from longspan.text.shards import ShardWriter, TokenStream


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def stream(tmp_path: Path) -> TokenStream:
    """Documents 1..4, 5..9 and 10..23; every token is unlike the others."""
    writer = ShardWriter(tmp_path, 100, shard_tokens=10)
    for document in (range(1, 5), range(5, 10), range(10, 24)):
        writer.add(list(document))
    writer.close()
    return TokenStream(tmp_path)


def test_a_window_tells_documents_apart(stream: TokenStream) -> None:
    batch = window(stream, 2, 8)
    assert batch.tokens.tolist() == [[3, 4, 5, 6, 7, 8, 9, 10]]
    assert batch.targets.tolist() == [[4, 0, 6, 7, 8, 9, 0, 11]]
    assert batch.mask.tolist() == [[True, False, True, True, True, True, False, True]]
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 1, 1, 1, 1, 1, 2]]
    joined = window(stream, 2, 8, separate=False)
    assert joined.documents is None
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(joined[:3], batch[:3], strict=True))


@pytest.mark.parametrize(("context", "batch"), [(4, 2), (5, 3), (22, 1), (7, 5)], ids=str)
def test_a_pass_reads_every_window_once_and_the_next_in_another_order(
    stream: TokenStream, context: int, batch: int
) -> None:
    windows = Windows(stream, context, batch, seed=3)
    assert windows.count == 22 // context
    starts = [start for step in range(6 * windows.count) for start in windows.starts(step)]
    passes = [starts[begin : begin + windows.count] for begin in range(0, len(starts), windows.count)]
    for each in passes:
        ordered = sorted(each)
        assert 0 <= ordered[0] <= 22 % context
        assert [start - ordered[0] for start in ordered] == list(range(0, windows.count * context, context))
    if windows.count > 2:
        assert len({tuple(each) for each in passes}) > 1


def test_the_batch_of_a_step_needs_no_history(stream: TokenStream) -> None:
    first, second = Windows(stream, 4, 3, seed=1), Windows(stream, 4, 3, seed=1)
    there = [first.starts(step) for step in range(8)]
    assert [second.starts(step) for step in (7, 0, 3)] == [there[7], there[0], there[3]]
    assert torch.equal(first.draw(5).tokens, second.draw(5).tokens)
    orders = {tuple(Windows(stream, 2, 11, seed=seed).starts(0)) for seed in range(4)}  # nothing is left over to shift
    assert len(orders) == 4
    parts = first.draw(2).split(2)
    assert [len(part.tokens) for part in parts] == [2, 1]
    assert torch.equal(torch.cat([part.mask for part in parts]), first.draw(2).mask)


def test_a_window_that_does_not_fit_is_an_error(stream: TokenStream) -> None:
    with pytest.raises(CorpusError, match="23 tokens and a target does not fit in 23"):
        Windows(stream, 23, 1)
    with pytest.raises(CorpusError, match="does not fit"):
        evenly_spaced(stream, 23, 1)


def test_validation_windows_are_spread(stream: TokenStream) -> None:
    assert evenly_spaced(stream, 5, 2).tokens[:, 0].tolist() == [1, 11]
    assert evenly_spaced(stream, 5, 99).tokens[:, 0].tolist() == [1, 6, 11, 16]


def essays(corpus: Corpus) -> list[str]:
    stream = corpus.split("validation")
    return [corpus.tokenizer.decode(stream.document(number).tolist()) for number in range(stream.documents)]


@pytest.mark.parametrize("task", HAYSTACKS)
@pytest.mark.parametrize("length", [600, 777, 3000])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_needle_is_where_and_as_long_as_asked(corpus: Corpus, task: str, length: int, depth: float) -> None:
    maker = NeedleMaker(task, corpus.tokenizer, essays=essays(corpus), answer_tokens=32)
    needle = maker.make(length, depth, seed=5)
    ids = needle.ids.tolist()
    assert ids == [corpus.tokenizer.begin, *corpus.tokenizer.encode(needle.prompt)]
    longest = max(len(corpus.tokenizer.encode(line)) for line in (NOISE, *sentences(essays(corpus))))
    assert length - 32 - longest - 2 <= len(ids) == needle.tokens <= length - 32
    if task == "s-niah-1":
        assert len(ids) + len(corpus.tokenizer.encode("\n" + NOISE)) > length - 32  # another line does not fit
    assert ids[0] == corpus.tokenizer.begin
    assert corpus.tokenizer.decode(ids) == needle.prompt
    assert needle.prompt.count(needle.answer) == 1
    assert len(needle.answer) == 7
    before, _, after = needle.prompt.partition("One of the special magic numbers for ")
    hay_before = len(before.split("\n", 1)[1].split())
    hay_after = len(after.split(".", 1)[1].split("\nWhat is")[0].split())
    assert hay_before / (hay_before + hay_after) == pytest.approx(depth, abs=50 / (hay_before + hay_after))
    key = after.split(" is:")[0]
    assert needle.prompt.endswith(f"The special magic number for {key} mentioned in the provided text is")


def test_a_word_without_end_does_not_leave_the_haystack_empty(corpus: Corpus) -> None:
    essays = ["A first line. " + "rivers" * 5000 + " A last line."]
    maker = NeedleMaker("s-niah-2", corpus.tokenizer, essays=essays, answer_tokens=16)
    least = len(max(sentences(essays), key=len))  # a letter is a token at most
    assert least < 5000
    for seed in range(4):
        assert 20_000 - 16 - least <= maker.make(20_000, 0.5, seed).tokens <= 20_000 - 16


def test_samples_differ_and_repeat(corpus: Corpus) -> None:
    maker = NeedleMaker("s-niah-2", corpus.tokenizer, essays=essays(corpus), answer_tokens=16)
    samples = maker.samples(500, 45)
    assert samples == maker.samples(500, 45)
    assert len({sample.answer for sample in samples}) == 45
    assert [sample.depth for sample in samples] == [*DEPTHS, *DEPTHS[:5]]
    assert sorted(DEPTHS) == pytest.approx([index / 39 for index in range(40)])
    assert {min(int(5 * depth), 4) for depth in DEPTHS[:7]} == {0, 1, 2, 3, 4}
    assert samples != maker.samples(500, 45, seed=1)


def test_an_answer_is_right_as_one_string() -> None:
    assert is_right("1234567", " 1234567. And then")
    assert not is_right("1234567", "123456")
    assert not is_right("1234567", "123 4567")


def test_impossible_needles_are_errors(corpus: Corpus) -> None:
    with pytest.raises(CorpusError, match="no needle task"):
        NeedleMaker("s-niah-9", corpus.tokenizer)
    with pytest.raises(CorpusError, match="essays, and there are none"):
        NeedleMaker("s-niah-2", corpus.tokenizer)
    maker = NeedleMaker("s-niah-1", corpus.tokenizer)
    with pytest.raises(CorpusError, match="too few: the question takes"):
        maker.make(150, 0.5, 0)
    with pytest.raises(CorpusError, match="between 0 and 1"):
        maker.make(900, 1.5, 0)


def test_passes_start_at_other_tokens(stream: TokenStream) -> None:
    windows = Windows(stream, 5, 4)  # four windows are a pass, and two tokens are left over
    assert {min(windows.starts(number)) for number in range(12)} == {0, 1, 2}


def test_a_needle_is_behind_the_sentence_that_is_nearest_to_its_depth(corpus: Corpus) -> None:
    maker = NeedleMaker("s-niah-1", corpus.tokenizer, answer_tokens=16)
    for depth in (0.1, 0.35, 0.49, 0.9):
        hay = maker.make(700, depth, seed=2).prompt.split("\n")[1:-1]
        (place,) = [number for number, line in enumerate(hay) if line != NOISE]
        assert place == round(depth * (len(hay) - 1))
