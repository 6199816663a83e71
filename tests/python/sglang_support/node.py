# SPDX-License-Identifier: Apache-2.0
"""One transport in a process of its own, with an arena for it.

    python -m sglang_support.node DESCRIPTOR

It does what it is told over the connection DESCRIPTOR (nodes.py is the other
end): the methods of Node.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

from kvt.sglang import (
    BufferKey,
    NixlHandle,
    NixlTransport,
    StridedRun,
    _NixlPostError,
)
from sglang_support.arena import Arena

# Ends with the process that started it.
ctypes.CDLL(None).prctl(1, signal.SIGKILL)

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
        """Shuts every TCP connection of this process; how many there were."""
        count = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                made = socket.socket(fileno=os.dup(int(name)))
            except OSError:
                continue  # no socket, or the listing's own
            with made:
                if made.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                try:
                    made.getpeername()
                except OSError:
                    continue  # it listens
                made.shutdown(socket.SHUT_RDWR)
                count += 1
        return count

    def close(self) -> None:
        self.transport.close()


def main() -> None:
    faulthandler.enable()
    connection = Connection(int(sys.argv[1]))
    node = Node()
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            return
        try:
            answer = "answer", getattr(node, name)(*args)
        except Exception as error:
            answer = "raised", f"{type(error).__name__}: {error}"
        connection.send(answer)


if __name__ == "__main__":
    main()
