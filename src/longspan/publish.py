"""The page of published results, made from the rows under a folder and nothing else: the same rows, the same page."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from longspan import language_report, report, retrieval_rows
from longspan.ladders import FIGURES, LANGUAGE_FIGURE, MAIN, MAIN_FIGURE, RECIPES, draw_all, main_panels, task_panels
from longspan.paper.names import config_named, parse_name
from longspan.paper.tables import PaperTable, RowKey, get_table, table_names
from longspan.report import details, markdown
from longspan.results import Row
from longspan.selection import RULE, Candidate, Choice, cell_of, choose, chosen_rows
from longspan.train.config import fingerprint

PAGE = "README.md"
MARKS = "<!-- {}: begin -->", "<!-- {}: end -->"

# Where the methods part, in the four tasks of the main text: what the front page shows.
HEADLINES = {"mqmtar": (4096, 65536), "reverse": (256, 512), "copy": (1024, 4096), "sort": (128, 256)}

_INTRODUCTION = """\
# Results

Made by `longspan report {folder}` from the rows beside this page; add rows or change the command, not the page.

One row is one run at one length, with its commit, command and device; a row with `event: run` says how a run went, also
one that failed. Every number below comes from `longspan table NAME --rows {folder} --chosen` too (or, of what was
not chosen, without `--chosen`), and `longspan table NAME --rows {folder} --chosen --csv` has the intervals.

- **Cells** are percent: mean over seeds ± standard deviation (best seed); one seed has its number alone. *published*
  are the paper's own numbers. The recipe *paper* is the paper's way of training, run by us; *longspan* is ours. They
  are never mixed. Both train on the paper's sources, with one exception: in our recipe for Sort half of the training
  sources are drawn from some of the symbols only, 1 to all of them, at the paper's lengths.
- **Intervals** are 95 % and come from the number of samples (Wilson), not from the seeds; where accuracy is counted by
  token (2Back, Local Count), from the number of tokens, as if each were drawn by itself, which makes them too narrow.
- **GPU minutes** are those of training one run; where several shared a GPU, its share.

## How rates and settings are chosen

{rule}
"""


def page(rows: Sequence[Row], folder: str = "results") -> str:
    """The whole page in Markdown; smoke runs are no results."""
    rows = [row for row in rows if not (name := parse_name(row.get("recipe") or "")) or not name.size]
    choices = choose(rows)
    shown = reported_rows(rows, choices)
    parts = [_INTRODUCTION.format(folder=folder, rule=RULE), _costs(choices), "## The main table\n"]
    if main_panels(shown):
        parts.append(f"![The four tasks of the main text]({FIGURES}/{MAIN_FIGURE}.png)\n")
    parts += [_block(get_table(f"main/{task}"), shown, choices) for task in MAIN]
    parts.append(language_report.section(rows, f"{FIGURES}/{LANGUAGE_FIGURE}.png"))
    parts.append("## The tables of the appendix\n")
    parts += [_block(get_table(name), shown, choices) for name in table_names() if not name.startswith("main/")]
    parts += [_unlucky(choices), _earlier(choices)]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def reported_rows(rows: Iterable[Row], choices: Sequence[Choice]) -> list[Row]:
    """The rows of the chosen rates, and those of runs that nothing was chosen for."""
    return chosen_rows(choices) + [row for row in rows if cell_of(row) is None]


def front(rows: Sequence[Row]) -> str:
    """What the front page shows: our recipe with NAPE at two lengths a task, the paper's numbers in brackets, and the
    language models."""
    shown = reported_rows(rows, choose(rows))
    lines = {
        (task, line.method): line
        for task in HEADLINES
        for line in report.table_lines(shown, get_table(task))
        if (line.position, line.source) == ("nape", "longspan")
    }
    measured = {task for task, _ in lines}
    places = [(task, length) for task in HEADLINES if task in measured for length in HEADLINES[task]]
    table = [["exact match, %", *(f"{task} {length}" for task, length in places)]]
    for method in dict.fromkeys(method for _, method in lines):
        cells = []
        for task, length in places:
            line, theirs = lines.get((task, method)), get_table(task).cell("nape", method, length)
            ours = "" if line is None or length not in line.cells else f"{line.cells[length].mean:.1f}"
            cells.append(f"{ours or '-'} ({theirs:.1f})" if theirs is not None else ours)
        table.append([method, *cells])
    return "\n\n".join(part for part in (markdown(table, names=1), language_report.front(rows)) if part)


def put_between(text: str, inserted: str, name: str = "results") -> str:
    """`text` with what stands between the two marks of this name replaced."""
    begin, end = (mark.format(name) for mark in MARKS)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the page needs the marks {begin} and {end}, once each and in this order")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{inserted}\n{end}{rest.partition(end)[2]}"


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the figures of the page into `folder`; what was written."""
    return draw_all(reported_rows(rows, choose(rows)), folder / FIGURES)


