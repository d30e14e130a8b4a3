"""`longspan sweep`."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from longspan.cli.console import console, device_named
from longspan.cli.training import config_of, folder_of

if TYPE_CHECKING:
    from longspan.train.sweep import Job

COLOURS = {"finished": "green", "failed": "red", "stopped": "yellow", "waiting": "bright_black"}


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
    tasks: Annotated[list[str], typer.Argument(help="Tasks, see `longspan tasks`; they come first.")],
    methods: Annotated[list[str], typer.Option("--methods", help="See `longspan recipes`.")] = ["asentmax"],  # noqa: B006
    positions: Annotated[list[str], typer.Option("--positions", help="nope, alibi, nape, rope.")] = ["nape"],  # noqa: B006
    seeds: Annotated[int, typer.Option(min=1, help="How many: 0, 1, ...")] = 1,
    rates: Annotated[list[float] | None, typer.Option("--rates", help="Learning rates of AdamW.")] = None,
    muon_rates: Annotated[list[float] | None, typer.Option("--muon-rates", help="Learning rates of Muon.")] = None,
    recipe: Annotated[str, typer.Option(help="`paper` or `longspan`.")] = "longspan",
    minutes: Annotated[float, typer.Option(min=0, help="When they are over, every run saves itself and ends.")] = 60,
    side_by_side: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    smoke: Annotated[bool, typer.Option("--smoke", help="A size that trains in seconds on a CPU.")] = False,
    edits: Annotated[list[str] | None, typer.Option("--set", help="Change a field of every run.")] = None,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Measure each run when it is trained.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Train every combination within a time budget; the same command goes on where it stopped.

    For example: longspan sweep copy sort --methods softmax asentmax --seeds 3 --rates 5e-4 1e-3 --side-by-side 3
    """
    from longspan.train import sweep as sweeps
    from longspan.train.loop import stop_on_signals

    device_named(device)
    jobs: dict[Path, Job] = {}  # a combination that is named twice is run once
    for cell, rate, muon_rate, seed in product(
        [f"{task}/{position}/{method}" for task, position, method in product(tasks, positions, methods)],
        [f"optimizer.learning_rate={rate}" for rate in rates or []] or [""],
        [f"optimizer.muon_learning_rate={rate}" for rate in muon_rates or []] or [""],
        range(seeds),
    ):
        changes = [change for change in (rate, muon_rate, *(edits or [])) if change]
        config = config_of(f"{recipe}/{cell}", seed, smoke, changes)
        folder = folder_of(config, out)
        train = ["train", f"{recipe}/{cell}", "--seed", str(seed), "--out", str(folder), "--device", device]
        train += ["--smoke"] if smoke else []
        train += [word for change in changes for word in ("--set", change)]
        measure = ["evaluate", str(folder), "--device", device] if evaluate else None
        title = " ".join([cell, rate.removeprefix("optimizer."), muon_rate.removeprefix("optimizer."), f"seed {seed}"])
        jobs[folder] = sweeps.Job(" ".join(title.split()), config, folder, train, measure)
    runs = list(jobs.values())
    with stop_on_signals() as stop, Live(console=console, auto_refresh=False) as live:
        sweeps.sweep(runs, side_by_side, 60 * minutes, stop, _shown(live, runs))
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


def _shown(live: Live, jobs: "list[Job]") -> Callable[[], None]:
    """What draws the table anew; where there is no screen, a line for every run that changes its state."""
    states = {job.title: job.state for job in jobs}

    def show() -> None:
        live.update(_table(jobs), refresh=True)
        for job in jobs:
            if not console.is_terminal and states[job.title] != job.state:
                console.print(f"{job.title}: {job.state}, step {job.step}", highlight=False, soft_wrap=True)
            states[job.title] = job.state

    return show


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
