# SPDX-License-Identifier: Apache-2.0
"""Transports with their pools, all in this process."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import pytest

import kvt
from conftest import absent, nixl_library
from kvt.vllm import NixlTransport
from stage import until
from vllm_support.memory import Pool

BLOCKS = 64
BLOCK_LEN = 4096

ENGINES = {
    "local": {"KVT_ENGINE": "local"},
    "fault": {"KVT_ENGINE": "fault:local"},
    "nixl": {"KVT_ENGINE": "", "KVT_SAME_HOST": ""},
    "nixl_only": {"KVT_ENGINE": "", "KVT_SAME_HOST": "0"},
}
"""What decides how a NixlTransport reaches a peer on this host."""


def choose(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine.startswith("nixl"):
        library = nixl_library()
        if library is not None:
            monkeypatch.setenv("KVT_NIXL_LIBRARY", library)
        need_nixl()
    for name, value in ENGINES[engine].items():
        monkeypatch.setenv(name, value)


def need_nixl() -> None:
    """Skips where there is no NIXL, and fails where there must be."""
    for info in kvt.engines():
        if info.name == "nixl" and not info.available:
            absent(f"no NIXL: {info.text}")


class Side:
    """A transport and its pool."""

    def __init__(self, name: str, seed: int, **more: Any) -> None:
        self.name = name
        self.pool = Pool(
            more.pop("blocks", BLOCKS),
            more.pop("block_len", BLOCK_LEN),
            seed,
            more.pop("fd", -1),
        )
        engine = more.pop("engine", None)
        with pytest.MonkeyPatch.context() as patch:
            if engine is not None:
                patch.setenv("KVT_ENGINE", engine)
            self.transport = NixlTransport(name, self.pool.view, **more)

    def arguments(self) -> tuple[bytes, int, int, int]:
        """What a peer's add_remote_peer() takes after the peer's name."""
        ours = self.transport
        return (
            ours.get_agent_metadata(),
            ours.base_addr,
            ours.num_blocks,
            ours.block_len,
        )

    def add(self, peer: Side, name: str | None = None) -> None:
        self.transport.add_remote_peer(name or peer.name, *peer.arguments())

    def write(
        self, peer: Side, local: list[int], remote: list[int], name: str = ""
    ) -> int:
        """Starts a write and puts it into the peer's image."""
        number = self.transport.write_blocks(name or peer.name, local, remote)
        assert number is not None
        for here, there in zip(local, remote, strict=True):
            peer.pool.expect(there, self.pool.block(here))
        return number

    def fault(self, rules: str) -> None:
        inner = self.transport.transport
        assert inner is not None
        inner.set_fault(rules)

    def inner(self) -> kvt.Transport:
        inner = self.transport.transport
        assert inner is not None
        return inner

    def results(
        self, count: int, peer: str | None = None
    ) -> tuple[list[int], list[int]]:
        """Polls until this many transfers ended: done, failed."""
        done: list[int] = []
        failed: list[int] = []

        def ready() -> bool:
            more = self.transport.poll(peer)
            done.extend(more.done)
            failed.extend(more.failed)
            return len(done) + len(failed) >= count

        until(f"{count} transfers ended", ready)
        return done, failed


class Sides:
    """Sides a, b, … that are closed at the end."""

    def __init__(self) -> None:
        self.made: list[Side] = []

    def side(self, **more: Any) -> Side:
        name = more.pop("name", "abcdefgh"[len(self.made)])
        side = Side(name, seed=len(self.made) + 1, **more)
        self.made.append(side)
        return side

    def two(self) -> tuple[Side, Side]:
        """a, which knows b, and b; nothing is under way."""
        a, b = self.side(), self.side()
        a.add(b)
        until("a is warm", lambda: a.inner().stats().inflight == 0)
        return a, b

    def __enter__(self) -> Sides:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for side in self.made:
            side.transport.close()
