"""Writes the tables of times in the docs from the rows in `benchmarks/results`: `python benchmarks/tables.py`.

A line is of the latest run that timed ours beside flash. Behind a peer's time is that time over ours, of the same run;
what is marked * is of the latest run that timed both, since that of the line did not. The same rows give the same
pages, which a test compares.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from longspan.publish import put_between
from longspan.report import details, markdown
from longspan.results import Row, read_rows, write_whole

HERE = Path(__file__).parent
KINDS = {"random": "random", "topics4": "4 topics", "topics16": "16 topics", "nape": "NAPE"}
OURS, FLASH = "entmax 1.5", "flash"
DIMS = (64, 128)
FRONT = {  # lines of the front page: a title, a workload, and what was timed
    "flash-2, softmax": ("random", FLASH),
    "cuDNN, softmax": ("random", "cudnn"),
    "entmax 1.5, noise: nothing is empty": ("random", OURS),
    "entmax 1.5, 70 to 75 % of tiles empty": ("topics4", OURS),
    "entmax 1.5, 87 to 93 % of tiles empty": ("topics16", OURS),
    "entmax 1.5, NAPE: half of the heads with ALiBi": ("nape", OURS),
}
FRONT_LENGTHS = (4096, 16384, 65536)


class Run(NamedTuple):
    number: int  # in the order of the rows
    commit: str
    command: str


@dataclass
class Cell:
    """What was timed of one workload at one length: rows by name, run by run."""

    runs: dict[Run, dict[str, Row]] = field(default_factory=dict)

    def run_with(self, *names: str) -> Run | None:
        """The latest run that has all of these."""
        return max((run for run, rows in self.runs.items() if all(name in rows for name in names)), default=None)


def cells_of(rows: Iterable[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], Cell]:
    """Cells by the values of `keys`."""
    cells: dict[tuple[Any, ...], Cell] = {}
    numbers: dict[tuple[str, str], int] = {}
    for row in rows:
        origin = row["commit"], row["command"]
        run = Run(numbers.setdefault(origin, len(numbers)), *origin)
        cells.setdefault(tuple(row[key] for key in keys), Cell()).runs.setdefault(run, {})[row["name"]] = row
    return cells


def with_runs(heading: list[str], lines: Sequence[tuple[list[str], Run]]) -> str:
    """A table whose lines end with a letter for their run, the latest first, and what these runs were."""
    runs = sorted({run for _, run in lines}, reverse=True)
    letters = {run: chr(ord("a") + number) for number, run in enumerate(runs)}
    table = markdown([[*heading, "run"], *([*line, letters[run]] for line, run in lines)], names=1)
    told = [f"- {letters[run]}: `{abbreviated(run.commit)}`, `{run.command}`" for run in runs]
    return f"{table}\n\n{details('Commits and commands of the runs, the latest first', chr(10).join(told))}".rstrip()


def abbreviated(commit: str) -> str:
    return commit[:12] if len(commit) == 40 else commit


def thousands(length: int) -> str:
    return f"{length >> 20}M" if length >= 1 << 20 else f"{length >> 10}K"


def short(number: float) -> str:
    """Three digits that tell."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def beside_ours(cell: Cell, run: Run, name: str, told: Callable[[Row, Row], str]) -> str:
    """A peer's time in this run and over ours; or, marked, in the latest that timed both."""
    if name in cell.runs[run]:
        return told(cell.runs[run][name], cell.runs[run][OURS])
    if (other := cell.run_with(OURS, name)) is None:
        return ""
    return f"{told(cell.runs[other][name], cell.runs[other][OURS])} *"


def attention_table(rows: Iterable[Row], dim: int) -> str:
    """Milliseconds, forward / forward + backward, of every workload by length."""
    cells = cells_of(rows, ("dim", "kind", "length"))
    peers = {FLASH: "flash-2", "cudnn": "cuDNN", "adasplash": "AdaSplash-2", "flex": "flex with ALiBi"}

    def told(row: Row, ours: Row) -> str:
        forward, both = (row[key] / ours[key] for key in ("forward_ms", "both_ms"))
        return f"{both_of(row)} ({forward:.2f} / {both:.2f})"

    lines = []
    for kind, name in KINDS.items():
        for length in sorted(key[2] for key in cells if key[:2] == (dim, kind)):
            cell = cells[dim, kind, length]
            if run := cell.run_with(OURS, FLASH):
                ours = cell.runs[run][OURS]
                others = [beside_ours(cell, run, peer, told) for peer in peers]
                dead, memory = f"{100 * ours['block_sparsity']:.0f} %", f"{ours['mebibytes']:,.0f}"
                lines.append(([name, thousands(length), both_of(ours), *others, dead, memory], run))
    return with_runs(["", "length", "ours", *peers.values(), "dead tiles", "MiB"], lines)


