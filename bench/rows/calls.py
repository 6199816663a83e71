# SPDX-License-Identifier: Apache-2.0
"""How long the calls take that a scheduler makes in its step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.candidates.pair import Pair
from bench.figures import Curve, Figures, Line, percentile
from bench.stage import Stage


class Calls:
    """Times of write_blocks, kept over the rounds."""

    def __init__(self, pair: Pair, count: int, turns: int) -> None:
        self.pair = pair
        self.count = count
        self.turns = turns
        self.rounds: list[list[int]] = []

    def measure(self) -> float:
        wait = self.pair.kind.waits[0]
        found = self.pair.do("writes", self.count, 1, self.turns, wait)
        self.rounds.append(found["call"])
        return percentile(found["call"], 50)

    def figures(self, which: float) -> Figures:
        """Microseconds, one percentile a round."""
        values = [percentile(each, which) / 1e3 for each in self.rounds]
        return Figures(self.pair.kind.name, values)


def call(stage: Stage) -> Iterator[Line]:
    turns = 40 if stage.quick else 100
    made = {}
    for kind in ("kvt", "vLLM"):
        pair = stage.pair(kind, stage.pool // 65536, 65536)
        pair.check(1024, 1)
        made[kind] = Calls(pair, 1024, turns)
    pair = stage.pair("kvt", stage.pool // 4096, 4096)
    pair.check(1024, 1)
    made["small"] = Calls(pair, 1024, turns)
    stage.take_turns({name: each.measure for name, each in made.items()})
    for which in (50, 99):
        yield Line(
            f"1,024 x 64 KiB, p{which}",
            "us",
            made["kvt"].figures(which),
            made["vLLM"].figures(which),
            "shorter",
            100,
        )
    few = made["small"].figures(99)
    yield Line(
        "p99 of 64 MiB against that of 4 MiB",
        "us",
        made["kvt"].figures(99),
        Figures("kvt, 1,024 x 4 KiB", few.values),
        "part",
        1.5,
        "independent of the bytes: not more than half as long again",
    )


INDICES = 65536


def indices(stage: Stage) -> Iterator[Line]:
    pair = stage.pair("kvt", INDICES, 4096)
    pair.check(16384, 1)
    turns = 3 if stage.quick else 30

    def measure(behind: int) -> Callable[[], float]:
        def once() -> float:
            found = pair.do("queued_calls", INDICES, behind, 16384, turns)
            return percentile(found, 50) / 1e6

        return once

    found = stage.take_turns(
        {"kvt": measure(0), "kvt, 10 large ones queued": measure(10)}
    )
    for name, each in found.items():
        queued = name.partition(", ")[2] or "nothing queued"
        yield Line(f"65,536 x 4 KiB, {queued}", "ms", each, None, "under", 2)


FLIGHTS = (0, 10, 100, 1000)


def poll(stage: Stage) -> Iterator[Line]:
    """Over TCP towards a target that is stopped: it ends nothing."""
    turns = 5 if stage.quick else 20
    found: dict[str, dict[int, Figures]] = {}
    pairs = {
        kind: stage.pair(kind, 2048, 65536)
        for kind in ("kvt over TCP", "vLLM over TCP")
    }
    for pair in pairs.values():
        pair.check(16, 1)
    for flying in FLIGHTS:
        candidates = {}
        for name, pair in pairs.items():
            with pair.awake():
                if flying:
                    pair.target.signal(19)
                    pair.initiator.do("fly", flying)
            candidates[name] = polling(pair, turns)
        for name, each in stage.take_turns(candidates).items():
            found.setdefault(name, {})[flying] = each
    curve = Curve(
        "poll", "poll(peer) that finds nothing", "transfers in flight", "us"
    )
    for flying in FLIGHTS:
        curve.add(flying, {name: each[flying] for name, each in found.items()})
    stage.curves.append(curve)
    ours, theirs = found["kvt over TCP"], found["vLLM over TCP"]
    yield Line(
        "1,000 in flight", "us", ours[1000], theirs[1000], "shorter", 1000
    )
    yield Line(
        "1,000 in flight against none",
        "us",
        ours[1000],
        Figures("kvt, none", ours[0].values),
        "part",
        1.5,
        "flat: not more than half as long again",
    )
    for pair in pairs.values():
        stage.drop(pair)


def polling(pair: Pair, turns: int) -> Callable[[], float]:
    """Microseconds a call, with only the initiator running."""

    def once() -> float:
        pair.initiator.signal(18)
        try:
            found = pair.initiator.do("polls", turns)
        finally:
            pair.rest()
        return percentile(found, 50) / 1e3

    return once
