"""`longspan inspect` and `longspan figure maps`: what the heads of a trained model do."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from longspan.cli.console import console, device_named, fail, print_whole
from longspan.cli.probes import Format
from longspan.cli.training import refuse_language
from longspan.results import Row, read_rows, replace_rows

if TYPE_CHECKING:
    from longspan.plots import Panel

# What is shown of a head, and how it is called in the table and on an axis.
COLUMNS = {
    "support": "support",
    "tiles": "live tiles",
    "entropy": "H / log n",
    "largest": "largest weight",
    "distance": "distance",
    "scale": "scale",
    "beta": "β",
    "gamma": "γ",
}
DRAWN = ("support", "entropy", "largest", "scale", "gamma")


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", exists=True, file_okay=False)],
    lengths: Annotated[list[int] | None, typer.Option("--length", help="Instead of the recipe's lengths.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Sequences of each length.")] = 8,
    queries: Annotated[int, typer.Option(min=1, help="Query rows of each sequence, evenly spaced.")] = 256,
    maps: Annotated[bool, typer.Option("--maps", help="Also the attention maps of one sequence.")] = False,
    layers: Annotated[list[int] | None, typer.Option("--layer", help="Layers of the maps; all by default.")] = None,
    cells: Annotated[int, typer.Option(min=1, help="Maps are max-pooled to at most so many cells a side.")] = 128,
    checkpoint: Annotated[Literal["best", "last"], typer.Option(help="By validation, or the last one.")] = "best",
    out: Annotated[Path | None, typer.Option(help="Folder for rows and figures, RUN by default.")] = None,
    format: Annotated[Format, typer.Option(help="Of the figures.")] = Format.png,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Measure the heads of a trained model: support, live tiles, entropy, largest weight, distance and scale."""
    import matplotlib  # noqa: F401  (missing, it is missed now and not when everything is measured)

    from longspan.evaluate.inspect import head_rows, map_rows, origin_of, query_rows
    from longspan.tasks import get_task
    from longspan.train import checkpoint as checkpoints
    from longspan.train.trainer import model_of

    place = device_named(device)
    loaded = checkpoints.load(checkpoints.of_run(folder, checkpoint))
    refuse_language(loaded.config, folder, "`longspan lm inspect` looks at its heads")
    model, config = model_of(loaded, place)
    task = get_task(config.task, **config.task_options)
    ladder = sorted(set(lengths or config.test_lengths or [config.longest]))
    for length in ladder:  # all of them before the first is measured
        task.check_length(length)
        query_rows(task.time(length), queries)
    if layers and not maps:
        fail("--layer chooses the layers of --maps")
    shown = sorted(set(layers or range(1, config.model.layers + 1)))
    if not 1 <= shown[0] <= shown[-1] <= config.model.layers:
        fail(f"the model has the layers 1 to {config.model.layers}, got --layer {', '.join(map(str, layers or []))}")
    where, origin = out or folder, origin_of(config, loaded.step, place)
    rows: list[Row] = []
    drawn: list[Row] = []
    for length in ladder:
        with console.status(f"length {length}"):
            rows += [row | origin for row in head_rows(model, task, length, samples, queries)]
            if maps:
                drawn += [row | origin for row in map_rows(model, task, length, shown, cells)]
    replace_rows(where / "inspect.jsonl", rows)
    draw_heads(rows, where / f"inspect.{format.value}")
    if maps:
        replace_rows(where / "maps.jsonl", drawn)
        draw_maps(drawn, where / f"maps.{format.value}")
    print_whole(_table(rows))  # last: what is measured stays, whatever becomes of the screen
    _say_gamma(rows)
    names = "inspect and maps" if maps else "inspect"
    console.print(f"Written: {names} (.jsonl, .{format.value}) in {where}", highlight=False, soft_wrap=True)


def redraw_maps(
    rows: Annotated[list[Path], typer.Argument(help="Rows of `longspan inspect --maps`.", exists=True, dir_okay=False)],
    layers: Annotated[list[int] | None, typer.Option("--layer", help="Only these layers.")] = None,
    heads: Annotated[list[int] | None, typer.Option("--head", help="Only these heads.")] = None,
    lengths: Annotated[list[int] | None, typer.Option("--length", help="Only these lengths.")] = None,
    out: Annotated[Path, typer.Option(help="A .png, .pdf or .svg.")] = Path("maps.png"),
) -> None:
    """Draw attention maps from their rows, of several runs together."""
    if out.suffix.lstrip(".") not in list(Format):
        fail(f"a figure is one of {', '.join(Format)}, got {out}")
    wanted = {"layer": layers, "head": heads, "length": lengths}
    found = [row for path in rows for row in read_rows(path) if "weights" in row]
    chosen = [row for row in found if all(not only or row[key] in only for key, only in wanted.items())]
    if not chosen:
        fail(f"there are no such maps in {', '.join(map(str, rows))}")
    draw_maps(chosen, out)
    console.print(f"written: {out}", soft_wrap=True)


def _heads(rows: Sequence[Row]) -> dict[tuple[int, int], list[Row]]:
    """The rows of every layer and head, by rising length."""
    heads: dict[tuple[int, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["layer"], row["head"], row["length"])):
        heads.setdefault((row["layer"], row["head"]), []).append(row)
    return heads


def _columns(rows: Sequence[Row]) -> list[str]:
    return [name for name in COLUMNS if any(row[name] is not None for row in rows)]


