"""Figures, drawn from result rows and nothing else. Needs the `plots` extra."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# Dense methods in warm colours, sparse ones in cool ones; a method has one colour in every figure.
COLOURS = {
    "softmax": "#d1495b",
    "adaptive temperature": "#edae49",
    "ssmax": "#e07a3f",
    "assmax": "#b5651d",
    "stick_breaking": "#c77dff",
    "top-2": "#8d96a3",
    "topk_16": "#b8bec8",
    "topk_32": "#8d96a3",
    "topk_half": "#5c6470",
    "entmax": "#3a86c8",
    "sentmax": "#48cae4",
    "entmax 1.25": "#8ecae6",
    "entmax 1.5": "#3a86c8",
    "entmax 1.75": "#5e60ce",
    "entmax 2": "#1d3557",
    "entmax 4": "#7b2cbf",
    "asentmax": "#0b6e4f",
    "asentmax, gamma 3": "#0b6e4f",
    "asentmax, γ = -0.5": "#95d5b2",
    "asentmax, γ = 1": "#40916c",
    "asentmax, γ = 2": "#0b6e4f",
}
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")  # Okabe and Ito, safe for the colour-blind

Curve = Mapping[int, float] | Mapping[float, float]


@dataclass(frozen=True)
class Panel:
    """One set of axes: curves by method, length on the x axis.

    `bands` are shaded from a low to a high value by length, `marks` dashed vertical lines, both in a curve's colour.
    """

    title: str
    y_label: str
    curves: Mapping[str, Curve]
    dotted: Mapping[str, Curve] = field(default_factory=dict)
    dotted_label: str = ""
    bands: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)
    trained_to: int | None = None
    y_scale: str = "linear"
    y_limits: tuple[float, float] | None = None
    x_label: str = "items"
    x_scale: Literal["log", "linear"] = "log"
    x_ticks: Sequence[float] | None = None  # by default, every length on a logarithmic axis
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    colours: Mapping[str, str] = field(default_factory=dict)
    marker: str = "o"


@dataclass(frozen=True)
class Map:
    """One set of axes: values in [0, 1] over a square, `values[y][x]`, with lines and points of (x, y) over them."""

    title: str
    x_label: str
    y_label: str
    ticks: Sequence[float]
    values: Sequence[Sequence[float]]
    value_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    points: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    colours: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """One set of axes: a number in each cell of a table, `values[row][column]`, coloured on both sides of `middle`."""

    title: str
    x_label: str
    y_label: str
    values: Sequence[Sequence[float]]
    spread: float  # from the middle to the full colour; cells beyond it have the full colour too
    middle: float = 0.0


def draw(
    panels: Sequence[Panel | Map | Grid],
    path: Path,
    width: float = 7.2,
    height: float = 4.4,
    columns: int | None = None,
) -> None:
    """Draw the panels into a PNG, PDF or SVG, written whole or not at all.

    They stand side by side, each with its legend; or in a grid of `columns`, with one legend for all below.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "longspan"  # the same rows, the same file
    from matplotlib import pyplot

    across = columns or len(panels)
    down = -(-len(panels) // across)
    figure, all_axes = pyplot.subplots(down, across, figsize=(width * across, height * down), squeeze=False)
    for panel, axes in zip(panels, all_axes.flat, strict=False):
        if isinstance(panel, Map):
            _draw_map(axes, panel)
        elif isinstance(panel, Grid):
            _draw_grid(axes, panel)
        else:
            _draw_panel(axes, panel)
    for empty in all_axes.flat[len(panels) :]:
        empty.set_visible(False)
    below = 0.0 if columns is None else _share_legend(figure, all_axes.flat[: len(panels)])
    figure.tight_layout(rect=(0, below, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".part{path.suffix}")
    figure.savefig(draft, dpi=144, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    draft.replace(path)


def _share_legend(figure: Any, all_axes: Any) -> float:
    """One legend at the bottom in place of the panels' own; the share of the height that it takes."""
    lines: dict[str, Any] = {}
    for axes in all_axes:
        handles, labels = axes.get_legend_handles_labels()
        lines |= {label: handle for label, handle in zip(labels, handles, strict=True) if label not in lines}
        if (legend := axes.get_legend()) is not None:
            legend.remove()
    lines = dict(sorted(lines.items(), key=lambda item: not len(item[1].get_xdata())))  # what is no curve comes last
    widest = 0.5 + 0.09 * max(map(len, lines), default=0)  # inches of an entry
    across = max(1, min(len(lines), 8, int(figure.get_figwidth() / widest)))
    figure.legend(lines.values(), lines.keys(), loc="lower center", ncols=across, frameon=False)
    return float((0.13 + 0.22 * -(-len(lines) // across)) / figure.get_figheight())


def _draw_panel(axes: Any, panel: Panel) -> None:
    lengths: list[float] = sorted({length for curve in panel.curves.values() for length in curve})
    colours = {**COLOURS, **panel.colours}
    for method, curve in panel.curves.items():
        ours = method.startswith("asentmax") and "γ" not in method
        (line,) = axes.plot(
            list(curve),
            list(curve.values()),
            label=method,
            color=colours.get(method),
            marker=panel.marker,
            markersize=4.5,
            linewidth=2.6 if ours else 1.7,
            zorder=3 if ours else 2,
        )
        colours[method] = line.get_color()
    for method, band in panel.bands.items():
        lows, highs = zip(*band.values(), strict=True) if band else ((), ())
        axes.fill_between(list(band), lows, highs, color=colours.get(method), alpha=0.15, linewidth=0, zorder=1.5)
    for method, curve in panel.dotted.items():
        style = {"color": colours.get(method), "linestyle": ":", "linewidth": 1, "alpha": 0.8, "zorder": 1.9}
        axes.plot(list(curve), list(curve.values()), **style)
    if panel.dotted:
        axes.plot([], [], color="grey", linestyle=":", linewidth=1, label=panel.dotted_label)
    for method, places in panel.marks.items():
        for place in places:
            axes.axvline(place, color=colours.get(method), linestyle="--", linewidth=1, alpha=0.8, zorder=1.8)
    if panel.x_scale == "log":
        axes.set_xscale("log", base=2)
    axes.set_yscale(panel.y_scale)
    if panel.trained_to is not None:
        end = min(panel.trained_to, lengths[-1] * 2**0.25)  # what is trained beyond the axis is not drawn
        axes.axvspan(lengths[0] / 2**0.5, end, color="grey", alpha=0.15, linewidth=0)
        axes.annotate(
            "trained", (end, 0.02), xycoords=("data", "axes fraction"), xytext=(-4, 0),
            textcoords="offset points", ha="right", fontsize=9, color="grey", rotation=90,
        )  # fmt: skip
    if panel.x_scale == "log":
        ticks = lengths if panel.x_ticks is None else panel.x_ticks
        axes.set_xlim(lengths[0] / 2**0.5, lengths[-1] * 2**0.25)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
    elif panel.x_ticks is not None:
        axes.set_xticks(panel.x_ticks)
    if panel.y_limits is not None:
        axes.set_ylim(*panel.y_limits)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_title(panel.title, fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)


def _draw_map(axes: Any, panel: Map) -> None:
    low, high = panel.ticks[0], panel.ticks[-1]
    image = axes.imshow(
        panel.values, origin="lower", extent=(low, high, low, high), cmap="cividis", vmin=0, vmax=1, aspect="equal"
    )
    for name, line in panel.lines.items():
        axes.plot(*zip(*line, strict=True), label=name, color=panel.colours.get(name), linewidth=1.8)
    for name, points in panel.points.items():
        style = {"marker": "o", "markersize": 4, "linestyle": "", "markeredgecolor": "black", "markeredgewidth": 0.6}
        axes.plot(*zip(*points, strict=True), label=name, color=panel.colours.get(name), **style)
    axes.figure.colorbar(image, ax=axes, label=panel.value_label, fraction=0.046, pad=0.03)
    axes.set(xlim=(low, high), ylim=(low, high), xticks=panel.ticks, yticks=panel.ticks)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_title(panel.title, fontsize=11)
    if panel.lines or panel.points:
        axes.legend(frameon=False, fontsize=9)


def _draw_grid(axes: Any, panel: Grid) -> None:
    limits = {"vmin": panel.middle - panel.spread, "vmax": panel.middle + panel.spread}
    rows, columns = len(panel.values), len(panel.values[0])
    image = axes.imshow(panel.values, cmap="RdBu_r", aspect="auto", **limits)
    axes.figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, extend="both")
    if rows * columns <= 64:  # more cells have no room for their numbers
        for row, column in itertools.product(range(rows), range(columns)):
            value = panel.values[row][column]
            dark = abs(value - panel.middle) > 0.6 * panel.spread
            style = {"ha": "center", "va": "center", "fontsize": 8, "color": "white" if dark else "black"}
            axes.text(column, row, f"{value:.2g}", **style)
    axes.set_xticks(range(columns), [str(column + 1) for column in range(columns)])
    axes.set_yticks(range(rows), [str(row + 1) for row in range(rows)])
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_title(panel.title, fontsize=11)
