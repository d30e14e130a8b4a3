"""Max Retrieval from the sampler to the figures, at a size for seconds."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from longspan import demo
from longspan.cli import app
from longspan.nn import Adaptive, AdaptiveTemperature, Entmax, NoScale, Softmax
from longspan.nn.retriever import Retrieval, Retriever
from longspan.paper.max_retrieval import ACCURACY, DEMO_ROWS, LENGTHS, paper_row
from longspan.results import Row, append_rows, provenance, read_rows
from longspan.tasks.max_retrieval import MaxRetrieval, MaxRetrievalBatch

TINY = demo.DemoConfig(steps=4, samples=20, lengths=(16, 64))


@pytest.mark.parametrize("length", [1, 2, 16, 301])
def test_the_target_is_the_class_of_the_largest_item(length: int) -> None:
    batch = MaxRetrieval().sample(500, length, generator=torch.Generator().manual_seed(length))
    assert batch.items.shape == (500, length, 11)
    for items, target, best in zip(batch.items.tolist(), batch.target.tolist(), batch.best.tolist(), strict=True):
        priorities = [item[0] for item in items]
        winner = priorities.index(max(priorities))
        assert winner == best
        assert items[winner][1:].index(1.0) == target
        assert all(sorted(item[1:]) == [0.0] * 9 + [1.0] for item in items)


def test_samples_come_from_the_generator() -> None:
    first, again, other = (MaxRetrieval().sample(4, 9, generator=torch.Generator().manual_seed(s)) for s in (3, 3, 4))
    assert torch.equal(first.items, again.items)
    assert not torch.equal(first.items, other.items)
    assert len({*first.query.flatten().tolist(), *other.query.flatten().tolist()}) == 8
    assert torch.equal(first.query, again.query)
    with pytest.raises(ValueError, match="at least one item"):
        MaxRetrieval().sample(4, 0)


def test_the_retriever_is_attention_over_projected_items() -> None:
    torch.manual_seed(0)
    model = Retriever(10, 16, Entmax(), Adaptive(16, 1, gamma=3.0, initial_beta=None)).double()
    batch = MaxRetrieval().sample(5, 12)
    items, query = batch.items.double(), batch.query.double()
    logits, weights = model(items, query)
    # Written out: project every item, then attend.
    x, asked = model.embed_items(items), model.embed_query(query)[:, None]
    scale = model.scaler(asked, torch.full((5, 1), 12))
    scores = (model.query(asked) * scale) @ model.key(x).transpose(1, 2) / 4
    expected = Entmax()(scores)
    torch.testing.assert_close(weights[:, None], expected)
    torch.testing.assert_close(logits, model.answer(expected @ model.value(x)).squeeze(1))


@pytest.mark.parametrize("training", ["demo", "paper"])
@pytest.mark.parametrize("number", range(len(demo.contestants())))
def test_each_contestant_trains_and_is_measured(number: int, training: demo.Training) -> None:
    events: list[demo.Event] = []
    contestant = demo.contestants(training)[number]
    demo.compete(contestant, replace(TINY, training=training), events.append)
    rows = [event for event in events if isinstance(event, dict)]
    methods = {contestant.name, *(name for name, _ in contestant.at_inference)}
    assert {(row["method"], row["length"]) for row in rows} == {(m, n) for m in methods for n in TINY.lengths}
    assert all(0 <= row["accuracy"] <= 100 and 0 <= row["weight_on_maximum"] <= 1 for row in rows)
    assert all(paper_row(name) in ACCURACY for name in methods)
    assert {row["training"] for row in rows} == {training}


def test_every_row_of_the_papers_table_has_a_contestant() -> None:
    names = [name for rival in demo.contestants() for name in (rival.name, *(other for other, _ in rival.at_inference))]
    assert [contestant.name for contestant in demo.contestants("paper")] == [rival.name for rival in demo.contestants()]
    # The first row is another team's measurement of the softmax below it.
    assert sorted(map(paper_row, names)) == sorted(set(ACCURACY) - {"softmax (Velickovic et al.)"})


def test_the_papers_temperatures_divide_the_bare_products() -> None:
    by_name = {contestant.name: contestant for contestant in demo.contestants()}
    scores = torch.randn(1, 1, 3, 5, dtype=torch.float64)  # q . k / sqrt(width)
    found = by_name["softmax, temperature 0.1"].normalizer()(scores)
    torch.testing.assert_close(found, (scores * math.sqrt(demo.WIDTH) / 0.1).softmax(-1))


def _watched_rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The rates of the steps that are taken from now on."""
    rates = []
    step = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW, *arguments: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    return rates


