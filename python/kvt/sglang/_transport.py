# SPDX-License-Identifier: Apache-2.0
"""The transport itself: keys to addresses, lists to layouts, ids to handles.

kvt does the rest: what is loaded, which generation a list belongs to, when a
write is final. Nothing is kept here for a block, and nothing here is polled
again once it is final.

Locks, outermost first: a peer's own, held while it is imported, reloaded or
unloaded, which may take its time; `_lists_lock`, held for one prepare; and
`_peers_lock`, for the table. Writes and status() take none.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import kvt

from . import _options, _pieces, _status
from ._errors import translate, translated
from ._memory import Memory
from ._types import (
    NixlHandle,
    NixlResult,
    PeerBuffers,
    StridedRun,
    address,
    device_of,
    kind_of,
    whole,
)

logger = _options.logger

THIS_SIDE = ""

_CLAIMS = "kvt.sglang: a peer's bases"
_PROBE = "kvt.sglang: one block"
"""Layouts that exist only inside a call."""


class _Peer:
    """A peer: kept for ever, since it may be reloaded. Under its lock, but for
    `ident` and `buffers`, which are replaced as a whole."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ident = 0  # kvt's; 0: never imported
        self.buffers: PeerBuffers | None = None
        self.metadata = b""  # of `buffers`
        self.given: bytes | None = None  # what kvt would reload
        self.loads = 0


