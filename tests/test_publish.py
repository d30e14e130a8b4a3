"""The page of results: every number from rows, and the committed page from the committed rows."""

import re
from pathlib import Path

import pytest
from made_up_rows import result, run, whole
from typer.testing import CliRunner

from longspan import cli
from longspan.ladders import main_panels, task_panels
from longspan.paper.recipes import recipe
from longspan.paper.tables import get_table
from longspan.plots import COLOURS
from longspan.publish import MARKS, front, page, put_between, reported_rows
from longspan.report import rows_under
from longspan.results import Row, append_rows
from longspan.retrieval_rows import in_common_words
from longspan.selection import choose

ROOT = Path(__file__).parent.parent
BEGIN, END = (mark.format("results") for mark in MARKS)
SOFTMAX, ASENTMAX = "longspan/copy/nape/softmax", "longspan/copy/nape/asentmax"
FASTER = f"{SOFTMAX}+optimizer.learning_rate={2 * recipe(SOFTMAX).optimizer.learning_rate}"
STUCK = {"escape_step": None, "loss": 1.75}


def made_up() -> list[Row]:
    """Two methods, two recipes, two rates, one run that diverged, one on the plateau, one that was stopped."""
    rows: list[Row] = []
    for seed in range(3):
        rows += whole(ASENTMAX, seed, {512: 90.0 + seed}, {64: 100.0, 4096: 70.0 + seed})
        rows += whole(SOFTMAX, seed, {512: 40.0}, {64: 99.0, 4096: 10.0 * seed})
    rows += whole(FASTER, 0, {512: 39.0}, {64: 98.0, 4096: 77.7})
    rows += whole("paper/copy/nape/softmax", 0, {512: 1.0}, {64: 55.5}, gpu_seconds=720.0, **STUCK)
    rows.append(run("longspan/copy/nape/entmax", 0, ending="diverged", step=321, **STUCK))
    rows.append(run("longspan/copy/nape/entmax", 1, ending="stopped", step=1, **(STUCK | {"loss": None})))
    rows += [result("longspan/copy/nape/softmax/smoke", 0, 12, 33.3)]
    rope = "longspan/flip_flop_sparse/rope/softmax"
    rows += [result(rope, 0, 64, 81.0), result(f"{rope}+model.attention.rope_factor=4", 0, 64, 82.0)]
    rows += [result(f"{rope}+model.attention.rope_factor=null", 0, 64, 83.0)]
    demo = {"task": "max_retrieval", "method": "asentmax", "length": 16, "accuracy": 97.5, "samples": 200, "seed": 0}
    return [*rows, *in_common_words([{**demo, "commit": "abc", "command": "longspan demo"}])]


def block(text: str, heading: str) -> str:
    """What stands under a heading."""
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, heading
    return found[2]


@pytest.fixture(scope="module")
def text() -> str:
    return page(made_up())


def test_our_lines_stand_beside_the_papers(text: str) -> None:
    copy = block(text, "`copy`")
    assert "| nape | asentmax | published | 100.0 | 100.0 | 99.9 | 99.7 | 99.4 | 96.3 | 86.6 |" in copy
    assert "| nape | asentmax | longspan | 100.0±0.0 (100.0) |  |  |  |  |  | 71.0±1.0 (72.0) |" in copy
    assert "| nape | softmax | longspan | 99.0±0.0 (99.0) |  |  |  |  |  | 10.0±10.0 (20.0) |" in copy
    assert "| nape | softmax | paper | 55.5 |" in copy
    assert "69.0 to 73.0, 1,000" in copy
    assert "figures/copy.png" in copy
    assert "33.3" not in text  # smoke runs are no results


def test_the_rates_that_were_not_chosen_are_listed_apart(text: str) -> None:
    copy = block(text, "`copy`")
    numbers, _, others = copy.partition("Rates and settings that were not chosen")
    assert "77.7" not in numbers
    assert "77.7" in others
    assert "validation at 512: 40.0 against 39.0" in numbers


def test_a_command_begins_with_the_first_seed_there_is() -> None:
    rows = [row for row in made_up() if row.get("seed", 0) > 0]
    assert f"`longspan sweep '{SOFTMAX}' --seeds 2 --first-seed 1 --evaluate` |" in block(page(rows), "`copy`")


