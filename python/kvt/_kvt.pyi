# SPDX-License-Identifier: Apache-2.0
"""The extension module: the C library's calls, Pythonic and typed.

Times are seconds (int or float). Where a call waits, ``timeout=None`` means
the transport's ``call_timeout``; the GIL is released meanwhile. Every call may
be made from any thread. Wrong types raise TypeError, everything else a
subclass of :class:`kvt.Error`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, final

from typing_extensions import Buffer, Self

from ._types import Kind, Notification, Op, PeerState, Region, Scope, State

class Tensor(Protocol):
    """What is asked of a torch tensor. It must be contiguous."""

    def data_ptr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

RegionLike: TypeAlias = Buffer | Tensor | tuple[Any, ...]
"""Memory: a writable contiguous buffer (numpy, memoryview, bytearray, mmap,
SharedMemory), a contiguous torch tensor, or a tuple with the fields of
:class:`kvt.Region`, of which the first two must be there."""

Indices: TypeAlias = Sequence[SupportsIndex] | Buffer | range
"""Block indices: list, tuple or range of ints, or a one-dimensional buffer of
any integer type (numpy, array, memoryview). Contiguous buffers of 32 and 64 bit
integers in native order go to the library without a copy. bool, bytes,
bytearray and str are no indices: TypeError, as is anything that is no
integer."""

RunLike: TypeAlias = tuple[int, ...]
"""A tuple with the fields of :class:`kvt.Run`; the first three must be
there."""

Runs: TypeAlias = Iterable[RunLike] | Buffer
"""Tuples as above; or a two-dimensional buffer of 64-bit integers in native
order, with a row for each run and 3 to 6 columns in the same order; or a
one-dimensional buffer of items with the fields of the C struct kvt_run, which
the library reads where they lie if the buffer is read-only and contiguous.
Rows cost less than 0.1 us each."""

Copies: TypeAlias = Iterable[tuple[int, ...]] | Buffer
"""Tuples with the fields of :class:`kvt.Copy`, of which the first three must be
there; or a contiguous two-dimensional buffer of 64-bit integers with 3 or 7
columns in the same order."""

CancelMode: TypeAlias = Literal["immediate", "wait"]

def version() -> str:
    """The library's version, for instance "0.1.0"."""

def engines() -> list[EngineInfo]:
    """The engines of this build, whether or not they can start here."""

def region_of(
    memory: RegionLike, *, kind: int | None = None, device: int | None = None
) -> Region:
    """The region that register() would make of this memory. Holds nothing."""

def _desc_rows(descs: list[Any], room: Any) -> None:
    """Writes three-element tuples as rows of three uint64, as many as there is
    room for. For kvt.nixl."""

def _desc_runs(rows: Any, room: Any) -> int:
    """Writes rows of (addr, length, device) as runs of five uint64 (addr,
    length, stride, count, device), as many as there is room for (None: none);
    says how many there are. Block i of the runs is row i. For kvt.nixl."""

def _desc_facts(runs: Any) -> tuple[int, int | None, bool]:
    """Of such runs: the number of blocks, the length that all have or None, and
    whether any has a device that is not 0. For kvt.nixl."""

def _ring(fd: int) -> None:
    """os.eventfd_write(fd, 1), but with the GIL held: it wakes a thread, and
    that would take the GIL away from the middle of the caller's call."""

def _checksum(data: Buffer) -> int:
    """XXH3 of 64 bits, as metadata has it."""

@final
class EngineInfo:
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def code(self) -> int:
        """0, or why the engine cannot start."""
    @property
    def kinds(self) -> tuple[Kind, ...]: ...
    @property
    def text(self) -> str: ...
    @property
    def available(self) -> bool:
        """Whether code is 0."""

