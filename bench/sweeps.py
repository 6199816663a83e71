# SPDX-License-Identifier: Apache-2.0
"""Curves over sizes and counts, for the full form only."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from bench.candidates.pair import Pair
from bench.candidates.program import Program
from bench.figures import Curve, percentile
from bench.rows.limits import Rounds, shape
from bench.rows.speed import compare, speed
from bench.stage import Stage

ROUNDS = 3


def block_sizes(stage: Stage) -> Curve:
    curve = Curve(
        "sizes",
        "Write to done, scattered blocks, private memory",
        "bytes of a block",
        "GB/s",
        base=2,
    )
    for block_len in (256, 1024, 4096, 16384, 65536, 262144, 1 << 20):
        blocks, count = shape(stage, block_len)
        candidates: dict[str, Callable[[], float]] = {}
        for kind in ("kvt", "kvt over NIXL", "vLLM"):
            pair = stage.pair(kind, blocks, block_len)
            pair.check(count, 1)
            candidates[kind] = measure(pair, count, 1)
        program = Program(
            stage.places.build,
            "limits",
            *("--method", "pvw", "--threads", "2", "--iov", "64"),
            *("--block-bytes", str(block_len)),
            *("--blocks", str(count), "--pool", str(blocks)),
        )
        try:
            candidates["process_vm_writev, 2 threads"] = Rounds(program).measure
            curve.add(block_len, stage.take_turns(candidates, ROUNDS))
        finally:
            program.end()
    return curve


def measure(pair: Pair, count: int, run: int) -> Callable[[], float]:
    wait = pair.kind.waits[0]
    return lambda: speed(pair, count, run, wait, 2)


def counts(stage: Stage) -> Curve:
    curve = Curve(
        "counts",
        "Write to done, scattered blocks of 4 KiB, private memory",
        "blocks of a transfer",
        "us",
    )
    pairs = [
        stage.pair(kind, stage.pool // 4096, 4096)
        for kind in ("kvt", "kvt over NIXL", "vLLM")
    ]

    def once(pair: Pair, count: int) -> Callable[[], float]:
        turns = 200 if count < 100 else 5

        def time() -> float:
            wait = pair.kind.waits[0]
            found = pair.do("writes", count, 1, turns, wait)
            return float(statistics.median(found["total"])) / 1e3

        return time

    for count in (1, 8, 64, 512, 4096, 16384, 65536):
        for pair in pairs:
            pair.check(count, 1)
        curve.add(
            count,
            stage.take_turns(
                {pair.kind.name: once(pair, count) for pair in pairs}, ROUNDS
            ),
        )
    return curve


def orders(stage: Stage) -> Curve:
    """1: scattered; 2: every other block follows its neighbour; and so on up
    to one stretch."""
    curve = Curve(
        "runs",
        "Write to done, 16,384 blocks of 4 KiB, private memory",
        "neighbours that lie side by side",
        "GB/s",
        base=2,
    )
    kinds = ("kvt", "kvt over NIXL", "vLLM")
    for run in (1, 2, 16, 16384):
        found = compare(stage, kinds, "private", 4096, 16384, run)
        curve.add(run, dict(zip(kinds, found, strict=True)))
    return curve


def regions(stage: Stage) -> Curve:
    curve = Curve(
        "regions",
        "Write to done, 16,384 x 4 KiB scattered, kvt.Transport",
        "registered regions",
        "GB/s",
    )
    for count in (1, 61):
        candidates = {}
        for engine in ("local", "NIXL"):
            kind = f"kvt {engine}, {count} region{'s' * (count > 1)}"
            pair = stage.pair(kind, 61 * 1024, 4096)
            pair.check(16384, 1)
            candidates[f"kvt {engine}"] = measure(pair, 16384, 1)
        curve.add(count, stage.take_turns(candidates, ROUNDS))
    return curve


def peers(stage: Stage) -> Curve:
    """The same target under many names: what is seen is the work that grows
    with the table of peers, not that of the targets."""
    curve = Curve(
        "peers",
        "10,000 transfers of 64 B, 32 in flight, to peers by turns",
        "peers",
        "1,000/s",
    )
    for count in (1, 50):
        candidates = {}
        for kind in ("kvt", "vLLM"):
            pair = stage.pair(kind, 16384, 64)
            pair.check(64, 1)
            pair.add_more(count)
            candidates[kind] = rate(pair, count)
        curve.add(count, stage.take_turns(candidates, ROUNDS))
    return curve


def rate(pair: Pair, peers: int) -> Callable[[], float]:
    return lambda: 10_000 / pair.do("many", 10_000, 32, peers) * 1e6


def layouts(stage: Stage) -> Curve:
    """vLLM's class makes a tuple for each block: 1.5 GB at 10 million."""
    curve = Curve(
        "layouts",
        "Preparing a layout",
        "blocks",
        "us",
    )
    ours = stage.pair("kvt", 2_000_000, 256)
    theirs = stage.pair("vLLM", 1_000_000, 256)
    for blocks in (10_000, 100_000, 1_000_000, 10_000_000, 200_000_000):
        candidates: dict[str, Callable[[], float]] = {
            "kvt": prepare(ours, "prepares", -(-blocks // 2_000_000))
        }
        if blocks <= 1_000_000:
            candidates["vLLM"] = prepare(theirs, "vllm_lists", blocks)
        curve.add(blocks, stage.take_turns(candidates, ROUNDS))
    return curve


def prepare(pair: Pair, job: str, size: int) -> Callable[[], float]:
    return lambda: percentile(pair.do(job, size, 3)["total"], 50) / 1e3


SWEEPS = (block_sizes, counts, orders, regions, peers, layouts)