class NixlTransport:
    """One agent of SGLang's prefill/decode disaggregation.

    Writes go from this side to a peer's buffers; ``write*`` never raise for
    what the engine or the peer does, the handle and :meth:`status` say it. All
    methods may be called from any thread.

    Attributes:
        supports_strided_runs: False from the first prepare on that shows that
            the engine takes no runs of more than one block. All of kvt's do.
        post_wait: seconds for which a write waits to see whether its first
            part is refused; it goes on by itself. What is refused later is
            said by :meth:`status`.
    """

    supports_strided_runs = True
    post_wait = 0.01

    def __init__(self, core: kvt.Transport) -> None:
        """Takes over an open transport; :meth:`create` makes one."""
        self._core = core
        self._memory = Memory(core)
        self._peers: dict[str, _Peer] = {}
        self._peers_lock = threading.Lock()
        self._lists: dict[tuple[str, str], int] = {}
        self._lists_lock = threading.Lock()

    @classmethod
    def create(
        cls,
        role: str,
        gpu_id: int = 0,
        backend: str | None = None,
        backend_params: str | Mapping[str, str] | None = None,
        ib_device: str | Sequence[str] | Mapping[int | str, str] | None = None,
        init_timeout: float | None = None,
        *,
        engine: str | None = None,
        **options: Any,
    ) -> NixlTransport:
        """Opens an agent for a role ("prefill" or "decode").

        None takes SGLang's environment variables, and then its defaults; the
        engine is that of KVT_ENGINE, or nixl. `options` are those of
        :class:`kvt.Transport`.

        Raises ImportError if NIXL is not found, ValueError for settings that
        contradict each other or a backend that is not there, RuntimeError if
        the backend does not start in time or fails otherwise.
        """
        name, params = _options.backend_options(
            role, backend, backend_params, ib_device, gpu_id
        )
        if init_timeout is None:
            init_timeout = _options.init_timeout()
        engine = engine or os.environ.get("KVT_ENGINE") or "nixl"
        if options.get("nixl_library") is None:
            _check_engine(engine)
        options.setdefault("agent_name", str(uuid.uuid4()))
        options.setdefault("workers", _options.workers(role))
        options.setdefault("grace", _options.GRACE_S)
        try:
            core = kvt.Transport(
                engine,
                device=gpu_id,
                backends=[name],
                params={name: params} if params else None,
                call_timeout=init_timeout,
                **options,
            )
        except (kvt.InvalidArgument, kvt.Unsupported) as error:
            raise ValueError(str(error)) from error
        except kvt.TimedOut as error:
            raise RuntimeError(
                f"creating the backend {name} was not done after "
                f"{init_timeout:g} s on {socket.gethostname()}: {error}"
            ) from error
        except kvt.Error as error:
            raise RuntimeError(
                f"creating the backend {name} failed: {error}"
            ) from error
        return cls(core)

    # ------------------------------------------------------------ this side

    @property
    def core(self) -> kvt.Transport:
        """kvt's transport, for statistics, metrics and notifications."""
        return self._core

    @property
    def agent_name(self) -> str:
        return self._core.agent_name

    @property
    def agent_metadata(self) -> bytes:
        """What a peer imports; covers all memory registered so far."""
        with translated():
            return self._core.metadata()

    def register_all(
        self, regions: Mapping[Any, tuple[int, int, str | int, int]]
    ) -> None:
        """Registers key -> (base, length, kind, device).

        A region of no length is skipped; one that several keys share is
        registered once. VRAM is registered before DRAM, each kind all or none.
        """
        self._memory.register(regions)

    def deregister(self, keys: Iterable[Hashable]) -> None:
        """Takes keys back; a region goes with its last key.

        Raises KeyError for a key that is not registered. NIXL's error, with
        nothing changed, if a write of ours still uses the memory.
        """
        with translated():
            self._memory.deregister(keys)

    # ----------------------------------------------------------------- peers

    def import_registration(
        self,
        agent_name: str,
        metadata: bytes,
        bases: Mapping[Any, int],
        devices: Mapping[Any, tuple[str | int, int]],
    ) -> PeerBuffers:
        """Loads a peer, whose buffer `key` is at bases[key], of the kind and
        on the device devices[key].

        The same registration of a loaded peer again changes nothing. Another
        one under the same name, or the same one of a peer that is not loaded,
        unloads first; the lists over the peer are then checked against it.

        Raises an error under NIXL's name if the metadata is damaged or of
        another agent, if a base (but 0) is outside its memory, or if the
        engine fails. A peer that was known stays known as it was, unloaded if
        the engine had begun.
        """
        buffers = _buffers_of(agent_name, bases, devices)
        metadata = bytes(metadata)
        with self._peers_lock:
            peer = self._peers.setdefault(agent_name, _Peer())
        with peer.lock, translated():
            if peer.ident == 0:
                peer.ident = self._core.add_peer(
                    agent_name,
                    metadata,
                    agent_name=agent_name,
                    regions=_claims_of(buffers),
                )
                peer.given = metadata
            elif peer.metadata != metadata or not self._loaded(peer):
                self._load(peer, metadata, buffers)
            elif peer.buffers != buffers:
                self._check_claims(peer, buffers)
            peer.metadata = metadata
            peer.buffers = buffers
        return buffers

    def is_loaded(self, peer: str | PeerBuffers) -> bool:
        """Whether writes are taken. False once a disconnect was seen, and for
        a peer that is not known."""
        known = self._peers.get(_name_of(peer))
        return known is not None and self._loaded(known)

    def reload(self, peer: str | PeerBuffers) -> None:
        """Unloads and loads again; every list over the peer is checked anew.

        Several threads that ask at the same time get one reload. Raises an
        error under NIXL's name when it fails; then the peer is unloaded and
        its lists are out of reach until a later reload works.
        """
        with translated():
            known, buffers = self._known(_name_of(peer))
            loads = known.loads
            with known.lock:
                if known.loads == loads or not self._loaded(known):
                    self._load(known, known.metadata, buffers)

    def unload(self, peer: str | PeerBuffers) -> None:
        """Drops the peer's lists and unloads it. Idempotent."""
        name = _name_of(peer)
        known = self._peers.get(name)
        if known is None or known.ident == 0:
            return
        with known.lock, translated():
            with self._lists_lock:
                for key in [key for key in self._lists if key[0] == name]:
                    with contextlib.suppress(kvt.NotFound):
                        self._core.drop_layout(self._lists.pop(key))
            self._core.unload_peer(known.ident)

    def _known(self, name: str) -> tuple[_Peer, PeerBuffers]:
        peer = self._peers.get(name)
        if peer is None or peer.buffers is None:
            raise kvt.NotFound(
                f"no peer {name!r} was imported: call import_registration()"
            )
        return peer, peer.buffers

    def _loaded(self, peer: _Peer) -> bool:
        return peer.ident != 0 and self._core.peer_loaded(peer.ident)

    def _load(self, peer: _Peer, metadata: bytes, buffers: PeerBuffers) -> None:
        """Unload, load, check. Under the peer's lock."""
        new = None if peer.given == metadata else metadata
        peer.given = None  # not known, if this fails
        self._core.reload_peer(peer.ident, new)
        peer.given = metadata
        try:
            found = self._core.peer_info(peer.ident).agent_name
            if found != buffers.agent_name:
                raise kvt.Mismatch(
                    f"the metadata is of agent {found!r}, not of "
                    f"{buffers.agent_name!r}"
                )
            self._check_claims(peer, buffers)
        except kvt.Error:
            self._core.unload_peer(peer.ident)
            raise
        peer.loads += 1

    def _check_claims(self, peer: _Peer, buffers: PeerBuffers) -> None:
        runs = [
            kvt.Run(base, length, 1, length, kind, device)
            for base, length, kind, device in _claims_of(buffers)
        ]
        if runs:
            layout = self._core.prepare(_CLAIMS, runs, peer.ident)
            self._core.drop_layout(layout)

    # ----------------------------------------------------------------- lists

    def prepare(
        self,
        side: str | PeerBuffers,
        layout: str,
        runs: Iterable[StridedRun | Sequence[int]],
        kind: str | int,
        allow_expansion: bool = True,
    ) -> bool:
        """Keeps a list of runs under (side, layout); the same name again
        replaces it. `side` is "" for this side, or a peer.

        The cost depends on the number of runs, not of blocks. False: the
        engine takes no strided runs, and the list may not be expanded. Raises
        an error under NIXL's name, and keeps nothing, if a run is malformed or
        not in registered memory.
        """
        name = _name_of(side)
        made = _runs_of(runs, kind_of(kind))
        with self._lists_lock, translated():
            ident = kvt.SELF if not name else self._known(name)[0].ident
            prepared = self._prepare(layout, made, ident, allow_expansion)
            if prepared is None:
                return False
            self._lists[name, layout] = prepared
        return True

    def _prepare(
        self, layout: str, runs: list[kvt.Run], ident: int, expand: bool
    ) -> int | None:
        if self.supports_strided_runs:
            try:
                return self._core.prepare(layout, runs, ident)
            except kvt.Unsupported:
                if not self._refuses_strides(runs, ident):
                    raise
            self.supports_strided_runs = False
            logger.warning(
                "the engine takes no strided runs: lists are expanded, or not "
                "available"
            )
        if not expand:
            return None
        return self._core.prepare(layout, _one_by_one(runs), ident)

    def _refuses_strides(self, runs: list[kvt.Run], ident: int) -> bool:
        """Whether it is the stride that is not supported, and not the kind of
        memory: one block alone would be taken."""
        if all(run.count == 1 for run in runs):
            return False
        block = runs[0]._replace(count=1)
        try:
            self._core.drop_layout(self._core.prepare(_PROBE, [block], ident))
        except kvt.Unsupported:
            return False
        except kvt.Error:
            pass  # the kind would do
        return True

    def _pair(
        self, name: str, src_layout: str, dst_layout: str
    ) -> tuple[int, int]:
        """kvt's ids of a list of ours and of one of the peer's."""
        found = []
        for side, layout in ((THIS_SIDE, src_layout), (name, dst_layout)):
            if (side, layout) not in self._lists:
                raise kvt.NotFound(
                    f"no list {layout!r} is prepared for "
                    f"{side or 'this side'!r}: call prepare()"
                )
            found.append(self._lists[side, layout])
        return found[0], found[1]

    # ---------------------------------------------------------------- writes

    def write(
        self,
        peer: str | PeerBuffers,
        src_key: Hashable,
        src_offset: int,
        dst_key: Hashable,
        dst_offset: int,
        length: int,
        note: bytes | None = None,
    ) -> NixlHandle | None:
        """Writes one piece. None if there is nothing to write."""
        return self.write_all(
            peer, [(src_key, src_offset, dst_key, dst_offset, length)], note
        )

    def write_all(
        self,
        peer: str | PeerBuffers,
        copies: Iterable[tuple[Any, ...]],
        note: bytes | None = None,
    ) -> NixlHandle | None:
        """Writes (src key, offset, dst key, offset, length) tuples as one.

        There is one engine transfer for each pair of kinds and devices, or
        more if it is large. Pieces of no length are skipped; None if nothing
        is left. `note`, a few bytes, is sent to the peer once all of it is
        done.
        """
        name = _name_of(peer)
        try:
            known, buffers = self._known(name)
            pieces = _pieces.from_copies(self._memory, buffers, copies)
            if not pieces:
                return None
            xfer = self._core.write(known.ident, pieces, event=False, note=note)
        except kvt.Error as error:
            return _refused(name, error)
        return self._started(name, xfer)

    def write_arrays(
        self,
        peer: str | PeerBuffers,
        src: Any,
        src_kind: str | int,
        dst: Any,
        dst_kind: str | int,
        note: bytes | None = None,
    ) -> NixlHandle | None:
        """Writes rows of two N x 3 integer arrays of (addr, len, dev_id).

        Rows of no length on either side are skipped; None if none is left.
        """
        name = _name_of(peer)
        try:
            pieces = _pieces.from_arrays(src, src_kind, dst, dst_kind)
            if len(pieces) == 0:
                return None
            xfer = self._core.write(
                self._known(name)[0].ident, pieces, event=False, note=note
            )
        except kvt.Error as error:
            return _refused(name, error)
        return self._started(name, xfer)

    def write_prepared(
        self,
        peer: str | PeerBuffers,
        src_layout: str,
        src_indices: Any,
        dst_layout: str,
        dst_indices: Any,
        note: bytes | None = None,
    ) -> NixlHandle:
        """Writes blocks of a list of this side to blocks of a peer's list.

        Indices are arrays of any integer type, lists or ranges.
        """
        name = _name_of(peer)
        try:
            ident = self._known(name)[0].ident
            lists = self._pair(name, src_layout, dst_layout)
            while True:
                try:
                    xfer = self._core.write_blocks(
                        ident,
                        lists[0],
                        src_indices,
                        lists[1],
                        dst_indices,
                        event=False,
                        note=note,
                    )
                    break
                except kvt.NotFound:
                    # One may just have been replaced.
                    with self._lists_lock:
                        newer = self._pair(name, src_layout, dst_layout)
                    if newer == lists:
                        raise
                    lists = newer
        except kvt.Error as error:
            return _refused(name, error)
        return self._started(name, xfer)

    def _started(self, name: str, xfer: int) -> NixlHandle:
        handle = NixlHandle(name, self._core, xfer)
        _status.wait_for_post(self._core, handle, self.post_wait)
        return handle

    def status(self, handle: NixlHandle) -> NixlResult:
        """What became of a write. Never raises for what the engine did.

        A final answer is kept with the handle. A write that cannot be told is
        UNREADABLE; it becomes quiescent once it is proven final.
        """
        return _status.look(self._core, handle)

    # ----------------------------------------------------------------- close

    def close(self, timeout: float = 10.0) -> None:
        """Drops the lists, unloads the peers, takes back the memory, and ends
        the agent. Idempotent; later calls fail, and status() still answers.

        Writes under way have half of `timeout` seconds to finish. What is not
        proven final then stays as it is, and its memory must stay mapped.
        """
        if self._core.closed:
            return
        try:
            self._core.close(timeout)
        except kvt.Busy as error:
            logger.warning("%s", error)
        with self._lists_lock:
            self._lists.clear()
        self._memory.clear()


