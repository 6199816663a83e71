# SPDX-License-Identifier: Apache-2.0
"""The transfers of a NixlTransport that it has not reported yet.

The extension (flights.h) has the table of them, starts them, ends those that
are done, and makes the answers of poll(). What is here is for the others, and
for peers that go away. It runs under the lock of the NixlTransport, but other
threads may start and end flights meanwhile. It may be left half-way by any
exception, and goes on in the next poll: a flight that failed is owed from the
call that takes it out of the table, and a Result is dropped last.

A transfer is a flight from write_blocks() until it is reported, cancelled or
dropped. What a poll found that then failed is reported by the next one,
cancelled meanwhile or not. A lost one stays: its blocks must not be reused, so cancel(mode="wait")
has to name it. A peer that is registered again while transfers of it are under
way stays in `replaced` until they are reported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import kvt
from kvt import _kvt

from ._base import CancelMode, PollResult
from ._plugin import HOME

# Under vLLM's own name: filters and levels that are set for it go on working.
logger = logging.getLogger(HOME)

GRACE = 2.0
"""Seconds. Transfers to a peer that is disconnected, but not proven dead, are
reported as failed after this time."""


class Peer(_kvt._Peer):
    """One registration that can be written to."""

    __slots__ = ("down", "lost", "name", "replaced")

    def __init__(
        self, flights: Flights, peer: int, layout: int, name: str
    ) -> None:
        self.name = name
        self.lost: set[int] = set()  # numbers
        self.down: float | None = None  # when its disconnect was seen
        self.replaced = False


class Flights(_kvt._Flights):
    replaced: dict[str, list[Peer]]

    def __init__(
        self,
        transport: kvt.Transport,
        layout: int,
        peers: dict[str, Peer],
        nothing: PollResult,
        agent_name: str,
    ) -> None:
        self._agent_name = agent_name
        self._transport = transport

    def replace(self, peer: Peer) -> None:
        """The peer is about to be removed; its transfers are reported."""
        peer.closed = True
        if peer.count:
            self.see(peer)
            peer.watched = True
            self.replaced.setdefault(peer.name, []).append(peer)
        peer.replaced = True

    def take_replaced(self, name: str) -> list[Peer]:
        return self.replaced.pop(name, [])

    def abandon(self, peer: Peer) -> list[int]:
        """Gives up a peer's transfers, whose numbers it returns; kvt keeps
        watching over their memory."""
        flights = peer.clear()
        peer.lost.clear()
        self._drop([xfer for _, xfer in flights])
        return [number for number, _ in flights]

    def abandon_all(self, peers: Iterable[Peer]) -> None:
        for some in [peers, *self.replaced.values()]:
            for peer in some:
                peer.closed = True
                self.abandon(peer)
        self.replaced.clear()

    def _drop(self, xfers: list[int]) -> None:
        if not xfers:
            return
        try:
            self._transport.cancel(xfers, "immediate")
        except kvt.Error as error:
            logger.warning(
                "NixlTransport %s: release_xfer_handle failed: %s",
                self._agent_name,
                error,
            )

    # ------------------------------------------------------------------ polls

    def collect(self, name: str | None, current: dict[str, Peer]) -> list[Peer]:
        """Finds what ended: the peer of a name, those it took the place of, or
        all."""
        for replaced in [*self.replaced.values()]:
            for peer in replaced[:]:
                self._sweep(peer)
        if name is None:
            peers = [*current.values()]
            for replaced in self.replaced.values():
                peers += replaced
        else:
            peers = self.replaced.get(name, [])[:]
            if name in current:
                peers.insert(0, current[name])
        for peer in peers:
            if peer.look():
                self.settle(peer)
        return peers

    def settle(self, peer: Peer) -> None:
        """Looks closer at a peer, and at its Results that are not done."""
        results = peer.odd[:]
        for result in results:
            number = result.user_data
            if self.find(number) is None:
                continue
            if result.state != kvt.State.CANCELLED:
                self._warn(number, result.error)
            if result.quiescent:
                self._report(peer, number)
            else:
                peer.lost.add(number)
        del peer.odd[: len(results)]
        for number in [n for n in peer.lost if self._proven(n)]:
            self._report(peer, number)
        if peer.count and self._over(peer):
            flying = peer.flying()
            self._drop([xfer for _, xfer in flying])
            for number, _ in flying:
                self._warn(number, f"peer={peer.name} is disconnected")
                self._report(peer, number)
        self._sweep(peer)

    def _warn(self, number: int, why: object) -> None:
        logger.warning(
            "NixlTransport %s: check_xfer_state failed for transfer_id=%d: %s",
            self._agent_name,
            number,
            why,
        )

    def _report(self, peer: Peer, number: int) -> None:
        self.fail(number)
        peer.lost.discard(number)

    def _sweep(self, peer: Peer) -> None:
        """Lets go of a replaced peer in any poll after the one that reported
        the last of its transfers."""
        peer.watched = bool(peer.replaced or peer.lost or peer.down is not None)
        if not peer.replaced or peer.count:
            return
        peers = self.replaced.get(peer.name, [])
        if peer in peers:
            peers.remove(peer)
        if not peers:
            self.replaced.pop(peer.name, None)

    def _proven(self, number: int) -> bool:
        """Whether the blocks of a lost transfer are known to be safe by now."""
        flight = self.find(number)
        if flight is None:
            return True
        try:
            return self._transport.status(flight[1]).quiescent
        except kvt.NotFound:
            return True

    def _is_lost(self, xfer: int) -> bool:
        try:
            return self._transport.status(xfer).state == kvt.State.LOST
        except kvt.NotFound:
            return False

    def see(self, peer: Peer) -> None:
        """Notes when a peer was first seen to be disconnected."""
        if peer.down is not None or peer.replaced:
            return
        if self._transport.peer_loaded(peer.id):
            return
        state = self._transport.peer_info(peer.id).state
        if state == kvt.PeerState.DISCONNECTED:
            peer.down = time.monotonic()
            peer.watched = True

    def _over(self, peer: Peer) -> bool:
        """Whether a peer is disconnected for so long that its transfers count
        as ended. That its process is dead kvt reports itself, and sooner."""
        self.see(peer)
        if peer.down is None:
            return False
        return time.monotonic() - peer.down >= GRACE

    # ----------------------------------------------------------------- cancel

    def cancel(self, numbers: Iterable[int], mode: CancelMode) -> list[int]:
        """Stops transfers; those that can still touch memory, in mode wait."""
        found = {number: self.find(number) for number in numbers}
        mine = {number: f for number, f in found.items() if f is not None}
        if not mine:
            return []
        xfers = [xfer for _, xfer in mine.values()]
        still = set(self._transport.cancel(xfers, mode))
        moving = []
        late = []
        for number, (peer, xfer) in mine.items():
            if xfer in still and not self._over(peer):
                moving.append(number)
                # A lost one may have been polled already: nobody else will
                # look when it is proven.
                if self._is_lost(xfer):
                    peer.lost.add(number)
                    peer.watched = True
                continue
            if xfer in still:
                late.append(xfer)
            peer.lost.discard(number)
            self.forget(number)
            self._sweep(peer)
        self._drop(late)
        for number in moving:
            logger.debug(
                "NixlTransport %s: cancel pending for transfer_id=%d: its last "
                "bytes are under way",
                self._agent_name,
                number,
            )
        return moving
