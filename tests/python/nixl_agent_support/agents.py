# SPDX-License-Identifier: Apache-2.0
"""Two agents of one process, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

import kvt
import kvt.nixl as nixl
from nixl_agent_support.nodes import pattern

BLOCK = 512
COUNT = 16
SIZE = BLOCK * COUNT
GUARD = 0xEE


class Two:
    """`one` moves to and from `other`; each with a registered buffer."""

    def __init__(self, **config: Any) -> None:
        self.one = nixl.nixl_agent("one", nixl.nixl_agent_config(**config))
        self.other = nixl.nixl_agent("other", nixl.nixl_agent_config())
        self.memory = {}
        self.addr = {}
        self.reg = {}
        for agent in (self.one, self.other):
            made = np.full(SIZE, GUARD, dtype=np.uint8)
            self.memory[agent.name] = made
            self.addr[agent.name] = int(made.ctypes.data)
            self.reg[agent.name] = agent.register_memory(
                [(self.addr[agent.name], SIZE, 0, "kv")], "DRAM"
            )
        self.one.add_remote_agent(self.other.get_agent_metadata())

    @property
    def core(self) -> kvt.Transport:
        """That of `one`."""
        assert self.one.core is not None
        return self.one.core

    def rows(self, name: str, *blocks: int) -> list[tuple[int, int, int]]:
        return [(self.addr[name] + i * BLOCK, BLOCK, 0) for i in blocks]

    def descs(self, name: str, *blocks: int) -> Any:
        return self.one.get_xfer_descs(self.rows(name, *blocks), "DRAM")

    def lists(self) -> tuple[Any, Any]:
        """All blocks of both sides, prepared."""
        every = range(COUNT)
        return (
            self.one.prep_xfer_dlist("", self.rows("one", *every), "DRAM"),
            self.one.prep_xfer_dlist(
                "other", self.rows("other", *every), "DRAM"
            ),
        )

    def fill(self, name: str, block: int, seed: int) -> bytes:
        data = pattern(seed, BLOCK)
        where = slice(block * BLOCK, (block + 1) * BLOCK)
        self.memory[name][where] = np.frombuffer(data, dtype=np.uint8)
        return data

    def block(self, name: str, block: int) -> bytes:
        return bytes(self.memory[name][block * BLOCK : (block + 1) * BLOCK])

    def clean(self) -> None:
        for made in self.memory.values():
            made[:] = GUARD
        self.other.get_new_notifs()
        self.other.notifs = {}

    def write(self, note: bytes | str = b"") -> Any:
        return self.one.initialize_xfer(
            "WRITE",
            self.descs("one", 0, 1, 5),
            self.descs("other", 2, 3, 9),
            "other",
            note,
        )


def run(agent: Any, handle: Any, note: bytes | str = b"") -> str:
    state = agent.transfer(handle, note)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    return str(state)


def notes(agent: Any, count: int) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    while sum(map(len, found.values())) < count:
        for name, texts in agent.get_new_notifs().items():
            found.setdefault(name, []).extend(texts)
    return found
