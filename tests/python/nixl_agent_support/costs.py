# SPDX-License-Identifier: Apache-2.0
"""What the agent's calls cost, for docs/nixl_agent.md: costs.py kvt|plain.

Run it under both, one after the other, on a machine that is idle. Two agents
of one process; times in milliseconds, the least of three, and what the process
grew by in MiB.
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BLOCKS = 8_000_000
POSTED = 1_300_000
LENGTH = 64


def resident() -> float:
    with open("/proc/self/statm") as lines:
        return int(lines.read().split()[1]) * 4096 / 2**20


def row(what: str, function: Callable[..., Any], *args: Any) -> Any:
    best, grown, kept = float("inf"), 0.0, None
    for _ in range(3):
        kept = None
        gc.collect()
        before = resident()
        begun = time.perf_counter()
        kept = function(*args)
        best = min(best, time.perf_counter() - begun)
        gc.collect()
        grown = resident() - before
    print(f"{what:44} {best * 1e3:10.3f} ms {grown:8.1f} MiB", flush=True)
    return kept


def rows_of(addr: int, order: Any) -> Any:
    made = np.empty((len(order), 3), dtype=np.uint64)
    made[:, 0] = np.uint64(addr) + order.astype(np.uint64) * np.uint64(LENGTH)
    made[:, 1] = LENGTH
    made[:, 2] = 0
    return made


def finish(agent: Any, handle: Any) -> str:
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    return str(state)


def main() -> None:
    if sys.argv[1] == "kvt":
        import kvt.nixl

        kvt.nixl.install()
    api = importlib.import_module("nixl._api")
    one, other = api.nixl_agent("one"), api.nixl_agent("other")
    size = BLOCKS * LENGTH
    memory = [np.ones(size, dtype=np.uint8) for _ in range(2)]
    addr = [int(made.ctypes.data) for made in memory]
    one.register_memory([(addr[0], size, 0, "")], "DRAM")
    other.register_memory([(addr[1], size, 0, "")], "DRAM")
    one.add_remote_agent(other.get_agent_metadata())

    every = np.arange(BLOCKS)
    mixed = np.random.default_rng(1).permutation(BLOCKS)
    regular = rows_of(addr[0], every)
    tuples = [tuple(each) for each in regular[:1_000_000].tolist()]
    strided = np.array([[addr[0], LENGTH, 0, LENGTH, BLOCKS]], dtype=np.uint64)
    prep = one.prep_xfer_dlist
    row("prep 1 M tuples, regular", prep, "", tuples, "DRAM")
    row("prep 8 M rows N x 3, regular", prep, "", regular, "DRAM")
    ours = row("prep 8 M blocks N x 5", prep, "", strided, "DRAM")
    scattered = rows_of(addr[0], mixed[:1_000_000])
    row("prep 1 M rows N x 3, scattered", prep, "", scattered, "DRAM")
    strided[0, 0] = addr[1]
    theirs = prep("other", strided, "DRAM")

    for count in (1, 1024, POSTED):
        some = mixed[:count].astype(np.int32)
        make = one.make_prepped_xfer
        handle = row(
            f"make {count}, scattered", make, "WRITE", ours, some, theirs, some
        )
        row(f"post and finish {count}", finish, one, handle)
        row("check of a finished one", one.check_xfer_state, handle)
    for count in (4, 256, 100_000):
        local = one.get_xfer_descs(rows_of(addr[0], mixed[:count]), "DRAM")
        remote = one.get_xfer_descs(rows_of(addr[1], mixed[:count]), "DRAM")
        handle = row(
            f"initialize_xfer of {count}, scattered",
            one.initialize_xfer,
            "WRITE",
            local,
            remote,
            "other",
        )
        row(f"post and finish {count}", finish, one, handle)


if __name__ == "__main__":
    main()
