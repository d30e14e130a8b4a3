"""Tables of results: ours beside the paper's, from rows alone."""

from pathlib import Path
from typing import Any

import pytest

from longspan.paper.tables import PaperTable, RowKey
from longspan.report import Cell, Line, as_csv, as_markdown, rows_under, sections, table_lengths, table_lines
from longspan.results import Row, append_rows, read_rows

TABLE = PaperTable(
    name="copy",
    caption="Copy",
    metric="exact_match",
    lengths=(64, 128),
    rows={RowKey("nape", "softmax"): {64: 100.0, 128: 50.0}, RowKey("nape", "topk_16"): {64: 90.0}},
)


def row(recipe: str, length: int, value: float, seed: int = 0, **more: Any) -> Row:
    defaults = {"task": "copy", "position": "nape", "method": "softmax", "time": "2026-01-01T00:00:00Z"}
    return {**defaults, "recipe": recipe, "length": length, "value": value, "seed": seed, **more}


SOFTMAX = "longspan/copy/nape/softmax"


def lines_of(*rows: Row) -> list[Line]:
    return [line for line in table_lines(rows, TABLE) if line.source != "published"]


def test_without_rows_the_papers_lines_stand_alone() -> None:
    assert table_lines([], TABLE) == [
        Line("nape", "softmax", "published", {64: Cell(100, None, 100, 1), 128: Cell(50, None, 50, 1)}),
        Line("nape", "topk_16", "published", {64: Cell(90, None, 90, 1)}),
    ]


def test_our_lines_follow_the_papers_and_those_without_a_peer_come_last() -> None:
    rows = [
        row("paper/copy/rope/softmax", 64, 1.0),
        row("longspan/copy/nape/topk_16", 64, 2.0, method="topk"),
        row("longspan/copy/nape/softmax", 64, 3.0),
        row("paper/copy/nape/softmax", 64, 4.0),
        row("longspan/copy/nape/softmax+optimizer.learning_rate=0.001", 64, 5.0),
    ]
    assert [line[:3] for line in table_lines(rows, TABLE)] == [
        ("nape", "softmax", "published"),
        ("nape", "softmax", "longspan"),
        ("nape", "softmax", "longspan+optimizer.learning_rate=0.001"),
        ("nape", "softmax", "paper"),
        ("nape", "topk_16", "published"),
        ("nape", "topk_16", "longspan"),
        ("rope", "softmax", "paper"),
    ]


def test_seeds_are_a_mean_a_spread_and_a_best() -> None:
    (line,) = lines_of(*(row(SOFTMAX, 64, value, seed) for seed, value in enumerate([10.0, 20.0, 60.0])))
    assert line.cells[64] == Cell(30, 700**0.5, 60, 3, worst=10)
    assert str(line.cells[64]) == "30.0±26.5 (60.0)"
    assert str(lines_of(row(SOFTMAX, 64, 12.34))[0].cells[64]) == "12.3"


def test_of_a_seed_measured_twice_the_latest_row_counts() -> None:
    early, late = (row(SOFTMAX, 64, day, time=f"2026-01-0{day}T00:00:00Z") for day in (1, 2))
    for rows in ((early, late), (late, early)):
        (line,) = lines_of(*rows)
        assert line.cells[64] == Cell(2, None, 2, 1, worst=2)


@pytest.mark.parametrize(
    ("recipe", "origin"),
    [
        ("longspan/copy/nape/softmax", ("nape", "softmax", "longspan")),
        ("longspan/copy/nape/softmax/smoke", ("nape", "softmax", "longspan/smoke")),
        ("longspan/copy/nape/softmax/smoke+steps=5+seed=1", ("nape", "softmax", "longspan/smoke+steps=5+seed=1")),
        ("paper/copy/nape/softmax+name=a/b", ("nape", "softmax", "paper+name=a/b")),
        ("my own", ("nape", "softmax", "my own")),
        ("", ("nape", "softmax", "unnamed")),
    ],
)
def test_where_a_line_comes_from(recipe: str, origin: tuple[str, str, str]) -> None:
    (line,) = lines_of(row(recipe, 64, 1.0))
    assert line[:3] == origin
    assert line.smoke is ("/smoke" in recipe)