def _table(rows: Sequence[Row]) -> Table:
    lengths = sorted({row["length"] for row in rows})
    title = f"{rows[0]['recipe']}: each number at the lengths {', '.join(map(str, lengths))}"
    drawn = Table(title=title, box=None, header_style="bold", title_justify="left")
    for name in ("layer", "head", "slope", *(COLUMNS[name] for name in _columns(rows))):
        drawn.add_column(name, justify="right", no_wrap=True)
    for (layer, head), found in _heads(rows).items():
        slope = found[0]["slope"]
        numbers = ("  ".join(_number(row[name]) for row in found) for name in _columns(rows))
        drawn.add_row(str(layer), str(head), "-" if slope is None else f"{slope:.3g}", *numbers)
    return drawn


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _say_gamma(rows: Sequence[Row]) -> None:
    """The paper's question of Copy: is gamma negative?"""
    longest = max(row["length"] for row in rows)
    known = [row for row in rows if row["length"] == longest and row["gamma"] is not None]
    if known:
        negative = sum(row["gamma"] < 0 for row in known)
        share = sum(row["gamma_negative"] for row in known) / len(known)
        console.print(
            f"γ is negative on average in {negative} of {len(known)} scaled heads, "
            f"and for {100 * share:.0f} % of their queries (length {longest})",
            highlight=False,
            soft_wrap=True,
        )


def draw_heads(rows: Sequence[Row], path: Path) -> None:
    """Statistics against the length: a line of panels a statistic, a column a layer, a curve a head."""
    from longspan.plots import draw

    layers = sorted({row["layer"] for row in rows})
    panels = [_panel(rows, name, layer) for name in _columns(rows) if name in DRAWN for layer in layers]
    draw(panels, path, width=4.6 if len(layers) < 4 else 3.6, height=2.6, columns=len(layers))


def _panel(rows: Sequence[Row], name: str, layer: int) -> "Panel":
    import matplotlib

    from longspan.plots import Panel

    heads = {_label(found[0]): found for (number, _), found in _heads(rows).items() if number == layer}
    colours = matplotlib.colormaps["viridis"].resampled(len(heads) + 1)  # without the yellow, too pale for a line
    shades = {head: matplotlib.colors.to_hex(colours(place)) for place, head in enumerate(heads)}
    known = {head: found for head, found in heads.items() if found[0][name] is not None}
    edges = {
        (head, edge): {row["length"]: row[edge] for row in found}
        for head, found in known.items()
        for edge in ("gamma_low", "gamma_high")
        if name == "gamma"
    }
    trained = rows[0]["trained_to"]
    return Panel(
        f"layer {layer}",
        COLUMNS[name],
        {head: {row["length"]: row[name] for row in found} for head, found in known.items()},
        {f"{head}, {edge}": curve for (head, edge), curve in edges.items()},
        "5 % and 95 % of the queries",
        trained_to=trained if min(row["length"] for row in rows) <= trained else None,
        x_label="length",
        colours=shades | {f"{head}, {edge}": shades[head] for head, edge in edges},
        y_scale="log" if name == "support" and all(row[name] > 0 for row in rows) else "linear",
    )


def _label(row: Row) -> str:
    return f"head {row['head']}" + (f", slope {row['slope']:.2g}" if row["slope"] else "")


def draw_maps(rows: Sequence[Row], path: Path) -> None:
    """A line of maps for every model, layer and length, a column for every head. White is exactly zero."""
    import matplotlib

    matplotlib.use("Agg")
    import numpy
    from matplotlib import pyplot

    models = list(dict.fromkeys((row["config"], row["step"]) for row in rows))
    lines: dict[tuple[int, ...], dict[int, Row]] = {}
    for row in rows:
        key = (models.index((row["config"], row["step"])), row["layer"], row["length"])
        lines.setdefault(key, {})[row["head"]] = row
    heads = sorted({row["head"] for row in rows})
    size = (1.7 * len(heads) + 1.7, 1.75 * len(lines) + 0.5)
    figure, axes = pyplot.subplots(len(lines), len(heads), figsize=size, squeeze=False, layout="constrained")
    colours = matplotlib.colormaps["viridis_r"].with_extremes(under="#f0f0e0", bad="white")
    image: Any = None
    for line, by_head in zip(axes, (lines[key] for key in sorted(lines)), strict=True):
        for place, head in zip(line, heads, strict=True):
            place.set(xticks=[], yticks=[])
            if head not in by_head:
                place.set_visible(False)
                continue
            weights = numpy.array(by_head[head]["weights"])
            norm = matplotlib.colors.LogNorm(1e-3, 1)
            image = place.imshow(numpy.ma.masked_equal(weights, 0), cmap=colours, norm=norm, interpolation="nearest")
        first = next(iter(by_head.values()))
        pooled = f", pooled {first['window']}×{first['window']}" if first["window"] > 1 else ""
        line[0].set_visible(True)
        line[0].set_ylabel(f"{first['method']}, layer {first['layer']}\nlength {first['length']}{pooled}", fontsize=8)
    for place, head in zip(axes[0], heads, strict=True):
        place.set_title(f"head {head}", fontsize=9)
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 3 / len(lines)), pad=0.02, extend="min")
    bar.set_label("attention weight (white: exactly 0)", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".part{path.suffix}")
    figure.savefig(draft, dpi=144)
    pyplot.close(figure)
    draft.replace(path)