def test_every_line_has_the_command_that_makes_it_again(text: str) -> None:
    copy = block(text, "`copy`")
    assert f"`longspan sweep '{SOFTMAX}' --seeds 3 --evaluate` |" in copy
    assert "`longspan sweep 'paper/copy/nape/softmax' --seeds 1 --evaluate` |" in copy
    changed = page([{**row, "variant": "before"} for row in made_up() if "variant" in row])
    assert "--evaluate` at the commit named: the recipe has changed since |" in block(changed, "`copy`")


def test_the_main_table_is_about_nape_and_the_lengths_of_the_main_text(text: str) -> None:
    main = block(text, "`main/copy`")
    assert "| nape | asentmax | longspan | 100.0±0.0 (100.0) |" in main
    assert "rope" not in main
    assert "No runs yet" in block(text, "`main/sort`")


def test_the_ablation_of_ropes_factor_has_its_rows_and_flip_flop_the_others(text: str) -> None:
    factors = block(text, "`rope_factor`")
    for line in ("rope_factor_16 | softmax | longspan | 81.0", "rope_factor_4 | softmax | longspan | 82.0",
                 "rope_unscaled | softmax | longspan | 83.0"):  # fmt: skip
        assert f"| {line} |" in factors
    flip_flop = block(text, "`flip_flop_sparse`")
    assert "| rope | softmax | longspan | 81.0 |" in flip_flop
    assert "82.0" not in flip_flop


def test_a_figure_of_max_retrieval_has_the_methods_of_the_demo() -> None:
    """The table has eighteen, which no one can tell apart by colour; both trainings have a panel."""
    row = {"task": "max_retrieval", "length": 16, "accuracy": 97.5, "samples": 200, "seed": 0}
    methods = ("softmax", "top-4", "asentmax", "asentmax, gamma 4")
    rows = [{**row, "method": method, "training": training} for method in methods for training in ("demo", "paper")]
    panels = task_panels(list(in_common_words(rows)), get_table("max_retrieval"))
    assert [panel.title for panel in panels] == ["max_retrieval, recipe demo", "max_retrieval, recipe paper"]
    assert [list(panel.curves) for panel in panels] == [["softmax", "asentmax, gamma 3"]] * 2


def test_rows_of_the_demo_are_those_of_max_retrieval(text: str) -> None:
    assert "| none | asentmax, gamma 3 | demo | 97.5 |" in block(text, "`max_retrieval`")
    assert "`longspan demo`" in block(text, "`max_retrieval`")


def test_runs_that_failed_are_told_and_everything_is_counted(text: str) -> None:
    unlucky = block(text, "Runs that failed, or never left the plateau")
    assert "| longspan/copy/nape/entmax | 0 | diverged | 321 of 20000 | never | 1.75 | abc |" in unlucky
    assert "| longspan/copy/nape/entmax | 1 | stopped | 1 of 20000 | - |  | abc |" in unlucky
    assert "| paper/copy/nape/softmax | 0 | finished | 20000 of 20000 | never | 1.75 | abc |" in unlucky
    assert SOFTMAX.replace("softmax", "asentmax") not in unlucky
    costs = block(text, "What it cost")
    assert "| copy | longspan | 9 | 7 | 1 | 1.0 | 9.0 |" in costs
    assert "| copy | paper | 1 | 1 | 1 | 12.0 | 12.0 |" in costs


def test_the_page_does_not_depend_on_the_order_of_the_rows(text: str) -> None:
    assert page(made_up()[::-1]) == text


def test_the_table_command_prints_the_numbers_of_the_page(text: str, tmp_path: Path) -> None:
    append_rows(tmp_path / "copy.jsonl", made_up())
    result = CliRunner().invoke(cli.app, ["table", "copy", "--rows", str(tmp_path), "--chosen", "--markdown"])
    assert result.exit_code == 0, result.output
    lines, _, smoke = result.output.partition("Smoke runs")
    assert "33.3" in smoke
    assert lines.strip() in block(text, "`copy`")
    every = CliRunner().invoke(cli.app, ["table", "copy", "--rows", str(tmp_path), "--markdown"]).output
    assert "77.7" in every


