# SPDX-License-Identifier: Apache-2.0
"""The table of the goals: each row has a name, a title and a function.

A function gets the Stage and gives the Lines of its row. The order is that of
the table in docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.figures import Line
from bench.rows import calls, idle, limits, network, peers, small, speed
from bench.stage import Stage


@dataclass(frozen=True)
class Row:
    name: str
    title: str
    run: Callable[[Stage], Iterable[Line]]
    full_only: bool = False


ROWS = (
    Row("call", "write_blocks: the call", calls.call),
    Row("indices", "write_blocks of 65,536 indices", calls.indices),
    Row("done64k", "write to done, 1,024 x 64 KiB", speed.done_64k),
    Row("done4k", "write to done, 16,384 x 4 KiB", speed.done_4k),
    Row("sizes", "each block size, private memory", limits.sizes),
    Row("memfd", "sealed memfd on both sides", limits.memfd),
    Row("file", "unsealed shared file on both sides", limits.file),
    Row("nixl", "NIXL only", speed.nixl_only),
    Row("tcp", "NIXL over TCP between two namespaces", network.tcp),
    Row("poll", "poll that finds nothing", calls.poll),
    Row("rate", "10,000 transfers of 64 B, 32 in flight", small.rate),
    Row("single", "one 64 B write to done", small.single),
    Row("add", "add_remote_peer, 1e6 blocks", peers.add),
    Row("prepare", "192 million blocks, 1.31 million indices", peers.prepare),
    Row("cpu", "CPU of a transport that has nothing to do", idle.cpu),
    Row("flood", "calls while another peer floods us over TCP", idle.flood),
    Row("mooncake", "Mooncake's engine over TCP (no goal)", speed.others, True),
)
