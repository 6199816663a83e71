# SPDX-License-Identifier: Apache-2.0
"""Figures of one candidate, and the lines of the table made of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Figures:
    """One figure a round."""

    name: str
    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rounds": self.values,
            "min": min(self.values),
            "median": self.median,
            "max": max(self.values),
        }


@dataclass
class Line:
    """One line of the table.

    `sense` says how the goal is meant: "times": ours is at least `goal` times
    the rival's, "shorter": at most the `goal`th part of it, "part": at most
    `goal` of it, "under": at most `goal` itself, whatever the rival has,
    "seen": there is no goal.
    """

    what: str
    unit: str
    ours: Figures
    rival: Figures | None
    sense: str
    goal: float
    note: str = ""
    row: str = ""

    @property
    def ratio(self) -> float | None:
        if self.rival is None:
            return None
        ours, theirs = self.ours.median, self.rival.median
        if self.sense == "shorter":
            return theirs / ours if ours else float("inf")
        return ours / theirs if theirs else float("inf")

    @property
    def met(self) -> bool | None:
        """None where there is no goal."""
        if self.sense == "seen":
            return None
        if self.sense == "under":
            return self.ours.median <= self.goal
        ratio = self.ratio
        assert ratio is not None
        return (
            ratio <= self.goal if self.sense == "part" else ratio >= self.goal
        )

    @property
    def goal_text(self) -> str:
        number = f"{self.goal:g}"
        if self.sense == "seen":
            return "-"
        if self.sense == "under":
            return f"under {number} {self.unit}"
        if self.sense == "part":
            return f"at most {number} of it"
        if self.sense == "shorter":
            return f"{number} times shorter"
        return f"{number} times"

    def as_dict(self) -> dict[str, Any]:
        return {
            "row": self.row,
            "what": self.what,
            "unit": self.unit,
            "ours": self.ours.as_dict(),
            "rival": self.rival.as_dict() if self.rival else None,
            "ratio": self.ratio,
            "sense": self.sense,
            "goal": self.goal,
            "met": self.met,
            "note": self.note,
        }


@dataclass
class Curve:
    """What a plot shows: one figure for each x, for each candidate."""

    name: str  # of its file
    title: str
    x_name: str
    y_name: str
    base: int = 10  # of the marks on the x axis
    points: dict[str, list[tuple[float, Figures]]] = field(default_factory=dict)

    def add(self, x: float, found: Mapping[str, Figures]) -> None:
        for name, each in found.items():
            self.points.setdefault(name, []).append((x, each))

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "x": self.x_name,
            "y": self.y_name,
            "points": {
                name: [{"x": x, **each.as_dict()} for x, each in points]
                for name, points in self.points.items()
            },
        }


def best(found: Iterable[Figures], high: bool) -> Figures:
    """That with the best median."""
    return (max if high else min)(found, key=lambda each: each.median)


def best_of(found: Mapping[str, Figures], kind: str, high: bool) -> Figures:
    """The best of "kind, one way", "kind, another way" …"""
    ways = (f for name, f in found.items() if name.startswith(f"{kind}, "))
    return best(ways, high)


def percentile(values: list[Any], which: float) -> float:
    return float(np.percentile(values, which))
