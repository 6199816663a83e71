# SPDX-License-Identifier: Apache-2.0
"""What SGLang's side and the transport hand to each other."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import kvt

KINDS = {"DRAM": kvt.DRAM, "VRAM": kvt.VRAM}


def kind_of(kind: str | int) -> kvt.Kind:
    """NIXL's name of a kind of memory, or kvt's number, as kvt's."""
    if isinstance(kind, str):
        try:
            return KINDS[kind]
        except KeyError:
            raise ValueError(
                f"memory kind {kind!r} is neither DRAM nor VRAM"
            ) from None
    return kvt.Kind(whole(kind, "memory kind"))


def whole(value: Any, what: str, least: int = 0, most: int = 2**64 - 1) -> int:
    """An integer. int() would make one of 1.7, of "1" and of True."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} must be an integer, not {type(value)}")
    number = operator.index(value)
    if not least <= number <= most:
        raise kvt.OutOfRange(
            f"{what} is {number}, it must be from {least} to {most}"
        )
    return number


def address(value: Any, what: str = "an address") -> int:
    """An address uses all 64 bits: that of an int64 array may be below 0."""
    return whole(value, what, -(2**63)) & (2**64 - 1)


def device_of(value: Any) -> int:
    return whole(value, "a device", 0, 2**32 - 1)


class BufferKey(NamedTuple):
    """Names a region whatever its address is: a group and an index in it.

    The groups are the caller's ("kv", "aux", "state0", "staging"); any other
    hashable object serves as a key as well.
    """

    group: str
    index: int = 0  # type: ignore[assignment]  # hides tuple.index


class StridedRun(NamedTuple):
    """``count`` blocks of ``len`` bytes, whose starts are ``stride`` bytes
    apart: one row of an N x 5 array."""

    addr: int
    len: int
    dev_id: int
    stride: int
    count: int  # type: ignore[assignment]  # hides tuple.count


@dataclass(frozen=True)
class PeerBuffers:
    """Where a peer's buffers are: key -> (base, kind, device).

    Names the peer wherever a peer is asked for. A write goes to where the
    peer's newest registration has the key, never to an older one's address.
    """

    agent_name: str
    buffers: Mapping[Any, tuple[int, kvt.Kind, int]]


class NixlState(str, Enum):
    """What became of a write."""

    NOT_CREATED = "NOT_CREATED"
    REJECTED = "REJECTED"
    IN_PROGRESS = "PROC"
    DONE = "DONE"
    FAILED = "ERR"
    UNREADABLE = "UNREADABLE"


class NixlResult(NamedTuple):
    """The state of a write when it was asked for.

    Only with ``quiescent`` may source and destination be used for something
    else.
    """

    state: NixlState
    quiescent: bool
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.state is NixlState.DONE

    @property
    def in_progress(self) -> bool:
        return self.state is NixlState.IN_PROGRESS


class NixlHandle:
    """One write. Letting go of it is always safe: kvt keeps what is unproven.

    Attributes:
        peer: the peer's agent name.
        error: why the write was not created or did not end well, as far as is
            known; :meth:`NixlTransport.status` updates it.
    """

    def __init__(
        self,
        peer: str,
        core: kvt.Transport | None,
        xfer: int,
        error: BaseException | None = None,
    ) -> None:
        """Without a core: a write that was not created."""
        self.peer = peer
        self.error = error
        self._xfer = xfer
        # The first answer that was not "in progress": no later one differs but
        # in `quiescent`.
        self._state: NixlState | None = None
        self._final: NixlResult | None = None
        if core is None:
            self._final = NixlResult(NixlState.NOT_CREATED, True, error)
        else:
            self._release = weakref.finalize(self, _release, core, xfer)
            self._release.atexit = False

    def _finish(self, result: NixlResult) -> NixlResult:
        """Keeps the last answer, so that kvt need not keep the transfer."""
        self._final = result
        self._release()
        return result

    def __repr__(self) -> str:
        state = self._state if self._final is None else self._final.state
        name = "in progress" if state is None else state.name
        return f"<NixlHandle to {self.peer!r}: {name}>"


def _release(core: kvt.Transport, xfer: int) -> None:
    """Nobody asks any more. Its memory stays kvt's until it is proven."""
    with contextlib.suppress(kvt.Error):  # closed: nothing is left to release
        core.release(xfer)
