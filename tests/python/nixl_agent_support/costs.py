# SPDX-License-Identifier: Apache-2.0
"""What the agent's calls cost beside plain NIXL's, for docs/nixl_agent.md.

    costs.py [PYTHON]

PYTHON has the wheel nixl-cu12 and numpy; without it, that of
KVT_TEST_NIXL_15. Two processes with two agents each, one over kvt and one over
plain NIXL, take turns, row by row, so that both meet the same machine. For each
row: the least time, the least that the calling thread used of a processor, and
the most that the process grew by. On a machine that is busy look at the ratio.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BLOCKS = 8_000_000
POSTED = 1_300_000
LENGTH = 64
ROUNDS = 3


def resident() -> float:
    with open("/proc/self/statm") as lines:
        return int(lines.read().split()[1]) * 4096 / 2**20


def rows_of(addr: int, order: Any) -> Any:
    made = np.empty((len(order), 3), dtype=np.uint64)
    made[:, 0] = np.uint64(addr) + order.astype(np.uint64) * np.uint64(LENGTH)
    made[:, 1] = LENGTH
    made[:, 2] = 0
    return made


def tuples_of(rows: Any) -> list[tuple[int, ...]]:
    return [tuple(row) for row in rows.tolist()]


def finish(agent: Any, handle: Any) -> str:
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    return str(state)


class Costs:
    """Two agents, and what is asked of them. A row is a generator of calls:
    what it yields is measured, what lies between is not."""

    def __init__(self) -> None:
        api = importlib.import_module("nixl._api")
        self.one, self.other = api.nixl_agent("one"), api.nixl_agent("other")
        size = BLOCKS * LENGTH
        self.memory = [np.ones(size, dtype=np.uint8) for _ in range(2)]
        self.addr = [int(made.ctypes.data) for made in self.memory]
        for agent, addr in zip((self.one, self.other), self.addr, strict=True):
            agent.register_memory([(addr, size, 0, "")], "DRAM")
        self.one.add_remote_agent(self.other.get_agent_metadata())
        self.mixed = np.random.default_rng(1).permutation(BLOCKS)
        self.sides = [
            self.one.prep_xfer_dlist(name, self.strided(addr), "DRAM")
            for name, addr in zip(("", "other"), self.addr, strict=True)
        ]

    def strided(self, addr: int) -> Any:
        row = [addr, LENGTH, 0, LENGTH, BLOCKS]
        return np.array([row], dtype=np.uint64)

    def rows(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        prep, addr = self.one.prep_xfer_dlist, self.addr[0]
        million = self.mixed[:1_000_000]
        for what, order in (
            ("8 M rows N x 3, regular", np.arange(BLOCKS)),
            ("1 M rows N x 3, scattered", million),
        ):
            rows = rows_of(addr, order)
            yield f"prepare {what}", lambda r=rows: prep("", r, "DRAM")
        for what, order in (
            ("8 M tuples, regular", np.arange(BLOCKS)),
            ("1 M tuples, scattered", million),
        ):
            tuples = tuples_of(rows_of(addr, order))
            yield f"prepare {what}", lambda r=tuples: prep("", r, "DRAM")
            tuples.clear()
        strided = self.strided(addr)
        yield "prepare 8 M blocks N x 5", lambda: prep("", strided, "DRAM")
        for count in (1, 1024, POSTED):
            yield from self._prepped(count)
        for count in (4, 256, 100_000):
            yield from self._plain(count)

    def _prepped(self, count: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        some = self.mixed[:count].astype(np.int32)
        ours, theirs = self.sides

        def make() -> Any:
            return self.one.make_prepped_xfer("WRITE", ours, some, theirs, some)

        yield f"make {count:,}, scattered", make
        handle = make()
        yield f"post and finish {count:,}", lambda: finish(self.one, handle)
        if count == 1:
            check = self.one.check_xfer_state
            yield "check of a finished one", lambda: check(handle)

    def _plain(self, count: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        rows = [rows_of(addr, self.mixed[:count]) for addr in self.addr]
        descs = [self.one.get_xfer_descs(each, "DRAM") for each in rows]
        yield (
            f"get_xfer_descs of {count:,} rows, scattered",
            lambda: self.one.get_xfer_descs(rows[0], "DRAM"),
        )

        def make() -> Any:
            return self.one.initialize_xfer("WRITE", *descs, "other")

        yield f"initialize_xfer of {count:,}, scattered", make
        handle = make()
        yield (
            f"post and finish {count:,}, ditto",
            lambda: finish(self.one, handle),
        )


def measured(call: Callable[[], Any]) -> list[float]:
    """Seconds, seconds of this thread, MiB."""
    gc.collect()
    before = resident()
    wall, own = time.perf_counter(), time.thread_time()
    kept = call()
    own, wall = time.thread_time() - own, time.perf_counter() - wall
    gc.collect()
    grown = resident() - before
    del kept
    return [wall, own, grown]


def serve(flavour: str) -> None:
    """Goes to the next row, or measures the row, as the parent says."""
    if flavour == "kvt":
        import kvt.nixl

        kvt.nixl.install()
    rows = Costs().rows()
    answer: Any = "ready"
    call: Callable[[], Any] = int
    while True:
        print(json.dumps(answer), flush=True)
        order = sys.stdin.readline().strip()
        if order == "next":
            answer, call = next(rows, ("", int))
        elif order == "measure":
            answer = measured(call)
        else:
            return


class Child:
    def __init__(self, flavour: str, python: str) -> None:
        self.process = subprocess.Popen(
            [python, __file__, flavour],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(line)  # NIXL writes lines of its own
        raise SystemExit("a process ended early")

    def ask(self, order: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self.answer()


def main() -> None:
    if sys.argv[1:] in (["kvt"], ["plain"]):
        serve(sys.argv[1])
        return
    venv = os.environ.get("KVT_TEST_NIXL_15", "")
    python = sys.argv[1] if sys.argv[1:] else str(Path(venv) / "bin/python")
    pair = [Child("kvt", sys.executable), Child("plain", python)]
    print(f"{'':44}{'kvt, ms':>20}{'NIXL, ms':>20}{'MiB':>16}")
    print(f"{'':44}{'(of the thread)':>20}{'(of the thread)':>20}{'':>16}")
    while True:
        what, _ = (child.ask("next") for child in pair)
        if not what:
            return
        taken: list[list[list[float]]] = [[], []]
        for _ in range(ROUNDS):
            for child, into in zip(pair, taken, strict=True):
                into.append(child.ask("measure"))
        text = f"{what:44}"
        for each in taken:
            wall, own, _ = (
                min(column) * 1e3 for column in zip(*each, strict=True)
            )
            text += f"{wall:10.3f}{f'({own:.3f})':>10}"
        grown = [max(row[2] for row in each) for each in taken]
        print(f"{text}{grown[0]:8.1f}{grown[1]:8.1f}", flush=True)


if __name__ == "__main__":
    main()
