# SPDX-License-Identifier: Apache-2.0
"""One agent as a process of its own, for tests: python agent.py OPTIONS.

It opens a transport with OPTIONS (JSON), registers COUNT blocks of zeros, and
then answers one JSON line with one JSON line: see the functions.
"""

from __future__ import annotations

import json
import select
import sys
from typing import Any

import kvt

BLOCK = 4096
COUNT = 64


class Agent:
    """The words that a test may say."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.memory = bytearray(BLOCK * COUNT)
        self.addr = kvt.region_of(self.memory).addr
        self.transport = kvt.Transport(**options)
        self.transport.register(self.memory)
        self.run = [kvt.Run(self.addr, BLOCK, COUNT)]
        self.layout = self.transport.prepare("kv", self.run)
        self.peers: dict[str, tuple[int, int]] = {}

    def describe(self) -> dict[str, Any]:
        return {"metadata": self.transport.metadata().hex(), "addr": self.addr}

    def fill(self, block: int, byte: int) -> None:
        self.memory[block * BLOCK : (block + 1) * BLOCK] = bytes([byte]) * BLOCK

    def block(self, block: int) -> list[int]:
        """The different bytes of a block."""
        return sorted(set(self.memory[block * BLOCK : (block + 1) * BLOCK]))

    def add(self, name: str, metadata: str, addr: int) -> None:
        peer = self.transport.add_peer(name, bytes.fromhex(metadata))
        run = [kvt.Run(addr, BLOCK, COUNT)]
        self.peers[name] = peer, self.transport.prepare("kv", run, peer)

    def write(self, name: str, local: list[int], remote: list[int]) -> str:
        peer, layout = self.peers[name]
        try:
            xfer = self.transport.write_blocks(
                peer, self.layout, local, layout, remote, note=name.encode()
            )
            return self.transport.wait(xfer, 60).state.name
        except kvt.Error as error:
            return type(error).__name__

    def note(self) -> str:
        poller = select.poll()
        poller.register(self.transport.fileno(), select.POLLIN)
        poller.poll(60000)
        return self.transport.notifications(1)[0].data.decode()


def main() -> None:
    agent = Agent(json.loads(sys.argv[1]))
    for line in sys.stdin:
        word, *args = json.loads(line)
        if word == "end":
            agent.transport.close()
        elif word == "leave":
            return  # as it is, with everything open
        else:
            print(json.dumps(getattr(agent, word)(*args)), flush=True)


if __name__ == "__main__":
    main()
