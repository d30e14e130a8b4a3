"""Result rows: one JSON object a line, appended as they are measured and never rewritten."""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

Row = dict[str, Any]


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append `rows` to `path`; they are on disk when this returns. A last line cut short by a crash is dropped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _drop_cut_line(file)
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        file.flush()
        os.fsync(file.fileno())


def replace_rows(path: Path, rows: Iterable[Row]) -> None:
    """Put `rows` in the place of those of `path`, all at once."""
    draft = path.with_suffix(".part")
    draft.unlink(missing_ok=True)
    append_rows(draft, rows)
    draft.replace(path)


def _drop_cut_line(file: IO[bytes]) -> None:
    """Every whole row ends in a newline, so what follows the last one is a piece of a row."""
    if end := file.seek(0, os.SEEK_END):
        file.seek(end - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one."""
    draft = path.with_suffix(".part")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # or else a power cut may leave the new name with nothing in it
    draft.replace(path)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of `path`; a last line cut short by a crash is left out, any other damage is an error."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not rows of JSON ({error})") from error
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and not text.endswith("\n"):
                return
            raise ValueError(f"{path}, line {number}: not a JSON row ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: not a JSON row, which is an object, but {line[:40]}")
        yield row


def now() -> str:
    """The time, as rows have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def provenance(device: torch.device | str | None = None) -> Row:
    """Where and how the rows of this run were made, on `device`, by default a GPU where there is one."""
    on_gpu = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    return {
        "commit": _commit(),
        "command": shlex.join([_program(), *map(_portable, sys.argv[1:])]),
        "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _program() -> str:
    path = Path(sys.argv[0])
    return "longspan" if path.parts[-3:] == ("longspan", "cli", "__main__.py") else path.name


def _portable(argument: str) -> str:
    """An argument without where on this machine its file lies: rows are published."""
    if Path(argument).is_absolute():  # a folder's name may have "=" in it
        return Path(argument).name
    option, equals, value = argument.partition("=")
    return option + equals + _portable(value) if equals else argument


def _commit() -> str | None:
    """The commit of the source tree, marked if the tree differs from it; None where there is none.

    The environment variable LONGSPAN_COMMIT tells it where the tree travels without its history.
    """
    if told := os.environ.get("LONGSPAN_COMMIT"):
        return told
    here = Path(__file__)
    if _git(here.parent, "ls-files", here.name):  # and not merely installed somewhere inside another repository
        return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return run.stdout.strip() or None


def _processor() -> str:
    names = [line.split(":", 1)[1].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
