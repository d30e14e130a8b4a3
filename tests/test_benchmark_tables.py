"""Tables of times in the docs: from the committed rows, ratios within a run."""

import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from longspan.results import Row

FILE = Path(__file__).parents[1] / "benchmarks/tables.py"


@pytest.fixture(scope="module")
def tables() -> Any:
    spec = util.spec_from_file_location("tables_of_times", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def timed(commit: str, name: str, milliseconds: float, length: int = 1024) -> Row:
    row: Row = {"dim": 64, "kind": "random", "length": length, "name": name, "commit": commit, "command": "timed"}
    return row | {"forward_ms": milliseconds, "both_ms": 2 * milliseconds, "block_sparsity": 0.5, "mebibytes": 1234}


def decoded(commit: str, name: str, microseconds: float) -> Row:
    row: Row = {"kind": "nape", "batch": 1, "length": 1 << 20, "name": name, "commit": commit, "command": "decoded"}
    traffic = {"key_bytes": 1 << 20, "value_bytes": 0, "summary_bytes": 0, "scratch_bytes": 1 << 19}
    return row | {"microseconds": microseconds} | traffic


def lines_of(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_the_committed_pages_are_what_the_committed_rows_give(tables: Any) -> None:
    for path, text in tables.pages().items():
        assert path.read_text(encoding="utf-8") == text, "run `python benchmarks/tables.py`"


def test_a_line_is_of_the_latest_run_beside_flash_and_ratios_are_within_a_run(tables: Any) -> None:
    rows = [timed("old", "entmax 1.5", 4.0), timed("old", "flash", 2.0), timed("old", "adasplash", 8.0)]
    rows += [timed("new", "entmax 1.5", 1.0), timed("new", "flash", 3.0)]
    rows += [timed("alone", "entmax 1.5", 0.1)]
    (line,) = lines_of(tables.attention_table(rows, 64))
    assert line[1:4] == ["1K", "1.00 / 2.00", "3.00 / 6.00 (3.00 / 3.00)"]
    assert line[4] == ""  # cuDNN was never timed
    assert line[5] == "8.00 / 16.0 (2.00 / 2.00) *"  # over the 4.0 of its own run
    assert line[-3:] == ["50 %", "1,234", "a"]


def test_runs_are_lettered_from_the_latest_and_told(tables: Any) -> None:
    rows = [
        timed(c, name, 1.0, length) for c, length in (("old", 1024), ("new", 4096)) for name in ("entmax 1.5", "flash")
    ]
    table = tables.attention_table(rows, 64)
    assert [(line[1], line[-1]) for line in lines_of(table)] == [("1K", "b"), ("4K", "a")]
    assert "- a: `new`, `timed`\n- b: `old`, `timed`" in table


def test_decoding_is_beside_the_better_of_softmaxs_two_ways(tables: Any) -> None:
    rows = [decoded("one", "entmax 1.5", 10.0), decoded("one", "sdpa flash", 30.0), decoded("one", "launch", 1.0)]
    rows += [decoded("one", "sdpa flash folded", 25.0), {**decoded("one", "kernels", 0), "name": "kernels"}]
    (line,) = lines_of(tables.decoding_table(rows))
    assert line == ["NAPE", "1", "1M", "10.0", "25.0 (2.50)", "", "1.0", "0.5", "a"]


def test_the_front_page_has_what_was_timed_and_a_gap_where_nothing_was(tables: Any) -> None:
    rows = [timed("one", "entmax 1.5", 5.0, 4096), timed("one", "flash", 4.0, 4096)]
    flash, cudnn, noise, *_ = lines_of(tables.front_table(rows))
    assert (flash[1], noise[1]) == ("8.00", "10.0 (0.80)")
    assert cudnn[1:] == [""] * 3