def _name_of(peer: str | PeerBuffers) -> str:
    return peer.agent_name if isinstance(peer, PeerBuffers) else peer


def _buffers_of(
    agent_name: str,
    bases: Mapping[Any, int],
    devices: Mapping[Any, tuple[str | int, int]],
) -> PeerBuffers:
    buffers = {}
    for key, base in bases.items():
        if key not in devices:
            raise ValueError(
                f"{key!r} has a base and no (kind, device): give both"
            )
        kind, device = devices[key]
        buffers[key] = address(base), kind_of(kind), device_of(device)
    return PeerBuffers(agent_name, buffers)


def _claims_of(
    buffers: PeerBuffers,
) -> list[tuple[int, int, kvt.Kind, int]]:
    """A byte of each buffer; those without memory have base 0."""
    return [
        (base, 1, kind, device)
        for base, kind, device in buffers.buffers.values()
        if base != 0
    ]


def _runs_of(
    runs: Iterable[StridedRun | Sequence[int]], kind: kvt.Kind
) -> list[kvt.Run]:
    rows = runs.tolist() if hasattr(runs, "tolist") else runs
    made = []
    for addr, length, device, stride, count in rows:
        if length > stride:
            raise ValueError(
                f"blocks of {length} bytes overlap at a stride of {stride}"
            )
        made.append(
            kvt.Run(
                address(addr),
                whole(length, "a block's length"),
                whole(count, "a number of blocks"),
                whole(stride, "a stride"),
                kind,
                device_of(device),
            )
        )
    return made


def _one_by_one(runs: list[kvt.Run]) -> Iterator[kvt.Run]:
    for run in runs:
        for i in range(run.count):
            yield run._replace(addr=run.addr + i * run.stride_bytes, count=1)


def _refused(name: str, error: kvt.Error) -> NixlHandle:
    return NixlHandle(name, None, 0, translate(error))


def _check_engine(engine: str) -> None:
    wanted = engine.removeprefix("fault:").split("?")[0].split(":")[0]
    for info in kvt.engines():
        if info.name == wanted and not info.available:
            raise ImportError(
                f"{info.text} (pip install nixl-cu12 or nixl-cu13, or set "
                "KVT_NIXL_LIBRARY)"
            )
