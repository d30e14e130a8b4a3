"""The paper's tables of language models as data, and as `longspan table` prints them beside our rows."""

import csv
from pathlib import Path
from typing import Any

import pytest
from test_cli import succeed

from longspan.language_report import Line, language_lines
from longspan.paper.language import (
    ARXIV,
    LANGUAGE_TABLES,
    NEEDLES_1,
    NEEDLES_2,
    OWN_CORPUS,
    PUBMED,
    SHORT,
    Column,
    LanguageTable,
)
from longspan.report import Cell
from longspan.results import Row, append_rows

METHODS = ["softmax", "ssmax", "entmax", "asentmax"]
TABLES = [table for tables in LANGUAGE_TABLES.values() for table in tables if table is not OWN_CORPUS]

SPOTS: list[tuple[LanguageTable, str, str, Column, float | None]] = [
    (ARXIV, "nape", "softmax", 16384, 12.71),
    (ARXIV, "nape", "asentmax", 16384, 10.01),
    (ARXIV, "rope", "softmax", 1024, None),
    (PUBMED, "nape", "ssmax", 8192, 13.75),
    (PUBMED, "nape", "entmax", 2048, 17.64),
    (NEEDLES_1, "nape", "asentmax", 16384, 97.4),
    (NEEDLES_1, "rope+abf", "softmax", 8192, 75.4),
    (NEEDLES_1, "rope", "asentmax", 2048, 87.2),
    (NEEDLES_2, "nape", "asentmax", 8192, 25.4),
    (NEEDLES_2, "rope+abf", "ssmax", 2048, 37.4),
    (NEEDLES_2, "nape", "asentmax", 16384, None),
    (SHORT, "rope+abf", "softmax", "lambada_perplexity", 126.3),
    (SHORT, "nape", "asentmax", "lambada", 34.3),
    (SHORT, "rope", "asentmax", "winogrande", 52.3),
]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.task)
def test_tables_are_whole(table: LanguageTable) -> None:
    positions = ["nape"] if table.digits == 2 else ["rope", "rope+abf", "nape"]
    assert list(table.rows) == [(position, method) for position in positions for method in METHODS]
    for row in table.rows.values():
        assert tuple(row) == table.columns
        assert all(round(value, table.digits) == value for value in row.values())
        assert all(0 <= value <= 100 for column, value in row.items() if column != "lambada_perplexity")
    for note in table.notes:
        assert all(table.cell(*cell) is not None for cell in note.cells)


@pytest.mark.parametrize(("table", "position", "method", "column", "value"), SPOTS)
def test_cells(table: LanguageTable, position: str, method: str, column: Column, value: float | None) -> None:
    assert table.cell(position, method, column) == value


def test_the_texts_claims_are_as_noted() -> None:
    lead = PUBMED.rows["nape", "ssmax"][16384] - PUBMED.rows["nape", "asentmax"][16384]  # type: ignore[index]
    assert lead == pytest.approx(1.82)
    for method in METHODS:
        plain, adjusted = (NEEDLES_1.cell(position, method, 2048) or 0 for position in ("rope", "rope+abf"))
        assert adjusted > plain
    assert max(NEEDLES_2.rows, key=lambda key: NEEDLES_2.rows[key][8192]) == ("rope+abf", "entmax")


def row(task: str, length: int, value: float, **more: Any) -> Row:
    defaults = {"recipe": "lm/50m/nape/softmax", "position": "nape", "method": "softmax", "rope_base": None}
    return {**defaults, "task": task, "length": length, "value": value, "seed": 0, "metric": "", "time": "1", **more}