def both_of(row: Row) -> str:
    return f"{short(row['forward_ms'])} / {short(row['both_ms'])}"


def decoding_table(rows: Iterable[Row]) -> str:
    """Microseconds of a step, softmax's by the better of its two ways, and the traffic of ours."""
    peers = {"sdpa flash": "SDPA flash", "sdpa cudnn": "SDPA cuDNN"}
    cells = cells_of(better_of_two(rows), ("kind", "batch", "length"))

    def told(row: Row, ours: Row) -> str:
        return f"{row['microseconds']:.1f} ({row['microseconds'] / ours['microseconds']:.2f})"

    lines = []
    for kind, name in KINDS.items():
        for batch, length in sorted(key[1:] for key in cells if key[0] == kind):
            cell = cells[kind, batch, length]
            if run := cell.run_with(OURS, "sdpa flash"):
                ours = cell.runs[run][OURS]
                others = [beside_ours(cell, run, peer, told) for peer in peers]
                read = sum(ours[key] for key in ("key_bytes", "value_bytes", "summary_bytes"))
                traffic = [f"{size / 2**20:,.1f}" for size in (read, ours["scratch_bytes"])]
                case = [name, str(batch), thousands(length)]
                lines.append(([*case, f"{ours['microseconds']:.1f}", *others, *traffic], run))
    return with_runs(["", "sequences", "keys", OURS, *peers.values(), "MiB read", "MiB of scores"], lines)


def better_of_two(rows: Iterable[Row]) -> list[Row]:
    """Softmax with the heads of a group as heads or, folded, as queries: the faster under one name."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if "microseconds" not in row or row["name"] == "launch":
            continue
        row = {**row, "name": row["name"].removesuffix(" folded")}
        key = tuple(row[part] for part in ("commit", "command", "kind", "batch", "length", "name"))
        best[key] = min(best.get(key, row), row, key=lambda each: each["microseconds"])
    return list(best.values())


def front_table(rows: Iterable[Row]) -> str:
    """Forward + backward of heads of 64, and flash's time over ours, for the front page."""
    cells = cells_of(rows, ("dim", "kind", "length"))

    def told(kind: str, length: int, name: str) -> str:
        cell = cells.get((64, kind, length), Cell())
        if (run := cell.run_with(OURS, FLASH, name)) is None:
            return ""
        time, flash = (cell.runs[run][each]["both_ms"] for each in (name, FLASH))
        times = flash / time
        return f"{short(time)} ({times:.{1 if times >= 1 else 2}f})" if name == OURS else short(time)

    heading = ["ms", *(thousands(length) + " x 4" * (length == 4096) for length in FRONT_LENGTHS)]
    lines = [[title, *(told(kind, length, name) for length in FRONT_LENGTHS)] for title, (kind, name) in FRONT.items()]
    return markdown([heading, *lines], names=1)


def pages() -> dict[Path, str]:
    """Every page with its tables as the rows have them."""
    attention, decoding = (list(read_rows(HERE / f"results/{name}.jsonl")) for name in ("attention", "decode"))
    root = HERE.parent
    tables = {f"heads of {dim}": (root / "docs/kernels.md", attention_table(attention, dim)) for dim in DIMS}
    tables["decoding"] = root / "docs/decoding.md", decoding_table(decoding)
    tables["kernels"] = root / "README.md", front_table(attention)
    made = {path: path.read_text(encoding="utf-8") for path, _ in tables.values()}
    for name, (path, table) in tables.items():
        made[path] = put_between(made[path], table, name)
    return made


def main() -> None:
    for path, text in pages().items():
        write_whole(path, text)


if __name__ == "__main__":
    main()