def test_the_papers_training_keeps_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = _watched_rates(monkeypatch)
    config = replace(demo.PAPER_TRAINING, steps=5, samples=2, lengths=(16,))
    assert demo.PAPER_TRAINING.steps == 100_000
    demo.compete(demo.contestants("paper")[0], config, lambda event: None)
    assert rates == [1e-3] * 5


def test_the_same_seed_gives_the_same_rows() -> None:
    def rows() -> list[demo.Event]:
        events: list[demo.Event] = []
        demo.compete(demo.CONTESTANTS[1], TINY, events.append)
        return [event | {"seconds": None} if isinstance(event, dict) else event for event in events]

    assert rows() == rows()


def test_rows_say_the_rate_and_what_it_is_chosen_by(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = _watched_rates(monkeypatch)
    events: list[demo.Event] = []
    softmax = demo.CONTESTANTS[0]
    demo.compete(softmax, replace(TINY, learning_rate=5e-4, warmup=1), events.append)
    assert max(rates) == 5e-4
    rows = [event for event in events if isinstance(event, dict)]
    assert [json.loads(json.dumps(row)) for row in rows] == rows
    assert {row["learning_rate"] for row in rows} == {5e-4}
    assert {row["validation_samples"] for row in rows} == {80}
    assert all(list(row["validation_accuracy"]) == ["16", "32", "64", "128"] for row in rows)
    assert all(0 <= accuracy <= 100 for row in rows for accuracy in row["validation_accuracy"].values())
    # Every row of a method has the same, whatever it was tested at.
    assert len({(row["method"], str(row["validation_accuracy"])) for row in rows}) == len(softmax.measured_as)


def test_validation_counts_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[MaxRetrievalBatch] = []
    sample = MaxRetrieval.sample

    def kept(*arguments: Any, **named: Any) -> MaxRetrievalBatch:
        drawn.append(sample(*arguments, **named))
        return drawn[-1]

    def always_3(items: Tensor, query: Tensor) -> Retrieval:
        return Retrieval(torch.eye(10)[[3] * len(items)], torch.ones(items.shape[:2]) / items.shape[1])

    monkeypatch.setattr(MaxRetrieval, "sample", kept)
    found = demo.validate(cast(Retriever, always_3), TINY)
    threes = {str(batch.items.shape[1]): batch.target.tolist().count(3) for batch in drawn}
    assert found == {
        "validation_accuracy": {n: 100 * count / 80 for n, count in threes.items()},
        "validation_samples": 80,
    }
    assert list(threes) == ["16", "32", "64", "128"]


def test_a_normalizer_that_takes_the_place_of_the_trained_one_is_validated_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "validate", lambda model, config: {"validated": type(model.normalizer)})
    events: list[demo.Event] = []
    demo.compete(demo.CONTESTANTS[0], TINY, events.append)
    found = {(event["method"], event["validated"]) for event in events if isinstance(event, dict)}
    assert found == {("softmax", Softmax), ("adaptive temperature", AdaptiveTemperature)}


