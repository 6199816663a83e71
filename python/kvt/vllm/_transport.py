# SPDX-License-Identifier: Apache-2.0
"""vLLM's NixlTransport over kvt.

What the class adds to kvt.Transport is vLLM's view of it: peers by their
names, transfers by small numbers, results by two lists.

- `_lock` guards the fields from `_layout` on, and each call on the transport
  is made under it, but for those that wait: metadata(), wait() and close(). A
  write that is accepted does without it, and so does a poll of one peer in which
  nothing goes wrong: they are single calls of the extension, see _flights.py. All of poll() is
  there, but for _look_closer().
- A peer is in `_peers` from the moment that it can be written to until it is
  removed or registered again.
- A _Registration is in `_adds` until it is done. If it is no longer the one
  there, a newer call for the same peer has taken its place: the order of the
  calls decides, not that in which the work ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import operator
import os
import threading
import warnings
from collections.abc import Iterable
from typing import Any

import kvt
from kvt import _kvt

from . import _plugin, _registrar, _shared
from ._base import CancelMode, DataTransport, PollResult
from ._flights import Flights, Peer

logger = logging.getLogger(_plugin.HOME)

# Of our blocks, and of each peer's.
_LAYOUT = "blocks"

# Seconds: for a registration, and at close for those under way and then for
# everything else.
ADD_TIMEOUT = 60.0
CLOSE_TIMEOUT = 5.0
# For one that is dropped without close(): the last reference may go anywhere.
DROP_TIMEOUT = 2.0


class _Superseded(RuntimeError):
    """A newer call for the same peer took this registration's place."""


class _Registration:
    __slots__ = ("blocks", "future", "name", "peer", "xfer")

    def __init__(self, name: str, blocks: tuple[int, int, int]) -> None:
        self.name = name
        self.blocks = blocks  # a run
        self.peer = 0
        self.xfer = 0
        self.future: concurrent.futures.Future[None]
        self.future = concurrent.futures.Future()
        # From here on nobody can cancel it.
        self.future.set_running_or_notify_cancel()