def test_models_trained_in_other_ways_have_lines_of_their_own() -> None:
    recipe = {"context": 1024, "step": 2000}  # the preset's
    rows = [
        row("lm-perplexity", 1024, 10, **recipe),
        row("lm-perplexity", 1024, 11, **recipe | {"step": 1600}),
        row("lm-perplexity", 2048, 12, **recipe | {"step": 1600}),
        row("lm-perplexity", 2048, 13, **recipe | {"context": 256, "step": 20}),
        row("lm-perplexity", 1024, 14, **recipe | {"recipe": "lm/own/nape/softmax"}),
    ]
    lines = {line.source: {length: cell.mean for length, cell in line.cells.items()} for line in _ours(rows)}
    assert lines == {
        "lm/50m": {1024: 10},
        "lm/50m, 1,600 steps": {1024: 11, 2048: 12},
        "lm/50m, 20 steps of 256 tokens": {2048: 13},
        "lm/own": {1024: 14},
    }


def _ours(rows: list[Row], table: LanguageTable = OWN_CORPUS) -> list[Line]:
    return [line for line in language_lines(rows, table) if line.source != "paper"]


def _sources(rows: list[Row], table: LanguageTable = OWN_CORPUS) -> dict[str, dict[Column, float]]:
    return {line.source: {length: cell.mean for length, cell in line.cells.items()} for line in _ours(rows, table)}


def test_other_tokens_are_not_the_same_tokens() -> None:
    """Another corpus, another ladder and fewer documents: each is scored on tokens of its own."""
    told = {"scoring": "same", "data": "aaa", "longest": 64, "scored": 16, "documents": 9}
    first = [row("lm-perplexity", 32, 1, **told), row("lm-perplexity", 64, 2, **told)]
    assert _sources(first) == {"lm/50m, same tokens": {32: 1, 64: 2}}
    for other, names in (
        ({"data": "bbb"}, ("text aaa", "text bbb")),
        ({"longest": 4096}, ("up to 64 tokens", "up to 4,096 tokens")),
        ({"scored": 8}, ("the last 16", "the last 8")),
        ({"documents": 5}, ("9 documents", "5 documents")),
    ):
        again = row("lm-perplexity", 32, 3, **told | other, time="2")
        one, two = (f"lm/50m, same tokens, {name}" for name in names)
        assert _sources([*first, again]) == {one: {32: 1, 64: 2}, two: {32: 3}}
    old = row("lm-perplexity", 32, 4, scoring="same", documents=9)  # from before rows told it: on what, nobody knows
    assert _sources([*first, old])["lm/50m, same tokens"] == {32: 4}


def test_needles_asked_for_in_another_way_have_lines_of_their_own() -> None:
    told = {"answer_tokens": 16, "data": "aaa", "depth": None, "needle_seed": 0}
    first = row("s-niah-1", 1024, 90, **told)
    for other, names in (
        ({"depth": 1.0}, ("", ", depth 1")),
        ({"answer_tokens": 128}, (", 16 answer tokens", ", 128 answer tokens")),
        ({"needle_seed": 1}, (", needles of seed 0", ", needles of seed 1")),
    ):
        found = _sources([first, row("s-niah-1", 1024, 10, **told | other, time="2")], NEEDLES_1)
        assert found == {f"lm/50m{names[0]}": {1024: 90}, f"lm/50m{names[1]}": {1024: 10}}


def test_a_part_of_a_benchmark_is_not_the_whole() -> None:
    told = {"benchmark": "piqa", "limit": None, "shots": None}
    part = row("lm-short", 1024, 40, **told | {"limit": 20, "shots": 5}, time="2")
    assert _sources([row("lm-short", 1024, 60, **told), part], SHORT) == {
        "lm/50m": {"piqa": 60},
        "lm/50m, 20 samples, 5 shots": {"piqa": 40},
    }


def test_models_that_are_called_alike_are_told_apart_by_their_config() -> None:
    rows = [row("s-niah-1", 1024, 90, variant="c0ffee"), row("s-niah-1", 1024, 80, variant="c0ffee", seed=1)]
    assert _sources(rows, NEEDLES_1) == {"lm/50m": {1024: 85}}
    rows.append(row("s-niah-1", 1024, 10, variant="facade"))
    assert _sources(rows, NEEDLES_1) == {"lm/50m, config c0ffee": {1024: 85}, "lm/50m, config facade": {1024: 10}}


