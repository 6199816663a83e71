# SPDX-License-Identifier: Apache-2.0
"""An agent's transfers: lists, what is made of them, and what became of it.

NIXL checks a transfer when it is made and moves it when it is posted; kvt does
both when it is submitted. So what can be wrong with a transfer is checked here
when it is made: kvt checks the lists, this the indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import kvt

from . import _forms, _runs
from ._descs import nixlXferDList, rows_of_array
from ._enums import KINDS, nixl_mem_t, nixl_xfer_op_t
from ._errors import (
    nixlInvalidParamError,
    nixlNotFoundError,
    not_offered,
    translated,
)
from ._handles import (
    Layout,
    nixl_prepped_dlist_handle,
    nixl_xfer_handle,
    nixlXferTelemetry,
)
from ._notes import message
from ._peers import Peer
from ._runs import Facts, Words

_THIS_SIDE = ("", "NIXL_INIT_AGENT", b"", b"NIXL_INIT_AGENT")

_INDEX_TYPES = tuple(
    np.dtype(kind) for kind in (np.int32, np.uint32, np.int64, np.uint64)
)


class Xfers:
    """The part of nixl_agent that prepares, makes and posts."""

    name: str
    backends: dict[str, int]
    nixl_mems: dict[str, nixl_mem_t]
    nixl_ops: dict[str, nixl_xfer_op_t]
    _measure: bool

    def _only(self, backends: Sequence[str] | None) -> kvt.Transport:
        raise NotImplementedError

    def _peer(self, agent: str | bytes) -> Peer:
        raise NotImplementedError

    def prep_xfer_dlist(
        self,
        agent_name: str | bytes,
        xfer_list: Any,
        mem_type: str | None = None,
        backends: Sequence[str] = (),
    ) -> nixl_prepped_dlist_handle:
        """Prepares a list of this side (`agent_name` "" or "NIXL_INIT_AGENT")
        or of an agent that was added.

        Takes what get_xfer_descs() takes, and an N x 5 array of (address,
        length, device, stride, count). It costs time and memory for runs, not
        for blocks.
        """
        core = self._only(backends)
        peer = None
        if agent_name not in _THIS_SIDE:
            self._refuse_loopback(agent_name)
            peer = self._peer(agent_name)
        runs, kind = _listed(xfer_list, mem_type, self.nixl_mems)
        return nixl_prepped_dlist_handle(_layout(core, peer, runs, kind))

    def _refuse_loopback(self, agent: str | bytes) -> None:
        if message(agent) == message(self.name):
            raise not_offered(
                "transfers of an agent with itself", "copy the memory"
            )

    def _covers(
        self, core: kvt.Transport, peer: Peer, descs: nixlXferDList
    ) -> bool:
        """Whether a peer's memory has all of the list."""
        if len(descs) == 0:
            return True
        try:
            _layout(core, peer, *_listed(descs, None, self.nixl_mems))
        except (nixlNotFoundError, nixlInvalidParamError):
            return False
        return True

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Any,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Any,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """A transfer between blocks of two prepared lists, by index.

        Neighbours are merged whatever `skip_desc_merge` says.
        """
        read = self.nixl_ops[operation] is nixl_xfer_op_t.NIXL_READ
        self._only(backends)
        local = _prepared(local_xfer_side)
        remote = _prepared(remote_xfer_side)
        if local.peer is not None or remote.peer is None:
            raise nixlInvalidParamError(
                "the first list must be of this side, the second of an agent"
            )
        ours = _indices(local_indices, local, "local")
        theirs = _indices(remote_indices, remote, "remote")
        if len(ours) != len(theirs):
            raise nixlInvalidParamError(
                f"{len(ours)} local indices, {len(theirs)} remote ones"
            )
        wrong = local.lengths.at(ours) != remote.lengths.at(theirs)
        if wrong if isinstance(wrong, bool) else wrong.any():
            raise nixlInvalidParamError("two blocks have different lengths")
        return self._made(read, local, ours, remote, theirs, notif_msg)

    def _made(
        self,
        read: bool,
        local: Layout,
        ours: Any,
        remote: Layout,
        theirs: Any,
        note: bytes | str,
    ) -> nixl_xfer_handle:
        peer = remote.peer
        assert peer is not None
        if self._peer(peer.life.name) is not peer:
            raise nixlNotFoundError(
                "the agent was added anew: prepare the list again"
            )
        return nixl_xfer_handle(
            read,
            peer,
            (local, remote),
            (ours, theirs),
            message(note),
            self._measure,
        )

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
    ) -> nixl_xfer_handle:
        """A transfer of all descriptors of two lists, pair by pair."""
        read = self.nixl_ops[operation] is nixl_xfer_op_t.NIXL_READ
        core = self._only(backends)
        for descs in (local_descs, remote_descs):
            if not isinstance(descs, nixlXferDList):
                raise TypeError(
                    "a nixlXferDList is needed, not a "
                    f"{type(descs).__name__}: get_xfer_descs()"
                )
        self._refuse_loopback(remote_agent)
        peer = self._peer(remote_agent)
        ours, local_kind = _listed(local_descs, None, self.nixl_mems)
        theirs, remote_kind = _listed(remote_descs, None, self.nixl_mems)
        ours, theirs, known = _paired(ours, theirs)
        local = _layout(core, None, ours, local_kind, known[0])
        remote = _layout(core, peer, theirs, remote_kind, known[1])
        every = range(local.count)
        return self._made(read, local, every, remote, every, notif_msg)

    def transfer(
        self, handle: nixl_xfer_handle, notif_msg: bytes | str = b""
    ) -> str:
        """Starts it; says "DONE" or "PROC". Never waits. A note replaces the
        one that the transfer was made with. Errors are exceptions."""
        return handle._post(message(notif_msg))

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """Says "DONE" when all bytes are visible there, before that "PROC". A
        failure is an exception, each time; its `quiescent` says whether the
        memory is free."""
        return handle._check()

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlXferTelemetry:
        return handle._telemetry()

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        """The backend. Between processes of one host kvt may copy without."""
        if len(self.backends) != 1:
            raise not_offered(
                "the backend of one transfer", "make an agent with one backend"
            )
        return next(iter(self.backends))

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Forgets a transfer, and stops it first if it is under way."""
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()


def _listed(
    descs: Any, mem_type: str | None, kinds: _forms.Kinds
) -> tuple[Words, int]:
    """The runs of anything that names memory, and kvt's kind."""
    strided = isinstance(descs, np.ndarray) and descs.shape[1:] == (5,)
    if strided:
        if mem_type is None:
            raise ValueError("name the mem_type of strided descriptors")
        memory = kinds[mem_type]
        runs = _checked_runs(_runs.from_strided(rows_of_array(descs, 5)))
    else:
        made = _forms.list_of(nixlXferDList, descs, mem_type, kinds)
        if made is None:
            raise TypeError(
                f"no descriptors can be made of a {type(descs).__name__} with "
                f"mem_type {mem_type!r}"
            )
        memory, runs = made.getType(), made.runs()
    if len(runs) == 0:
        raise nixlNotFoundError("the list is empty")
    return runs, _kind(memory)


