# SPDX-License-Identifier: Apache-2.0
"""The waits of a transport, on top of the calls of the extension.

A call that waits inside the library hears no signal: Python's handlers run in
the main thread, between its bytecodes. There such a call is made by a thread of
its own (see _answering()), and the main thread waits for that as Python waits.

A wait claims its transfer (see claims.c): whichever thread drains the library
hands the result over, and results that a wait drains for others are kept for
their poll(). So waits, polls and event loops can be mixed freely. A wait that
ends in any other way than by its result leaves that for poll() or a later wait;
nothing may come between the claim's `outcome` and the return.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from . import _kvt
from ._errors import Error, NotFound, TimedOut

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

    from ._kvt import RegionLike, Result, _Claim

_T = TypeVar("_T")

_LOOK_AGAIN_MS = 1
"""How often a wait looks where no descriptor can tell: at transfers without an
event, and when others leave more unread than a wait may keep for them."""

_LOOK_ANYWAY_MS = 1000
"""How often a wait looks although a descriptor should tell."""


class Transport(_kvt.Transport):
    """One agent: an engine, registered memory, peers and transfers.

    Every call may be made from any thread. As a context manager it is closed
    at the end. See docs/python.md for a tour.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<kvt.Transport {state} at {id(self):#x}>"

    # A call that is interrupted (by Ctrl-C, or a handler that raises) goes on
    # without the caller, and what it then brings is undone.

    def close(self, timeout: float | None = None) -> None:
        """Ends the transport; idempotent. poll(), status(), stats() and
        notifications() still answer. Busy when some transfers are not
        quiescent: it is closed all the same, and their memory is kept."""
        _answering(partial(super().close, timeout))

    def register(
        self,
        regions: RegionLike | Sequence[RegionLike],
        *,
        kind: int | None = None,
        device: int | None = None,
        fd: int | None = None,
        fd_offset: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Registers one region or a list of them, all or none, and holds the
        buffers. `kind`, `device`, `fd` and `fd_offset` are for regions that do
        not say it themselves."""
        _answering(
            partial(
                super().register,
                regions,
                kind=kind,
                device=device,
                fd=fd,
                fd_offset=fd_offset,
                timeout=timeout,
            ),
            lambda _: self.deregister(regions, kind=kind, device=device),
        )

    def deregister(
        self,
        regions: RegionLike | Sequence[RegionLike],
        *,
        kind: int | None = None,
        device: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Takes registrations back, all or none, and lets go of the buffers."""
        _answering(
            partial(
                super().deregister,
                regions,
                kind=kind,
                device=device,
                timeout=timeout,
            )
        )

    def metadata(self) -> bytes:
        """What lets a peer import this agent and the memory registered so
        far."""
        return _answering(super().metadata)

    def add_peer(
        self,
        name: str | bytes,
        metadata: Buffer,
        *,
        agent_name: str | bytes | None = None,
        regions: Sequence[tuple[int, ...]] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Imports a peer, waits until it can be written to; returns its id.
        `agent_name` and `regions` are checked against the metadata."""
        return _answering(
            partial(
                super().add_peer,
                name,
                metadata,
                agent_name=agent_name,
                regions=regions,
                timeout=timeout,
            ),
            self.remove_peer,
        )

    def reload_peer(
        self,
        peer: int,
        metadata: Buffer | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Unloads, then loads again: the kept metadata, or the new one."""
        _answering(
            partial(super().reload_peer, peer, metadata, timeout=timeout)
        )

    def unload_peer(self, peer: int, *, timeout: float | None = None) -> None:
        """Stops new work and takes the peer from the engine; metadata and
        layouts are kept for a reload."""
        _answering(partial(super().unload_peer, peer, timeout=timeout))

    def wait(self, xfer: int, timeout: float | None = None) -> Result:
        """Waits for one transfer, takes its result and checks it.

        Raises the transfer's error if it did not end well (the exception's
        `result` has all that is known), Cancelled if it was cancelled or
        released meanwhile, NotFound if it is unknown or was reported by poll()
        already, and TimedOut if it is not finished after `timeout` seconds
        (None: for ever); it then goes on, and can be waited for again.
        """
        deadline = None
        if timeout is not None:
            deadline = time.monotonic() + self._seconds(timeout)
        claim = self._claim(xfer)
        try:
            if not claim.look():
                self._sleep(xfer, claim, deadline)
        except BaseException:
            claim.leave()
            raise
        return claim.outcome

    def _sleep(self, xfer: int, claim: _Claim, deadline: float | None) -> None:
        """Returns when the claim is done."""
        mine = select.poll()
        mine.register(claim.fileno(), select.POLLIN)
        both = select.poll()
        both.register(claim.fileno(), select.POLLIN)
        both.register(self._raw_fileno(), select.POLLIN)
        longest = _LOOK_ANYWAY_MS if claim.has_event else _LOOK_AGAIN_MS
        while True:
            drained = self._drain()
            if claim.look():
                return
            left = longest
            if deadline is not None:
                now = time.monotonic()
                if now >= deadline:
                    raise TimedOut(
                        f"transfer {xfer} is not finished yet; it goes on"
                    )
                left = min(left, int((deadline - now) * 1000) + 1)
            ready = both.poll(left)
            if ready and not drained and not self._drain():
                mine.poll(_LOOK_AGAIN_MS)

    async def wait_async(self, xfer: int) -> Result:
        """wait() for asyncio. Cancelling the task leaves the transfer alone;
        it can be waited for again."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        claim = self._claim(
            xfer,
            functools.partial(loop.call_soon_threadsafe, _finish, future),
        )
        try:
            if not claim.look():
                if claim.has_event:
                    await self._wait_readable(loop, claim, future)
                else:
                    while not claim.look():
                        await asyncio.sleep(_LOOK_AGAIN_MS / 1000)
        except BaseException:
            claim.leave()
            raise
        return claim.outcome

    async def _wait_readable(
        self,
        loop: asyncio.AbstractEventLoop,
        claim: _Claim,
        future: asyncio.Future[None],
    ) -> None:
        reader = _Reader.of(self, loop)
        reader.enter(claim, future)
        try:
            await future
        finally:
            reader.leave(claim)

    async def add_peer_async(
        self,
        name: str | bytes,
        metadata: Buffer,
        *,
        agent_name: str | bytes | None = None,
        regions: Sequence[tuple[int, ...]] | None = None,
    ) -> int:
        """add_peer() for asyncio: the peer's id once it can be written to.

        Cancelling the task removes the peer.
        """
        peer, xfer = self.start_add_peer(
            name, metadata, agent_name=agent_name, regions=regions
        )
        try:
            await self.wait_async(xfer)
        except asyncio.CancelledError:
            with contextlib.suppress(NotFound):  # it failed by itself
                self.remove_peer(peer)
            with contextlib.suppress(Error):  # nobody knows its id
                self.release(xfer)
            raise
        return peer

    async def reload_peer_async(
        self,
        peer: int,
        metadata: Buffer | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """reload_peer() for asyncio, in a worker thread. A task that is
        cancelled does not stop the reload."""
        await asyncio.to_thread(
            self.reload_peer, peer, metadata, timeout=timeout
        )


class _Errand(threading.Thread, Generic[_T]):
    """One call, by a thread that may outlive its caller's patience."""

    def __init__(
        self, call: Callable[[], _T], undo: Callable[[_T], object] | None
    ) -> None:
        super().__init__(name="kvt-call", daemon=True)
        self._call = call
        self._undo = undo
        self._lock = threading.Lock()
        self._abandoned = False
        # Not an Event: a handler that raises in the midst of its wait() could
        # leave the lock in it taken.
        self._over = False
        self._running = threading.Lock()
        self._running.acquire()
        self._answer: list[_T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._answer.append(self._call())
        except BaseException as error:
            self._error = error
        with self._lock:
            self._over = True
            abandoned = self._abandoned
        self._running.release()
        if abandoned:
            self._forget()

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            over = self._over
        if over:
            self._forget()

    def _forget(self) -> None:
        # Somebody else's close or remove may have come first.
        with contextlib.suppress(Error):
            for answer in self._answer:
                if self._undo is not None:
                    self._undo(answer)

    def answer(self) -> _T:
        # Not join(): interrupted, that of CPython 3.11 takes a thread that
        # runs for one that has ended.
        self._running.acquire()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame
        return self._answer[0]


def _answering(
    call: Callable[[], _T], undo: Callable[[_T], object] | None = None
) -> _T:
    """Makes a call that waits inside the library so that a signal's handler
    runs meanwhile. Only the main thread has handlers to run, and no other one
    comes to the GIL once the interpreter is being torn down."""
    if (
        sys.is_finalizing()
        or threading.current_thread() is not threading.main_thread()
    ):
        return call()
    errand = _Errand(call, undo)
    try:
        try:
            errand.start()
        except RuntimeError:
            if errand.ident is not None:
                raise  # a handler's own
            # No thread is left, or the interpreter is ending.
            return call()
        return errand.answer()
    except BaseException:
        errand.abandon()
        raise


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Reader:
    """The one reader of a transport's descriptor in one event loop, there
    while something awaits a transfer."""

    def __init__(
        self, transport: Transport, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._fd = transport._raw_fileno()
        self._waiting: dict[_Claim, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._anyway: asyncio.TimerHandle | None = None

    @staticmethod
    def of(transport: Transport, loop: asyncio.AbstractEventLoop) -> _Reader:
        readers: dict[int, _Reader] = transport.__dict__.setdefault(
            "_readers", {}
        )
        reader = readers.get(id(loop))
        if reader is None:
            reader = readers[id(loop)] = _Reader(transport, loop)
        return reader

    def enter(self, claim: _Claim, future: asyncio.Future[None]) -> None:
        self._waiting[claim] = future
        if len(self._waiting) == 1:
            self._listen()
            self._look_anyway()

    def leave(self, claim: _Claim) -> None:
        self._waiting.pop(claim, None)
        if not self._waiting:
            if self._timer is None:
                self._loop.remove_reader(self._fd)
            else:
                self._timer.cancel()
                self._timer = None
            if self._anyway is not None:
                self._anyway.cancel()
                self._anyway = None
            # The loop's id may be another loop's later.
            self._transport.__dict__["_readers"].pop(id(self._loop), None)

    def _look_anyway(self) -> None:
        """Wakes those whose call of _finish() got lost, for want of memory."""
        for claim, future in self._waiting.items():
            if claim.done:
                _finish(future)
        self._anyway = self._loop.call_later(
            _LOOK_ANYWAY_MS / 1000, self._look_anyway
        )

    def _listen(self) -> None:
        self._timer = None
        self._loop.add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        if not self._transport._drain():
            # Another thread was faster, or what is left may not be kept.
            self._loop.remove_reader(self._fd)
            self._timer = self._loop.call_later(
                _LOOK_AGAIN_MS / 1000, self._listen
            )
