# SPDX-License-Identifier: Apache-2.0
"""The table, the file with every figure, and the published page."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bench.figures import Curve, Figures, Line

HEAD = ("row", "what", "ours", "rival", "ratio", "goal", "")
BEGIN = "<!-- made by ./dev bench --publish, from here -->"
END = "<!-- to here -->"


def number(value: float) -> str:
    """Three digits that count."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def spread(figures: Figures | None, unit: str) -> str:
    if figures is None:
        return "-"
    low, high = min(figures.values), max(figures.values)
    return (
        f"{number(figures.median)} {unit} ({number(low)} to {number(high)}; "
        f"{figures.name})"
    )


def cells(line: Line) -> tuple[str, ...]:
    ratio = line.ratio
    return (
        line.row,
        line.what,
        spread(line.ours, line.unit),
        spread(line.rival, line.unit),
        "-" if ratio is None else number(ratio),
        line.goal_text,
        {True: "met", False: "MISSED", None: "-"}[line.met],
    )


def table(lines: list[Line]) -> str:
    """Markdown, with columns that are as wide as what is in them."""
    rows = [HEAD, *(cells(line) for line in lines)]
    wide = [max(3, *(len(row[n]) for row in rows)) for n in range(len(HEAD))]
    rows.insert(1, tuple("-" * n for n in wide))
    return "\n".join(
        "| "
        + " | ".join(c.ljust(n) for c, n in zip(row, wide, strict=True))
        + " |"
        for row in rows
    )


def verdict(lines: list[Line]) -> str:
    goals = [line.met for line in lines if line.met is not None]
    return f"{sum(goals)} of {len(goals)} met"


def write_json(
    path: Path,
    about: dict[str, Any],
    lines: list[Line],
    curves: list[Curve],
) -> None:
    whole = {
        "about": about,
        "lines": [line.as_dict() for line in lines],
        "curves": [curve.as_dict() for curve in curves],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")


def publish(
    page: Path, about: dict[str, Any], lines: list[Line], plots: list[Path]
) -> None:
    """Replaces what stands between the two marks of the page."""
    text = page.read_text()
    before, found, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"{page} has no place for the table: {BEGIN} … {END}")
    facts = "\n".join(f"| {name} | {value} |" for name, value in about.items())
    pictures = "\n\n".join(
        f"![{path.stem}]({os.path.relpath(path, page.parent)})"
        for path in plots
    )
    parts = (
        f"| of this run | |\n| --- | --- |\n{facts}",
        table(lines),
        f"{verdict(lines)}.",
        pictures,
    )
    made = "\n\n".join(part for part in parts if part)
    page.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}")