def test_validation_shares_no_samples_with_the_test_and_training(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: dict[str, set[int]] = {"train": set(), "validation": set(), "test": set()}
    purpose = "train"
    manual_seed = torch.Generator.manual_seed

    class Watched(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            seeds[purpose].add(seed % 2**32)  # what torch keeps of it
            return manual_seed(self, seed)

    monkeypatch.setattr(torch, "Generator", Watched)
    model = Retriever(10, 8, Entmax(), NoScale())
    for seed in range(5):
        config = replace(TINY, steps=1, batch=1, samples=1, seed=seed)
        purpose = "train"
        list(demo.train(model, config))
        purpose = "validation"
        demo.validate(model, config)
        purpose = "test"
        for length in (16, 32, 64, 128):
            demo.evaluate(model, length, config)
    assert [len(found) for found in seeds.values()] == [5, 20, 20]
    assert len(set.union(*seeds.values())) == 45
    assert max(demo.DemoConfig().validation_lengths) == 8 * demo.DemoConfig().longest


def test_samples_of_the_test_are_those_of_older_rows() -> None:
    """Drawn here as they were before there was validation, by which the rows in the repository are."""
    torch.manual_seed(0)
    model, config = Retriever(10, 16, Entmax(), NoScale()), replace(TINY, samples=17, seed=2)
    generator = torch.Generator().manual_seed(2 + 1_000_003 * 4096)
    logits, targets = [], []
    for size in (16, 1):  # as many as fit in 2^16 items
        batch = MaxRetrieval().sample(size, 4096, generator=generator)
        logits.append(model(batch.items, batch.query).logits)
        targets.append(batch.target)
    demo.validate(model, config)
    right = (torch.cat(logits).argmax(-1) == torch.cat(targets)).sum().item()
    assert demo.evaluate(model, 4096, config)["accuracy"] == 100 * right / 17


def test_a_little_training_learns_the_task() -> None:
    events: list[demo.Event] = []
    contestant = next(contestant for contestant in demo.CONTESTANTS if contestant.name == "asentmax")
    demo.compete(contestant, demo.DemoConfig(steps=300, samples=300, lengths=(16,)), events.append)
    (row,) = (event for event in events if isinstance(event, dict))
    assert row["accuracy"] > 90


def test_the_command_writes_rows_and_figures_and_shows_the_paper(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--steps", "2", "--samples", "3"])
    assert result.exit_code == 0, result.output
    rows = list(read_rows(tmp_path / "rows.jsonl"))
    assert len(rows) == 6 * len(LENGTHS)
    assert {"commit", "command", "device", "torch"} <= rows[0].keys()
    assert "62.7" in result.output
    for figure in ("accuracy.png", "attention.png"):
        assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.part.png"))


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    words = ["demo", "--out", str(tmp_path), "--steps", "2", "--samples", "3", "--method", "top-4"]
    assert CliRunner().invoke(app, words).exit_code == 0
    path = tmp_path / "rows.jsonl"
    whole = list(read_rows(path))
    assert {row["method"] for row in whole} == {"top-4"}
    begun = {**whole[0], "method": "entmax 2"}  # stopped after its first length
    path.unlink()
    append_rows(path, [*whole, begun])
    result = CliRunner().invoke(app, [*words, "--method", "entmax 2", "--resume"])
    assert result.exit_code == 0, result.output
    rows = list(read_rows(path))
    assert rows[: len(whole)] == whole
    assert [(row["method"], row["length"]) for row in rows[len(whole) :]] == [("entmax 2", n) for n in LENGTHS]


def test_what_a_method_was_not_measured_as_is_missing_too(tmp_path: Path) -> None:
    words = ["demo", "--out", str(tmp_path), "--steps", "2", "--samples", "3", "--method", "softmax"]
    assert CliRunner().invoke(app, words).exit_code == 0
    path = tmp_path / "rows.jsonl"
    whole = [(row["method"], row["length"]) for row in read_rows(path)]
    assert whole[-1] == ("adaptive temperature", LENGTHS[-1])  # softmax, trained once, with another normaliser
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert CliRunner().invoke(app, [*words, "--resume"]).exit_code == 0
    assert [(row["method"], row["length"]) for row in read_rows(path)] == whole


def test_rows_of_another_run_are_not_gone_on_with(tmp_path: Path) -> None:
    words = ["demo", "--out", str(tmp_path), "--steps", "2", "--samples", "3", "--method", "top-2"]
    assert CliRunner().invoke(app, words).exit_code == 0
    before = (tmp_path / "rows.jsonl").read_bytes()
    result = CliRunner().invoke(app, [*words, "--resume", "--seed", "1"])
    assert result.exit_code == 2
    assert "another run" in result.output
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    result = CliRunner().invoke(app, [*words, "--method", "top-3"])
    assert result.exit_code == 2
    assert "'top-4'" in result.output
    assert (tmp_path / "rows.jsonl").read_bytes() == before


def test_rows_of_another_rate_are_not_gone_on_with(tmp_path: Path) -> None:
    words = ["demo", "--out", str(tmp_path), "--steps", "2", "--samples", "3", "--method", "top-2"]
    assert CliRunner().invoke(app, [*words, "--rate", "5e-4"]).exit_code == 0
    path = tmp_path / "rows.jsonl"
    rows, before = list(read_rows(path)), path.read_bytes()
    assert {row["learning_rate"] for row in rows} == {5e-4}
    result = CliRunner().invoke(app, [*words, "--resume"])
    assert result.exit_code == 2
    assert "another run" in result.output
    assert path.read_bytes() == before
    path.unlink()
    added = ("learning_rate", "validation_accuracy", "validation_samples")
    old = [{key: value for key, value in row.items() if key not in added} for row in rows]
    append_rows(path, old)
    assert CliRunner().invoke(app, [*words, "--resume", "--rate", "5e-4"]).exit_code == 2
    assert CliRunner().invoke(app, [*words, "--resume"]).exit_code == 0  # what rows that do not tell were trained at
    assert list(read_rows(path)) == old


def test_rows_stay_until_there_are_new_ones_and_those_of_another_run_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["demo", "--out", str(tmp_path), "--steps", "2", "--samples", "3", "--method", "top-2"]
    assert CliRunner().invoke(app, words).exit_code == 0
    path = tmp_path / "rows.jsonl"
    before = path.read_bytes()
    for other in (["--seed", "1"], ["--rate", "5e-4"]):
        result = CliRunner().invoke(app, [*words, *other])
        assert result.exit_code == 2
        assert "another run" in result.output
        assert path.read_bytes() == before
    new: list[Row] = []

    def stopped(*_: object) -> Iterator[Row]:
        yield from new
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", stopped)
    assert CliRunner().invoke(app, words).exit_code == 130
    assert path.read_bytes() == before
    new += [{**row, "accuracy": 0.0} for row in list(read_rows(path))[:2]]
    assert CliRunner().invoke(app, words).exit_code == 130
    assert [row["accuracy"] for row in read_rows(path)] == [0.0, 0.0]


@pytest.mark.parametrize("rate", ["0", "-1e-3", "nan", "inf"])
def test_a_rate_is_above_0(rate: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--rate", rate])
    assert result.exit_code == 2
    assert "above 0" in result.output
    assert f"got {float(rate):g}" in result.output
    assert not list(tmp_path.iterdir())


def test_methods_command_lists_every_method() -> None:
    result = CliRunner().invoke(app, ["methods"])
    assert result.exit_code == 0
    assert "asentmax" in result.output


def test_rows_survive_a_crash_and_tell_of_damage(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    append_rows(path, [{"a": 1}, {"a": 2}])
    append_rows(path, [{"a": 3}])
    assert [row["a"] for row in read_rows(path)] == [1, 2, 3]
    with path.open("a") as file:
        file.write('{"a": 4')
    assert [row["a"] for row in read_rows(path)] == [1, 2, 3]
    for damaged, told in (
        (b'{"a": 1}\n{"a"\n{"a": 3}\n', "line 2"),
        (b'{"a": 1}\ngarbage\n', "line 2"),  # a whole line: no crash cut it
        (b'{"a": "\xff"}\n', "rows.jsonl: not rows of JSON"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=told):
            list(read_rows(path))
    assert json.dumps(provenance())


def test_the_papers_table_is_whole() -> None:
    assert all(tuple(row) == LENGTHS for row in ACCURACY.values())
    assert ACCURACY["asentmax, gamma 3"][4096] == 62.7
    assert set(DEMO_ROWS.values()) <= set(ACCURACY)


def test_the_commit_can_be_told_where_the_history_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPAN_COMMIT", "0123456789ab")
    assert provenance()["commit"] == "0123456789ab"
    monkeypatch.delenv("LONGSPAN_COMMIT")
    monkeypatch.setenv("PATH", "")
    assert provenance()["commit"] is None


def test_a_command_does_not_say_where_files_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["/here/bench.py", "--lengths", "8", "--out", "/there/of/mine/rows.jsonl", "--log=/x/y", "runs/a"]
    )
    assert provenance()["command"] == "bench.py --lengths 8 --out rows.jsonl --log=y runs/a"
    monkeypatch.setattr("sys.argv", ["longspan", "train", "--set", "validate_lengths=[64, 128]"])
    assert provenance()["command"] == "longspan train --set 'validate_lengths=[64, 128]'"
    arguments = ["/runs/of/mine/copy+steps=30+norm=true-s1", "--out=/x/a=b", "--set=corpus=/texts/of/mine"]
    monkeypatch.setattr("sys.argv", ["longspan", "evaluate", *arguments])
    assert provenance()["command"] == "longspan evaluate copy+steps=30+norm=true-s1 --out=a=b --set=corpus=mine"
