# SPDX-License-Identifier: Apache-2.0
"""Small transfers: how many a second, and how long one takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.candidates.pair import Pair
from bench.candidates.program import Program
from bench.figures import Line, best_of, percentile
from bench.stage import Stage

SMALL = 64
BLOCKS = 16384


def rate(stage: Stage) -> Iterator[Line]:
    total = 10_000

    def measure(pair: Pair) -> Callable[[], float]:
        return lambda: total / pair.do("many", total, 32) * 1e6

    def in_c(program: Program) -> Callable[[], float]:
        return lambda: float(program.round()[0]["per_second"]) / 1e3

    candidates = {}
    for kind in ("kvt", "vLLM"):
        pair = stage.pair(kind, BLOCKS, SMALL)
        pair.check(64, 1)
        candidates[kind] = measure(pair)
    programs = {
        f"kvt in C, {wait}": Program(
            stage.places.build,
            "small",
            *("--row", "rate", "--wait", wait, "--count", str(total)),
        )
        for wait in ("fd", "spin")
    }
    try:
        for name, program in programs.items():
            candidates[name] = in_c(program)
        found = stage.take_turns(candidates)
    finally:
        for program in programs.values():
            program.end()
    theirs = found["vLLM"]
    yield Line("in Python", "1,000/s", found["kvt"], theirs, "times", 5)
    ours = best_of(found, "kvt in C", True)
    what = "in C, vLLM's class in Python"
    yield Line(what, "1,000/s", ours, theirs, "times", 25)


def single(stage: Stage) -> Iterator[Line]:
    turns = 1000 if stage.quick else 5000

    def measure(pair: Pair, wait: str) -> Callable[[], float]:
        return lambda: percentile(pair.do("singles", turns, wait), 50) / 1e3

    candidates = {}
    for kind in ("kvt", "vLLM"):
        pair = stage.pair(kind, BLOCKS, SMALL)
        pair.check(64, 1)
        for wait in pair.kind.waits:
            candidates[f"{kind}, {wait}"] = measure(pair, wait)
    found = stage.take_turns(candidates)
    ours, theirs = (best_of(found, kind, False) for kind in ("kvt", "vLLM"))
    yield Line("p50", "us", ours, theirs, "part", 0.6)
    yield after_idleness(stage)


def after_idleness(stage: Stage) -> Line:
    """A caller that sleeps on the descriptor, as one that is idle does."""
    turns, rounds = (3, 1) if stage.quick else (5, 3)

    def measure(kind: str) -> Callable[[], float]:
        pair = stage.pair(kind, BLOCKS, SMALL)
        wait = pair.kind.waits[0]

        def once() -> float:
            found = pair.do("singles", turns, wait, gap=1.0)
            return percentile(found, 50) / 1e3

        return once

    found = stage.take_turns(
        {kind: measure(kind) for kind in ("kvt", "vLLM")}, rounds
    )
    what = "p50 after a second of idleness"
    return Line(what, "us", found["kvt"], found["vLLM"], "under", 50)
