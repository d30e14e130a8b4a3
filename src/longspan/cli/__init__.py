"""The command line. Needs the `cli` extra."""

import io
import sys
import traceback
from pathlib import Path

try:
    import rich  # noqa: F401
    import typer
except ImportError as error:
    sys.exit(f"the command line needs {error.name}: pip install 'longspan[cli,train,plots]'")

from longspan.cli import demo, hub, inspect, lm, probes, results, sweep, tables, training
from longspan.cli.console import fail, fail_without

# Modules that read rows of results: what they miss is missing there, and elsewhere it is an error of ours.
_READERS = {"collect", "language_report", "ladders", "publish", "report", "results", "retrieval_rows", "selection"}
_READERS |= {"sweep", "tables"}

app = typer.Typer(
    help="Attention that keeps its focus at contexts far longer than it was trained on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(demo.demo)
app.command()(tables.methods)
app.add_typer(tables.tasks_app, name="tasks")
app.command()(tables.recipes)
app.command()(training.train)
app.command()(training.evaluate)
app.command()(inspect.inspect)
app.command(cls=sweep.Spread)(sweep.sweep)
app.command()(results.collect)
app.command()(results.choose)
app.command()(tables.table)
app.command()(results.report)
app.add_typer(tables.figure_app, name="figure")
app.command()(probes.probe)
app.add_typer(lm.lm_app, name="lm")
app.command()(hub.export)
app.command("import")(hub.import_)
tables.figure_app.command("probe")(probes.redraw)
tables.figure_app.command("maps")(inspect.redraw_maps)


def main() -> None:
    """Run a command; a wrong argument ends with its message instead of a traceback, a full disk too."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a screen that has no β still has the numbers
    from longspan.train.checkpoint import CheckpointError
    from longspan.train.loop import Diverged

    try:
        app()
    except (ValueError, OSError, CheckpointError, Diverged) as error:
        fail(str(error))
    except KeyError as error:
        place = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if place.stem not in _READERS:
            raise
        fail(f"{error} is missing in a row that was read ({place.name} looks for it)")
    except ModuleNotFoundError as error:
        fail_without(error, "cli,train,plots")
