# SPDX-License-Identifier: Apache-2.0
"""Moves blocks by kvt, and checks that each transfer is reported once."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Literal, NamedTuple

import kvt

from .peers import Born
from .shape import BLOCK, BLOCKS, SMALL

FINISHED = (
    "done", "rejected", "failed", "disconnected", "cancelled", "timed_out",
    "lost",
)  # fmt: skip


class Link(NamedTuple):
    peer: int
    layout: int


class KvtMover:
    """All but follow() is called by one thread.

    `live` are the transfers that poll() has still to report.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._transport = kvt.Transport(**options)
        self._memory = bytearray(BLOCK * BLOCKS)
        self._transport.register(self._memory)
        addr = kvt.region_of(self._memory).addr
        self._local = self._transport.prepare(
            "kv", [kvt.Run(addr, BLOCK, BLOCKS)]
        )
        # No two neighbours, so that a large transfer is many copies.
        self._scattered = list(range(BLOCKS))
        random.Random(1).shuffle(self._scattered)
        self.live: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def fileno(self) -> int:
        return self._transport.fileno()

    # ----------------------------------------------------------------- peers

    def add(self, index: int, born: Born) -> Link:
        peer = self._transport.add_peer(f"peer{index}", born.metadata)
        run = [kvt.Run(born.addr, BLOCK, BLOCKS)]
        return Link(peer, self._transport.prepare("kv", run, peer))

    def follow(self, index: int, link: Link, born: Born, deaths: int) -> Link:
        """The next process of a peer: by turns the peer is reloaded, or
        removed and added again. For another thread, while writes go on."""
        if deaths % 2:
            return self.reload(link, born)
        self._transport.remove_peer(link.peer)
        return self.add(index, born)

    def reload(self, link: Link, born: Born) -> Link:
        self._transport.reload_peer(link.peer, born.metadata)
        return link

    def remove(self, link: Link) -> None:
        self._transport.remove_peer(link.peer)

    # ------------------------------------------------------------- transfers

    def write(
        self, link: Link, number: int, large: bool, note: bytes | None
    ) -> int | None:
        """The transfer, or None where the peer is known to be gone."""
        if large:
            local, remote = self._scattered, self._scattered[::-1]
        else:
            at = number * SMALL % BLOCKS
            local = list(range(at, at + SMALL))
            remote = local
        try:
            xfer = self._transport.write_blocks(
                link.peer, self._local, local, link.layout, remote, note=note
            )
        except (kvt.PeerDisconnected, kvt.NotFound):
            self.counts["refused"] += 1
            return None
        self.live.add(xfer)
        self.counts["accepted"] += 1
        return xfer

    def cancel(self, xfer: int, under_way: bool) -> None:
        """At once, or when a part of it has been posted; the result is wanted
        in one of two cases."""
        state = self._transport.status(xfer).state
        while under_way and state is kvt.State.QUEUED:
            state = self._transport.status(xfer).state
        self.counts["cancels"] += 1
        self.counts[f"cancels while {state.name.lower()}"] += 1
        modes: tuple[Literal["wait"], Literal["immediate"]]
        modes = "wait", "immediate"
        mode = modes[self.counts["cancels"] // 2 % 2]
        if xfer not in self._transport.cancel(xfer, mode):
            self.live.remove(xfer)

    def poll(self) -> None:
        for result in self._transport.poll():
            if result.id not in self.live:
                self.wrong.append(f"not awaited: {result}")
            self.live.discard(result.id)
            self.counts[result.state.name.lower()] += 1

    # ------------------------------------------------------------------- end

    def at_rest(self) -> bool:
        """Whether kvt itself has nothing to do any more, too."""
        stats = self._transport.stats()
        return not self.live and stats.inflight == stats.quarantined == 0

    def check(self) -> dict[str, int]:
        """At rest: each transfer that was accepted has ended, once."""
        stats = self._transport.stats()
        ended = {name: getattr(stats, name) for name in FINISHED}
        if stats.accepted != sum(ended.values()):
            self.wrong.append(f"{stats.accepted} accepted, but {ended}")
        if stats.lost:
            self.wrong.append(f"{stats.lost} were lost")
        # Not wrong by itself: whoever stops all of us for long causes one.
        return {**self.counts, "stalls": stats.stalls}

    def close(self) -> None:
        self._transport.close()
        del self._transport  # the descriptors go with it