def test_other_tasks_and_rows_that_are_no_results_are_left_out() -> None:
    assert not lines_of(row(SOFTMAX, 64, 1.0, task="sort"), {"task": "copy", "accuracy": 5}, {"event": "train"})


def test_a_table_of_the_main_text_takes_the_rows_of_its_task() -> None:
    main = PaperTable("main/copy", "Copy", "exact_match", (64,), TABLE.rows)
    assert any(line.source == "longspan" for line in table_lines([row(SOFTMAX, 64, 1.0)], main))


MIXED = [
    row(SOFTMAX, 64, 10.0, low=5.0, high=15.0, samples=1000),
    row(SOFTMAX, 256, 5.0, 0, low=2.0, high=8.0, samples=1000),
    row(SOFTMAX, 256, 7.0, 1, low=4.0, high=10.0, samples=200),
    row(f"{SOFTMAX}/smoke+steps=5", 12, 99.0),
]


def test_smoke_runs_are_a_section_of_their_own() -> None:
    parts = sections(table_lines(MIXED, TABLE))
    assert list(parts) == ["", "Smoke runs"]
    assert table_lengths(parts[""]) == [64, 128, 256]
    assert table_lengths(parts["Smoke runs"]) == [12]
    assert list(sections(table_lines([], TABLE))) == [""]


def test_markdown() -> None:
    assert as_markdown(table_lines(MIXED, TABLE)).splitlines() == [
        "| position | method | source | 64 | 128 | 256 |",
        "| --- | --- | --- | ---: | ---: | ---: |",
        "| nape | softmax | published | 100.0 | 50.0 |  |",
        "| nape | softmax | longspan | 10.0 |  | 6.0±1.4 (7.0) |",
        "| nape | topk_16 | published | 90.0 |  |  |",
        "",
        "Smoke runs",
        "",
        "| position | method | source | 12 |",
        "| --- | --- | --- | ---: |",
        "| nape | softmax | longspan/smoke+steps=5 | 99.0 |",
    ]


def test_csv() -> None:
    assert as_csv(table_lines(MIXED, TABLE)).splitlines() == [
        "position,method,source,length,mean,spread,best,seeds,low,high,samples",
        "nape,softmax,published,64,100.00,,100.00,1,,,",
        "nape,softmax,published,128,50.00,,50.00,1,,,",
        "nape,softmax,longspan,64,10.00,,10.00,1,5.00,15.00,1000",
        "nape,softmax,longspan,256,6.00,1.41,7.00,2,3.00,9.00,200",
        "nape,softmax,longspan/smoke+steps=5,12,99.00,,99.00,1,,,",
        "nape,topk_16,published,64,90.00,,90.00,1,,,",
    ]


def test_rows_are_found_under_folders_and_logs_are_not_rows(tmp_path: Path) -> None:
    append_rows(tmp_path / "runs" / "a" / "results.jsonl", [{"n": 1}])
    append_rows(tmp_path / "runs" / "a" / "log.jsonl", [{"n": 2}])
    append_rows(tmp_path / "runs" / "logs.jsonl", [{"n": 2}])
    append_rows(tmp_path / "runs" / "b" / "results.jsonl", [{"n": 3}])
    append_rows(tmp_path / "more.jsonl", [{"n": 4}])
    assert [each["n"] for each in rows_under([tmp_path / "runs", tmp_path / "more.jsonl"])] == [1, 3, 4]


def test_rows_appended_after_a_cut_line_are_not_lost_with_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for cut in ('{"n": 1}\n{"n"', '{"n": 1}\n{', '{"n": 1}\n'):
        path.write_text(cut)
        append_rows(path, [{"n": 2}, {"n": 3}])
        assert [each["n"] for each in read_rows(path)] == [1, 2, 3]
    path.write_text('{"n')
    append_rows(path, [{"n": 2}])
    assert path.read_text() == '{"n": 2}\n'
