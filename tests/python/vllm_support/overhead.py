# SPDX-License-Identifier: Apache-2.0
"""What a call costs: kvt.vllm.NixlTransport beside vLLM's own class.

    KVT_TEST_VLLM=build/vllm python tests/python/vllm_support/overhead.py [tcp]

One process has a transport of each kind and writes to nodes in other processes,
by turns. `write_blocks` is timed alone; what was written is polled for before
the next call. With the argument "tcp", `poll` is timed with transfers under
way: over TCP, towards processes that are stopped. Microseconds, median and 99th
percentile of all calls; the machine's other load is in them.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stage import NodeProcess
from vllm_support import stand_in
from vllm_support.memory import Pool
from vllm_support.nodes import Stage, paths

BLOCKS = 4096
BLOCK_LEN = 4096
TURNS = 200
FLYING = 1000


def classes(place: Path) -> dict[str, Any]:
    sys.path[1:1] = paths(place)
    stand_in.install(place)
    from vllm.v1.kv_offload.tiering.p2p.data.nixl import NixlTransport as theirs

    from kvt.vllm import NixlTransport as ours

    return {"vLLM": theirs, "kvt over NIXL": ours, "kvt": ours}


class Caller:
    """A transport of one kind in this process, and its peer."""

    def __init__(self, kind: str, made: Any, stage: Stage) -> None:
        same_host = "" if kind == "kvt" else "0"
        os.environ["KVT_SAME_HOST"] = same_host
        self.kind = kind
        self.pool = Pool(BLOCKS, BLOCK_LEN, 1)
        self.transport = made(f"caller {kind}", self.pool.view)
        self.peer = stage.node(kvt=kind != "vLLM", KVT_SAME_HOST=same_host)
        self.peer.open(f"peer of {kind}", BLOCKS, BLOCK_LEN, 2)
        self.add(self.peer)
        self.times: dict[str, list[int]] = {}

    def add(self, peer: NodeProcess) -> None:
        numbers = [
            peer.call(name) for name in ("base_addr", "num_blocks", "block_len")
        ]
        metadata = peer.call("get_agent_metadata")
        self.transport.add_remote_peer("peer", metadata, *numbers)

    def write(self, what: str, ours: Any, theirs: Any) -> None:
        begun = perf_counter_ns()
        number = self.transport.write_blocks("peer", ours, theirs)
        self.times.setdefault(what, []).append(perf_counter_ns() - begun)
        assert number is not None
        while number not in self.transport.poll("peer").done:
            pass

    def poll(self, what: str) -> None:
        begun = perf_counter_ns()
        result = self.transport.poll("peer")
        taken = perf_counter_ns() - begun
        # A few bytes fit between the processes: their transfers do end.
        if not result.done and not result.failed:
            self.times.setdefault(what, []).append(taken)

    def fly(self) -> None:
        """Leaves transfers under way, for polls that find nothing."""
        self.peer.stop()
        for turn in range(FLYING):
            ours, theirs = [turn * 2], [turn * 2 + 1]
            assert self.transport.write_blocks("peer", ours, theirs) is not None


def measure(callers: list[Caller]) -> None:
    rng = np.random.default_rng(1)
    for count in 1, 64, 1024:
        ours = rng.permutation(BLOCKS)[:count]
        theirs = rng.permutation(BLOCKS)[:count]
        plain = ours.tolist(), theirs.tolist()
        for _ in range(TURNS):
            for caller in callers:
                caller.write(f"write_blocks, {count}, list", *plain)
                caller.write(f"write_blocks, {count}, numpy", ours, theirs)
    for _ in range(TURNS):
        for caller in callers:
            caller.poll("poll, nothing under way")


def measure_polls(callers: list[Caller]) -> None:
    for caller in callers:
        caller.fly()
    for _ in range(TURNS):
        for caller in callers:
            caller.poll(f"poll, {FLYING} under way")


def table(callers: list[Caller]) -> str:
    def cell(times: list[int] | None) -> str:
        if not times:
            return "-"
        last = sorted(times)[len(times) * 99 // 100]
        return f"{statistics.median(times) / 1000:.1f} / {last / 1000:.1f}"

    rows = [["call", *(caller.kind for caller in callers)]]
    rows.append(["---"] * len(rows[0]))
    for what in callers[0].times:
        rows.append([what, *(cell(c.times.get(what)) for c in callers)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def run(place: Path, tcp: bool, work: Callable[[list[Caller]], None]) -> str:
    if tcp:
        os.environ["UCX_TLS"] = "tcp"
    made = classes(place)
    if tcp:
        # kvt's own way needs no network that could stand still.
        del made["kvt"]
    with Stage(place) as stage:
        callers = [Caller(kind, made[kind], stage) for kind in made]
        work(callers)
        return table(callers)


def main() -> None:
    place = Path(os.environ["KVT_TEST_VLLM"])
    os.environ["UCX_MODULES"] = "^efa"
    tcp = sys.argv[1:] == ["tcp"]
    print(run(place, tcp, measure_polls if tcp else measure), flush=True)
    # Its own class cannot be closed towards a peer that is stopped.
    os._exit(0)


if __name__ == "__main__":
    main()
