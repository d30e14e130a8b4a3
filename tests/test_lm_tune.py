"""Fine-tuning on needles: what a lesson is, that it is learned, and that the tuned run can be measured."""

from pathlib import Path

import pytest
import torch
from test_cli import succeed
from tiny_text import tiny_corpus
from torch import Tensor

from longspan import cli
from longspan.nn.decoder import AttentionConfig, DecoderConfig
from longspan.nn.llama import Llama
from longspan.results import read_rows
from longspan.text.corpora import Corpus
from longspan.text.documents import CorpusError
from longspan.train.needles import Tuning, lesson, lessons, makers_for, tune
from longspan.train.optimizers import Optimizer

CONTEXT = 400  # tokens; a question alone takes about 250 of a vocabulary of 300


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.mktemp("tune"))


def test_a_lesson_ends_in_its_answer_and_is_a_function_of_its_number(corpus: Corpus) -> None:
    makers, tuning = makers_for(corpus), Tuning(shortest=350)
    seen = set()
    for number in range(4):
        one = lesson(makers, number, CONTEXT, tuning)
        assert one == lesson(makers, number, CONTEXT, tuning)
        assert 300 < len(one.ids) <= CONTEXT
        assert one.ids[0] == corpus.tokenizer.begin
        assert one.ids[-1] == corpus.tokenizer.end
        answer = corpus.tokenizer.decode(one.ids[one.answer :]).strip(" .")
        assert len(answer) == 7
        assert f"is: {answer}." in corpus.tokenizer.decode(one.ids[: one.answer])
        seen.add(answer)
    assert len(seen) == 4
    assert lesson(makers, 0, CONTEXT, Tuning(shortest=350, seed=1)) != lesson(makers, 0, CONTEXT, tuning)


def test_a_context_below_the_shortest_needle_is_an_error(corpus: Corpus) -> None:
    with pytest.raises(CorpusError, match="more than the context of 100"):
        lesson(makers_for(corpus), 0, 100, Tuning())


@pytest.mark.parametrize("method", ["softmax", "asentmax"])
def test_the_loss_of_the_answers_falls(corpus: Corpus, method: str) -> None:
    torch.manual_seed(0)
    attention = AttentionConfig(method=method, slopes="exponential")
    vocabulary = corpus.tokenizer.vocabulary
    model = Llama(DecoderConfig(vocabulary, layers=1, dim=32, hidden=64, heads=4, attention=attention))
    tuning = Tuning(steps=20, batch=2, samples=4, shortest=380, learning_rate=1e-2, warmup=2)
    told: list[tuple[int, float]] = []
    last = tune(model, lessons(makers_for(corpus), CONTEXT, tuning), tuning, report=lambda *row: told.append(row))
    assert [step for step, _ in told] == [10, 20]
    assert told[-1][1] == last
    assert last < 3.5  # of log(vocabulary), 5.7, at the first step
    assert not model.training


def test_the_command_leaves_a_run_to_measure_and_not_to_train(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = str(corpus.folder)
    train = ("lm", "train", text, "--steps=2", f"--context={CONTEXT}", "--set=batch=2", "--device=cpu")
    succeed(*train, "--out=run")
    options = ("--steps=2", "--batch=2", "--samples=2", "--shortest=350", "--device=cpu")
    assert "after 2 steps: run-needles" in succeed("lm", "tune", "run", *options)
    succeed("lm", "needle", "run-needles", "--length=400", "--samples=2", "--answer-tokens=16", "--device=cpu")
    row = list(read_rows(tmp_path / "run-needles/results.jsonl"))[-1]
    tuned = "+tuning.steps=2+tuning.batch=2+tuning.samples=2+tuning.shortest=350"
    assert (row["recipe"], row["step"]) == (f"lm/tiny/nape/asentmax+batch=2{tuned}+needles", 2)
    assert "holds a run already" in refusal(monkeypatch, capsys, "lm", "tune", "run", *options)
    assert "tuned after training" in refusal(monkeypatch, capsys, *train, "--out=run-needles")


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the program says when it gives up."""
    monkeypatch.setattr("sys.argv", ["longspan", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    return capsys.readouterr().err


def test_the_rate_rises_and_falls_to_zero(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, tuple[float, float]]] = []

    class Spy(Optimizer):
        def step(self, gradients: dict[str, Tensor]) -> Tensor:
            seen.append((float(self.rate), self.config.betas))
            return super().step(gradients)

    monkeypatch.setattr("longspan.train.needles.Optimizer", Spy)
    model = Llama(DecoderConfig(corpus.tokenizer.vocabulary, layers=1, dim=8, hidden=8, heads=2))
    tuning = Tuning(steps=5, batch=1, samples=1, shortest=380, warmup=2)
    tune(model, lessons(makers_for(corpus), CONTEXT, tuning), tuning)
    assert [rate for rate, _ in seen] == pytest.approx([0.5, 0.8, 0.6, 0.4, 0.2])
    assert {betas for _, betas in seen} == {(0.9, 0.95)}
