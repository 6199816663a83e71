# SPDX-License-Identifier: Apache-2.0
"""Peers and layouts with very many blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.candidates.pair import Pair
from bench.figures import Figures, Line, percentile
from bench.stage import Stage

ADDED = 1_000_000
BLOCK = 256

# 80 layers with keys and values, 1.2 million blocks each.
RUNS = 160
RUN_BLOCKS = 1_200_000
WRITTEN = 1_310_720


class Adds:
    """Times and memory of add_remote_peer, kept over the rounds."""

    def __init__(self, pair: Pair, turns: int) -> None:
        self.pair = pair
        self.turns = turns
        self.memory: list[float] = []

    def measure(self) -> float:
        found = self.pair.do("adds", self.pair.numbers, self.turns)
        self.memory.append(percentile(found["memory"], 50) / 1024)
        return percentile(found["total"], 50) / 1e6


def add(stage: Stage) -> Iterator[Line]:
    made = {}
    for kind in ("kvt", "kvt over NIXL", "vLLM", "vLLM strided"):
        pair = stage.pair(kind, ADDED, BLOCK, fill=False)
        made[kind] = Adds(pair, 1 if kind == "vLLM" else 5)
    found = stage.take_turns(
        {name: each.measure for name, each in made.items()},
        2 if stage.quick else 7,
    )
    theirs, strided = found["vLLM"], found["vLLM strided"]
    over_nixl = found["kvt over NIXL"]
    through = "through NIXL"
    yield Line(through, "ms", over_nixl, theirs, "shorter", 15)
    yield Line(f"{through}, strided", "ms", over_nixl, strided, "part", 1)
    yield Line("same host", "ms", found["kvt"], theirs, "shorter", 100)
    for kind in ("kvt", "kvt over NIXL"):
        memory = Figures(kind, made[kind].memory)
        rival = Figures("vLLM", made["vLLM"].memory)
        yield Line(f"memory, {kind}", "MiB", memory, rival, "under", 1)

    def call(pair: Pair) -> Callable[[], float]:
        return lambda: (
            percentile(pair.do("async_adds", pair.numbers, 10), 50) / 1e3
        )

    found = stage.take_turns(
        {
            kind: call(stage.pair(kind, ADDED, BLOCK))
            for kind in ("kvt", "kvt over NIXL")
        }
    )
    for each in found.values():
        yield Line(
            f"the async call, {each.name}", "us", each, None, "under", 50
        )


def prepare(stage: Stage) -> Iterator[Line]:
    pair = stage.pair("kvt", RUN_BLOCKS, BLOCK)
    memory: list[float] = []

    def layouts() -> float:
        found = pair.do("prepares", RUNS, 50)
        memory.extend(found["memory"])
        return percentile(found["total"], 50) / 1e6

    def call() -> float:
        base = pair.numbers[1]
        found = pair.do("run_writes", RUNS, base, WRITTEN, 3)
        return percentile(found, 50) / WRITTEN

    found = stage.take_turns({"prepare": layouts, "write": call})
    what = f"prepare {RUNS * RUN_BLOCKS / 1e6:g} million blocks, {RUNS} runs"
    yield Line(what, "ms", found["prepare"], None, "under", 1)
    yield Line(
        "memory of that layout",
        "KiB",
        Figures("kvt", memory),
        None,
        "under",
        64,
    )
    yield Line(
        f"write {WRITTEN:,} of them, the call",
        "ns an index",
        found["write"],
        None,
        "under",
        10,
    )
