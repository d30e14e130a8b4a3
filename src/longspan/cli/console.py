"""What the commands share: one console, and how they give up."""

from typing import NoReturn

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

console = Console()
errors = Console(stderr=True)  # what is piped into a file has none of them


def fail(message: str) -> NoReturn:
    """End with an error message."""
    errors.print(f"[red]error:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    raise SystemExit(2)


def fail_without(error: ModuleNotFoundError, extras: str) -> NoReturn:
    """End with what is to be installed; an import that breaks inside of a package may name none."""
    fail(f"this command needs {error.name}: pip install 'longspan[{extras}]'" if error.name else str(error))


def print_whole(table: Table) -> None:
    """Print a table: fitted to a screen, at its full width into a pipe or a file."""
    (console if console.is_terminal else Console(width=10_000)).print(table)


def device_named(name: str) -> torch.device:
    """The device called `name`; "auto" is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type != "cuda":  # there it would take memory of the GPU
            torch.Generator(device)  # a name that torch knows need not be a device that is here, or that has numbers
    except RuntimeError as error:
        raise typer.BadParameter(f"there is no device {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("there is no GPU on this machine")
    return device
