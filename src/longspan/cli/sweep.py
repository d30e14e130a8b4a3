"""`longspan sweep`."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from longspan.cli.console import console, device_named, fail
from longspan.cli.training import config_of, folder_of
from longspan.paper.names import RecipeName, parse_name

if TYPE_CHECKING:
    from longspan.collect import Harvest
    from longspan.evaluate.ladder import Purpose
    from longspan.results import Row
    from longspan.train.sweep import Job

COLOURS = {"finished": "green", "failed": "red", "diverged": "red", "stopped": "yellow", "waiting": "bright_black"}
EVERY = 20.0  # seconds between two harvests of what is still running
TELL = 60.0  # seconds between two lines on what is running, where there is no screen


class Spread(TyperCommand):
    """A command whose repeatable options take every value that follows: `--methods softmax asentmax`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeatable = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        spread: list[str] = []
        option, values = "", 0
        for arg in args:
            if arg.startswith("--"):
                option, values = (arg if arg in repeatable else ""), 0
            elif option:
                values += 1
                spread += [option] if values > 1 else []
            spread.append(arg)
        return super().parse_args(ctx, spread)


def sweep(
    what: Annotated[
        list[str] | None, typer.Argument(help="Tasks, or whole recipes with their edits; they come first.")
    ] = None,
    methods: Annotated[list[str], typer.Option("--methods", help="See `longspan recipes`.")] = ["asentmax"],  # noqa: B006
    positions: Annotated[list[str], typer.Option("--positions", help="nope, alibi, nape, rope.")] = ["nape"],  # noqa: B006
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    first_seed: Annotated[
        int, typer.Option(min=0, help="The first seed; the others follow it. A plan's own seeds come first.")
    ] = 0,
    rates: Annotated[list[float] | None, typer.Option("--rates", help="Learning rates of AdamW.")] = None,
    muon_rates: Annotated[list[float] | None, typer.Option("--muon-rates", help="Learning rates of Muon.")] = None,
    recipe: Annotated[str, typer.Option(help="`paper` or `longspan`.")] = "longspan",
    plan: Annotated[
        Path | None, typer.Option(help="A file of recipes, one a line, each with its seeds if wanted.", exists=True)
    ] = None,
    minutes: Annotated[float, typer.Option(min=0, help="The whole time, saving included.")] = 60,
    reserve: Annotated[float, typer.Option(min=0, help="Seconds of it that are left for saving.")] = 30,
    whole: Annotated[bool, typer.Option("--whole", help="Start no run that would not end in time.")] = False,
    side_by_side: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    smoke: Annotated[bool, typer.Option("--smoke", help="A size that trains in seconds on a CPU.")] = False,
    edits: Annotated[list[str] | None, typer.Option("--set", help="Change a field of every run.")] = None,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Measure each run when it is trained.")] = False,
    purpose: Annotated[Literal["both", "validation", "test"], typer.Option(help="What it is measured for.")] = "both",
    collect: Annotated[
        Path | None, typer.Option(help="Folder that gets results.jsonl and logs.jsonl, as they come.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="Folder that gets the weights, in half precision.")] = None,
    known: Annotated[Path, typer.Option(help="Rows on earlier runs, to estimate times by.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Train every combination within a time budget; the same command goes on where it stopped.

    For example: longspan sweep copy sort --methods softmax asentmax --seeds 3 --rates 5e-4 1e-3 --side-by-side 3
    """
    from longspan.collect import Harvest, run_row
    from longspan.report import rows_under
    from longspan.train import sweep as sweeps
    from longspan.train.loop import stop_on_signals

    device_named(device)
    if 60 * minutes <= reserve:
        fail(f"--minutes {minutes:g} leaves no time for training: --reserve is {reserve:g} seconds")
    which = range(first_seed, first_seed + seeds)
    cells: list[tuple[str, Sequence[int]]] = [
        (f"{recipe}/{task}/{position}/{method}" if "/" not in task else task, which)
        for task in what or []
        for position, method in (product(positions, methods) if "/" not in task else [("", "")])
    ]
    cells += _planned(plan, which)
    if not cells:
        fail("nothing to train: name tasks or recipes, or a --plan with some")
    purposes: list[Purpose] = ["validation", "test"] if purpose == "both" else [purpose]
    jobs: dict[Path, Job] = {}  # a combination that is named twice is run once
    for name, seed in _runs(cells, rates or [], muon_rates or [], edits or [], smoke):
        config = config_of(str(name), seed, False, [])
        folder = folder_of(config, out)
        train = ["train", name.base, "--seed", str(seed), "--out", str(folder), "--device", device]
        train += ["--smoke"] if name.size else []
        train += [word for edit in name.edits for word in ("--set", edit)]
        measure = ["evaluate", str(folder), "--purpose", purpose, "--device", device] if evaluate else None
        jobs[folder] = sweeps.Job(_title(name, seed, edits or []), config, folder, train, measure, purposes)
    runs = list(jobs.values())
    earlier = list(rows_under([known])) if known.exists() else []
    _tell_times(runs, earlier, side_by_side)
    harvest = Harvest(collect) if collect is not None else None

    ended: dict[Path, Row] = {}  # the runs of this sweep teach too

    def fits(job: "Job", left: float) -> bool:
        if not whole:
            return True
        for each in runs:
            if each.state == "finished" and each.folder not in ended:
                ended[each.folder] = run_row(each.folder)
        expected = sweeps.expected_seconds(job.config, job.step, [*earlier, *ended.values()])
        return expected is None or expected * side_by_side <= left

    with stop_on_signals() as stop, Live(console=console, auto_refresh=False) as live:
        show = _shown(live, runs, harvest, weights)
        sweeps.sweep(runs, side_by_side, 60 * minutes, stop, show, reserve=reserve, fits=fits)
    for job in runs:
        _harvest(harvest, job)
    if not console.is_terminal:
        console.line()
    failed = [job for job in runs if job.state == "failed"]
    for job in failed:
        message = f"[red]failed:[/red] {escape(str(job.folder))}\n{escape(job.tail())}"
        console.print(message, highlight=False, soft_wrap=True)
    left = sum(job.state in ("waiting", "stopped") for job in runs)
    if left:
        console.print(f"{left} of {len(runs)} are not finished: the same command goes on.", highlight=False)
    if stop.wanted:
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def _planned(path: Path | None, seeds: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
    """The recipes of a plan, the most urgent first: a name and, if not the first few, its seeds; # starts a comment."""
    lines = [] if path is None else path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        name, *words = line.partition("#")[0].split() or [""]
        if not all(word.isdecimal() for word in words):
            fail(f"{path}, line {number}: a line is a recipe and its seeds, got {line!r}")
        if name:
            yield name, [int(word) for word in words] or seeds


def _runs(
    cells: Sequence[tuple[str, Sequence[int]]],
    rates: Sequence[float],
    muon_rates: Sequence[float],
    edits: Sequence[str],
    smoke: bool,
) -> Iterator[tuple[RecipeName, int]]:
    """The recipes with their edits, and the seeds, in the order they are to run in."""
    for cell, seeds in cells:
        name = parse_name(cell)
        if name is None:
            fail(f"there is no recipe {cell!r}; `longspan recipes` lists them, such as paper/copy/nape/asentmax")
        for rate, muon_rate, seed in product(
            [f"optimizer.learning_rate={rate}" for rate in rates] or [""],
            [f"optimizer.muon_learning_rate={rate}" for rate in muon_rates] or [""],
            seeds,
        ):
            changes = [*name.edits, *(change for change in (rate, muon_rate, *edits) if change)]
            yield name._replace(size="smoke" if smoke else name.size, edits=tuple(changes)), seed


def _title(name: RecipeName, seed: int, everywhere: Sequence[str]) -> str:
    """The run in a few words; what is changed in every run is not among them."""
    changes = [edit.removeprefix("optimizer.") for edit in name.edits if edit not in everywhere]
    return " ".join([name.base, *changes, f"seed {seed}"])


def _tell_times(jobs: "Sequence[Job]", earlier: "Sequence[Row]", side_by_side: int) -> None:
    """How long it may take, as far as earlier runs tell."""
    from longspan.train.sweep import expected_seconds

    for job in jobs:
        job.look()
    expected = [expected_seconds(job.config, job.step, earlier) for job in jobs]
    told = [seconds / 60 for seconds in expected if seconds is not None]
    words = f"{len(jobs)} runs, {side_by_side} at a time"
    if told:
        words += f"; about {sum(told):.0f} minutes of training, {min(told):.1f} to {max(told):.1f} a run"
    if len(told) < len(jobs):
        words += f"; {len(jobs) - len(told)} have no earlier run to go by"
    console.print(words, highlight=False, soft_wrap=True)


def _harvest(harvest: "Harvest | None", job: "Job") -> None:
    if harvest is not None and job.state != "waiting":
        harvest.add(job.folder, ended=job.state != "training")


def _shown(live: Live, jobs: "list[Job]", harvest: "Harvest | None", weights: Path | None) -> Callable[[], None]:
    """What draws the table anew and brings in rows; where there is no screen, a line for every change of a state."""
    from longspan.collect import keep_weights

    states = {job.folder: job.state for job in jobs}
    started = told = harvested = time.monotonic()

    def show() -> None:
        nonlocal told, harvested
        now = time.monotonic()
        live.update(_table(jobs), refresh=True)
        changed = [job for job in jobs if states[job.folder] != job.state]
        for job in changed:
            if not console.is_terminal:
                words = f"{_clock(now - started)} {job.title}: {job.state}, step {job.step}"
                console.print(words, highlight=False, soft_wrap=True)
            _harvest(harvest, job)
            if weights is not None and job.state == "finished":
                keep_weights(job.folder, weights)
            states[job.folder] = job.state
        running = [job for job in jobs if job.worker is not None]
        if now - harvested > EVERY:
            harvested = now
            for job in running:
                _harvest(harvest, job)
        if now - told > TELL and not console.is_terminal:
            told = now
            for job in running:
                loss = "" if job.loss is None else f", loss {job.loss:.4f}"
                words = f"{_clock(now - started)} {job.title}: {job.step}/{job.config.steps}{loss}"
                console.print(words, highlight=False, soft_wrap=True)

    return show


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _table(jobs: "list[Job]") -> Table:
    table = Table("run", box=None, header_style="bold")
    table.add_column("step", justify="right")
    table.add_column("loss", justify="right")
    table.add_column("state")
    for job in jobs:
        loss = "" if job.loss is None else f"{job.loss:.4f}"
        state = f"[{COLOURS.get(job.state, 'cyan')}]{job.state}"
        table.add_row(job.title, f"{job.step}/{job.config.steps}", loss, state)
    return table
