"""The choice of a learning rate: by validation rows alone, by shorter lengths where the longer ones are level."""

from pathlib import Path

import pytest
from made_up_rows import result, run, whole
from typer.testing import CliRunner

from longspan.cli import app
from longspan.cli.sweep import _planned
from longspan.cli.training import config_of
from longspan.evaluate.ladder import identity
from longspan.paper.names import config_named, parse_name
from longspan.paper.recipes import recipe
from longspan.results import Row, append_rows
from longspan.selection import CellKey, Choice, choose, chosen_rows

BASE = "longspan/copy/nape/softmax"
RATE = recipe(BASE).optimizer.learning_rate
LOW, OWN, HIGH = f"{BASE}+optimizer.learning_rate={RATE / 2}", BASE, f"{BASE}+optimizer.learning_rate={RATE * 2}"
RECIPES = {"low": LOW, "own": OWN, "high": HIGH}


def one(rows: list[Row]) -> Choice:
    (choice,) = choose(rows)
    return choice


def validated(name: str, *by_seed: dict[int, float], token_accuracy: float | None = None) -> list[Row]:
    rows = [row for seed, scores in enumerate(by_seed) for row in whole(name, seed, scores, {64: 50.0})]
    for row in rows:
        if token_accuracy is not None and "length" in row:
            row["token_accuracy"] = token_accuracy
    return rows


