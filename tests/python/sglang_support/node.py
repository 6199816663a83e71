# SPDX-License-Identifier: Apache-2.0
"""One transport in a process of its own, with an arena for it:
-m sglang_support.node DESCRIPTOR."""

from __future__ import annotations

import sys
from typing import Any

from kvt.sglang import (
    BufferKey,
    NixlHandle,
    NixlTransport,
    StridedRun,
    _NixlPostError,
)
from sglang_support.arena import Arena
from stage import cut_links, serve

KV = BufferKey("kv", 0)


class Node:
    def __init__(self) -> None:
        self.handles: list[NixlHandle] = []

    def open(self, role: str, size: int, block: int, seed: int) -> None:
        self.block = block
        self.arena = Arena(size, seed)
        self.transport = NixlTransport.create(role)
        self.transport.register_all({KV: (self.arena.addr, size, "DRAM", 0)})
        self.transport.prepare("", "kv", [self.run(self.arena.addr)], "DRAM")

    def run(self, addr: int) -> StridedRun:
        block = self.block
        return StridedRun(addr, block, 0, block, self.arena.size // block)

    def registration(self) -> tuple[Any, ...]:
        return (
            self.transport.agent_name,
            self.transport.agent_metadata,
            {KV: self.arena.addr},
            {KV: ("DRAM", 0)},
        )

    def load(self, *registration: Any) -> None:
        peer = self.transport.import_registration(*registration)
        base = registration[2][KV]
        self.transport.prepare(peer, "kv", [self.run(base)], "DRAM")

    def write(self, peer: str, src: list[int], dst: list[int]) -> int:
        """The handle's number."""
        handle = self.transport.write_prepared(
            peer, "kv", src, "kv", dst, b"note"
        )
        self.handles.append(handle)
        return len(self.handles) - 1

    def status(self, number: int) -> tuple[str, bool, str, str]:
        """State, quiescent, and the error's class and text."""
        handle = self.handles[number]
        state, quiescent, error = self.transport.status(handle)
        assert error is handle.error
        what = _NixlPostError("what", error)
        assert str(what) == ("what" if error is None else f"what: {error}")
        return state.name, quiescent, type(error).__name__, str(error)

    def is_loaded(self, peer: str) -> bool:
        return self.transport.is_loaded(peer)

    def reload(self, peer: str) -> None:
        self.transport.reload(peer)

    def path(self, peer: str) -> str:
        core = self.transport.core
        return core.peer_info(core.find_peer(peer)).path

    def notes(self) -> list[bytes]:
        return [n.data for n in self.transport.core.notifications()]

    def blocks(self, blocks: list[int]) -> list[bytes]:
        return [self.arena.read(i * self.block, self.block) for i in blocks]

    def expect(self, blocks: list[int], data: list[bytes]) -> None:
        for i, content in zip(blocks, data, strict=True):
            self.arena.expect(i * self.block, content)

    def wrong(self) -> int:
        return self.arena.wrong()

    def cut(self) -> int:
        return cut_links()

    def close(self) -> None:
        self.transport.close()


if __name__ == "__main__":
    serve(Node(), sys.argv[1])
