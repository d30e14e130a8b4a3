"""Which learning rate and settings a table reports: chosen for each cell by validation rows, never by test rows.

A cell is a task, a position, a method and a family of recipes (`paper`, `longspan`, or one of them with other fields
changed). Its candidates are the rates, and in our recipe the settings of attention, that it was trained with. RULE is
what the choice goes by, in words.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longspan.evaluate.ladder import VALIDATION_MULTIPLES, purpose_of
from longspan.paper.names import parse_name
from longspan.paper.tables import get_table
from longspan.results import Row

RULE = (
    "For each task, position, method and recipe the learning rate, and in our recipe the norms and the noise on "
    "queries and keys and the slopes, are chosen by validation samples, which share no seed with test samples, at"
    " lengths up to 8 times the training length: the one whose mean over seeds at 8 times is the highest; those "
    "that are level there are compared at 4 times, then 2, then 1, and if they are level everywhere (0 at every "
    "length, for instance) by their accuracy by token, averaged over these lengths. If even that is level, the "
    "recipe's own is taken, then the lowest rate. Only seeds that all were run with are compared, so that further"
    " seeds of the chosen one cannot change the choice; a run that diverged or failed counts as 0. Neither test "
    "samples nor longer lengths play a part."
)
_ENDED_BADLY = ("diverged", "failed")


class CellKey(NamedTuple):
    task: str
    position: str
    method: str
    family: str


@dataclass(frozen=True)
class Candidate:
    """A cell at one learning rate and with one choice of settings: its rows, on runs and of measurements."""

    recipe: str  # its name, with edits
    rates: str
    rows: tuple[Row, ...]

    @property
    def own(self) -> bool:
        """Whether rate and settings are the recipe's own."""
        name = parse_name(self.recipe)
        return name is None or not (name.rates or name.settings)

    @property
    def runs(self) -> list[Row]:
        """The latest row on each run, by seed."""
        latest = {row["seed"]: row for row in self.rows if row.get("event") == "run"}
        return [latest[seed] for seed in sorted(latest)]

    @property
    def tests(self) -> list[Row]:
        return [row for row in self.rows if "length" in row and purpose_of(row) == "test"]

    @property
    def seeds(self) -> list[int]:
        return sorted({row["seed"] for row in self.rows})

    def validation(self) -> dict[tuple[int, int], Row]:
        """The latest validation row by length and seed, at lengths that may decide."""
        rows = [row for row in self.rows if "length" in row and purpose_of(row) == "validation"]
        return {
            (row["length"], row["seed"]): row
            for row in rows
            if row["length"] <= VALIDATION_MULTIPLES[-1] * _trained_to(row)
        }

    def ended_badly(self) -> set[int]:
        """The seeds whose runs diverged or failed."""
        return {row["seed"] for row in self.runs if row["ending"] in _ENDED_BADLY}

    def judged(self) -> set[int]:
        """The seeds that can be compared: validated, or known to have ended badly."""
        return self.ended_badly() | {seed for _, seed in self.validation()}

    def score(self, lengths: Sequence[int], seeds: Iterable[int]) -> tuple[float, ...]:
        """Means over seeds: the task's metric by length, and last the accuracy by token over all; missing is 0.

        So is what was measured of a run before it ended badly. By token it is the average, because alone at the longest
        length it would rank what is left of chance.
        """
        bad, seeds = self.ended_badly(), list(seeds)
        rows = {(length, seed): row for (length, seed), row in self.validation().items() if seed not in bad}

        def mean(key: str, length: int) -> float:
            return sum(rows[length, seed][key] for seed in seeds if (length, seed) in rows) / max(len(seeds), 1)

        by_token = sum(mean("token_accuracy", length) for length in lengths) / max(len(lengths), 1)
        return tuple(round(value, 6) for value in (*(mean("value", length) for length in lengths), by_token))


@dataclass(frozen=True)
class Choice:
    """A cell, the candidate that tables report, why it is that one, and the others."""

    cell: CellKey
    chosen: Candidate
    reason: str
    others: tuple[Candidate, ...] = ()
    superseded: tuple[Candidate, ...] = ()  # trained by an earlier form of the same recipe


