# SPDX-License-Identifier: Apache-2.0
"""The command behind `./dev bench`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench import machine, plots, report, sweeps
from bench.candidates.pair import ROOT, Places
from bench.figures import Line
from bench.rows import ROWS
from bench.stage import Stage

PAGE = ROOT / "docs/benchmarks.md"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev bench",
        description="kvt beside its rivals and the machine's limits, in one "
        "run. Docs: docs/benchmarks.md",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--quick", action="store_true", help="under two minutes (the default)"
    )
    form.add_argument(
        "--full", action="store_true", help="more rounds, and the sweeps"
    )
    names = [row.name for row in ROWS] + [s.__name__ for s in sweeps.SWEEPS]
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="ROW",
        choices=names,
        help="these rows or sweeps: " + " ".join(names),
    )
    parser.add_argument(
        "--publish",
        action="store_true",
        help="put the table and the plots into docs/, too",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/bench", metavar="FOLDER"
    )
    return parser.parse_args()


def places() -> Places:
    """BENCH_PYTHON is an interpreter with the kvt that is to be measured; the
    rivals are in that which runs this. BENCH_BUILD has the C programs."""
    site = os.environ.get("BENCH_NIXL") or sysconfig.get_path("purelib")
    return Places(
        python=os.environ.get("BENCH_PYTHON") or sys.executable,
        vllm=Path(os.environ.get("KVT_TEST_VLLM") or ROOT / "build/vllm"),
        nixl=Path(site),
        build=Path(os.environ.get("BENCH_BUILD") or ROOT / "build/release"),
    )


class Run:
    """Rows and sweeps, one after the other; one that fails is named at the
    end and keeps no other from being run."""

    def __init__(self, stage: Stage, only: list[str] | None) -> None:
        self.stage = stage
        self.only = only
        self.current = ""
        self.lines: list[Line] = []
        self.failed: list[str] = []

    def rows(self) -> None:
        for row in ROWS:
            asked = not (row.full_only and self.stage.quick)
            if row.name in self.only if self.only else asked:
                self.step(row.name, partial(self.lines_of, row.run))

    def sweeps(self) -> None:
        for sweep in sweeps.SWEEPS:
            name = sweep.__name__
            asked = name in self.only if self.only else not self.stage.quick
            if asked:
                self.step(name, partial(self.curve_of, sweep))

    def lines_of(self, run: Callable[[Stage], Any]) -> None:
        for line in run(self.stage):
            line.row = self.current
            self.lines.append(line)

    def curve_of(self, run: Callable[[Stage], Any]) -> None:
        self.stage.curves.append(run(self.stage))

    def step(self, name: str, work: Callable[[], None]) -> None:
        self.current = name
        begun = time.monotonic()
        try:
            work()
        except Exception:
            self.failed.append(name)
            # One of the pairs may still be at what failed.
            self.stage.clear()
            self.stage.say(f"{name} failed:\n{traceback.format_exc()}")
        self.stage.say(f"{name}: {time.monotonic() - begun:.1f} s")


def main() -> int:
    args = arguments()
    # So that what was started is ended, namespaces included.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    where = places()
    about = machine.about(where)
    about["form"] = "full" if args.full else "quick"
    begun = time.monotonic()
    with Stage(where, quick=not args.full) as stage:
        run = Run(stage, args.only)
        run.rows()
        run.sweeps()
    about["seconds"] = round(time.monotonic() - begun)
    for name, value in about.items():
        print(f"{name}: {value}")
    print(f"\n{report.table(run.lines)}\n\n{report.verdict(run.lines)}")
    if run.failed:
        print(f"not measured, see above: {' '.join(run.failed)}")
    report.write_json(args.out / "results.json", about, run.lines, stage.curves)
    plots.draw(run.lines, stage.curves, args.out)
    if args.publish:
        drawn = plots.draw(run.lines, stage.curves, PAGE.parent / "bench")
        report.publish(PAGE, about, run.lines, drawn)
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
