# SPDX-License-Identifier: Apache-2.0
"""What the calls give back: prepared lists, and transfers.

A layout of kvt lives as long as a list or a transfer needs it: NIXL lets a
list be released while transfers over it can still be posted. A transfer is
described when it is made, so it can be posted any number of times, one after
the other; kvt knows it only while it is under way. What became of it is kept
here, and asked of kvt no more once nothing can change it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any

import kvt

from . import _runs
from ._errors import (
    nixlInvalidParamError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    translate,
)
from ._log import logger
from ._peers import Peer
from ._runs import Facts, Lengths, Words

_numbers = itertools.count(1)

_CANCEL_WAIT_S = 0.5
"""How long a release waits until what was posted is final. Most of it is over
in a fraction of a millisecond; a peer that is stopped can make it long."""

_CANCEL_STEP_S = 0.0002

_APART_MAX = 1 << 24
"""Blocks of runs that are taken apart: 40 bytes each, twice."""

_BROKEN = (
    kvt.State.REJECTED,
    kvt.State.DISCONNECTED,
    kvt.State.UNREADABLE,
    kvt.State.CANCELLED,
)
"""States that are a failure before kvt has proven anything about it."""


class nixlXferTelemetry:
    """Figures of a transfer that is done; times are in microseconds."""

    def __init__(self) -> None:
        self.startTime = 0
        self.postDuration = 0
        self.xferDuration = 0
        self.totalBytes = 0
        self.descCount = 0


class Layout:
    """A list that kvt has prepared, of this side or of a peer."""

    def __init__(
        self,
        core: kvt.Transport,
        peer: Peer | None,
        runs: Words,
        kind: int,
        known: Facts,
    ) -> None:
        self.core = core
        self.peer = peer  # None: this side
        self.number = next(_numbers)
        self.count = known.blocks
        self.lengths = Lengths(runs, known)
        self.ident = self._prepare(runs, kind, known)

    def _prepare(self, runs: Words, kind: int, known: Facts) -> int:
        side = kvt.SELF if self.peer is None else self.peer.ident
        name = f"nixl-{self.number}"

        def prepared(these: Words) -> int:
            made = _runs.for_kvt(these, kind, known)
            return self.core.prepare(name, made, side)

        try:
            return prepared(runs)
        except kvt.OutOfRange as error:
            # Blocks at equal distances, each in a region of its own, are no
            # run: what lies between them is not registered.
            apart = runs[_runs.gaps(runs)]
            if len(apart) == 0 or _runs.wrap(apart):
                raise
            try:  # at no cost, before there is a run for each block
                self.core.drop_layout(prepared(_runs.ends(apart)))
            except kvt.OutOfRange:
                raise error from None
            if apart[:, _runs.COUNT].astype(float).sum() > _APART_MAX:
                raise nixlInvalidParamError(
                    f"more than {_APART_MAX} blocks lie apart in several "
                    "regions: list those of each region as a run of its own"
                ) from None
            return prepared(_runs.without_gaps(runs))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # gone with its peer, or closed
            self.core.drop_layout(self.ident)


class nixl_prepped_dlist_handle:
    """A prepared list. release() forgets it; so does its end."""

    __slots__ = ("__weakref__", "_layout", "_released")

    def __init__(self, layout: Layout) -> None:
        self._layout: Layout | None = layout
        self._released = False

    @property
    def _handle(self) -> int:
        return 0 if self._layout is None else self._layout.number

    def __repr__(self) -> str:
        return (
            f"nixl_prepped_dlist_handle({self._handle:#x}, "
            f"released={self._released})"
        )

    def release(self) -> None:
        self._released = True
        self._layout = None


class nixl_xfer_handle:
    """A transfer. release() stops it if it is under way; so does its end.

    When the release of a transfer that had not failed returns, nothing of it
    moves any more, here or at the peer. One that raises nixlRepostActiveError
    has stopped what was not posted yet, and can be called again. So can that of
    a transfer that has failed, which raises until its end is proven, or given
    up after the grace time or by a close: its error's `quiescent` says which.
    """

    __slots__ = (
        "__weakref__",
        "_answer",
        "_indices",
        "_layouts",
        "_measure",
        "_note",
        "_number",
        "_peer",
        "_post_ns",
        "_read",
        "_released",
        "_result",
        "_start_ns",
        "_xfer",
    )

    def __init__(
        self,
        read: bool,
        peer: Peer,
        layouts: tuple[Layout, Layout],
        indices: tuple[Any, Any],
        note: bytes,
        measure: bool,
    ) -> None:
        self._number = next(_numbers)
        self._read = read
        self._peer = peer
        self._layouts: tuple[Layout, Layout] | None = layouts
        self._indices = indices
        self._note = note
        self._measure = measure
        self._xfer = 0  # kvt's id while it is under way
        self._answer: str | Exception | None = None  # None: ask kvt
        self._result: kvt.Result | None = None  # of the last post, finished
        self._released = False
        self._start_ns = 0  # 0: never posted
        self._post_ns = 0

    @property
    def _handle(self) -> int:
        return self._number

    def __repr__(self) -> str:
        return f"nixl_xfer_handle({self._number:#x}, released={self._released})"

    def _post(self, note: bytes) -> str:
        """NIXL's transfer()."""
        if self._layouts is None:
            raise nixlInvalidParamError("the transfer was released")
        if self._xfer != 0 and self._check_quietly() == "PROC":
            raise nixlRepostActiveError("wait until it is done")
        if isinstance(self._answer, Exception) and not self._is_over():
            raise nixlRepostActiveError(
                "the transfer failed, and what was posted of it may still move"
            )
        self._forget()
        if note:
            self._note = note
        local, remote = self._layouts
        self._result = None
        self._answer = None
        core = local.core
        start = core.read_blocks if self._read else core.write_blocks
        begun = time.monotonic_ns()
        try:
            self._xfer = start(
                self._peer.ident,
                local.ident,
                self._indices[0],
                remote.ident,
                self._indices[1],
                note=self._note or None,
                event=False,
            )
        except kvt.Error as error:
            raise self._failed(translate(error)) from error
        self._start_ns = begun
        self._post_ns = time.monotonic_ns() - begun
        return self._check()

    def _check_quietly(self) -> str:
        try:
            return self._check()
        except Exception:
            return "ERR"

    def _check(self) -> str:
        """NIXL's check_xfer_state()."""
        if self._start_ns == 0:
            raise nixlNotPostedError("transfer() was not called")
        answer: Any = self._answer
        if answer != "DONE" and self._result is None and self._xfer != 0:
            answer = self._ask(self._xfer, answer)
        if isinstance(answer, Exception):
            # One object for every poll: its traceback must not grow.
            raise answer.with_traceback(None)
        return "PROC" if answer is None else str(answer)

    def _ask(self, xfer: int, before: Any) -> Any:
        """What kvt knows now. The first failure stays what is said; whether
        the memory is free may be known later."""
        core = self._core()
        try:
            seen = core.status(xfer)
        except kvt.Error as error:
            if self._answer is not None and self._answer is not before:
                return self._answer  # another thread was faster
            return before or self._failed(translate(error))
        if seen.finished and seen.quiescent:
            self._result = seen
        if seen.state == kvt.State.DONE and seen.finished:
            self._answer = "DONE"
            self._forget()
            return "DONE"
        if not seen.finished and seen.state not in _BROKEN:
            return "PROC"
        failure = before if before is not None else self._error_of(seen)
        if self._result is not None:
            failure.quiescent = True
            self._forget()
        return self._failed(failure)

    def _error_of(self, seen: kvt.Result) -> Any:
        error = seen.error
        if not isinstance(error, kvt.Error):
            error = kvt.EngineError(f"the transfer ended as {seen.state.name}")
        made: Any = translate(error)
        if seen.state == kvt.State.CANCELLED and self._peer.gone:
            made = nixlNotFoundError("the agent was removed, or added anew")
            made.__cause__ = error
        made.quiescent = seen.quiescent
        return made

    def _failed(self, error: Exception) -> Exception:
        if isinstance(error, nixlRemoteDisconnectError):
            self._peer.broken = True
        self._answer = error
        return error

    def _core(self) -> kvt.Transport:
        if self._layouts is None:
            raise nixlInvalidParamError("the transfer was released")
        return self._layouts[0].core

    def _forget(self) -> None:
        """kvt need not remember it any more."""
        xfer, self._xfer = self._xfer, 0
        if xfer != 0 and self._layouts is not None:
            with contextlib.suppress(kvt.Error):
                self._layouts[0].core.release(xfer)

    def _telemetry(self) -> nixlXferTelemetry:
        if self._start_ns == 0:
            raise nixlNotPostedError("transfer() was not called")
        if not self._measure:
            raise nixlNoTelemetryError(
                "the agent was made without capture_telemetry"
            )
        if self._result is None and self._layouts is not None:
            self._check()
        if self._result is None:
            raise nixlNoTelemetryError("the transfer is not done")
        made = nixlXferTelemetry()
        made.startTime = self._start_ns // 1000
        made.postDuration = self._post_ns // 1000
        made.xferDuration = self._result.latency_ns // 1000
        made.totalBytes = self._result.bytes
        made.descCount = self._result.copies
        return made

    def release(self) -> None:
        if self._released or self._layouts is None:
            self._released = True
            return
        if isinstance(self._answer, Exception):
            if not self._ends(_CANCEL_WAIT_S):
                raise nixlRepostActiveError(
                    "the transfer failed, and what was posted of it may still "
                    "move; release it again"
                )
        elif self._xfer != 0 and not self._stop(_CANCEL_WAIT_S):
            raise nixlRepostActiveError(
                "what was posted of the transfer still moves; release it again"
            )
        self._released = True
        self._forget()
        self._layouts = None

    def _is_over(self) -> bool:
        """Of one that failed: whether its end is proven, or given up, after the
        grace time or by a close that said so. vLLM takes a release for the
        proof that its blocks are free."""
        if self._xfer == 0:
            return True
        try:
            return bool(self._core().status(self._xfer).finished)
        except kvt.NotFound:
            return True  # known no more: it was final
        except kvt.Error:
            return self._result is not None

    def _ends(self, longest_s: float) -> bool:
        """Of one that failed: whether it is over within this time."""
        until = time.monotonic() + longest_s
        while not self._is_over():
            if time.monotonic() >= until:
                return False
            time.sleep(_CANCEL_STEP_S)
        return True

    def _stop(self, longest_s: float) -> bool:
        """Posts nothing more of it; whether all of it is final."""
        core = self._core()
        until = time.monotonic() + longest_s
        while core.cancel(self._xfer, mode="wait"):
            if time.monotonic() >= until:
                return False
            time.sleep(_CANCEL_STEP_S)
        return True

    def __del__(self) -> None:
        if self._layouts is None:
            return
        try:
            if self._xfer != 0:
                core = self._core()
                core.cancel(self._xfer)
                core.release(self._xfer)
        except kvt.Error:
            pass  # known no more
        except Exception:
            logger.exception("%r could not be stopped", self)
