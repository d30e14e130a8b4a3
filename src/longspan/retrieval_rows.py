"""Rows of `longspan demo` in the words of the other tasks', so that tables, figures and choices need know of no others.

The demo measures Max Retrieval, which is no language and has no recipe. A row of it tells the accuracy at one length,
and on every length how its model did in validation.
"""

from collections.abc import Iterable, Iterator

from longspan.evaluate.ladder import wilson
from longspan.paper.max_retrieval import paper_row
from longspan.results import Row

TASK = "max_retrieval"
# Steps and peak rate by training: what a recipe's name does not say. Rows older than the rate do not tell it either.
ITS_OWN: dict[str, tuple[int, float]] = {"demo": (5000, 2e-3), "paper": (100_000, 1e-3)}


def learning_rate_of(row: Row) -> float:
    """The peak rate that a row was trained at; rows older than the field had one for all methods."""
    return float(row.get("learning_rate") or ITS_OWN[row.get("training", "demo")][1])


def in_common_words(rows: Iterable[Row]) -> Iterator[Row]:
    """Every row as it is, but for those of the demo: measurements of a recipe, and those it was chosen by.

    Of a run that was made again the later counts.
    """
    rows = list(rows)
    latest = {_run(row)[:2]: _run(row) for row in rows if _of_demo(row)}
    validated = set()
    for row in rows:
        if not _of_demo(row):
            yield row
        elif (run := _run(row)) == latest[run[:2]]:
            told = {**row, "recipe": run[0], "position": "none", "rates": f"AdamW {learning_rate_of(row):g}"}
            accuracy = told.pop("validation_accuracy", {})
            yield _measured(told, row["length"], row["accuracy"], row["samples"])
            if run not in validated:
                validated.add(run)
                for length, percent in accuracy.items():
                    found = _measured(told, int(length), percent, row["validation_samples"])
                    yield found | {"purpose": "validation", "token_accuracy": percent}


def _of_demo(row: Row) -> bool:
    return row.get("task") == TASK and "accuracy" in row


def _run(row: Row) -> tuple[str, int, object, object]:
    """The recipe and the seed of a row, and what tells runs of them apart."""
    return recipe_of(row), row["seed"], row.get("commit"), row.get("command")


def recipe_of(row: Row) -> str:
    training = row.get("training", "demo")
    steps, rate = ITS_OWN[training]
    name = f"{training}/{TASK}/none/{paper_row(row['method'])}"
    if learning_rate_of(row) != rate:
        name += f"+optimizer.learning_rate={learning_rate_of(row):g}"
    return name if row.get("steps", steps) == steps else f"{name}+steps={row['steps']}"


def _measured(row: Row, length: int, percent: float, samples: int) -> Row:
    low, high = wilson(round(percent * samples / 100), samples)
    return {**row, "length": length, "value": percent, "samples": samples, "low": 100 * low, "high": 100 * high}
