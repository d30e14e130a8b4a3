"""Figures of accuracy against length, one a task: a panel for each position and recipe, the paper's numbers dotted."""

import math
from collections.abc import Sequence
from pathlib import Path

from longspan import language_report, report
from longspan.paper.max_retrieval import DEMO_ROWS
from longspan.paper.tables import MAX_RETRIEVAL, PaperTable, RowKey, get_table, table_names
from longspan.plots import Panel, draw
from longspan.results import Row

FIGURES = "figures"
MAIN = ("mqmtar", "reverse", "copy", "sort")
MAIN_FIGURE = "main"
LANGUAGE_FIGURE = "language_models"
RECIPES = ("longspan", "paper", "demo")  # as they are; what else was changed is for tables
_ENDINGS = (".png", ".svg")
_METHODS = ("softmax", "topk_16", "topk_32", "topk_half", "ssmax", "assmax", "entmax", "sentmax", "asentmax")


def draw_all(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw a figure for every task that has rows, one of the four tasks of the main text and one of
    language models; what was written."""
    written: list[Path] = []
    for name in table_names():
        if not name.startswith("main/") and (panels := task_panels(rows, get_table(name))):
            written += _drawn(panels, folder / name, columns=min(len(panels), 2))
    if panels := main_panels(rows):
        written += _drawn(panels, folder / MAIN_FIGURE, columns=min(len(panels), 2))
    if panels := language_report.panels(rows):
        written += _drawn(panels, folder / LANGUAGE_FIGURE, columns=len(panels))
    return written


def task_panels(rows: Sequence[Row], table: PaperTable) -> list[Panel]:
    """A panel for every position and recipe that has rows."""
    lines = _ours(rows, table)
    groups = dict.fromkeys((_group(line), line.source) for line in lines)
    return [
        _panel(", ".join([table.name, *([group] if group != "none" else []), f"recipe {source}"]), table, among)
        for group, source in groups
        if (among := [line for line in lines if (_group(line), line.source) == (group, source)])
    ]


def main_panels(rows: Sequence[Row]) -> list[Panel]:
    """The four tasks by our recipe with NAPE, and stick-breaking."""
    panels = []
    for task in MAIN:
        lines = _ours(rows, get_table(task))
        lines = [line for line in lines if line.source == "longspan" and (line.position == "nape" or _alone(line))]
        if lines:
            panels.append(_panel(task, get_table(task), lines))
    return panels


def _ours(rows: Sequence[Row], table: PaperTable) -> list[report.Line]:
    lines = report.table_lines(rows, table)
    drawn = set(DEMO_ROWS.values()) if table.name == MAX_RETRIEVAL.name else {line.method for line in lines}
    return sorted(
        (line for line in lines if line.source in RECIPES and line.method in drawn),  # more than ten are for the table
        key=lambda line: (_group(line) != "nape", _group(line), line.source, _rank(line.method)),
    )


def _rank(method: str) -> tuple[int, str]:
    """The order of the methods in every legend."""
    return (_METHODS.index(method) if method in _METHODS else len(_METHODS), method)


def _alone(line: report.Line) -> bool:
    return line.method == "stick_breaking"


def _group(line: report.Line) -> str:
    """RoPE's factors are compared in one panel; elsewhere a panel has one position."""
    return "rope" if line.position.startswith("rope") else line.position


def _panel(title: str, table: PaperTable, lines: Sequence[report.Line]) -> Panel:
    named = {(line.position if table.name == "rope_factor" else line.method): line for line in lines}
    peers = {label: table.rows.get(RowKey(line.position, line.method)) for label, line in named.items()}
    curves = {label: {length: cell.mean for length, cell in line.cells.items()} for label, line in named.items()}
    bands = {label: _extremes(line) for label, line in named.items()}
    measured = {length for curve in curves.values() for length in curve}
    ours_or_theirs = measured | {length for length in table.lengths if length <= max(measured)}
    return Panel(
        title=title,
        y_label="exact match, %" if table.metric == "exact_match" else "accuracy, %",
        curves=curves,
        dotted={label: peer for label, peer in peers.items() if peer},
        dotted_label="the paper",
        bands=bands,
        trained_to=table.lengths[0],
        y_limits=(0, 103),
        x_label="length",
        x_ticks=_ticks(sorted(ours_or_theirs)),
    )


def _ticks(lengths: Sequence[int]) -> list[int]:
    """The lengths to write below a panel: of a long ladder every fourfold one, or they run into each other."""
    if len(lengths) <= 8:
        return list(lengths)
    return [length for length in lengths if round(math.log2(length / lengths[0])) % 2 == 0]


def _extremes(line: report.Line) -> dict[int, tuple[float, float]]:
    """The worst and the best seed by length, where there are several."""
    cells = {length: cell for length, cell in line.cells.items() if cell.seeds > 1}
    return {length: (cell.mean if cell.worst is None else cell.worst, cell.best) for length, cell in cells.items()}


def _drawn(panels: Sequence[Panel], stem: Path, columns: int) -> list[Path]:
    paths = [stem.with_name(stem.name + ending) for ending in _ENDINGS]
    for path in paths:
        draw(panels, path, columns=columns)
    return paths
