# SPDX-License-Identifier: Apache-2.0
"""From the call to done: bytes a second."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from bench.candidates.pair import Pair
from bench.figures import Figures, Line, best_of
from bench.stage import Stage


def speed(pair: Pair, count: int, run: int, wait: str, turns: int) -> float:
    """GB/s (decimal), median of `turns` transfers."""
    found = pair.do("writes", count, run, turns, wait)
    size = count * pair.numbers[3]
    return float(size / statistics.median(found["total"]))


def all_waits(
    pair: Pair, count: int, run: int, turns: int
) -> dict[str, Callable[[], float]]:
    """One candidate for each way to wait; the best of them is what counts."""

    def measure(wait: str) -> Callable[[], float]:
        return lambda: speed(pair, count, run, wait, turns)

    return {
        f"{pair.kind.name}, {wait}": measure(wait) for wait in pair.kind.waits
    }


def compare(
    stage: Stage,
    kinds: tuple[str, ...],
    memory: str,
    block_len: int,
    count: int,
    run: int = 1,
) -> tuple[Figures, ...]:
    """Each candidate's, with the way to wait that suits it best."""
    blocks = stage.pool // block_len
    turns = 3 if stage.quick else 5
    pairs = [stage.pair(kind, blocks, block_len, memory) for kind in kinds]
    candidates: dict[str, Callable[[], float]] = {}
    for pair in pairs:
        pair.check(count, run)
        candidates |= all_waits(pair, count, run, turns)
    found = stage.take_turns(candidates)
    return tuple(best_of(found, kind, True) for kind in kinds)


MAPPINGS = {
    "private": "private",
    "memfd": "shared, sealed memfd",
    "file": "shared, unsealed file",
}


def done(
    stage: Stage, block_len: int, count: int, private: float, shared: float
) -> Iterator[Line]:
    for memory, name in MAPPINGS.items():
        ours, theirs = compare(stage, ("kvt", "vLLM"), memory, block_len, count)
        what = f"{count:,} x {block_len >> 10} KiB, {name}"
        goal = private if memory == "private" else shared
        yield Line(what, "GB/s", ours, theirs, "times", goal)


def done_64k(stage: Stage) -> Iterator[Line]:
    return done(stage, 65536, 1024, 4, 6)


def done_4k(stage: Stage) -> Iterator[Line]:
    return done(stage, 4096, 16384, 5, 7)


def nixl_only(stage: Stage) -> Iterator[Line]:
    for block_len, count, run, goal in (
        (4096, 16384, 1, 1.8),
        (65536, 1024, 1, 1.8),
        (4096, 16384, 16, 3),
    ):
        ours, theirs = compare(
            stage, ("kvt over NIXL", "vLLM"), "private", block_len, count, run
        )
        kind = "scattered" if run == 1 else f"runs of {run}"
        what = f"NIXL only, {count:,} x {block_len >> 10} KiB, {kind}"
        yield Line(what, "GB/s", ours, theirs, "times", goal)


def others(stage: Stage) -> Iterator[Line]:
    """Mooncake, which has no row of its own in the goals."""
    for block_len, count in (65536, 1024), (4096, 4096):
        kinds = ("kvt", "kvt over TCP", "Mooncake")
        ours, over_tcp, theirs = compare(
            stage, kinds, "private", block_len, count
        )
        what = f"{count:,} x {block_len >> 10} KiB, private"
        for each in ours, over_tcp:
            yield Line(f"{what}, Mooncake", "GB/s", each, theirs, "seen", 0)
