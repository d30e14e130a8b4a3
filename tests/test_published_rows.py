"""What stands in `results/`: every row's name makes the run it comes from, today too."""

from pathlib import Path

from longspan.cli.sweep import _planned
from longspan.paper.names import config_named, parse_name
from longspan.results import Row, read_rows
from longspan.train.config import check, fingerprint

FOLDER = Path(__file__).parent.parent / "results"


def test_the_name_of_a_row_is_still_its_run() -> None:
    """A recipe may change; the rows made by the old one then get the edits that make it what it was."""
    every: list[Row] = [row for path in sorted(FOLDER.glob("*.jsonl")) for row in read_rows(path) if "config" in row]
    rows = [row for row in every if "context" not in row]  # the run of a language model is made with its corpus too
    assert rows
    for text, seed, config in {(row["recipe"], row["seed"], row["config"]) for row in rows}:
        name = parse_name(text)
        assert name is not None, text
        assert fingerprint(config_named(name, seed)) == config, text


def test_every_line_of_a_plan_is_a_run_that_can_be() -> None:
    planned = [line for path in FOLDER.glob("plans/*.txt") for line in _planned(path, [0])]
    assert planned
    for text, seeds in planned:
        name = parse_name(text)
        assert name is not None, text
        for seed in seeds:
            check(config_named(name, seed))