@final
class Result:
    """One transfer, as status() sees it now or as poll() reports it."""

    @property
    def id(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def user_data(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def bytes_done(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def copies(self) -> int: ...
    @property
    def latency_ns(self) -> int: ...
    @property
    def op(self) -> Op: ...
    @property
    def state(self) -> State: ...
    @property
    def tag(self) -> int: ...
    @property
    def code(self) -> int: ...
    @property
    def engine_code(self) -> int: ...
    @property
    def scope(self) -> Scope: ...
    @property
    def text(self) -> str: ...
    @property
    def flags(self) -> int: ...
    @property
    def local_final(self) -> bool:
        """Our memory is touched no more."""
    @property
    def peer_final(self) -> bool:
        """The peer's memory is touched no more."""
    @property
    def quiescent(self) -> bool:
        """Both: the blocks may be reused."""
    @property
    def finished(self) -> bool:
        """Completed: state changes no more."""
    @property
    def ok(self) -> bool:
        """state is DONE."""
    @property
    def error(self) -> Exception | None:
        """A new kvt.Error of the class of `code`, or None while `code` is 0."""
    def check(self) -> Result:
        """Returns itself if state is DONE, raises `error` otherwise.

        A transfer that is not finished is Busy."""

@final
class PeerInfo:
    @property
    def name(self) -> str: ...
    @property
    def agent_name(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def region_count(self) -> int: ...
    @property
    def layout_count(self) -> int: ...
    @property
    def inflight(self) -> int: ...
    @property
    def state(self) -> PeerState: ...
    @property
    def code(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def text(self) -> str: ...

@final
class Histogram:
    """Bucket i counts values below 2**i ns that no lower bucket counts."""

    @property
    def count(self) -> int: ...
    @property
    def sum_ns(self) -> int: ...
    @property
    def buckets(self) -> tuple[int, ...]: ...

@final
class Stats:
    """The counters of kvt_stats(), under the same names."""

    @property
    def accepted(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def done(self) -> int: ...
    @property
    def rejected(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def disconnected(self) -> int: ...
    @property
    def cancelled(self) -> int: ...
    @property
    def timed_out(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def quarantined(self) -> int: ...
    @property
    def inflight(self) -> int: ...
    @property
    def undrained(self) -> int: ...
    @property
    def queued_commands(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_local(self) -> int: ...
    @property
    def bytes_nixl(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def copies(self) -> int: ...
    @property
    def merged(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def notes_sent(self) -> int: ...
    @property
    def notes_failed(self) -> int: ...
    @property
    def notes_received(self) -> int: ...
    @property
    def peers(self) -> int: ...
    @property
    def peers_loaded(self) -> int: ...
    @property
    def peer_adds(self) -> int: ...
    @property
    def peer_reloads(self) -> int: ...
    @property
    def peer_disconnects(self) -> int: ...
    @property
    def mismatches(self) -> int: ...
    @property
    def regions(self) -> int: ...
    @property
    def layouts(self) -> int: ...
    @property
    def runs(self) -> int: ...
    @property
    def stalls(self) -> int: ...
    @property
    def post_ns(self) -> Histogram: ...
    @property
    def complete_ns(self) -> Histogram: ...

@final
class SharedMemory:
    """Zeroed shared memory that same-host peers write by memcpy: a sealed
    memfd. It is a buffer, and register() takes it with its descriptor."""

    def __init__(self, size: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> SharedMemory: ...
    def __exit__(self, *exc: object) -> None: ...
    @property
    def addr(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def fileno(self) -> int: ...
    def close(self) -> None:
        """Unmaps it. BufferError while a buffer of it is in use, and while it
        is registered. Idempotent."""

class Transport:
    """The calls of the C library. :class:`kvt.Transport` adds the waits.

    Buffers that are registered are held until they are deregistered or the
    transport is closed; those that could still be touched then are held for
    the life of the process.
    """

    def __init__(
        self,
        engine: str | None = None,
        *,
        agent_name: str | bytes | None = None,
        workers: int = 0,
        device: int = 0,
        backends: Sequence[str] | None = None,
        params: Mapping[str, Mapping[str, object]] | None = None,
        nixl_library: str | None = None,
        same_host: bool = True,
        probe_metadata: bool = False,
        allow_ptrace: bool = False,
        telemetry: bool = True,
        inflight_max: int = 0,
        peers_max: int = 0,
        regions_max: int = 0,
        layouts_max: int = 0,
        notify_max: int = 0,
        notify_bytes_max: int = 0,
        runs_max: int = 0,
        grace: float | None = None,
        call_timeout: float | None = None,
        log: bool = True,
    ) -> None:
        """Opens a transport. None and 0 take the library's defaults. `params`
        maps a backend's name to its parameters. With `log`, lines go to the
        logger "kvt"."""

    @property
    def agent_name(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    def close(self, timeout: float | None = None) -> None:
        """Ends the transport; idempotent. poll(), status(), stats() and
        notifications() still answer. Busy when some transfers are not
        quiescent: it is closed all the same, and their memory is kept."""

    def fileno(self) -> int:
        """A descriptor that is readable while poll() or notifications() has
        something. For select, selectors and asyncio; never read it."""

    # memory
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

    def deregister(
        self,
        regions: RegionLike | Sequence[RegionLike],
        *,
        kind: int | None = None,
        device: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Takes registrations back, all or none, and lets go of the buffers."""

    def metadata(self) -> bytes:
        """What lets a peer import this agent and the memory registered so
        far."""

    # peers
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

    def start_add_peer(
        self,
        name: str | bytes,
        metadata: Buffer,
        *,
        agent_name: str | bytes | None = None,
        regions: Sequence[tuple[int, ...]] | None = None,
        user_data: int = 0,
    ) -> tuple[int, int]:
        """The same without waiting: (peer, transfer). The transfer, of op ADD,
        completes through poll() or wait()."""

    def find_peer(self, name: str | bytes) -> int: ...
    def peer_loaded(self, peer: int) -> bool:
        """Whether writes are taken; False for unknown ids."""
    def peer_info(self, peer: int) -> PeerInfo: ...
    def reload_peer(
        self,
        peer: int,
        metadata: Buffer | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Unloads, then loads again: the kept metadata, or the new one."""
    def unload_peer(
        self, peer: int, *, timeout: float | None = None
    ) -> None: ...
    def remove_peer(self, peer: int) -> None: ...
    def confirm_peer_dead(self, peer: int) -> None: ...

    # layouts
    def prepare(self, name: str | bytes, runs: Runs, peer: int = 0) -> int:
        """Names a list of runs of ours (`peer` SELF) or of a peer; returns the
        layout's id. A block's index is its position in the runs."""
    def find_layout(self, name: str | bytes, peer: int = 0) -> int: ...
    def drop_layout(self, layout: int) -> None: ...

    # transfers; each returns the transfer's id at once. `timeout` is the
    # deadline of the transfer, from now.
    def write(
        self,
        peer: int,
        copies: Copies,
        *,
        local_kind: int = 0,
        local_device: int = 0,
        peer_kind: int = 0,
        peer_device: int = 0,
        timeout: float | None = None,
        tag: int = 0,
        note: Buffer | None = None,
        user_data: int = 0,
        event: bool = True,
    ) -> int:
        """Starts one transfer of any list of pieces. The kinds and devices are
        for pieces of three columns. With `event` False poll() does not report
        it: ask status() and call release()."""

    def read(
        self,
        peer: int,
        copies: Copies,
        *,
        local_kind: int = 0,
        local_device: int = 0,
        peer_kind: int = 0,
        peer_device: int = 0,
        timeout: float | None = None,
        tag: int = 0,
        note: Buffer | None = None,
        user_data: int = 0,
        event: bool = True,
    ) -> int: ...
    def write_blocks(
        self,
        peer: int,
        local_layout: int,
        local: Indices,
        peer_layout: int,
        remote: Indices,
        *,
        timeout: float | None = None,
        tag: int = 0,
        note: Buffer | None = None,
        user_data: int = 0,
        event: bool = True,
    ) -> int:
        """Writes block local[i] of local_layout to block remote[i] of
        peer_layout, for all i."""

    def read_blocks(
        self,
        peer: int,
        local_layout: int,
        local: Indices,
        peer_layout: int,
        remote: Indices,
        *,
        timeout: float | None = None,
        tag: int = 0,
        note: Buffer | None = None,
        user_data: int = 0,
        event: bool = True,
    ) -> int: ...
    def warm_up(
        self,
        peer: int,
        *,
        timeout: float | None = None,
        tag: int = 0,
        note: Buffer | None = None,
        user_data: int = 0,
        event: bool = True,
    ) -> int:
        """Makes the engine's connection before the first real transfer."""

    def status(self, xfer: int) -> Result:
        """What is known of a transfer now; never consumes a result. NotFound
        when it is unknown, drained, or released and quiescent."""

    def poll(self, peer: int = ..., limit: int | None = None) -> list[Result]:
        """Takes finished transfers of one peer, or of all, oldest first. Never
        waits, and never takes a transfer that a wait() is waiting for."""

    def cancel(
        self, xfers: int | Iterable[int], mode: CancelMode = "immediate"
    ) -> list[int]:
        """Stops transfers; unknown ids are skipped. Mode "wait" returns the ids
        that still move; they surface in poll(). ValueError for other modes."""

    def release(self, xfer: int) -> None: ...

    # notifications
    def notify(self, peer: int, data: Buffer) -> None: ...
    def notifications(self, limit: int | None = None) -> list[Notification]:
        """Takes the received notifications, oldest first. Never waits."""

    # observation
    def stats(self) -> Stats: ...
    def metrics(self) -> str:
        """Everything as Prometheus text."""
    def set_fault(self, rules: str) -> None:
        """Replaces the rules of a "fault:" transport; "" takes all away."""

    # for kvt.Transport only
    def _claim(
        self, xfer: int, wake: Callable[[], object] = ..., /
    ) -> _Claim: ...
    def _seconds(self, timeout: float, /) -> float: ...
    def _drain(self) -> bool: ...
    def _raw_fileno(self) -> int: ...

# for kvt.Transport only
@final
class _Claim:
    """That a wait wants the result of a transfer."""

    @property
    def has_event(self) -> bool:
        """Whether poll() would report the transfer."""
    @property
    def done(self) -> bool:
        """Whether it waits no more."""
    @property
    def outcome(self) -> Result:
        """The checked result, once; raises what went wrong."""
    def look(self) -> bool:
        """Takes the result if it is there: whether it is."""
    def leave(self) -> None:
        """Wants no result any more: poll() or a later wait gets it."""
    def fileno(self) -> int:
        """A descriptor, readable once it is done."""

# for kvt.vllm only
class _Flights:
    """Transfers that are not reported yet. `nothing` is what a poll gives that
    finds nothing, and its class that of other answers."""

    def __new__(
        cls,
        transport: Transport,
        layout: int,
        peers: dict[str, Any],
        nothing: tuple[Any, ...],
        more: object = ...,
        /,
    ) -> Self: ...
    @property
    def count(self) -> int: ...
    def find(self, number: object, /) -> tuple[Any, int] | None:
        """Its _Peer and kvt's id."""
    def forget(self, number: object, /) -> bool:
        """Whether it was there."""
    def fail(self, number: object, /) -> bool:
        """Has it reported as failed: whether it was there."""
    @property
    def replaced(self) -> dict[str, list[Any]]:
        """By name: peers that others took the place of."""

class _Polled:
    """poll() for a class that has a method _look_closer(peer_id), which gives
    the list of peers to report of, and the answer _NOTHING."""

    @property
    def _flights(self) -> Any: ...
    @_flights.setter
    def _flights(self, value: Any) -> None: ...
    def poll(self, peer_id: str | None = None) -> Any:
        """The transfers, of one peer or of all, that ended since the last
        poll: done, or failed with nothing of them under way any more."""

class _Peer:
    """One registration that can be written to."""

    def __new__(
        cls, flights: _Flights, id: int, layout: int, more: object = ..., /
    ) -> Self: ...
    @property
    def id(self) -> int: ...
    @property
    def count(self) -> int:
        """Of its flights."""
    @property
    def closed(self) -> bool:
        """Whether it takes no more writes."""
    @closed.setter
    def closed(self, value: bool) -> None: ...
    @property
    def watched(self) -> bool:
        """Whether each poll is to be looked at closer."""
    @watched.setter
    def watched(self, value: bool) -> None: ...
    def write(self, local: Indices, remote: Indices, /) -> int:
        """Starts to write blocks: the flight's number."""
    @property
    def odd(self) -> list[Result]:
        """Of flights that are not done, to be looked at closer."""
    def look(self) -> bool:
        """Finds what ended: whether something has to be looked at closer."""
    def flying(self) -> list[tuple[int, int]]:
        """Its flights: numbers, and kvt's ids."""
    def clear(self) -> list[tuple[int, int]]:
        """Forgets the peer's flights, and what is to be reported of others:
        numbers, and kvt's ids."""
