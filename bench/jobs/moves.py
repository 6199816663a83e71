# SPDX-License-Identifier: Apache-2.0
"""Transfers: their call, their end, and how many of them a second."""

from __future__ import annotations

import gc
import time
from time import perf_counter_ns
from typing import Any

from bench.jobs.common import (
    LISTS,
    PEER,
    Started,
    TransferFailed,
    lists,
    taken,
    waiter,
)
from bench.pools import picks


def writes(
    side: Any, count: int, run: int = 1, turns: int = 4, wait: str = "spin"
) -> dict[str, list[int]]:
    """Transfers of `count` blocks one after the other: the call alone, and
    from the call to done."""
    transport = side.transport
    until = waiter(transport, wait)
    chosen = lists(side, count, run)
    call, total = [], []
    gc.collect()
    for turn in range(turns):
        ours, theirs = chosen[turn % LISTS]
        begun = perf_counter_ns()
        number = transport.write_blocks(PEER, ours, theirs)
        called = perf_counter_ns()
        until(taken(number))
        total.append(perf_counter_ns() - begun)
        call.append(called - begun)
    return {"call": call, "total": total}


def digest(side: Any, which: int, count: int, run: int, turn: int = 0) -> int:
    """Of the blocks that turn `turn` of writes() has on this side."""
    chosen = picks(side.pool.blocks, count, run, turn)[which]
    return int(side.pool.digest(chosen))


def scrub(side: Any) -> None:
    side.pool.scrub()


def queued_calls(
    side: Any, count: int, behind: int, behind_count: int, turns: int
) -> list[int]:
    """The call of `count` blocks with `behind` large transfers queued."""
    started = Started(side)
    chosen = lists(side, count, 1)
    large = picks(side.pool.blocks, behind_count, 1, 99)
    call = []
    gc.collect()
    for turn in range(turns):
        for _ in range(behind):
            started.start(*large)
        ours, theirs = chosen[turn % LISTS]
        begun = perf_counter_ns()
        started.start(ours, theirs)
        call.append(perf_counter_ns() - begun)
        started.wait_for_all()
    return call


def many(side: Any, total: int, window: int, peers: int = 1) -> int:
    """`total` transfers of one block, `window` under way, to that many peers
    by turns: ns for all."""
    transport = side.transport
    ours, theirs = picks(side.pool.blocks, min(total, side.pool.blocks), 1, 3)
    ours_one = [ours[n : n + 1] for n in range(len(ours))]
    theirs_one = [theirs[n : n + 1] for n in range(len(theirs))]
    size = len(ours_one)
    names = [PEER, *(f"{PEER}{n}" for n in range(1, peers))]
    asked = PEER if peers == 1 else None
    started = ended = 0
    gc.collect()
    begun = perf_counter_ns()
    while ended < total:
        while started < total and started - ended < window:
            at = started % size
            name = names[started % peers]
            transport.write_blocks(name, ours_one[at], theirs_one[at])
            started += 1
        done, failed = transport.poll(asked)
        if failed:
            raise TransferFailed(str(failed))
        ended += len(done)
    return perf_counter_ns() - begun


def singles(side: Any, turns: int, wait: str, gap: float = 0.0) -> list[int]:
    """One block, from the call to done; `gap` seconds of idleness before."""
    transport = side.transport
    until = waiter(transport, wait)
    ours, theirs = picks(side.pool.blocks, 64, 1, 5)
    each = []
    gc.collect()
    for turn in range(turns):
        at = turn % 64
        local, remote = ours[at : at + 1], theirs[at : at + 1]
        if gap:
            time.sleep(gap)
        begun = perf_counter_ns()
        number = transport.write_blocks(PEER, local, remote)
        until(taken(number))
        each.append(perf_counter_ns() - begun)
    return each


def mixed_calls(side: Any, turns: int) -> dict[str, list[int]]:
    """write_blocks of one block, and the polls until it is done: ns of every
    call."""
    transport = side.transport
    ours, theirs = picks(side.pool.blocks, 64, 1, 5)
    write_ns, poll_ns = [], []
    gc.collect()
    for turn in range(turns):
        at = turn % 64
        begun = perf_counter_ns()
        number = transport.write_blocks(
            PEER, ours[at : at + 1], theirs[at : at + 1]
        )
        write_ns.append(perf_counter_ns() - begun)
        ended = False
        while not ended:
            time.sleep(50e-6)
            begun = perf_counter_ns()
            done, failed = transport.poll(PEER)
            poll_ns.append(perf_counter_ns() - begun)
            if failed:
                raise TransferFailed(str(failed))
            ended = taken(number) in done
    return {"write_blocks": write_ns, "poll": poll_ns}
