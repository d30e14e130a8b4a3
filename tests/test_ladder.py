"""Accuracy against length: the same samples however they are batched, and what a row of results says."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TINY, tiny

from longspan.evaluate import ladder
from longspan.evaluate.ladder import identity, lengths_measured, measure, row_of, samples_at, wilson
from longspan.nn.decoder import Decoder
from longspan.results import append_rows
from longspan.tasks import get_task
from longspan.tasks.base import Batch, Task
from longspan.train.config import fingerprint
from longspan.train.trainer import Trainer


@pytest.fixture(scope="module")
def trained() -> Trainer:
    """A little training, so that some answers are right and some are not."""
    trainer = Trainer(tiny(model__dim=32, steps=60, batch=32, shortest=2, longest=2))
    for _ in range(12):
        trainer.advance()
    return trainer


@pytest.mark.parametrize("tokens", [1, 50, 700, 1 << 20])
def test_samples_do_not_depend_on_how_many_fit_at_once(
    trained: Trainer, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    expected = measure(trained.model, trained.task, 2, 150)
    monkeypatch.setattr(ladder, "_CPU_TOKENS", tokens)
    found = measure(trained.model, trained.task, 2, 150)
    assert found._replace(seconds=0) == expected._replace(seconds=0)
    assert 0 < found.value < 100


def test_samples_drawn_ahead_are_the_same_in_the_same_order() -> None:
    task = get_task("mqmtar", alphabet=16, num_words=64, num_queries=2)
    drawn: list[int] = []

    def batches() -> Iterator[Batch]:
        for number, batch in enumerate(ladder._batches(task, 40, 150, "test", 16)):
            drawn.append(number)
            yield batch

    expected = list(ladder._batches(task, 40, 150, "test", 16))
    for number, (batch, other) in enumerate(zip(ladder._ahead(batches()), expected, strict=True)):
        assert all(torch.equal(*parts) for parts in zip(batch, other, strict=True))
        assert set(drawn) <= set(range(number + 2))  # one ahead, and no more: they take memory
    assert len(drawn) == len(expected) > 5


def test_what_cannot_be_drawn_ahead_is_told_and_who_stops_early_leaves_no_thread() -> None:
    def batches() -> Iterator[Batch]:
        yield from ladder._batches(get_task("copy"), 4, 8, "test", 8)
        raise ValueError("no more")

    before = threading.active_count()
    ahead = ladder._ahead(batches())
    next(ahead)
    with pytest.raises(ValueError, match="no more"):
        next(ahead)
    early = ladder._ahead(ladder._batches(get_task("copy"), 4, 100, "test", 8))
    next(early)
    del early
    assert threading.active_count() == before


def test_a_measurement_is_repeated_exactly_and_the_purposes_differ(trained: Trainer) -> None:
    first, again, other = (
        measure(trained.model, trained.task, 2, 200, purpose=purpose) for purpose in ("test", "test", "validation")
    )
    assert first._replace(seconds=0) == again._replace(seconds=0)
    assert first._replace(seconds=0) != other._replace(seconds=0)


class Oracle(torch.nn.Module):
    """Right at every position but those that `wrong` names, by the targets of the batches that it draws itself."""

    def __init__(self, task: Task, length: int, wrong: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches = ladder._batches(task, length, 128, "test", ladder._CPU_TOKENS // task.time(length))
        self.wrong, self.vocabulary = wrong, task.vocabulary

    def forward(self, tokens: torch.Tensor, last: int) -> torch.Tensor:
        batch = next(self.batches)
        assert torch.equal(batch.tokens, tokens)
        assert not batch.mask[:, :-last].any()  # all that counts is asked for,
        assert batch.mask[:, -last].any()  # and nothing before it
        said = torch.where(self.wrong(batch.mask), (batch.targets + 1) % self.vocabulary, batch.targets)
        return torch.nn.functional.one_hot(said, self.vocabulary)[:, -last:].float()


def _rows(mask: torch.Tensor) -> torch.Tensor:
    """One answer token of every second row."""
    wrong = torch.zeros_like(mask)
    wrong[::2, -2] = True
    return wrong


@pytest.mark.parametrize(
    ("name", "wrong", "value", "token_accuracy"),
    [
        ("copy", lambda mask: torch.zeros_like(mask), 100, 100),
        ("copy", lambda mask: ~mask, 100, 100),
        ("copy", _rows, 50, 100 * (1 - 0.5 / 11)),
        ("copy", lambda mask: mask, 0, 0),
        ("2back", _rows, 100 * (1 - 0.5 / 10), 100 * (1 - 0.5 / 10)),
        ("flip_flop_sparse", _rows, 50, 75),
    ],
    ids=["all-right", "wrong-where-nothing-counts", "one-token", "all-wrong", "classes", "one-bit"],
)
def test_exact_match_counts_rows_and_accuracy_counts_tokens(
    name: str, wrong: Callable[[torch.Tensor], torch.Tensor], value: float, token_accuracy: float
) -> None:
    task = get_task(name)
    model: Any = Oracle(task, 10, wrong)
    found = measure(model, task, 10, 128)
    assert (found.metric, found.samples) == (task.metric, 128)
    assert found.value == pytest.approx(value)
    assert found.token_accuracy == pytest.approx(token_accuracy)
    assert found.low - 1e-9 <= found.value <= found.high + 1e-9


# The middle four are those of Newcombe (1998), table I.
@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 0, 0.0, 1.0),
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (1000, 1000, 0.9962, 1.0),
    ],
)
def test_wilson_interval(successes: int, trials: int, low: float, high: float) -> None:
    assert list(wilson(successes, trials)) == pytest.approx([low, high], abs=5e-5)


def test_a_row_says_what_was_measured_of_what_where_and_when(trained: Trainer) -> None:
    result = measure(trained.model, trained.task, 4, 10)
    row = row_of(TINY, 30, 4, result, torch.device("cpu"))
    assert row.keys() == {
        "task", "method", "position", "length", "metric", "value", "low", "high", "token_accuracy", "samples",
        "seconds", "recipe", "seed", "step", "config", "time", "commit", "command", "device", "torch", "python",
        "purpose", "variant", "rates", "trained_to",
    }  # fmt: skip
    assert (row["task"], row["method"], row["position"], row["length"]) == ("copy", "asentmax", "nape", 4)
    assert (row["recipe"], row["config"]) == ("longspan/copy/nape/asentmax/smoke", fingerprint(TINY))
    assert "cores" in row["device"]


def test_a_length_is_measured_when_its_step_has_a_row_of_enough_samples(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    wanted = {64: 10, 128: 10, 256: 10, 512: 10, 1024: 5}
    assert lengths_measured(path, 5, wanted) == set()
    rows = [(5, 64, 10), (5, 128, 9), (4, 256, 10), (5, 512, 100), (5, 1024, 5), (5, 2048, 10)]
    append_rows(path, [{"step": step, "length": length, "samples": samples} for step, length, samples in rows])
    append_rows(path, [{"step": 5, "length": 256, "samples": 10, "purpose": "validation"}])
    assert lengths_measured(path, 5, wanted) == {64, 512, 1024}
    assert lengths_measured(path, 5, wanted, "validation") == {256}


def test_few_samples_will_do_at_long_lengths_and_validation_ends_at_8_times_the_training_length() -> None:
    config = tiny(test_lengths=[65536, 6, 8192, 16384], test_samples=1000)
    assert samples_at(config, "test") == {6: 1000, 8192: 1000, 16384: 200, 65536: 200}
    assert list(samples_at(config, "test")) == [6, 8192, 16384, 65536]
    assert samples_at(config, "validation") == {6: 1000, 12: 1000, 24: 1000, 48: 1000}
    assert samples_at(tiny(test_lengths=[16384], test_samples=20), "test") == {16384: 20}


def test_the_seeds_of_one_config_share_a_variant() -> None:
    one, other, faster = (
        identity(config) for config in (TINY, tiny(seed=1), tiny(optimizer__learning_rate=0.5, average=None))
    )
    assert one["config"] != other["config"]
    assert one["variant"] == other["variant"] != faster["variant"]
    assert (one["rates"], faster["rates"]) == ("Muon 0.02, AdamW 0.003", "Muon 0.02, AdamW 0.5")
    assert identity(tiny(optimizer__name="adamw"))["rates"] == "AdamW 0.003"
    assert one["trained_to"] == 6


def test_a_length_that_cannot_be_is_refused() -> None:
    task = get_task("mqmtar", alphabet=16, num_words=64, num_queries=2)
    with pytest.raises(ValueError, match="fewer than the 2 queries"):
        measure(Decoder(TINY.model), task, 5, 10)


@pytest.mark.parametrize("length", [-1, 0])
def test_a_length_that_no_sample_has_is_told(trained: Trainer, length: int) -> None:
    with pytest.raises(ValueError, match=f"copy: length {length} is too short"):
        measure(trained.model, trained.task, length, 4)


# Of the tokens of every task's first 70 test samples at length 64, and of its targets.
CHECKSUMS = {
    "2back": "0abef3fd4e4e",
    "copy": "cf4acc9cb1c9",
    "delayed_copy": "0207317169e8",
    "flip_flop_dense": "b33d91798b18",
    "flip_flop_sparse": "2b89ebeae2f9",
    "local_count": "bb3f7ffa99c6",
    "mqmtar": "d239cf9be588",
    "reverse": "6583056d587c",
    "sort": "8f61119eeead",
}


@pytest.mark.parametrize("name", CHECKSUMS)
def test_test_samples_are_those_of_every_published_row(name: str) -> None:
    """Rows are compared with those of long ago, which are only comparable where the samples are the same."""
    (batch,) = ladder._batches(get_task(name), 64, 70, "test", 70)
    digest = hashlib.blake2b(digest_size=6)
    for part in batch[:2]:
        digest.update(part.numpy().tobytes())
    assert digest.hexdigest() == CHECKSUMS[name]
