# SPDX-License-Identifier: Apache-2.0
"""The agents that were added."""

from __future__ import annotations

import threading
import time

import kvt

from . import _blob
from ._blob import Life
from ._errors import nixlNotFoundError

_SETTLE_S = 0.5
"""How long an update waits for transfers under way, which it would stop."""

_SETTLE_STEP_S = 0.0002


class Peer:
    """One life of an agent: lists and transfers over it die with it."""

    def __init__(self, ident: int, life: Life, metadata: bytes) -> None:
        self.ident = ident  # kvt's
        self.life = life
        self.metadata = metadata
        self.broken = False  # a transfer said that the link is gone
        self.gone = False  # removed here, or added anew

    def loaded(self, core: kvt.Transport) -> bool:
        return not self.broken and core.peer_loaded(self.ident)


class Peers:
    """By the agent's name. The lock is held while one is added."""

    def __init__(self, core: kvt.Transport) -> None:
        self._core = core
        self._table: dict[str, Peer] = {}
        self._lock = threading.Lock()

    def find(self, name: str) -> Peer | None:
        return self._table.get(name)

    def add(self, metadata: bytes) -> bytes:
        """Adds the agent, or updates it; its name."""
        life = _blob.life_of(metadata)
        name = life.name.decode(errors="surrogateescape")
        with self._lock:
            peer = self._table.get(name)
            if peer is not None and self._update(peer, life, metadata):
                return life.name
            if not life.connections:
                raise nixlNotFoundError(
                    f"agent {name!r} is not loaded, and this metadata does not "
                    "say where to connect"
                )
            # Under the same name: kvt tears down what was there.
            ident = self._core.add_peer(name, metadata)
            if peer is not None:
                peer.gone = True
            self._table[name] = Peer(ident, life, metadata)
        return life.name

    def _update(self, peer: Peer, life: Life, metadata: bytes) -> bool:
        """False: the old life is over, and its lists with it."""
        if not peer.loaded(self._core) or not peer.life.is_same(life):
            return False
        newer = metadata
        if life.is_part:
            newer = _blob.joined(peer.metadata, metadata)
        if newer == peer.metadata:
            return True
        self._settle(peer)
        try:
            self._core.reload_peer(peer.ident, newer)
        except kvt.OutOfRange:
            return False  # a list is over memory that is there no more
        peer.metadata = newer
        return True

    def _settle(self, peer: Peer) -> None:
        """Lets what is under way end well; what other threads post meanwhile
        may go on and on."""
        until = time.monotonic() + _SETTLE_S
        while self._core.peer_info(peer.ident).inflight > 0:
            if time.monotonic() >= until:
                break
            time.sleep(_SETTLE_STEP_S)

    def remove(self, name: str) -> None:
        with self._lock:
            peer = self._table.pop(name, None)
        if peer is not None:
            peer.gone = True
            self._core.remove_peer(peer.ident)