def test_the_command_writes_the_page_and_figures_and_the_same_again(tmp_path: Path) -> None:
    append_rows(tmp_path / "copy.jsonl", [row for row in made_up() if row["task"] == "copy"])
    readme = tmp_path / "front.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    command = ["report", str(tmp_path), "--front", str(readme)]
    assert CliRunner().invoke(cli.app, command, catch_exceptions=False).exit_code == 0
    written = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert set(written) == {"README.md", "front.md", "copy.jsonl", "copy.png", "copy.svg", "main.png", "main.svg"}
    assert written["copy.png"].startswith(b"\x89PNG")
    assert "| asentmax |" in readme.read_text()
    assert readme.read_text().startswith("before\n")
    assert readme.read_text().endswith("after\n")
    assert CliRunner().invoke(cli.app, command).exit_code == 0
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == written

    check = ["report", str(tmp_path), "--check"]
    assert CliRunner().invoke(cli.app, check).exit_code == 0
    append_rows(tmp_path / "copy.jsonl", [result(ASENTMAX, 3, 64, 1.0)])
    stale = CliRunner().invoke(cli.app, check)
    assert stale.exit_code == 2
    assert "not what the rows give" in stale.output
    assert (tmp_path / "README.md").read_bytes() == written["README.md"]


def test_the_front_page_has_our_recipe_beside_the_papers_numbers() -> None:
    lines = front(made_up()).splitlines()
    assert "copy 4096" in lines[0]
    (ours,) = [line for line in lines if line.startswith("| asentmax")]
    assert "71.0 (86.6)" in ours
    assert "- (99.4)" in ours  # no run of ours yet, at 1024
    assert "mqmtar" not in lines[0]  # a task without runs
    assert "55.5" not in "".join(lines)  # the paper's recipe, run by us


@pytest.mark.parametrize("page", ["no marks", f"{END} {BEGIN}", f"{BEGIN} {END} {BEGIN} {END}"])
def test_a_front_page_without_its_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="needs the marks"):
        put_between(page, "new")


def test_a_figure_has_a_panel_for_each_position_and_recipe_and_one_colour_a_method() -> None:
    rows = reported_rows(made_up(), choose(made_up()))
    panels = {panel.title: panel for panel in task_panels(rows, get_table("copy"))}
    assert set(panels) == {"copy, nape, recipe longspan", "copy, nape, recipe paper"}
    ours = panels["copy, nape, recipe longspan"]
    assert ours.curves == {"softmax": {64: 99.0, 4096: 10.0}, "asentmax": {64: 100.0, 4096: 71.0}}
    assert ours.bands["softmax"] == {64: (99.0, 99.0), 4096: (0.0, 20.0)}
    assert ours.dotted["asentmax"] == get_table("copy").rows["nape", "asentmax"]  # type: ignore[index]
    assert ours.trained_to == 64
    (factors,) = task_panels(rows, get_table("rope_factor"))
    assert set(factors.curves) == {"rope_factor_16", "rope_factor_4", "rope_unscaled"}
    assert [panel.title for panel in main_panels(rows)] == ["copy"]


def test_every_method_of_the_recipes_has_a_colour() -> None:
    from longspan.paper.recipes import recipe_names

    assert {name.split("/")[3] for name in recipe_names()} <= set(COLOURS)


def test_the_committed_page_is_what_the_committed_rows_give() -> None:
    rows = list(rows_under([ROOT / "results"]))
    assert (ROOT / "results" / "README.md").read_text(encoding="utf-8") == page(rows), "run `longspan report results`"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if BEGIN in readme:
        assert readme == put_between(readme, front(rows)), "run `longspan report results --front README.md`"


def test_below_a_panel_of_many_lengths_every_fourfold_one_is_written() -> None:
    def ticks(lengths: list[int]) -> list[float]:
        rows = [result("longspan/copy/nape/softmax", 0, length, 50.0) for length in lengths]
        return list(task_panels(rows, get_table("copy"))[0].x_ticks or ())

    few = [64 << doubled for doubled in range(7)]
    assert ticks(few) == few
    assert ticks([64 << doubled for doubled in range(11)]) == [64, 256, 1024, 4096, 16384, 65536]