def _checked_runs(runs: Words) -> Words:
    """NIXL takes no run of no blocks and no blocks that overlap."""
    wrong = (runs[:, _runs.COUNT] == 0) | (
        runs[:, _runs.STRIDE] < runs[:, _runs.LENGTH]
    )
    if wrong.any():
        raise nixlNotFoundError(
            f"run {int(np.flatnonzero(wrong)[0])} has no blocks, or its blocks "
            "overlap"
        )
    return runs


def _kind(memory: nixl_mem_t) -> int:
    if memory not in KINDS:
        raise not_offered(
            f"memory of the type {memory.name}", "it moves DRAM and VRAM"
        )
    return KINDS[memory]


def _layout(
    core: kvt.Transport,
    peer: Peer | None,
    runs: Words,
    kind: int,
    known: Facts | None = None,
) -> Layout:
    with translated():
        try:
            return Layout(core, peer, runs, kind, known or _runs.facts(runs))
        except kvt.OutOfRange as error:
            raise nixlNotFoundError(str(error)) from error


def _paired(
    ours: Words, theirs: Words
) -> tuple[Words, Words, tuple[Facts, Facts]]:
    """Checks that the lists go together, and leaves out what has no length."""
    known = _runs.facts(ours), _runs.facts(theirs)
    (count, length, _), (there, other, _) = known
    if count != there:
        raise nixlInvalidParamError(
            f"{count} local descriptors, {there} remote ones"
        )
    if length is not None and length == other:
        if length == 0:
            raise nixlInvalidParamError("the descriptors have no length")
        return ours, theirs, known
    same = _runs.expanded_lengths(ours) == _runs.expanded_lengths(theirs)
    if not same.all():
        where = int(np.flatnonzero(~same)[0])
        raise nixlInvalidParamError(
            f"the descriptors {where} have different lengths"
        )
    ours = ours[ours[:, _runs.LENGTH] != 0]
    theirs = theirs[theirs[:, _runs.LENGTH] != 0]
    if len(ours) == 0:
        raise nixlInvalidParamError("the descriptors have no length")
    return ours, theirs, (_runs.facts(ours), _runs.facts(theirs))


def _prepared(handle: nixl_prepped_dlist_handle) -> Layout:
    if handle._layout is None:
        raise nixlInvalidParamError("the prepared list was released")
    return handle._layout


def _indices(given: Any, layout: Layout, side: str) -> Any:
    """A copy of the indices that kvt takes as it is."""
    made = np.array(given)
    if made.size == 0:
        raise nixlInvalidParamError(f"there are no {side} indices")
    if made.ndim != 1 or made.dtype.kind not in "iu":
        raise TypeError(f"{side} indices must be a row of integers")
    if made.dtype not in _INDEX_TYPES:
        made = made.astype(np.int64)
    low, high = int(made.min()), int(made.max())
    if low < 0 or high >= layout.count:
        wrong = low if low < 0 else high
        raise nixlInvalidParamError(
            f"{side} index {wrong} is outside the list of {layout.count}"
        )
    return made
