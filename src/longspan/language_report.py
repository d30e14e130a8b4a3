"""Tables and figures of language models, ours beside the paper's, from rows alone.

A result row goes to the table of its `task`, under its `length`; a row of `lm-short` under its `benchmark`.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from longspan.paper.format import RowKey
from longspan.paper.language import (
    NEEDLES_1,
    NEEDLES_2,
    OWN_CORPUS,
    Column,
    LanguageTable,
)
from longspan.plots import COLOURS, Panel
from longspan.report import Cell, details, markdown
from longspan.results import Row

PAPER = "paper"
_TRAINED_BASE, _ADJUSTED_BASE = 10_000, 500_000  # of RoPE
SHOWN = (OWN_CORPUS, NEEDLES_1, NEEDLES_2)
_SHORT = {OWN_CORPUS: "perplexity", NEEDLES_1: "S-NIAH-1", NEEDLES_2: "S-NIAH-2"}
_INTRODUCTION = """\
Trained and measured by `benchmarks/language_models.py`, all with the same settings; what the corpus is, and what is
scored: [docs/language-models.md](../docs/language-models.md). *paper* are the paper's own numbers, of a model of 420M
parameters trained on 2,048 tokens of another text; rows with `+needles` are of models that were shown needles within
the length that they were trained on. A curve has the lengths of a row; the grey part was trained."""


# What rows of one model and task may differ in besides the length, and how a line that differs in it says so. Rows
# without a field are a line apart: on what they were measured, nobody knows.
_MEASURED = {
    "data": "text {}",
    "longest": "up to {:,} tokens",
    "scored": "the last {:,}",
    "documents": "{:,} documents",
    "answer_tokens": "{} answer tokens",
    "depth": "depth {:g}",
    "needle_seed": "needles of seed {}",
    "limit": "{:,} samples",
    "shots": "{} shots",
}
Origin: TypeAlias = tuple[str, str, str]  # position, method and source, as in a line


class Line(NamedTuple):
    position: str
    method: str
    source: str  # PAPER, or the recipe that made ours
    cells: dict[Column, Cell]


def language_lines(rows: Iterable[Row], table: LanguageTable) -> list[Line]:
    """The paper's lines, each followed by ours of the same position and method, then ours without a peer."""
    ours = _our_lines(_named(rows, table))
    lines: list[Line] = []
    for (position, method), values in table.rows.items():
        lines.append(
            Line(position, method, PAPER, {column: Cell(value, None, value, 1) for column, value in values.items()})
        )
        lines += [line for line in ours if line[:2] == (position, method)]
    return lines + [line for line in ours if line[:2] not in table.rows]


def _named(rows: Iterable[Row], table: LanguageTable) -> list[tuple[Origin, Row]]:
    """The rows of a table, each with the line it belongs to.

    What not all of them were measured on or by is part of the line, and so is the config of models called alike.
    """
    own = [row for row in rows if row.get("task") == table.task and "recipe" in row]
    differing = [name for name in _MEASURED if len({row.get(name) for row in own}) > 1]
    models: dict[Origin, set[str | None]] = defaultdict(set)
    for row in own:
        models[_origin(row)].add(row.get("variant"))

    def line_of(row: Row) -> Origin:
        position, method, source = origin = _origin(row)
        said = [_MEASURED[name].format(row[name]) for name in differing if row.get(name) is not None]
        if len(models[origin]) > 1 and row.get("variant"):
            said.append(f"config {row['variant']}")
        return position, method, ", ".join([source, *said])

    return [(line_of(row), row) for row in own]


def _our_lines(rows: Iterable[tuple[Origin, Row]]) -> list[Line]:
    """A seed measured twice counts once, by its latest row."""
    latest: dict[tuple[Origin, Column], dict[int, Row]] = defaultdict(dict)
    for origin, row in sorted(rows, key=lambda pair: pair[1]["time"]):
        column = row["benchmark"] if row["task"] == "lm-short" else row["length"]
        latest[origin, column][row["seed"]] = row
    found: dict[Origin, dict[Column, Cell]] = defaultdict(dict)
    for (origin, column), by_seed in latest.items():
        values = [row["value"] for row in by_seed.values()]
        spread = statistics.stdev(values) if len(values) > 1 else None
        best = min(values) if any(row["metric"] == "perplexity" for row in by_seed.values()) else max(values)
        worst = max(values) if best == min(values) else min(values)
        low, high = (_mean_of(by_seed.values(), name) for name in ("low", "high"))
        counts = [count for row in by_seed.values() if (count := row.get("samples", row.get("documents")))]
        cell = Cell(statistics.mean(values), spread, best, len(values), low, high, min(counts, default=None), worst)
        found[origin][column] = cell
    return [Line(*origin, cells) for origin, cells in sorted(found.items())]


