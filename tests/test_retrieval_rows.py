"""Rows of the demo in the words of the other tasks', and the rates that validation chooses by them."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longspan.cli import app
from longspan.paper.max_retrieval import LENGTHS
from longspan.paper.tables import get_table
from longspan.publish import page, reported_rows
from longspan.report import rows_under, table_lines
from longspan.results import Row, append_rows
from longspan.retrieval_rows import in_common_words, learning_rate_of, recipe_of
from longspan.selection import choose


def rows_of(method: str, validated: dict[str, float] | None, tested: float, **told: Any) -> list[Row]:
    """A run as the demo writes it: a row a length, each with what validation said."""
    row: Row = {"task": "max_retrieval", "method": method, "seed": 0, "training": "demo", "steps": 5000}
    row |= {"samples": 200, "commit": "abc", "command": f"longspan demo --rate {told.get('learning_rate')}"}
    if validated is not None:
        row |= {"validation_accuracy": validated, "validation_samples": 800}
    return [row | told | {"length": length, "accuracy": tested} for length in LENGTHS]


def test_rows_older_than_the_field_had_the_rate_of_their_training() -> None:
    assert learning_rate_of({"learning_rate": 5e-4, "training": "paper"}) == 5e-4
    assert learning_rate_of({"training": "paper"}) == 1e-3
    assert learning_rate_of({"training": "demo"}) == learning_rate_of({}) == 2e-3


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({}, "demo/max_retrieval/none/asentmax, gamma 3"),
        ({"learning_rate": 2e-3, "steps": 5000}, "demo/max_retrieval/none/asentmax, gamma 3"),
        ({"learning_rate": 4e-3}, "demo/max_retrieval/none/asentmax, gamma 3+optimizer.learning_rate=0.004"),
        ({"steps": 20_000}, "demo/max_retrieval/none/asentmax, gamma 3+steps=20000"),
        ({"training": "paper", "steps": 100_000}, "paper/max_retrieval/none/asentmax, gamma 3"),
    ],
)
def test_a_name_says_what_differs_from_the_training_itself(told: Row, name: str) -> None:
    assert recipe_of({"method": "asentmax", **told}) == name


def test_a_run_has_its_tests_and_each_validation_once() -> None:
    of_another_task = {"task": "copy", "accuracy": 1.0}
    found = list(in_common_words([of_another_task, *rows_of("softmax", {"16": 90.0, "128": 50.0}, 70.0)]))
    assert found[0] is of_another_task
    told = [(row["length"], row["value"], row["samples"], row.get("purpose", "test")) for row in found[1:]]
    assert [each for each in told if each[-1] == "test"] == [(length, 70.0, 200, "test") for length in LENGTHS]
    validations = [each for each in told if each[-1] == "validation"]
    assert validations == [(16, 90.0, 800, "validation"), (128, 50.0, 800, "validation")]
    assert all(row["low"] < row["value"] < row["high"] for row in found[1:])


def test_the_rate_is_chosen_at_8_times_the_length_and_not_by_the_test() -> None:
    slow = rows_of("softmax", {"16": 99.0, "128": 60.0}, 10.0, learning_rate=1e-3)
    own = rows_of("softmax", {"16": 100.0, "128": 50.0}, 90.0, learning_rate=2e-3)
    fast = rows_of("softmax", {"16": 98.0, "128": 55.0}, 80.0, learning_rate=4e-3)
    untold = rows_of("softmax", None, 77.0, seed=1)  # of the recipe's own rate, before rows told it
    rows = list(in_common_words([*untold, *own, *slow, *fast]))
    (choice,) = choose(rows)
    assert choice.chosen.rates == "AdamW 0.001"
    assert choice.reason == "validation at 128: 60.0 against 55.0"
    assert sorted(each.rates for each in choice.others) == ["AdamW 0.002", "AdamW 0.004"]
    lines = table_lines(reported_rows(rows, [choice]), get_table("max_retrieval"))
    (line,) = (line for line in lines if line.source == "demo")
    assert (line.method, line.cells[4096].mean, line.cells[4096].seeds) == ("softmax", 10.0, 1)
    text = page(rows)
    assert "| AdamW 0.001 | validation at 128: 60.0 against 55.0 | 1 | 5000 |" in text
    assert "| `longspan demo --rate 0.001` |" in text
    assert "| none | softmax | demo | AdamW 0.004 | 1 | 80.0 |" in text


def test_of_a_run_that_was_made_again_the_later_counts() -> None:
    rows = list(in_common_words([*rows_of("top-2", None, 40.0), *rows_of("top-2", {"128": 90.0}, 60.0, commit="def")]))
    assert {row["commit"] for row in rows} == {"def"}
    assert len(rows) == len(LENGTHS) + 1


def test_other_steps_are_another_line() -> None:
    rows = [*rows_of("top-2", None, 40.0), *rows_of("top-2", None, 60.0, steps=20_000)]
    lines = table_lines(list(in_common_words(rows)), get_table("max_retrieval"))
    ours = {line.source: line.cells[4096].mean for line in lines if line.source != "published"}
    assert ours == {"demo": 40.0, "demo+steps=20000": 60.0}


def test_a_plan_for_sweeps_has_no_run_of_the_demo(tmp_path: Path) -> None:
    append_rows(tmp_path / "rows.jsonl", rows_of("entmax 2", {"128": 50.0}, 40.0, learning_rate=1e-3))
    assert len(list(rows_under([tmp_path]))) == len(LENGTHS) + 1
    output = CliRunner().invoke(app, ["choose", "--rows", str(tmp_path)], catch_exceptions=False).output
    assert output.startswith(
        "# longspan demo, demo/max_retrieval/none/entmax 2+optimizer.learning_rate=0.001 0 1 2  # "
    )