def _block(table: PaperTable, rows: Sequence[Row], choices: Sequence[Choice]) -> str:
    """One table of the paper: the numbers, the figure, and how each of our lines was made."""
    lines = [line for line in report.table_lines(rows, table) if not line.smoke]
    if table.name.startswith("main/"):
        lines = [_cut(line, table.lengths) for line in lines if _in_main(line, table)]
    ours = [line for line in lines if line.source != report.PUBLISHED and line.cells]
    title = f"### `{table.name}`\n\n{table.caption.rstrip('.')}.\n"
    if not ours:
        return f"{title}\nNo runs yet; `longspan table {table.name}` prints the paper's numbers.\n"
    mine = [choice for choice in choices if choice.cell.task == report.task_of(table)]
    made = {origin: choice for choice in mine for origin in report.table_rows(chosen_rows([choice]), table)}
    parts = [title]
    if not table.name.startswith("main/") and task_panels(rows, table):
        parts.append(f"![{table.name}: accuracy against length]({FIGURES}/{table.name}.png)\n")
    parts += [report.as_markdown(lines) + "\n", *(f"Note: {note.text}\n" for note in table.notes)]
    parts.append(details("95 % intervals, and samples a seed", _intervals(ours)))
    parts.append(details("How each line was made, and by which command", _made(ours, made, table, rows)))
    others = [choice for choice in mine if choice.others and choice in made.values()]
    if others and not table.name.startswith("main/"):
        parts.append(details("Rates and settings that were not chosen", _others(others)))
    return "\n".join(parts)


def _in_main(line: report.Line, table: PaperTable) -> bool:
    """The main text is about NAPE; stick-breaking is a position of its own kind. Recipes stand as they are."""
    known = RowKey(line.position, line.method) in table.rows
    place = known or line.position == "nape" or line.method == "stick_breaking"
    return place and line.source in (report.PUBLISHED, *RECIPES)


def _cut(line: report.Line, lengths: Sequence[int]) -> report.Line:
    return line._replace(cells={length: cell for length, cell in line.cells.items() if length in lengths})


def _intervals(lines: Sequence[report.Line]) -> str:
    lengths = report.table_lengths(lines)
    table = [["position", "method", "recipe", *map(str, lengths)]]
    for line in lines:
        cells = [_interval(line.cells[length]) if length in line.cells else "" for length in lengths]
        table.append([line.position, line.method, line.source, *cells])
    return markdown(table, names=3)


def _interval(cell: report.Cell) -> str:
    if cell.low is None or cell.high is None:
        return ""
    return f"{cell.low:.1f} to {cell.high:.1f}" + (f", {cell.samples:,}" if cell.samples else "")


def _made(
    lines: Sequence[report.Line], made: dict[report.Origin, Choice], table: PaperTable, rows: Sequence[Row]
) -> str:
    heading = ["position", "method", "recipe", "rate", "why this one", "seeds", "steps", "left the plateau at step"]
    text = [[*heading, "GPU minutes a run", "commit", "command"]]
    measured = report.table_rows(rows, table)
    for line in lines:
        origin = (line.position, line.method, line.source)
        found = measured[origin]
        seeds = sorted({row["seed"] for row in found})
        if (choice := made.get(origin)) is None:
            text.append([*origin, "", "", _seeds(seeds, seeds), *[""] * 3, _commits(found), _commands(found)])
            continue
        runs = choice.chosen.runs
        steps = ", ".join(sorted({str(row["steps"]) for row in runs or found if "steps" in row}))
        cells = [choice.chosen.rates, choice.reason, _seeds(seeds, choice.chosen.seeds), steps, _escapes(runs)]
        text.append([*origin, *cells, _minutes(runs), _commits(found), _command(choice.chosen)])
    return markdown(text, names=len(text[0]))


def _others(choices: Sequence[Choice]) -> str:
    lengths = sorted({row["length"] for choice in choices for each in choice.others for row in each.tests})
    table = [["position", "method", "recipe", "rate", "seeds", *map(str, lengths)]]
    for choice in choices:
        for each in choice.others:
            cells = report.cells_of(each.tests)
            numbers = [str(cells[length]) if length in cells else "" for length in lengths]
            measured = sorted({row["seed"] for row in each.tests})
            table.append([*choice.cell[1:], each.rates, _seeds(measured, each.seeds), *numbers])
    return markdown(table, names=5)