def _mean_of(rows: Iterable[Row], name: str) -> float | None:
    """The mean of an end of the intervals; None where a row has none."""
    values = [row.get(name) for row in rows]
    return None if None in values else statistics.mean(value for value in values if value is not None)


def _origin(row: Row) -> Origin:
    """Position, method, and the recipe without them: a size and the edits of the command line."""
    base, plus, edits = row["recipe"].partition("+")
    size = base.removesuffix(f"/{row['position']}/{row['method']}")
    source = size + plus + edits + _otherwise_trained(size, row)
    if row.get("scoring"):
        source += {"same": ", same tokens", "all": ", all tokens"}[row["scoring"]]
    position = row["position"]
    if "rope_base=" not in edits and (rope := row.get("rope_base")) not in (None, _TRAINED_BASE):
        position += "+abf" if rope == _ADJUSTED_BASE else f"+abf={rope:g}"
    return position, row["method"], source or "unnamed"


def _otherwise_trained(size: str, row: Row) -> str:
    """Steps and tokens that are not those of the preset: the recipe does not tell them."""
    from longspan.train.lm import RECIPES

    preset = RECIPES.get(size.removeprefix("lm/"))
    if preset is None or "step" not in row or (row["step"], row["context"]) == (preset.steps, preset.context):
        return ""
    tokens = "" if row["context"] == preset.context else f" of {row['context']:,} tokens"
    return f", {row['step']:,} steps{tokens}"


def columns_of(table: LanguageTable, lines: Sequence[Line]) -> list[Column]:
    """Lengths in order, the paper's and ours; benchmarks as the paper has them, then the others."""
    found = dict.fromkeys([*table.columns, *(column for line in lines for column in line.cells)])
    return list(found) if any(isinstance(column, str) for column in found) else sorted(found, key=int)


def cell_text(cell: Cell | None, digits: int, missing: str) -> str:
    if cell is None:
        return missing
    mean = f"{cell.mean:.{digits}f}"
    return mean if cell.spread is None else f"{mean}±{cell.spread:.{digits}f} ({cell.best:.{digits}f})"


def as_markdown(table: LanguageTable, lines: Sequence[Line]) -> str:
    columns = columns_of(table, lines)
    texts = [["position", "method", "source", *map(str, columns)], ["---"] * 3 + ["---:"] * len(columns)]
    texts += [
        [*line[:3], *(cell_text(line.cells.get(column), table.digits, "") for column in columns)] for line in lines
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in texts)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Perplexity and needles against length, a panel each; the paper's needles of the same methods are dotted."""
    return [_panel(table, lines) for table in SHOWN if (lines := _ours(rows, table))]


def section(rows: Sequence[Row], figure: str) -> str:
    """The part of the page of results on language models, in Markdown; empty without rows."""
    if not panels(rows):
        return ""
    parts = [f"## Language models\n\n{_INTRODUCTION}\n\n![Perplexity and needles against length]({figure})\n"]
    for table in SHOWN:
        if ours := _ours(rows, table):
            heading = f"### `{table.task}`\n\n{table.caption}.\n\n"
            parts.append(heading + as_markdown(table, language_lines(rows, table)) + "\n")
            more = _changes(rows, ours) if table is OWN_CORPUS else []
            parts.append(details("95 % intervals", "\n\n".join([_intervals(table, ours), *more])))
            parts.append(details("Commits and commands", _commands(rows, table)))
    return "\n".join(parts)


def front(rows: Sequence[Row]) -> str:
    """The table of the front page: our models at the shortest length, which they were trained on, and the longest."""
    lines = {table: _fullest(_ours(rows, table)) for table in SHOWN}
    lengths = sorted({int(length) for ours in lines.values() for line in ours.values() for length in line.cells})
    if not lengths:
        return ""
    places = [(table, length) for table in SHOWN for length in (lengths[0], lengths[-1])]
    texts = [["", *(f"{_SHORT[table]} {length}" for table, length in places)]]
    for position, method in dict.fromkeys(origin for ours in lines.values() for origin in ours):
        cells = []
        for table, length in places:
            line, theirs = lines[table].get((position, method)), table.cell(position, method, length)
            ours = cell_text(line.cells.get(length) if line else None, table.digits, "-")
            cells.append(ours if theirs is None else f"{ours} ({theirs:.1f})")
        texts.append([f"{method}, {position}", *cells])
    said = f"Language models trained on {lengths[0]:,} tokens, at that length and at {lengths[-1]:,}; needles in %, in "
    return f"{said}brackets the paper's (420M parameters, trained on 2,048):\n\n{markdown(texts, names=1)}"


def _fullest(lines: Iterable[Line]) -> dict[tuple[str, str], Line]:
    """Of the lines of one position and method the one with the most numbers; the first of equals."""
    found: dict[tuple[str, str], Line] = {}
    for line in lines:
        before = found.setdefault((line.position, line.method), line)
        if len(line.cells) > len(before.cells):
            found[line.position, line.method] = line
    return found


