"""Figures, drawn from result rows and nothing else. Needs the `plots` extra."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Dense methods in warm colours, sparse ones in cool ones; a method has one colour in every figure.
COLOURS = {
    "softmax": "#d1495b",
    "adaptive temperature": "#edae49",
    "ssmax": "#e07a3f",
    "top-2": "#8d96a3",
    "entmax 1.5": "#3a86c8",
    "asentmax": "#0b6e4f",
}

Curve = Mapping[int, float]


@dataclass(frozen=True)
class Panel:
    """One set of axes: curves by method, length on the x axis."""

    title: str
    y_label: str
    curves: Mapping[str, Curve]
    dotted: Mapping[str, Curve] = field(default_factory=dict)
    dotted_label: str = ""
    trained_to: int | None = None
    y_scale: str = "linear"
    y_limits: tuple[float, float] | None = None
    x_label: str = "items"


def draw(panels: Sequence[Panel], path: Path, width: float = 7.2, height: float = 4.4) -> None:
    """Draw the panels side by side into a PNG, written whole or not at all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(width * len(panels), height), squeeze=False)
    for panel, axes in zip(panels, all_axes[0], strict=True):
        _draw_panel(axes, panel)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part.png")
    figure.savefig(draft, dpi=144)
    pyplot.close(figure)
    draft.replace(path)


def _draw_panel(axes: Any, panel: Panel) -> None:
    lengths = sorted({length for curve in panel.curves.values() for length in curve})
    colours = dict(COLOURS)
    for method, curve in panel.curves.items():
        ours = method == "asentmax"
        (line,) = axes.plot(
            list(curve),
            list(curve.values()),
            label=method,
            color=COLOURS.get(method),
            marker="o",
            markersize=4.5,
            linewidth=2.6 if ours else 1.7,
            zorder=3 if ours else 2,
        )
        colours[method] = line.get_color()
    for method, curve in panel.dotted.items():
        style = {"color": colours.get(method), "linestyle": ":", "linewidth": 1, "alpha": 0.8, "zorder": 1.9}
        axes.plot(list(curve), list(curve.values()), **style)
    if panel.dotted:
        axes.plot([], [], color="grey", linestyle=":", linewidth=1, label=panel.dotted_label)
    axes.set_xscale("log", base=2)
    axes.set_yscale(panel.y_scale)
    if panel.trained_to is not None:
        axes.axvspan(lengths[0] / 2**0.5, panel.trained_to, color="grey", alpha=0.15, linewidth=0)
        axes.annotate(
            "trained", (panel.trained_to, 0.02), xycoords=("data", "axes fraction"), xytext=(-4, 0),
            textcoords="offset points", ha="right", fontsize=9, color="grey", rotation=90,
        )  # fmt: skip
    axes.set_xlim(lengths[0] / 2**0.5, lengths[-1] * 2**0.25)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    if panel.y_limits is not None:
        axes.set_ylim(*panel.y_limits)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_title(panel.title, fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
