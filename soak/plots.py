# SPDX-License-Identifier: Apache-2.0
"""One picture of a run: a row a measure, a line a writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from .figures import MEASURES
from .proc import Sample

mpl.rcParams.update(
    {
        "svg.hashsalt": "kvt",
        "font.size": 9,
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
)


def draw(runs: Mapping[str, Sequence[Sample]], title: str, path: Path) -> None:
    figure, rows = plt.subplots(
        len(MEASURES), sharex=True, figsize=(8, 2 * len(MEASURES))
    )
    for axes, (measure, words) in zip(rows, MEASURES.items(), strict=True):
        for name, samples in runs.items():
            axes.plot(
                [each.seconds / 60 for each in samples],
                [getattr(each, measure) for each in samples],
                label=name,
                linewidth=1,
            )
        axes.set_ylabel(words)
        axes.set_ylim(bottom=0)
    rows[0].set_title(title)
    rows[0].legend(fontsize=8)
    rows[-1].set_xlabel("minutes")
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
