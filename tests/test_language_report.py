"""What pages say of language models: every number from rows."""

from typing import Any

import pytest

from longspan.language_report import front, panels, section
from longspan.results import Row


def row(task: str, method: str, length: int, value: float, **other: Any) -> Row:
    scored = {"metric": "perplexity", "scoring": "same", "documents": 3, "tokens": 30, "seconds": 1.0}
    own = scored if task == "lm-perplexity" else {"metric": "exact_string", "samples": 200}
    needles = "" if task == "lm-perplexity" else "+needles"
    made = {"task": task, "method": method, "position": "nape", "length": length, "value": value, "seed": 0}
    made |= {"low": value - 2, "high": value + 1, "recipe": f"lm/50m/nape/{method}{needles}", "step": 2000}
    return own | made | {"context": 1024, "time": "2026", "commit": "abc", "command": "measure"} | other


def rows() -> list[Row]:
    found = []
    for length, loss in ((1024, 0.0), (4096, 0.5)):
        losses = [2.0 + loss, 1.0 + loss, 3.0 + loss]
        found.append(row("lm-perplexity", "asentmax", length, 8.0 - loss, by_document=losses))
        found += [row("s-niah-1", "asentmax", length, 100.0 - 10 * seed, seed=seed) for seed in (0, 1)]
        found.append(row("s-niah-1", "softmax", length, 90.0 - 80 * (length > 1024)))
    return found


def test_the_front_page_has_the_shortest_and_the_longest_length_beside_the_papers() -> None:
    text = front(rows())
    assert "trained on 1,024 tokens, at that length and at 4,096" in text
    assert (
        "| asentmax, nape | 8.00 | 7.50 | 95.0±7.1 (100.0) (99.6) | 95.0±7.1 (100.0) (100.0) | - (99.4) | - (83.2) |"
        in text
    )
    assert "| softmax, nape | - | - | 90.0 (100.0) | 10.0 (94.2) | - (100.0) | - (4.8) |" in text


def test_the_page_has_tables_intervals_changes_and_commands() -> None:
    text = section(rows(), "figures/it.png")
    assert text.startswith("## Language models\n")
    assert "(figures/it.png)" in text
    assert "| nape | softmax | paper | 100.0 | 99.4 | 94.2 | 11.4 | 0.8 |" in text
    assert "| nape | softmax | lm/50m+needles | 90.0 |  | 10.0 |  |  |" in text
    assert "| nape | asentmax | lm/50m+needles | 93.0 to 96.0, 200 |" in text  # the mean over seeds
    assert "| nape | asentmax | +0.000 (+0.000 to +0.000) | +0.500 (+0.500 to +0.500) |" in text
    assert "| nape | softmax | lm/50m+needles | 0 | abc | `measure` |" in text
    assert "s-niah-2" not in text


@pytest.mark.parametrize("given", [[], [{"task": "copy", "recipe": "longspan/copy/nape/softmax", "length": 64}]])
def test_without_rows_there_is_nothing(given: list[Row]) -> None:
    assert (front(given), section(given, "x"), panels(given)) == ("", "", [])


def test_a_panel_has_our_curves_their_intervals_and_the_papers_numbers() -> None:
    perplexity, needles = panels(rows())
    assert perplexity.curves == {"asentmax": {1024: 8.0, 4096: 7.5}}
    assert not perplexity.bands
    assert not perplexity.dotted
    assert needles.curves["softmax"] == {1024: 90.0, 4096: 10.0}
    assert needles.bands["softmax"] == {1024: (88.0, 91.0), 4096: (8.0, 11.0)}
    assert needles.dotted["softmax"][8192] == 11.4
    assert needles.trained_to == 1024


def test_two_measurements_of_one_method_are_two_curves() -> None:
    rows = [row("s-niah-1", "softmax", 1024, 99.0, depth=depth) for depth in (None, 0.5)]
    (panel,) = panels(rows)
    assert panel.curves == {
        "softmax, lm/50m+needles": {1024: 99.0},
        "softmax, lm/50m+needles, depth 0.5": {1024: 99.0},
    }


def test_another_position_has_a_curve_of_its_own() -> None:
    rope = [row("s-niah-1", "softmax", 1024, 99.0) | {"position": "rope", "recipe": "lm/50m/rope/softmax"}]
    adjusted = [
        row("s-niah-1", "softmax", 1024, 98.0, rope_base=5e5) | {"position": "rope", "recipe": "lm/50m/rope/softmax"}
    ]
    (panel,) = panels([*rope, *adjusted])
    assert set(panel.curves) == {"softmax, rope", "softmax, rope+abf"} == set(panel.colours)
    assert len(set(panel.colours.values())) == 2


def test_lines_of_one_method_are_told_apart_by_shade() -> None:
    (panel,) = panels([row("s-niah-1", "softmax", 1024, 90.0, data=data) for data in ("abc", "xyz")])
    assert len(set(panel.colours.values())) == 2


def test_the_front_page_has_the_fullest_line_of_a_model() -> None:
    partial = row("s-niah-1", "softmax", 4096, 50.0, depth=0.5)
    assert front([*rows(), partial]) == front(rows())