def _seeds(measured: Sequence[int], run: Sequence[int]) -> str:
    return str(len(measured)) if set(measured) == set(run) else f"{len(measured)} measured of {len(run)}"


def _escapes(runs: Sequence[Row]) -> str:
    return ", ".join("never" if _is_stuck(row) else str(row["escape_step"] or "-") for row in runs)


def _is_stuck(run: Row) -> bool:
    """Whether it had its time and stayed on the plateau; of a run that was stopped nobody knows."""
    return run["escape_step"] is None and run["ending"] != "stopped"


def _minutes(runs: Sequence[Row]) -> str:
    return f"{statistics.mean(row['gpu_seconds'] for row in runs) / 60:.1f}" if runs else ""


def _commits(rows: Sequence[Row]) -> str:
    return ", ".join(sorted({str(row.get("commit")) for row in rows}))


def _commands(rows: Iterable[Row]) -> str:
    return ", ".join(sorted({f"`{row['command']}`" for row in rows}))


def _command(candidate: Candidate) -> str:
    """What makes the runs again; marked where the recipe has changed since."""
    if candidate.rows[-1]["task"] == retrieval_rows.TASK:
        return _commands(candidate.tests)
    first, last = min(candidate.seeds), max(candidate.seeds)
    seeds = f"--seeds {last - first + 1}" + (f" --first-seed {first}" if first else "")
    command = f"`longspan sweep '{candidate.recipe}' {seeds} --evaluate`"
    name = parse_name(candidate.recipe)
    assert name is not None
    variants = {row["variant"] for row in candidate.rows if "variant" in row}
    try:
        same = not variants or fingerprint(config_named(name)) in variants
    except ValueError:
        same = False
    return command if same else f"{command} at the commit named: the recipe has changed since"


def _costs(choices: Sequence[Choice]) -> str:
    """Runs and GPU minutes of each recipe, every run counted, whatever became of it."""
    everything = [(choice, each) for choice in choices for each in _candidates(choice)]
    table = [["task", "recipe", "runs", "finished", "never left the plateau", "GPU minutes a run", "together"]]
    for task, family in dict.fromkeys((choice.cell.task, choice.cell.family) for choice in choices):
        of_it = [each for choice, each in everything if (choice.cell.task, choice.cell.family) == (task, family)]
        runs = [row for each in of_it for row in each.runs]
        if runs:
            ended = sum(row["ending"] == "finished" for row in runs)
            stuck = sum(map(_is_stuck, runs))
            total = sum(row["gpu_seconds"] for row in runs) / 60
            table.append([task, family, *map(str, (len(runs), ended, stuck)), _minutes(runs), f"{total:.1f}"])
    return f"## What it cost\n\n{markdown(table, names=2)}\n" if len(table) > 1 else ""


def _unlucky(choices: Sequence[Choice]) -> str:
    """Every run that did not end well."""
    table = [["recipe", "seed", "ended", "at step", "left the plateau at step", "last loss", "commit"]]
    for choice in choices:
        for each in _candidates(choice):
            for row in each.runs:
                if row["ending"] != "finished" or row["escape_step"] is None:
                    loss = "" if row["loss"] is None else f"{row['loss']:.3g}"
                    cells = [f"{row['step']} of {row['steps']}", _escapes([row]), loss, str(row["commit"])]
                    table.append([row["recipe"], str(row["seed"]), row["ending"], *cells])
    if len(table) == 1:
        return ""
    words = "The plateau is left at the first logged step with an accuracy by token above 90 %."
    return f"## Runs that failed, or never left the plateau\n\n{words}\n\n{markdown(table, names=7)}\n"


def _earlier(choices: Sequence[Choice]) -> str:
    """Runs of recipes as they were before a change: kept as rows, in no table."""
    table = [["recipe", "rate", "seeds", "commit"]]
    for choice in choices:
        for each in choice.superseded:
            table.append([each.recipe, each.rates, str(len(each.seeds)), _commits(each.rows)])
    if len(table) == 1:
        return ""
    words = "These rows were made before a recipe was changed, and are in none of the tables."
    return f"## Rows of earlier forms of a recipe\n\n{words}\n\n{markdown(table, names=4)}\n"


def _candidates(choice: Choice) -> list[Candidate]:
    return [choice.chosen, *choice.others, *choice.superseded]
