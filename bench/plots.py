# SPDX-License-Identifier: Apache-2.0
"""The plots: one SVG a curve, and one of all goals."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from bench.figures import Curve, Line

# The same picture for the same figures.
mpl.rcParams.update(
    {
        "svg.hashsalt": "kvt",
        "font.size": 9,
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
)
COLOURS = {
    "kvt": "tab:blue",
    "kvt over NIXL": "tab:cyan",
    "vLLM": "tab:red",
    "process_vm_writev, 2 threads": "black",
}


def save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def draw_curve(curve: Curve, folder: Path) -> Path:
    """Medians, and the band from the lowest to the highest round."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, points in curve.points.items():
        xs = [x for x, _ in points]
        lows = [min(each.values) for _, each in points]
        highs = [max(each.values) for _, each in points]
        (line,) = axes.plot(
            xs,
            [each.median for _, each in points],
            marker="o",
            markersize=3,
            label=name,
            color=COLOURS.get(name),
        )
        axes.fill_between(xs, lows, highs, alpha=0.15, color=line.get_color())
    every = [x for points in curve.points.values() for x, _ in points]
    if min(every) == 0:
        axes.set_xscale("symlog", linthresh=1)
    else:
        axes.set_xscale("log", base=curve.base)
    axes.set_yscale("log")
    axes.set(title=curve.title, xlabel=curve.x_name, ylabel=curve.y_name)
    axes.legend()
    path = folder / f"{curve.name}.svg"
    save(figure, path)
    return path


def reached(line: Line) -> float:
    """How much of the goal: 1 and more is met."""
    if line.sense == "under":
        return line.goal / max(line.ours.median, 1e-9)
    ratio = line.ratio
    assert ratio is not None
    return (
        line.goal / max(ratio, 1e-9)
        if line.sense == "part"
        else ratio / line.goal
    )


def draw_goals(lines: list[Line], folder: Path) -> Path:
    shown = [line for line in lines if line.met is not None]
    figure, axes = plt.subplots(figsize=(8, 0.24 * len(shown) + 1))
    places = range(len(shown))
    axes.barh(
        places,
        [min(max(reached(line), 0.01), 100) for line in shown],
        color=["tab:green" if line.met else "tab:orange" for line in shown],
    )
    axes.set_yticks(places, [f"{line.row}: {line.what}" for line in shown])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set(xlabel="of the goal (1 and more: met; cut at 100)")
    path = folder / "goals.svg"
    save(figure, path)
    return path


def draw(lines: list[Line], curves: list[Curve], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    made = [draw_curve(curve, folder) for curve in curves]
    if any(line.met is not None for line in lines):
        made.insert(0, draw_goals(lines, folder))
    return made
