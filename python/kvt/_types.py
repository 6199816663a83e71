# SPDX-License-Identifier: Apache-2.0
"""The words of the package: enumerations and the tuples that name memory."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

SELF = 0
"""This side, where a side is asked for."""

ANY = 2**64 - 1
"""Every peer, in :meth:`Transport.poll`."""

TAG_MAX = 15
NAME_MAX = 255


class Kind(IntEnum):
    """What memory is: the host's, or a device's."""

    DRAM = 0
    VRAM = 1


class State(IntEnum):
    """The state of a transfer."""

    QUEUED = 0
    IN_PROGRESS = 1
    DONE = 2
    REJECTED = 3
    FAILED = 4
    DISCONNECTED = 5
    UNREADABLE = 6
    CANCELLED = 7
    TIMED_OUT = 8
    LOST = 9


class Op(IntEnum):
    """What a transfer does."""

    WRITE = 0
    READ = 1
    WARM_UP = 2
    ADD = 3


class Scope(IntEnum):
    """How much is damaged by a failure: drop that much, keep the rest."""

    NONE = 0
    REQUEST = 1
    PEER = 2
    TRANSPORT = 3


class PeerState(IntEnum):
    """The state of a peer."""

    ADDING = 0
    LOADED = 1
    DISCONNECTED = 2
    UNLOADED = 3
    RELOADING = 4


class Region(NamedTuple):
    """Memory by address. ``fd`` and ``fd_offset`` say which file backs it."""

    addr: int
    length: int
    kind: int = Kind.DRAM
    device: int = 0
    fd: int | None = None
    fd_offset: int = 0


class Run(NamedTuple):
    """``count`` blocks of ``block_bytes``, ``stride_bytes`` from start to
    start; a stride of 0 means that they lie end to end."""

    addr: int
    block_bytes: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    stride_bytes: int = 0
    kind: int = Kind.DRAM
    device: int = 0


class Copy(NamedTuple):
    """One piece of :meth:`Transport.write` or :meth:`Transport.read`."""

    local_addr: int
    peer_addr: int
    length: int
    local_kind: int = Kind.DRAM
    local_device: int = 0
    peer_kind: int = Kind.DRAM
    peer_device: int = 0


class Notification(NamedTuple):
    """A received message; ``peer`` is 0 when no peer with this agent name
    is added."""

    peer: int
    agent_name: str
    data: bytes
