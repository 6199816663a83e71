# SPDX-License-Identifier: Apache-2.0
"""kvt.Transport with the pool in several registered regions, and the part of
vLLM's interface that the jobs use."""

from __future__ import annotations

import ctypes
from typing import Any

import kvt


class Regions:
    engine = "local"
    count = 1

    def __init__(self, name: str, view: memoryview) -> None:
        assert view.shape is not None
        self.num_blocks, self.block_len = view.shape
        self.base_addr = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self.transport = kvt.Transport(self.engine, agent_name=name)
        self.transport.register(
            [(run[0], run[1] * run[2]) for run in self._runs(self.base_addr)]
        )
        self._layout = self.transport.prepare(
            "ours", self._runs(self.base_addr)
        )
        self._view = view
        self._peers: dict[str, tuple[int, int]] = {}

    def _runs(self, base: int) -> list[tuple[int, int, int]]:
        each = self.num_blocks // self.count
        size = each * self.block_len
        return [
            (base + n * size, self.block_len, each) for n in range(self.count)
        ]

    def get_agent_metadata(self) -> bytes:
        return self.transport.metadata()

    def add_remote_peer(
        self,
        peer_id: str,
        agent_metadata: bytes,
        base_addr: int,
        num_blocks: int,
        block_len: int,
    ) -> None:
        peer = self.transport.add_peer(peer_id, agent_metadata)
        layout = self.transport.prepare("theirs", self._runs(base_addr), peer)
        self._peers[peer_id] = peer, layout

    def write_blocks(self, peer_id: str, ours: Any, theirs: Any) -> int:
        peer, layout = self._peers[peer_id]
        return self.transport.write_blocks(
            peer, self._layout, ours, layout, theirs
        )

    def poll(self, peer_id: str | None = None) -> tuple[list[int], list[int]]:
        results = self.transport.poll()
        done = [each.id for each in results if each.ok]
        return done, [each.id for each in results if not each.ok]


def made(engine: str, count: int) -> type[Regions]:
    return type("Regions", (Regions,), {"engine": engine, "count": count})
