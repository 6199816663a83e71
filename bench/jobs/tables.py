# SPDX-License-Identifier: Apache-2.0
"""Peers and layouts, and what they keep in memory."""

from __future__ import annotations

import gc
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from bench.jobs.common import PEER
from bench.pools import picks


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise LookupError(name)


def peak_kib() -> int:
    """The most memory this process ever had, since the last forget_peak()."""
    return _status("VmHWM")


def resident_kib() -> int:
    return _status("VmRSS")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def adds(
    side: Any, numbers: tuple[Any, ...], turns: int
) -> dict[str, list[int]]:
    """The registered peer, removed and added again: ns, and the KiB that the
    add took for a moment."""
    transport = side.transport
    each, memory = [], []
    for _ in range(turns):
        transport.remove_remote_peer(PEER)
        gc.collect()
        forget_peak()
        before = resident_kib()
        begun = perf_counter_ns()
        transport.add_remote_peer(PEER, *numbers)
        each.append(perf_counter_ns() - begun)
        memory.append(peak_kib() - before)
    return {"total": each, "memory": memory}


def async_adds(side: Any, numbers: tuple[Any, ...], turns: int) -> list[int]:
    """The call alone; its end is waited for."""
    transport = side.transport
    each = []
    for _ in range(turns):
        transport.remove_remote_peer(PEER)
        gc.collect()
        begun = perf_counter_ns()
        future = transport.add_remote_peer_async(PEER, *numbers)
        each.append(perf_counter_ns() - begun)
        future.result()
    return each


def prepares(side: Any, runs: int, turns: int) -> dict[str, list[float]]:
    """Layouts of `runs` runs, each over the whole pool: ns, and the KiB that a
    layout keeps."""
    inner = side.transport.transport
    pool = side.pool
    run = side.transport.base_addr, pool.block_len, pool.blocks
    rows = [run] * runs
    inner.drop_layout(inner.prepare("warm-up", rows))
    each: list[float] = []
    made = []
    before = resident_kib()
    for turn in range(turns):
        begun = perf_counter_ns()
        made.append(inner.prepare(f"layout {turn}", rows))
        each.append(perf_counter_ns() - begun)
    kept = (resident_kib() - before) / turns
    for layout in made:
        inner.drop_layout(layout)
    return {"total": each, "memory": [kept]}


def vllm_lists(side: Any, blocks: int, turns: int) -> dict[str, list[int]]:
    """What vLLM's class does for its own blocks when it is opened: ns."""
    agent = side.transport._agent
    base, size = side.transport.base_addr, side.pool.block_len
    each = []
    for _ in range(turns):
        begun = perf_counter_ns()
        rows = [(base + n * size, size, 0) for n in range(blocks)]
        listed = agent.get_xfer_descs(rows, mem_type="DRAM")
        handle = agent.prep_xfer_dlist("NIXL_INIT_AGENT", listed)
        each.append(perf_counter_ns() - begun)
        agent.release_dlist_handle(handle)
    return {"total": each}


def run_writes(
    side: Any, runs: int, peer_base: int, count: int, turns: int
) -> list[int]:
    """The call of `count` scattered indices into layouts of `runs` runs."""
    inner = side.transport.transport
    pool = side.pool
    peer = inner.find_peer(PEER)
    ours = [(side.transport.base_addr, pool.block_len, pool.blocks)] * runs
    theirs = [(peer_base, pool.block_len, pool.blocks)] * runs
    local, remote = inner.prepare("a", ours), inner.prepare("b", theirs, peer)
    chosen = picks(runs * pool.blocks, count, 1, 11, sparse=True)
    each = []
    gc.collect()
    for _ in range(turns):
        begun = perf_counter_ns()
        number = inner.write_blocks(peer, local, chosen[0], remote, chosen[1])
        each.append(perf_counter_ns() - begun)
        inner.wait(number)
    inner.drop_layout(local)
    inner.drop_layout(remote)
    return each
