# SPDX-License-Identifier: Apache-2.0
"""Processes that do little, and one that does too much."""

from __future__ import annotations

import gc
import threading
import time
from time import perf_counter_ns
from typing import Any

from bench.jobs.common import LISTS, PEER, Started, TransferFailed, lists
from bench.pools import picks


def polls(side: Any, turns: int, batch: int = 100) -> list[float]:
    """poll() that finds nothing: ns a call, one figure a batch."""
    poll = side.transport.poll
    each = []
    gc.collect()
    for _ in range(turns):
        begun = perf_counter_ns()
        for _ in range(batch):
            poll(PEER)
        each.append((perf_counter_ns() - begun) / batch)
    return each


def fly(side: Any, wanted: int, count: int = 1) -> None:
    """Has `wanted` transfers under way to a peer that is stopped: those
    that still fit into what lies between end, and are made up for."""
    chosen = picks(side.pool.blocks, min(wanted, side.pool.blocks), 1, 7)
    if side.started is None:
        side.started = Started(side)
    started = side.started
    at = 0
    for _ in range(20):
        while len(started.numbers) < wanted:
            at = (at + count) % (len(chosen[0]) - count + 1)
            span = slice(at, at + count)
            started.start(chosen[0][span], chosen[1][span])
        time.sleep(0.05)
        if started.collect() == 0:
            return
    raise TransferFailed("transfers to a stopped peer go on ending")


def flood(side: Any, count: int) -> None:
    """From now on, in a thread: transfers of `count` blocks, four under way."""
    chosen = lists(side, count, 1)
    started = Started(side)

    def work() -> None:
        turn = 0
        while True:
            while len(started.numbers) < 4:
                started.start(*chosen[turn % LISTS])
                turn += 1
            side.flooded += started.collect()
            time.sleep(200e-6)

    threading.Thread(target=work, daemon=True).start()


def flooded(side: Any) -> int:
    """Transfers of the flood that are done."""
    return int(side.flooded)


def cpu(side: Any, seconds: float) -> float:
    """The share of a core that this process takes while it does nothing."""
    begun, clock = time.process_time(), time.monotonic()
    time.sleep(seconds)
    return (time.process_time() - begun) / (time.monotonic() - clock)
