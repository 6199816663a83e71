# SPDX-License-Identifier: Apache-2.0
"""A prefill and decode sides, all in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

import kvt
from conftest import Engine
from kvt.sglang import (
    BufferKey,
    NixlHandle,
    NixlResult,
    NixlTransport,
    PeerBuffers,
    StridedRun,
)
from sglang_support.arena import Arena
from stage import until

ITEM = 64
SLOTS = 64
KV = BufferKey("kv", 0)
PATIENT = 60.0
"""A `post_wait` for tests in which the first part is refused; never reached."""


class Side:
    """A transport and its arena, which is registered as KV."""

    def __init__(
        self, role: str, engine: Engine, seed: int, size: int, **options: Any
    ) -> None:
        self.arena = Arena(size, seed)
        self.transport = NixlTransport.create(
            role, engine=engine.name, **{**engine.options, **options}
        )
        self.transport.register_all({KV: (self.arena.addr, size, "DRAM", 0)})

    @property
    def name(self) -> str:
        return self.transport.agent_name

    def run(
        self,
        offset: int = 0,
        length: int = ITEM,
        stride: int = ITEM,
        count: int = SLOTS,
    ) -> StridedRun:
        return StridedRun(self.arena.addr + offset, length, 0, stride, count)

    def load(self, peer: Side) -> PeerBuffers:
        return self.transport.import_registration(
            peer.name,
            peer.transport.agent_metadata,
            {KV: peer.arena.addr},
            {KV: ("DRAM", 0)},
        )

    def lists(self, peer: Side, layout: str = "kv") -> PeerBuffers:
        """Loads the peer; `layout` is all of either arena, in items."""
        loaded = self.load(peer)
        assert self.transport.prepare("", layout, [self.run()], "DRAM")
        assert self.transport.prepare(loaded, layout, [peer.run()], "DRAM")
        return loaded

    def write(
        self, peer: Side, src: list[int], dst: list[int], layout: str = "kv"
    ) -> NixlHandle:
        """Items, which the peer's image must then have."""
        for here, there in zip(src, dst, strict=True):
            data = self.arena.read(here * ITEM, ITEM)
            peer.arena.expect(there * ITEM, data)
        return self.transport.write_prepared(
            peer.name, layout, src, layout, dst
        )

    def final(self, handle: NixlHandle) -> NixlResult:
        """The answer once it is not "in progress" any more."""
        status = self.transport.status
        until("it ended", lambda: not status(handle).in_progress)
        return status(handle)

    def settled(self, handle: NixlHandle) -> NixlResult:
        """The answer once it is quiescent."""
        status = self.transport.status
        until("it is quiescent", lambda: status(handle).quiescent)
        return status(handle)

    def fault(self, rules: str) -> None:
        self.transport.core.set_fault(rules)


class Sides:
    """Sides that are closed at the end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.made: list[Side] = []

    def side(
        self,
        role: str,
        rules: str = "",
        size: int = ITEM * SLOTS,
        **options: Any,
    ) -> Side:
        engine = self.engine
        if rules:
            engine = engine._replace(name=f"{engine.name}?{rules}")
        side = Side(role, engine, len(self.made) + 1, size, **options)
        self.made.append(side)
        return side

    def two(self, rules: str = "", **options: Any) -> tuple[Side, Side]:
        """A prefill, which follows the rules, and a decode."""
        return self.side("prefill", rules, **options), self.side("decode")

    def __enter__(self) -> Sides:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for side in self.made:
            core = side.transport.core
            if not core.closed:
                with contextlib.suppress(kvt.Unsupported):
                    core.set_fault("")  # lets go of what is held
            side.transport.close()


def counted(
    transport: NixlTransport, name: str
) -> tuple[list[tuple[Any, ...]], Callable[[], None]]:
    """Records the calls of one of the core's methods; and how to stop."""
    calls: list[tuple[Any, ...]] = []
    core = transport._core

    class Spy:
        def __getattr__(self, attribute: str) -> Any:
            found = getattr(core, attribute)
            if attribute != name:
                return found

            def call(*args: Any, **more: Any) -> Any:
                calls.append(args)
                return found(*args, **more)

            return call

    def stop() -> None:
        transport._core = core
        transport._memory._core = core

    transport._core = transport._memory._core = Spy()  # type: ignore[assignment]
    return calls, stop
