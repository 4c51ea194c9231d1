"""What the benchmarks write beside their tables: `--json` and `--plot`, and the two kinds of plot."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure import Spread, spread

__all__ = ["add_outputs", "bars", "lines"]

_BAR, _LETTER = 0.34, 0.075  # inches
_WIDE = 10.0  # times; figures that differ by more are drawn on a logarithmic axis


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds `--plot` and `--json`. A plot that cannot be drawn is refused at once, not after the measurement."""
    parser.add_argument("--plot", metavar="FILE", type=_plot_file, help="draw it; .svg or .png, by matplotlib")
    parser.add_argument("--json", metavar="FILE", help="write every measurement here")


def _plot_file(name: str) -> str:
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install 'outboard[plots]'")
    if not name.endswith((".svg", ".png")):
        raise argparse.ArgumentTypeError(f"{name!r} ends neither with .svg nor with .png")
    return name


def bars(
    path: str,
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    goals: Mapping[str, float] | None = None,
    log: bool = False,
) -> None:
    """Draws a panel of horizontal bars for each title: medians, with a line from the least to the greatest.

    Args:
        path: the file.
        panels: values by title and label.
        goals: by label; drawn across the bar.
        log: whether the axis is logarithmic.
    """
    pyplot = importlib.import_module("matplotlib.pyplot")
    most = max(len(panel) for panel in panels.values())
    longest = max(len(label) for panel in panels.values() for label in panel)
    size = ((3.4 + _LETTER * longest) * len(panels), 1.0 + _BAR * most)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, (title, panel) in zip(axes[0], panels.items(), strict=True):
        found = [spread(values) for values in panel.values()]
        places = range(len(panel))
        axis.barh(places, [one.median for one in found], xerr=_whiskers(found), height=0.7, color="tab:blue", alpha=0.8)
        for place, label in enumerate(panel):
            if goals and label in goals:
                axis.plot([goals[label]] * 2, [place - 0.4, place + 0.4], color="tab:orange", linewidth=2.5)
        axis.set_yticks(places, list(panel))
        axis.set_ylim(len(panel) - 0.4, -0.6)
        axis.set_title(title, loc="left", fontsize=10)
        if log:
            axis.set(xscale="log", xlim=(min(1.0, *(one.least for one in found)), None))
            axis.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
            axis.minorticks_off()
            axis.set_xlim(axis.get_xlim()[0], 1.1 * max(max(one.most for one in found), *(goals or {}).values(), 1.0))
        axis.grid(axis="x", alpha=0.3)
    _save(figure, pyplot, path)


def lines(path: str, panels: Mapping[str, tuple[str, Mapping[str, Mapping[float, Sequence[float]]]]]) -> None:
    """Draws a panel of lines for each x axis: medians, with a line from the least to the greatest.

    The x axis is logarithmic; the y axis begins with 0, unless figures differ too much for that.

    Args:
        path: the file.
        panels: by the title of the x axis: the title of the y axis, and values by line and x.
    """
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(3.6 * len(panels), 3.2), layout="constrained", squeeze=False
    )
    for axis, (x_title, (y_title, found)) in zip(axes[0], panels.items(), strict=True):
        for label, points in found.items():
            spreads = [spread(values) for values in points.values()]
            medians = [one.median for one in spreads]
            axis.errorbar(list(points), medians, yerr=_whiskers(spreads), fmt="o-", label=label)
        axis.set(xscale="log", xlabel=x_title, ylabel=y_title)
        values = [value for points in found.values() for several in points.values() for value in several]
        if max(values) > _WIDE * min(values):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:,g}")
        else:
            axis.set_ylim(0, 1.08 * max(values))
        sizes = sorted({size for points in found.values() for size in points})
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        if len(found) > 1:
            axis.legend(fontsize=8, frameon=False)
    _save(figure, pyplot, path)


def _whiskers(found: Sequence[Spread]) -> list[list[float]]:
    return [[one.median - one.least for one in found], [one.most - one.median for one in found]]


def _save(figure: Any, pyplot: Any, path: str) -> None:
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