def test_our_lines_follow_the_papers() -> None:
    rope = {"position": "rope", "recipe": "lm/50m/rope/softmax"}
    trained = "lm/50m/rope/softmax+model.attention.rope_base=500000"
    rows = [
        row("s-niah-1", 1024, 5.0),
        row("s-niah-1", 2048, 6.0, seed=1),
        row("s-niah-1", 2048, 8.0, seed=2),
        row("s-niah-1", 1024, 4.0, rope_base=10_000.0, **rope),
        row("s-niah-1", 1024, 3.0, rope_base=500_000.0, **rope),
        row("s-niah-1", 1024, 2.0, rope_base=1e6, **rope),
        row("s-niah-1", 1024, 1.0, rope_base=500_000.0, **rope | {"recipe": trained}),
        row("s-niah-2", 1024, 9.0),
        {"event": "train"},
    ]
    lines = language_lines(rows, NEEDLES_1)
    ours = [(number, line) for number, line in enumerate(lines) if line.source != "paper"]
    assert [(line.position, line.source) for _, line in ours] == [
        ("rope", "lm/50m"),
        ("rope", "lm/50m+model.attention.rope_base=500000"),
        ("rope+abf", "lm/50m"),
        ("nape", "lm/50m"),
        ("rope+abf=1e+06", "lm/50m"),
    ]
    assert all(lines[number - 1].position == line.position for number, line in ours[:-1])
    assert ours[3][1].cells == {1024: Cell(5, None, 5, 1, worst=5), 2048: Cell(7, 2**0.5, 8, 2, worst=6)}


def test_of_perplexities_the_lowest_is_the_best_and_the_latest_counts() -> None:
    same = {"metric": "perplexity", "scoring": "same"}
    rows = [
        row("lm-perplexity", 128, 30.0, **same),
        row("lm-perplexity", 128, 20.0, **same | {"time": "2"}),
        row("lm-perplexity", 128, 10.0, **same, seed=1),
        row("lm-perplexity", 128, 5.0, **same | {"scoring": "all"}),
    ]
    every, alike = language_lines(rows, OWN_CORPUS)
    assert (every.source, every.cells[128].mean) == ("lm/50m, all tokens", 5)
    assert (alike.source, alike.cells[128].mean, alike.cells[128].best) == ("lm/50m, same tokens", 15, 10)


def test_without_rows_the_papers_lines_stand_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = succeed("table", "lm-perplexity")
    assert "10.01" in output
    assert "own corpus" not in output
    output = succeed("table", "lm-needles")
    assert output.index("S-NIAH-1") < output.index("97.4") < output.index("S-NIAH-2") < output.index("25.4")
    output = succeed("table", "lm-short")
    assert "lambada_perplexity" in output
    assert "note: The main text has 52.4" in output.replace("\n", " ")


def test_our_rows_stand_beside_and_what_is_missing_is_missing(tmp_path: Path) -> None:
    short = row("lm-short", 0, 40.0, benchmark="piqa", metric="accuracy")
    own = row("lm-perplexity", 128, 98.77, scoring="same", metric="perplexity")
    append_rows(tmp_path / "results.jsonl", [short, own])
    lines = succeed("table", "lm-short", f"--rows={tmp_path}").splitlines()
    (ours,) = [line.split() for line in lines if "lm/50m" in line]
    assert ours == ["nape", "softmax", "lm/50m", "-", "-", "-", "40.0", "-", "-", "-"]
    markdown = succeed("table", "lm-perplexity", f"--rows={tmp_path}", "--markdown")
    assert "| nape | softmax | lm/50m, same tokens | 98.77 |" in markdown
    assert "| nape | asentmax | paper | 21.30 | 16.86 | 13.31 | 10.89 | 10.01 |" in markdown
    cells = list(csv.DictReader(succeed("table", "lm-short", f"--rows={tmp_path}", "--csv").splitlines()))
    assert len([cell for cell in cells if cell["source"] == "paper"]) == 84
    assert [cell["column"] for cell in cells if cell["source"] == "lm/50m"] == ["piqa"]