CASES: dict[str, tuple[dict[str, dict[int, float]], str, str]] = {
    "highest-at-8x": (
        {"low": {512: 10.0}, "own": {512: 30.0}, "high": {512: 20.0}},
        "own",
        "at 512: 30.0 against 20.0",
    ),
    "level-at-8x": ({"low": {512: 0, 256: 5.0}, "own": {512: 0, 256: 1.0}}, "low", "at 256: 5.0 against 1.0"),
    "level-at-4x": ({"low": {512: 0, 256: 0, 128: 1}, "own": {512: 0, 256: 0, 128: 2}}, "own", "at 128: 2.0"),
    "one-length": ({"low": {512: 1.0}, "own": {512: 0.0, 256: 99.0}}, "low", "at 512: 1.0 against 0.0"),
    "only-8x-counts-first": ({"low": {512: 1.0, 64: 0}, "high": {512: 0.5, 64: 100}}, "low", "at 512"),
    "too-long-to-count": ({"low": {1024: 100.0, 512: 1.0}, "own": {1024: 0.0, 512: 2.0}}, "own", "at 512: 2.0"),
    "level-everywhere": ({"low": {512: 0.0}, "high": {512: 0.0}, "own": {512: 0.0}}, "own", "level with another"),
    "level-without-own": ({"high": {512: 7.0}, "low": {512: 7.0}}, "low", "level with another"),
    "alone": ({"high": {512: 7.0}}, "high", "the only one tried"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rule(case: str) -> None:
    scores, expected, reason = CASES[case]
    rows = [row for name, each in scores.items() for row in validated(RECIPES[name], each)]
    for order in (rows, rows[::-1]):
        choice = one(order)
        assert choice.chosen.recipe == RECIPES[expected]
        assert reason in choice.reason
        assert {each.recipe for each in choice.others} == {RECIPES[name] for name in scores} - {RECIPES[expected]}


def test_where_nothing_is_right_the_accuracy_by_token_decides() -> None:
    rows = validated(LOW, {512: 0.0, 256: 0.0}, token_accuracy=12.0)
    rows += validated(OWN, {512: 0.0, 256: 0.0}, token_accuracy=11.0)
    choice = one(rows)
    assert choice.chosen.recipe == LOW
    assert choice.reason == "validation by token: 12.0 against 11.0"


def test_test_rows_play_no_part() -> None:
    rows = validated(LOW, {512: 10.0}) + validated(OWN, {512: 9.0})
    rows += [result(OWN, 0, length, 100.0) for length in (128, 512, 4096)]
    assert one(rows).chosen.recipe == LOW


def test_the_mean_is_over_the_seeds_that_every_rate_has() -> None:
    grid = validated(LOW, {512: 60.0}) + validated(OWN, {512: 50.0})
    assert one(grid).chosen.recipe == LOW
    more = [row for seed in (1, 2) for row in whole(LOW, seed, {512: 0.0}, {})]
    assert one(grid + more).chosen.recipe == LOW
    assert one(validated(LOW, {512: 60.0}, {512: 0.0}) + validated(OWN, {512: 50.0}, {512: 50.0})).chosen.recipe == OWN


def test_a_run_that_diverged_counts_as_nothing_right() -> None:
    lucky = [*validated(HIGH, {512: 90.0}), run(HIGH, 1, ending="diverged", step=10, escape_step=None, loss=None)]
    steady = validated(OWN, {512: 50.0}, {512: 50.0})
    assert one(lucky + steady).chosen.recipe == OWN
    assert one([*lucky[:-1], *steady]).chosen.recipe == HIGH
    measured = whole(HIGH, 1, {512: 80.0}, {}, ending="diverged", step=900)  # by the checkpoint that was best before
    assert one([*lucky[:-1], *measured, *steady]).chosen.recipe == OWN
    went_on = run(HIGH, 1, time="2026-01-02T00:00:00Z")
    assert one([*lucky[:-1], *measured, went_on, *steady]).chosen.recipe == HIGH
    cut = run(HIGH, 1, ending="cut", step=10)  # killed, which says nothing about the rate
    assert one([*lucky[:-1], cut, *steady]).chosen.recipe == HIGH


def test_a_rate_without_validation_rows_does_not_compete_and_is_told() -> None:
    choice = one([*validated(OWN, {512: 1.0}), *validated(LOW, {512: 0.5}), run(HIGH, 0)])
    assert choice.chosen.recipe == OWN
    assert choice.reason == "validation at 512: 1.0 against 0.5; 1 without validation rows"
    nothing = one([run(HIGH, 0), run(OWN, 0), run(LOW, 0)])
    assert nothing.chosen.recipe == OWN
    assert nothing.reason.startswith("no validation rows")


def test_an_edit_that_says_the_recipes_own_rate_is_that_rate() -> None:
    same = f"{BASE}+optimizer.learning_rate={RATE}"
    choice = one(validated(OWN, {512: 1.0}) + whole(same, 1, {512: 2.0}, {}))
    assert choice.chosen.seeds == [0, 1]
    assert choice.others == ()


def test_recipes_and_other_edits_are_cells_of_their_own() -> None:
    recipes = [OWN, "paper/copy/nape/softmax", f"{BASE}+steps=500", f"{LOW}+log_every=7", "longspan/copy/rope/softmax"]
    choices = choose([row for name in recipes for row in validated(name, {512: 1.0})])
    assert [choice.cell for choice in choices] == [
        CellKey("copy", "nape", "softmax", "longspan"),
        CellKey("copy", "nape", "softmax", "longspan+steps=500"),
        CellKey("copy", "nape", "softmax", "paper"),
        CellKey("copy", "rope", "softmax", "longspan"),
    ]


def test_settings_of_our_recipe_compete_as_rates_do() -> None:
    setting = "model.attention.qk_noise=0.5"
    choice = one(validated(OWN, {512: 1.0}) + validated(f"{BASE}+{setting}", {512: 2.0}))
    assert choice.cell.family == "longspan"
    assert choice.chosen.recipe == f"{BASE}+{setting}"
    assert "qk_noise=0.5" in choice.chosen.rates
    assert choice.reason == "validation at 512: 2.0 against 1.0"
    assert [each.own for each in choice.others] == [True]
    changed = validated(f"paper/copy/nape/softmax+{setting}", {512: 1.0})
    assert one(changed).cell.family == f"paper+{setting}"


def test_rows_of_an_earlier_form_of_a_recipe_are_set_aside() -> None:
    old = [{**row, "variant": "before", "time": "2025-01-01T00:00:00Z"} for row in validated(OWN, {512: 99.0})]
    choice = one([*validated(OWN, {512: 1.0}), *old])
    assert {row["variant"] for row in choice.chosen.rows} != {"before"}
    (aside,) = choice.superseded
    assert {row["variant"] for row in aside.rows} == {"before"}


def test_the_rows_of_the_chosen_rate_go_under_the_name_of_their_family() -> None:
    rows = validated(f"{LOW}+steps=500+log_every=7", {512: 2.0}) + validated(f"{BASE}+steps=500", {512: 1.0})
    assert {row["recipe"] for row in chosen_rows(choose(rows))} == {f"{BASE}+steps=500"}


def test_the_command_prints_a_plan_of_what_was_chosen(tmp_path: Path) -> None:
    rows = validated(LOW, {512: 2.0}) + validated(OWN, {512: 1.0}) + validated("paper/sort/nape/ssmax", {512: 1.0})
    append_rows(tmp_path / "rows.jsonl", rows)
    args = ["choose", "copy", "--rows", str(tmp_path), "--seeds", "2"]
    output = CliRunner().invoke(app, args, catch_exceptions=False).output
    rates = identity(config_of(LOW, 0, False, []))["rates"]
    assert output == f"{LOW} 0 1  # {rates}: validation at 512: 2.0 against 1.0\n"
    (tmp_path / "plan.txt").write_text(output)
    assert list(_planned(tmp_path / "plan.txt", [])) == [(LOW, [0, 1])]


def test_a_plan_asks_a_sweep_for_nothing_that_it_has_no_recipe_for(tmp_path: Path) -> None:
    language = {"task": "s-niah-1", "recipe": "lm/50m/nape/softmax+needles", "length": 64, "seed": 0, "value": 1.0}
    retrieval = {"task": "max_retrieval", "method": "top-2", "length": 64, "seed": 0, "accuracy": 1.0, "samples": 9}
    append_rows(tmp_path / "rows.jsonl", [language, retrieval, *validated(OWN, {512: 1.0})])
    output = CliRunner().invoke(app, ["choose", "--rows", str(tmp_path)], catch_exceptions=False).output
    assert "# longspan lm, lm/50m/nape/softmax+needles 0 1 2  #" in output
    assert "# longspan demo, demo/max_retrieval/none/top-2 0 1 2  #" in output
    (tmp_path / "plan.txt").write_text(output)
    assert list(_planned(tmp_path / "plan.txt", [])) == [(OWN, [0, 1, 2])]


def test_a_plan_can_be_read_when_an_edit_was_typed_with_spaces(tmp_path: Path) -> None:
    edits = ("test_lengths=[6, 12]", 'training_options={"few": 0.5}', "optimizer.learning_rate=1e-3")
    one_word = f'{BASE}+test_lengths=[6,12]+training_options={{"few":0.5}}+optimizer.learning_rate=1e-3'
    assert config_of(BASE, 0, False, edits).name == one_word
    rows = [{**row, "recipe": "+".join([BASE, *edits])} for row in validated(OWN, {512: 1.0})]  # as names were once
    append_rows(tmp_path / "rows.jsonl", rows)
    output = CliRunner().invoke(app, ["choose", "--rows", str(tmp_path)], catch_exceptions=False).output
    (tmp_path / "plan.txt").write_text(output)
    assert list(_planned(tmp_path / "plan.txt", [])) == [(one_word, [0, 1, 2])]


def test_rows_of_other_kinds_are_no_part_of_it() -> None:
    assert (
        choose(
            [
                {"task": "max_retrieval", "method": "softmax", "accuracy": 1.0},
                result(OWN, 0, 64, 1.0) | {"recipe": "mine"},
            ]
        )
        == []
    )


@pytest.mark.parametrize(
    "name",
    [
        BASE,
        f"{BASE}/smoke",
        f"{BASE}/smoke+steps=7+optimizer.learning_rate=1e+3",
        "paper/2back/rope/entmax+average=null",
    ],
)
def test_a_name_is_taken_apart_and_put_together(name: str) -> None:
    parsed = parse_name(name)
    assert parsed is not None
    assert str(parsed) == name
    assert config_named(parsed, seed=3).name == name
    assert config_named(parsed, seed=3).seed == 3


@pytest.mark.parametrize("name", ["", "copy", "my own", "a/b/c", "a/b/c/d/e/f", "a//c/d"])
def test_a_free_name_is_no_recipes(name: str) -> None:
    assert parse_name(name) is None


def test_a_size_that_there_is_not_is_refused() -> None:
    name = parse_name(f"{BASE}/huge")
    assert name is not None
    with pytest.raises(ValueError, match="there is no size 'huge'"):
        config_named(name)


def test_a_run_that_failed_counts_as_nothing_right() -> None:
    lucky = [*validated(HIGH, {512: 90.0}), run(HIGH, 1, ending="failed", step=10)]
    assert one([*lucky, *validated(OWN, {512: 50.0}, {512: 50.0})]).chosen.recipe == OWN


def test_the_accuracy_by_token_is_the_mean_over_the_lengths() -> None:
    def rows(name: str, by_token: dict[int, float]) -> list[Row]:
        return [result(name, 0, at, 0.0, "validation", token_accuracy=value) for at, value in by_token.items()]

    choice = one(rows(LOW, {512: 10.0, 256: 90.0, 128: 10.0}) + rows(OWN, {512: 20.0, 256: 20.0, 128: 20.0}))
    assert choice.chosen.recipe == LOW
    assert choice.reason == "validation by token: 36.7 against 20.0"


def test_the_lowest_rate_is_that_of_the_lowest_number() -> None:
    small, smaller = (f"{BASE}+optimizer.learning_rate={rate}" for rate in ("0.0001", "1e-05"))
    choice = one(validated(small, {512: 7.0}) + validated(smaller, {512: 7.0}))
    assert "1e-05" in choice.chosen.rates
    assert choice.chosen.recipe == smaller


def test_the_later_form_of_a_recipe_is_that_of_the_latest_row() -> None:
    """One that was begun first and went on after the other."""
    first, last, between = ("2025-01-01T00:00:00Z", "2025-01-03T00:00:00Z", "2025-01-02T00:00:00Z")
    rows = [result(OWN, seed, 512, 1.0, "validation", variant="ours", time=at) for seed, at in enumerate((first, last))]
    choice = one([*rows, result(OWN, 0, 512, 99.0, "validation", variant="other", time=between)])
    assert {row["variant"] for row in choice.chosen.rows} == {"ours"}
