# SPDX-License-Identifier: Apache-2.0
"""Moves blocks by NIXL's own Python agent, without kvt.

It does what its users do: a request for each transfer, released when its status
says that it is over, and a remote agent that is removed when its process died,
before the next one is added. Nothing is cancelled: NIXL has no way to.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import nixl

from .peers import Born
from .shape import BLOCK, BLOCKS, SMALL


@dataclass(eq=False)
class Remote:
    name: str
    addr: int
    gone: bool = False


@dataclass
class Request:
    handle: Any
    remote: Remote


class RawMover:
    """All but follow() is called by one thread."""

    def __init__(self, options: dict[str, Any]) -> None:
        del options
        # Its user polls; a progress thread would spin a core.
        config = nixl.nixl_agent_config(
            enable_prog_thread=False,
            sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._agent = nixl.nixl_agent("raw-writer", config)
        self._memory = bytearray(BLOCK * BLOCKS)
        held = ctypes.c_char.from_buffer(self._memory)
        self._addr = ctypes.addressof(held)
        whole = [(self._addr, BLOCK * BLOCKS, 0, "")]
        self._agent.register_memory(
            self._agent.get_reg_descs(whole, mem_type="DRAM")
        )
        self._scattered = list(range(BLOCKS))
        random.Random(1).shuffle(self._scattered)
        self._numbers = itertools.count(1)
        self.live: dict[int, Request] = {}
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def fileno(self) -> None:
        return None

    # ----------------------------------------------------------------- peers

    def add(self, index: int, born: Born) -> Remote:
        del index
        name = self._agent.add_remote_agent(born.metadata)
        return Remote(name, born.addr)

    def follow(
        self, index: int, remote: Remote, born: Born, deaths: int
    ) -> Remote:
        """For another thread, which waits until the peer's requests are
        over."""
        del deaths
        remote.gone = True
        while any(each.remote is remote for each in list(self.live.values())):
            time.sleep(0.001)
        self._agent.remove_remote_agent(remote.name)
        return self.add(index, born)

    def reload(self, remote: Remote, born: Born) -> Remote:
        self._agent.remove_remote_agent(remote.name)
        return self.add(0, born)

    def remove(self, remote: Remote) -> None:
        self._agent.remove_remote_agent(remote.name)

    # ------------------------------------------------------------- transfers

    def _descs(self, base: int, chosen: list[int], count: int) -> Any:
        rows = [(base + at * BLOCK, count * BLOCK, 0) for at in chosen]
        return self._agent.get_xfer_descs(rows, mem_type="DRAM")

    def write(
        self, remote: Remote, number: int, large: bool, note: bytes | None
    ) -> int | None:
        if remote.gone:
            self.counts["refused"] += 1
            return None
        if large:
            shape = self._scattered, self._scattered[::-1], 1
        else:
            shape = [number * SMALL % BLOCKS], [number * SMALL % BLOCKS], SMALL
        handle = None
        try:
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._descs(self._addr, shape[0], shape[2]),
                self._descs(remote.addr, shape[1], shape[2]),
                remote.name,
                note or b"",
            )
            self.counts["accepted"] += 1
            state = self._agent.transfer(handle)
        except Exception:
            if handle is None:
                self.counts["refused"] += 1
                return None
            state = "ERR"
        xfer = next(self._numbers)
        self._judge(xfer, Request(handle, remote), state)
        return xfer

    def _judge(self, xfer: int, request: Request, state: str) -> None:
        if state == "PROC":
            self.live[xfer] = request
            return
        self.counts["done" if state == "DONE" else "failed"] += 1
        request.handle.release()
        self.live.pop(xfer, None)

    def cancel(self, xfer: int, under_way: bool) -> None:
        del xfer, under_way

    def poll(self) -> None:
        for xfer, request in list(self.live.items()):
            try:
                state = self._agent.check_xfer_state(request.handle)
            except Exception:
                state = "ERR"
            self._judge(xfer, request, state)

    # ------------------------------------------------------------------- end

    def at_rest(self) -> bool:
        return not self.live

    def check(self) -> dict[str, int]:
        return dict(self.counts)

    def close(self) -> None:
        del self._agent