def _ours(rows: Sequence[Row], table: LanguageTable) -> list[Line]:
    return [line for line in language_lines(rows, table) if line.source != PAPER]


def _labels(lines: Sequence[Line]) -> list[tuple[str, Line]]:
    """What a curve is called: method and position, and the source where several lines share them."""
    short = [line.method if line.position == "nape" else f"{line.method}, {line.position}" for line in lines]
    return [
        (name if short.count(name) == 1 else f"{name}, {line.source}", line)
        for name, line in zip(short, lines, strict=True)
    ]


def _panel(table: LanguageTable, lines: Sequence[Line]) -> Panel:
    labels = _labels(lines)
    curves = {label: {int(length): cell.mean for length, cell in line.cells.items()} for label, line in labels}
    # A perplexity's interval is that of its documents, which are the same at every length and for every model.
    bands = {} if table is OWN_CORPUS else {label: _band(line) for label, line in labels}
    peers = {label: table.rows.get(RowKey(line.position, line.method), {}) for label, line in labels}
    dotted = {label: {int(length): value for length, value in peer.items()} for label, peer in peers.items() if peer}
    return Panel(
        title=table.caption if table is not OWN_CORPUS else "Perplexity on the same tokens, with more past",
        y_label="perplexity" if table is OWN_CORPUS else "answers that are right, %",
        curves=curves,
        dotted=dotted,
        dotted_label="the paper, 420M",
        bands=bands,
        trained_to=min(length for curve in curves.values() for length in curve),
        y_limits=None if table is OWN_CORPUS else (0, 103),
        x_label="tokens",
        colours=_colours(labels),
    )


def _band(line: Line) -> dict[int, tuple[float, float]]:
    ends = {length: (cell.low, cell.high) for length, cell in line.cells.items()}
    return {int(length): (low, high) for length, (low, high) in ends.items() if low is not None and high is not None}


def _colours(labels: Iterable[tuple[str, Line]]) -> dict[str, str]:
    """A method's own colour, lighter with another position than NAPE, with an adjusted base, and in further lines."""
    steps, shades = {"nape": 0, "rope": 1}, ("", "a0", "60")
    found: dict[str, str] = {}
    before: Counter[tuple[str, str]] = Counter()
    for label, line in labels:
        step = steps.get(line.position, 2) + before[line[:2]]
        found[label] = COLOURS[line.method] + shades[min(step, 2)]
        before[line[:2]] += 1
    return found


def _intervals(table: LanguageTable, lines: Sequence[Line]) -> str:
    def interval(cell: Cell | None) -> str:
        if cell is None or cell.low is None or cell.high is None:
            return ""
        return f"{cell.low:.{table.digits}f} to {cell.high:.{table.digits}f}, {cell.samples}"

    names = "documents" if table is OWN_CORPUS else "samples"
    columns = columns_of(table, lines)
    texts = [["position", "method", f"interval, {names}", *map(str, columns)]]
    texts += [[*line[:3], *(interval(line.cells.get(column)) for column in columns)] for line in lines]
    return markdown(texts, names=3)


def _changes(rows: Sequence[Row], lines: Sequence[Line]) -> list[str]:
    """How much more loss than at the shortest length, by document, of models whose tokens are the same everywhere."""
    from longspan.evaluate.perplexity import Perplexity, change

    texts = []
    named = _named(rows, OWN_CORPUS)
    for line in lines:
        own = sorted((row for origin, row in named if origin == line[:3]), key=lambda row: row["time"])
        by_length = {row["length"]: row for row in own if row["seed"] == own[0]["seed"] and row["scoring"] == "same"}
        if by_length:
            found = {
                length: Perplexity(*(row[name] for name in Perplexity._fields)) for length, row in by_length.items()
            }
            first = found[min(found)]
            changes = [change(first, found[length]) for length in sorted(found)]
            texts.append([*line[:2], *(f"{each.value:+.3f} ({each.low:+.3f} to {each.high:+.3f})" for each in changes)])
    if not texts:
        return []
    lengths = sorted({int(length) for line in lines for length in line.cells})
    table = markdown([["position", "method", *map(str, lengths)], *texts], names=2)
    return [f"Nats a token more than at the shortest length, document by document, the first seed:\n\n{table}"]


def _commands(rows: Sequence[Row], table: LanguageTable) -> str:
    found = dict.fromkeys(
        (*origin, str(row["seed"]), str(row["commit"]), f"`{row['command']}`") for origin, row in _named(rows, table)
    )
    texts = [["position", "method", "recipe", "seed", "commit", "command"], *map(list, found)]
    return markdown(texts, names=6)