def choose(rows: Iterable[Row]) -> list[Choice]:
    """A choice for every cell that has rows."""
    cells: dict[CellKey, dict[tuple[str, str], list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: row.get("time", "")):
        if (key := cell_of(row)) is not None:
            cells[key][_rates(row), row.get("variant", "")].append(row)
    return [_choice(key, candidates) for key, candidates in sorted(cells.items())]


def cell_of(row: Row) -> CellKey | None:
    """The cell a row belongs to; None for rows of other kinds, and of runs that were named freely."""
    name = parse_name(row.get("recipe") or "")
    if name is None or not (row.get("event") == "run" or "length" in row):
        return None
    return CellKey(row["task"], name.position, name.method, name.family)


def chosen_rows(choices: Iterable[Choice]) -> list[Row]:
    """The rows that tables report, under their family's name: what was chosen is no part of it."""
    rows = []
    for choice in choices:
        for row in choice.chosen.rows:
            name = parse_name(row["recipe"])
            assert name is not None
            author, *edits = choice.cell.family.split("+")
            author, _, size = author.partition("/")
            rows.append({**row, "recipe": str(name._replace(author=author, size=size, edits=tuple(edits)))})
    return rows


def _choice(cell: CellKey, found: dict[tuple[str, str], list[Row]]) -> Choice:
    """Of two forms of a recipe at one rate and setting the later counts; then these compete."""
    by_time = sorted(found, key=lambda key: found[key][-1].get("time", ""))
    newest = dict(by_time)  # the last variant of each
    candidates: list[Candidate] = []
    superseded: list[Candidate] = []
    for (rates, variant), rows in found.items():
        candidate = Candidate(rows[-1]["recipe"], rates, tuple(rows))
        (candidates if newest[rates] == variant else superseded).append(candidate)
    candidates.sort(key=lambda each: (not each.own, _numbers(each.rates)))
    chosen, reason = _best(candidates)
    others = tuple(each for each in candidates if each is not chosen)
    return Choice(cell, chosen, reason, others, tuple(superseded))


def _best(candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
    """The first candidate that no other beats, and why."""
    if len(candidates) == 1:
        return candidates[0], "the only one tried"
    judged = [each for each in candidates if each.judged()]
    if not judged:
        return candidates[0], "no validation rows: not chosen, the recipe's own or the lowest"
    common = set.intersection(*(each.judged() for each in judged))
    lengths = sorted({length for each in judged for length, _ in each.validation()}, reverse=True)
    scores = [each.score(lengths, common or each.judged()) for each in judged]
    best = max(range(len(judged)), key=lambda index: (scores[index], -index))
    rivals = [score for index, score in enumerate(scores) if index != best]
    return judged[best], _reason(scores[best], rivals, lengths, len(candidates) - len(judged))


def _reason(best: tuple[float, ...], rivals: Sequence[tuple[float, ...]], lengths: Sequence[int], left_out: int) -> str:
    """Where the chosen one parted from the best of the others."""
    without = f"; {left_out} without validation rows" if left_out else ""
    if not rivals:
        return f"the only one with validation rows{without}"
    rival = max(rivals)
    labels = [*(f"at {length}" for length in lengths), "by token"]
    for label, ours, theirs in zip(labels, best, rival, strict=True):
        if ours != theirs:
            return f"validation {label}: {ours:.1f} against {theirs:.1f}{without}"
    return f"level with another everywhere: the recipe's own, or the lowest{without}"


def _rates(row: Row) -> str:
    """Rates, and settings that are not the recipe's own, in words."""
    name = parse_name(row["recipe"])
    assert name is not None
    rates = row.get("rates") or ", ".join(name.rates) or "the recipe's"
    return ", ".join([str(rates), *(edit.removeprefix("model.attention.") for edit in name.settings)])


def _numbers(text: str) -> list[float]:
    """The numbers in the name of a rate, to sort by."""
    found = []
    for word in text.replace(",", " ").replace("=", " ").split():
        try:
            found.append(float(word))
        except ValueError:
            continue
    return found


def _trained_to(row: Row) -> int:
    return int(row.get("trained_to") or get_table(row["task"]).lengths[0])
