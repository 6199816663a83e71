# SPDX-License-Identifier: Apache-2.0
"""What a transport costs that does nothing, and calls while others do much."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from bench.candidates.pair import NodeProcess, Pair
from bench.figures import Figures, Line, percentile
from bench.stage import Stage

BLOCKS = 1024


def cpu(stage: Stage) -> Iterator[Line]:
    """Per cent of a core; of the two sides that which takes more."""
    seconds = 1 if stage.quick else 3

    def idle(pair: Pair) -> Callable[[], float]:
        def once() -> float:
            with pair.awake():
                for node in pair.nodes():
                    node.tell("job", "cpu", (seconds,), {})
                return max(100 * float(n.answer()) for n in pair.nodes())

        return once

    candidates = {}
    for kind in ("kvt", "kvt over NIXL", "vLLM"):
        pair = stage.pair(kind, BLOCKS, 65536)
        pair.check(64, 1)
        candidates[kind] = idle(pair)
    found = stage.take_turns(candidates, 2 if stage.quick else 5)
    for kind in ("kvt", "kvt over NIXL"):
        yield Line(
            f"idle, {kind}", "%", found[kind], found["vLLM"], "under", 0.5
        )
    yield stuck(stage, seconds)


def stuck(stage: Stage, seconds: float) -> Line:
    """100 transfers of 1 MiB under way over TCP to a target that is stopped;
    the initiator's share alone."""

    def once(pair: Pair) -> Callable[[], float]:
        def share() -> float:
            pair.initiator.signal(signal.SIGCONT)
            try:
                return 100 * float(pair.initiator.do("cpu", seconds))
            finally:
                pair.rest()

        return share

    candidates = {}
    for kind in ("kvt over TCP", "vLLM over TCP"):
        pair = stage.pair(kind, 2048, 65536)
        pair.check(64, 1)
        pair.initiator.signal(signal.SIGCONT)
        pair.initiator.do("fly", 100, 16)
        pair.rest()
        candidates[kind] = once(pair)
    found = stage.take_turns(candidates, 2 if stage.quick else 5)
    for kind in candidates:
        stage.drop(stage.pair(kind, 2048, 65536))
    return Line(
        "100 stuck",
        "%",
        found["kvt over TCP"],
        found["vLLM over TCP"],
        "under",
        5,
    )


CALLS = ("write_blocks", "poll")
FLOOD_BLOCKS = 64


class Flood:
    """A node that writes as fast as it can, over TCP, into the pool of another
    process. Both are stopped between the rounds."""

    def __init__(self, stage: Stage, target: NodeProcess) -> None:
        self.target = target
        self.speeds: list[float] = []
        self.node = stage.node("kvt over TCP")
        name = f"flooder of {target.process.pid}"
        self.node.open(name, BLOCKS, 65536, "private", True)
        target.signal(signal.SIGCONT)
        self.node.add(*target.numbers())
        self.node.do("writes", FLOOD_BLOCKS, 1, 1, "spin")
        self.node.do("flood", FLOOD_BLOCKS)
        self.rest()

    def rest(self) -> None:
        self.node.signal(signal.SIGSTOP)
        self.target.signal(signal.SIGSTOP)

    @contextmanager
    def running(self) -> Iterator[None]:
        self.target.signal(signal.SIGCONT)
        self.node.signal(signal.SIGCONT)
        try:
            before, begun = self.node.do("flooded"), time.monotonic()
            yield
            moved = self.node.do("flooded") - before
            seconds = time.monotonic() - begun
        finally:
            self.rest()
        self.speeds.append(moved * FLOOD_BLOCKS * 65536 / seconds / 1e9)


def flood(stage: Stage) -> Iterator[Line]:
    """p99 of the calls towards a healthy peer over NIXL. The same flood towards
    another process is measured beside it: on few cores a flood takes time from
    everybody, whoever gets it."""
    turns = 500 if stage.quick else 3000
    ours = stage.pair("kvt over NIXL", BLOCKS, 65536)
    ours.check(64, 1)
    other = stage.node("kvt over TCP")
    other.open("other", BLOCKS, 65536, "private", True)
    floods = {
        "us": Flood(stage, ours.initiator),
        "elsewhere": Flood(stage, other),
    }
    found: dict[tuple[str, str], list[float]] = {}

    def measure(where: str) -> Callable[[], float]:
        def once() -> float:
            running = floods[where].running() if where in floods else None
            with running or nullcontext():
                calls = ours.do("mixed_calls", turns)
            for name in CALLS:
                value = percentile(calls[name], 99) / 1e3
                found.setdefault((where, name), []).append(value)
            return found[where, CALLS[0]][-1]

        return once

    try:
        names = ("nowhere", "elsewhere", "us")
        stage.take_turns({name: measure(name) for name in names})
    finally:
        for each in floods.values():
            each.node.end()
        other.end()
        stage.drop(ours)
    speeds = {where: min(each.speeds) for where, each in floods.items()}
    note = ", ".join(f"{speed:.2f} GB/s {w}" for w, speed in speeds.items())
    for name in CALLS:
        calm = Figures("no flood", found["nowhere", name])
        beside = Figures("flood elsewhere", found["elsewhere", name])
        flooded = Figures(f"at least {note}", found["us", name])
        what = f"{name}, p99, against"
        yield Line(f"{what} no flood", "us", flooded, calm, "part", 1.5)
        yield Line(f"{what} one elsewhere", "us", flooded, beside, "part", 1.5)
