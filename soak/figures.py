# SPDX-License-Identifier: Apache-2.0
"""What the samples of a run say: slopes, and who holds what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .proc import Sample

MEASURES = {
    "rss_kib": "RSS, KiB",
    "fds": "descriptors",
    "threads": "threads",
    "mappings": "mappings",
}
WARM_UP = 0.2
"""The part of a run that is not fitted: caches fill, pools grow."""

HOUR = 3600.0


@dataclass(frozen=True)
class Slope:
    """A straight line through a measure by least squares."""

    per_hour: float
    error: float  # standard error of per_hour
    first: float  # of the samples that were fitted
    last: float
    low: float
    high: float

    def json(self) -> dict[str, Any]:
        return asdict(self)


def fit(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """The slope and its standard error, which takes the points for
    independent."""
    count = len(xs)
    x_mean, y_mean = sum(xs) / count, sum(ys) / count
    spread = sum((x - x_mean) ** 2 for x in xs)
    if count < 3 or spread == 0:
        return 0.0, math.inf
    slope = (
        sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
        / spread
    )
    rest = sum(
        (y - y_mean - slope * (x - x_mean)) ** 2
        for x, y in zip(xs, ys, strict=True)
    )
    return slope, math.sqrt(rest / (count - 2) / spread)


def slope_of(samples: Sequence[Sample], measure: str) -> Slope:
    begun = samples[0].seconds
    span = samples[-1].seconds - begun
    fitted = [s for s in samples if s.seconds >= begun + span * WARM_UP]
    ys = [float(getattr(each, measure)) for each in fitted]
    slope, error = fit([each.seconds for each in fitted], ys)
    return Slope(slope * HOUR, error * HOUR, ys[0], ys[-1], min(ys), max(ys))


def slopes(samples: Sequence[Sample]) -> dict[str, Slope]:
    return {name: slope_of(samples, name) for name in MEASURES}


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """By how many there are more (or fewer) of each kind."""
    names = sorted({*before, *after})
    change = {n: after.get(n, 0) - before.get(n, 0) for n in names}
    return {name: by for name, by in change.items() if by}