class NixlTransport(_kvt._Polled, DataTransport):
    """Moves KV blocks to vLLM's peers, by kvt.

    Every method may be called from any thread. Only close(), add_remote_peer()
    and get_agent_metadata() wait.
    """

    _NOTHING = PollResult(done=(), failed=())
    _flights: Flights | None
    _file: int | None = None  # that the view is a mapping of

    def __init__(
        self,
        agent_name: str,
        view: memoryview,
        config_fields: dict[str, Any] | None = None,
        backends: list[str] | None = None,
        num_threads: int = 4,
    ) -> None:
        view = _checked(view)
        super().__init__(view, config_fields=config_fields)
        self._agent_name = agent_name
        self._lock = threading.Lock()
        self._layout = 0
        self._peers: dict[str, Peer] = {}
        self._adds: dict[str, _Registration] = {}
        self._pending: set[concurrent.futures.Future[None]] = set()
        self._flights = None
        self._transport: kvt.Transport | None = None
        self._closing = False
        self._why = "it is closed"
        self._open(view, list(backends) if backends else ["UCX"], num_threads)

    def _open(
        self, view: memoryview, backends: list[str], num_threads: int
    ) -> None:
        engine = os.environ.get("KVT_ENGINE") or "nixl"
        inner = engine.removeprefix("fault:").partition("?")[0]
        for info in kvt.engines():
            if info.name == inner and not info.available:
                self._why = info.text
                self._view = None
                logger.warning("NIXL is not available: %s", info.text)
                return
        # Other backends than UCX have their own defaults.
        workers = num_threads if all(n == "UCX" for n in backends) else 0
        transport = kvt.Transport(
            engine,
            agent_name=self._agent_name,
            workers=workers,
            backends=backends,
        )
        try:
            self._register(transport, view)
            run = (self._base_addr, self._block_len, self._num_blocks)
            self._layout = transport.prepare(_LAYOUT, [run])
        except BaseException:
            try:
                transport.close()
            finally:
                self._close_file()
            raise
        self._transport = transport
        self._flights = Flights(
            transport,
            self._layout,
            self._peers,
            self._NOTHING,
            self._agent_name,
        )
        logger.info(
            "NixlTransport %s: engine=%s backends=%s num_threads=%d",
            self._agent_name,
            engine,
            backends,
            num_threads,
        )
        logger.info(
            "NixlTransport %s: registered %d blocks",
            self._agent_name,
            self._num_blocks,
        )

    def _register(self, transport: kvt.Transport, view: memoryview) -> None:
        shared = _shared.backing(self._base_addr, view.nbytes)
        if shared is not None:
            self._file, offset = shared
            try:
                transport.register(view, fd=self._file, fd_offset=offset)
                return
            except kvt.InvalidArgument:
                self._close_file()  # kvt knows better
        transport.register(view)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    @property
    def available(self) -> bool:
        return self._transport is not None and not self._closing

    @property
    def transport(self) -> kvt.Transport | None:
        """kvt's own transport, for stats() and metrics(); None if closed. It
        is closed with this object."""
        return self._transport

    def get_agent_metadata(self) -> bytes:
        """What a peer's add_remote_peer() takes, also of vLLM's own class."""
        transport = self._opened()
        try:
            return transport.metadata()
        except kvt.Closed as error:
            raise self._unavailable() from error

    def _opened(self) -> kvt.Transport:
        transport = self._transport
        if transport is None or self._closing:
            raise self._unavailable()
        return transport

    def _unavailable(self) -> RuntimeError:
        return RuntimeError(
            f"NixlTransport {self._agent_name} is not available: {self._why}"
        )

    # ------------------------------------------------------------------ peers

    def add_remote_peer(
        self,
        peer_id: str,
        agent_metadata: bytes,
        base_addr: int,
        num_blocks: int,
        block_len: int,
    ) -> None:
        """Returns when the peer can be written to, or when a newer call for
        the same peer has taken over."""
        registration = self._start(
            peer_id, agent_metadata, base_addr, num_blocks, block_len
        )
        self._finish(registration, self._wait(registration))
        with contextlib.suppress(_Superseded):
            registration.future.result()

    def add_remote_peer_async(
        self,
        peer_id: str,
        agent_metadata: bytes,
        base_addr: int,
        num_blocks: int,
        block_len: int,
    ) -> concurrent.futures.Future[None]:
        """The same without waiting. What is wrong is raised by the future: a
        RuntimeError if a newer call for the same peer took over."""
        self._opened()
        try:
            registration = self._start(
                peer_id, agent_metadata, base_addr, num_blocks, block_len
            )
        except (kvt.Error, TypeError, ValueError) as error:
            failed: concurrent.futures.Future[None]
            failed = concurrent.futures.Future()
            failed.set_exception(error)
            return failed
        try:
            _registrar.run(lambda: self._complete(registration))
        except (RuntimeError, OSError) as error:
            self.remove_remote_peer(peer_id)
            self._settle(registration, error)
        return registration.future

    def _start(
        self,
        peer_id: str,
        agent_metadata: bytes,
        base_addr: int,
        num_blocks: int,
        block_len: int,
    ) -> _Registration:
        """Tears down what is there under this name and starts anew."""
        blocks = self._geometry(peer_id, base_addr, num_blocks, block_len)
        registration = _Registration(peer_id, blocks)
        with self._lock:
            transport = self._opened()
            assert self._flights is not None
            older = self._adds.pop(peer_id, None)
            if older is not None:
                self._remove(older.peer, peer_id)
            peer = self._peers.pop(peer_id, None)
            if peer is not None:
                self._flights.replace(peer)
                self._remove(peer.id, peer_id)
            registration.peer, registration.xfer = transport.start_add_peer(
                peer_id,
                agent_metadata,
                regions=[(blocks[0], blocks[1] * blocks[2])],
            )
            self._adds[peer_id] = registration
            self._pending.add(registration.future)
        return registration

    def _geometry(
        self, peer_id: str, base_addr: int, num_blocks: int, block_len: int
    ) -> tuple[int, int, int]:
        """The peer's blocks as a run; ValueError if they cannot be."""
        base_addr = operator.index(base_addr)
        num_blocks = operator.index(num_blocks)
        block_len = operator.index(block_len)
        if block_len != self._block_len:
            raise kvt.Mismatch(
                f"peer {peer_id} has blocks of {block_len} bytes, ours have "
                f"{self._block_len}: run both with the same configuration"
            )
        end = base_addr + num_blocks * block_len
        if base_addr <= 0 or num_blocks <= 0 or end >= 1 << 64:
            raise kvt.OutOfRange(
                f"peer {peer_id} claims {num_blocks} blocks of {block_len} "
                f"bytes at {base_addr:#x}, which no address space holds"
            )
        return base_addr, block_len, num_blocks

    def _wait(self, registration: _Registration) -> Exception | None:
        # close() lets it finish, so _opened() is not asked.
        transport = self._transport
        if transport is None:
            return self._unavailable()
        try:
            transport.wait(registration.xfer, timeout=ADD_TIMEOUT)
        except kvt.Closed:
            return self._unavailable()
        except Exception as error:
            return error
        return None

    async def _complete(self, registration: _Registration) -> None:
        """The same, and the rest, in the registrar's thread."""
        transport = self._transport
        failure: Exception | None = None
        try:
            if transport is None:
                raise self._unavailable()
            await asyncio.wait_for(
                transport.wait_async(registration.xfer), ADD_TIMEOUT
            )
        except kvt.Closed:
            failure = self._unavailable()
        except kvt.Error as error:  # kvt's own TimedOut is a TimeoutError too
            failure = error
        except asyncio.TimeoutError:
            failure = kvt.TimedOut(
                f"peer {registration.name} is not added in {ADD_TIMEOUT} s"
            )
            # Nobody would take its result any more.
            if transport is not None:
                with contextlib.suppress(kvt.Error):
                    transport.release(registration.xfer)
        except Exception as error:
            failure = error
        try:
            self._finish(registration, failure)
        except BaseException as error:
            if not registration.future.done():
                self._settle(registration, error)
            raise

    def _finish(
        self, registration: _Registration, failure: Exception | None
    ) -> None:
        """Publishes a registration and settles its future."""
        with self._lock:
            fresh = self._adds.get(registration.name) is registration
            if fresh:
                del self._adds[registration.name]
                failure = failure or self._publish(registration)
            if failure is not None or not fresh:
                self._remove(registration.peer, registration.name)
        if not fresh and self._closing:
            failure = failure or self._unavailable()
        elif not fresh:
            logger.info(
                "NixlTransport %s: discarding superseded registration "
                "for peer=%s",
                self._agent_name,
                registration.name,
            )
            failure = _Superseded(
                f"registration for peer {registration.name} was superseded: "
                "the peer was removed or registered again meanwhile"
            )
        self._settle(registration, failure)

    def _publish(self, registration: _Registration) -> Exception | None:
        transport = self._transport
        if transport is None or self._flights is None:
            return self._unavailable()
        name, peer = registration.name, registration.peer
        try:
            layout = transport.prepare(_LAYOUT, [registration.blocks], peer)
            info = transport.peer_info(peer)
        except kvt.Error as error:
            return error
        self._peers[name] = Peer(self._flights, peer, layout, name)
        self._warm_up(transport, peer)
        logger.info(
            "NixlTransport %s: peer=%s is reached by %s (%s)",
            self._agent_name,
            name,
            info.path,
            info.text,
        )
        return None

    @staticmethod
    def _warm_up(transport: kvt.Transport, peer: int) -> None:
        """Has the connection made now, not in the first transfer. Nobody waits
        for it: a write that comes before its end is no worse off."""
        with contextlib.suppress(kvt.Error):
            transport.release(transport.warm_up(peer, event=False))

    def _settle(
        self, registration: _Registration, failure: BaseException | None
    ) -> None:
        with self._lock:
            self._pending.discard(registration.future)
        if failure is None:
            registration.future.set_result(None)
        else:
            registration.future.set_exception(failure)

    def remove_remote_peer(self, peer_id: str) -> None:
        """Forgets a peer; its transfers are not reported any more."""
        with self._lock:
            if self._flights is None:
                return
            registration = self._adds.pop(peer_id, None)
            peers = self._flights.take_replaced(peer_id)
            if peer_id in self._peers:
                peers.append(self._peers.pop(peer_id))
            for peer in peers:
                peer.closed = True
                self._flights.abandon(peer)
                self._remove(peer.id, peer_id)
            if registration is not None:
                self._remove(registration.peer, peer_id)

    def _remove(self, peer: int, peer_id: str) -> None:
        if self._transport is None:
            return
        try:
            self._transport.remove_peer(peer)
        except (kvt.NotFound, kvt.Closed):
            pass
        except kvt.Error as error:
            logger.warning(
                "NixlTransport %s: removing peer=%s failed: %s",
                self._agent_name,
                peer_id,
                error,
            )

    # -------------------------------------------------------------- transfers

    def write_blocks(
        self, peer_id: str, local_idxs: list[int], remote_idxs: list[int]
    ) -> int | None:
        """Starts to write our blocks local_idxs to the peer's remote_idxs.

        Indices are a list, tuple or range, or a one-dimensional buffer of any
        integer type, which is the fastest. None when the peer takes no writes.
        """
        peer = self._peers.get(peer_id)
        if peer is None:
            self._warn_unknown(peer_id)
            return None
        try:
            return peer.write(local_idxs, remote_idxs)
        except ValueError:  # the caller's own mistake
            raise
        except kvt.Error as error:
            self._refused(peer, error)
            return None

    def _warn_unknown(self, peer_id: str) -> None:
        logger.warning(
            "NixlTransport %s: write_blocks NO REMOTE DLIST for peer=%s "
            "(known peers=%s)",
            self._agent_name,
            peer_id,
            list(self._peers),
        )

    def _refused(self, peer: Peer, error: kvt.Error) -> None:
        if isinstance(error, kvt.PeerDisconnected):
            # The grace of what is under way begins now, not at the next poll.
            with self._lock:
                assert self._flights is not None
                if not peer.closed:  # removed meanwhile: kvt knows it no more
                    self._flights.see(peer)
        logger.warning(
            "NixlTransport %s: write_blocks to peer=%s failed: %s",
            self._agent_name,
            peer.name,
            error,
        )

    def _look_closer(self, peer_id: str | None) -> list[Peer]:
        """For a poll() that has to look closer: whose transfers it reports."""
        with self._lock:
            if self._flights is None:
                return []
            return self._flights.collect(peer_id, self._peers)

    def cancel(
        self, transfer_ids: Iterable[int], mode: CancelMode = "immediate"
    ) -> list[int]:
        """Stops transfers. Mode "wait" returns those that can still touch
        memory; they surface in a later poll()."""
        if mode not in ("immediate", "wait"):
            raise ValueError(
                f'cancel mode must be "immediate" or "wait", not {mode!r}'
            )
        with self._lock:
            if self._flights is None:
                return []
            return self._flights.cancel(transfer_ids, mode)

    # ------------------------------------------------------------------ close

    def close(self) -> None:
        """Ends the transport and everything on it; idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._why = "it is closed"
            pending = list(self._pending)
        try:
            concurrent.futures.wait(pending, timeout=CLOSE_TIMEOUT)
        finally:
            self._end(CLOSE_TIMEOUT)

    def __del__(self) -> None:
        """For who drops it without close(): peers on this host may open the
        file until the transport is closed."""
        if self._file is not None:
            try:
                with contextlib.suppress(kvt.Error):
                    self._end(DROP_TIMEOUT)
            finally:
                warnings.warn(
                    f"unclosed NixlTransport {self._agent_name}",
                    ResourceWarning,
                    source=self,
                    stacklevel=2,
                )

    def _end(self, timeout: float) -> None:
        with self._lock:
            transport, self._transport = self._transport, None
            if self._flights is not None:
                self._flights.abandon_all(self._peers.values())
            self._peers.clear()
            self._adds.clear()
            self._view = None
        if transport is None:
            return
        try:
            transport.close(timeout=timeout)
        except kvt.Busy as error:
            logger.warning(
                "NixlTransport %s: release_xfer_handle failed: %s",
                self._agent_name,
                error,
            )
        else:
            self._close_file()


def _checked(view: memoryview) -> memoryview:
    try:
        view = memoryview(view)
    except TypeError as error:
        raise ValueError(f"view must be a memoryview, not {view!r}") from error
    good = view.ndim == 2 and view.itemsize == 1 and view.c_contiguous
    if not good or view.readonly:
        raise ValueError(
            "view must have two dimensions, num_blocks x block_len bytes, be "
            f"C-contiguous and writable: its shape is {view.shape}, its format "
            f"{view.format!r}, strides {view.strides}, "
            f"readonly {view.readonly}"
        )
    if view.nbytes == 0:
        raise ValueError(f"view has no block: its shape is {view.shape}")
    return view


# For the case that vLLM's base class was imported just now, for ours, and its
# own class beside it.
_plugin.register()
