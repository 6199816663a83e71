# SPDX-License-Identifier: Apache-2.0
"""Proves a peer's life under kvt.sglang.NixlTransport: import, drop, reload,
unload, close; that no list of an older generation is ever used; and that calls
of several threads neither wait for nor disturb each other.

The fault engine breaks links, holds loads and refuses lists on order. The
arenas are compared with their images. Numbers are those of the table in
docs/sglang.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

import pytest

import kvt
from conftest import Engine, run_python
from kvt.sglang import (
    BufferKey,
    NixlHandle,
    NixlState,
    PeerBuffers,
    nixlBackendError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotFoundError,
)
from sglang_support.arena import Arena
from sglang_support.sides import ITEM, KV, SLOTS, Side, Sides
from stage import LIMIT, until


@pytest.fixture
def sides() -> Iterator[Sides]:
    with Sides(Engine("fault:local", {})) as made:
        yield made


@pytest.fixture
def every(engine: Engine) -> Iterator[Sides]:
    """On every engine."""
    with Sides(engine) as made:
        yield made


def drop(a: Side, b: Side, rules: str = "disconnect=1") -> NixlHandle:
    """A write during which the link breaks; its bytes land all the same."""
    a.fault(rules)
    handle = a.write(b, [1], [2])
    assert a.final(handle).state is NixlState.UNREADABLE
    assert not a.transport.is_loaded(b.name)
    return handle


def not_created(a: Side, b: Side, layout: str = "kv") -> bool:
    """Whether a write over the list is not created, and nothing is posted."""
    before = a.transport.core.stats().chunks
    handle = a.transport.write_prepared(b.name, layout, [0], layout, [0])
    state, quiescent, error = a.transport.status(handle)
    if state is not NixlState.NOT_CREATED:
        return False
    assert quiescent
    assert error is not None
    return a.transport.core.stats().chunks == before


def works(a: Side, b: Side, layout: str = "kv") -> None:
    assert a.transport.is_loaded(b.name)
    assert a.settled(a.write(b, [7], [9], layout)).done
    assert b.arena.wrong() == 0


def in_thread(
    call: Callable[[], object],
) -> tuple[threading.Thread, list[object]]:
    """Its one result, or what it raised, is put into the list."""
    result: list[object] = []

    def work() -> None:
        try:
            result.append(call())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, result


# ---------------------------------------------------------------------- import


def test_importing_gives_where_the_buffers_are(every: Sides) -> None:
    a, b = every.side("prefill"), every.side("decode")
    empty = BufferKey("state0", 3)
    peer = a.transport.import_registration(
        b.name,
        b.transport.agent_metadata,
        {KV: b.arena.addr, empty: 0},
        {KV: ("DRAM", 0), empty: ("VRAM", 2)},
    )
    assert peer == PeerBuffers(
        b.name,
        {KV: (b.arena.addr, kvt.DRAM, 0), empty: (0, kvt.VRAM, 2)},
    )
    assert a.transport.is_loaded(peer)
    assert a.transport.is_loaded(b.name)
    handle = a.transport.write(peer, KV, 0, empty, 0, 8)
    assert handle is not None
    assert a.transport.status(handle).state is NixlState.NOT_CREATED


def test_unknown_peers_are_not_loaded(every: Sides) -> None:
    a = every.side("prefill")
    assert a.transport.is_loaded("nobody") is False
    a.transport.unload("nobody")
    with pytest.raises(nixlNotFoundError, match="import_registration"):
        a.transport.reload("nobody")


def test_bad_registrations_are_refused(every: Sides) -> None:
    a, b = every.side("prefill"), every.side("decode")
    ours, theirs = a.transport.agent_metadata, b.transport.agent_metadata
    bases, devices = {KV: b.arena.addr}, {KV: ("DRAM", 0)}
    load = a.transport.import_registration
    with pytest.raises(nixlMismatchError):
        load(b.name, b"garbage", bases, devices)
    with pytest.raises(nixlInvalidParamError, match="own"):
        load(a.name, ours, {KV: a.arena.addr}, devices)
    with pytest.raises(nixlInvalidParamError, match="not of"):
        load("another name", theirs, bases, devices)
    with pytest.raises(nixlInvalidParamError, match="outside"):
        load(b.name, theirs, {KV: b.arena.addr - 8192}, devices)
    with pytest.raises(nixlInvalidParamError, match="outside"):
        load(b.name, theirs, bases, {KV: ("DRAM", 1)})
    with pytest.raises(ValueError, match="no \\(kind, device\\)"):
        load(b.name, theirs, bases, {})
    assert not a.transport.is_loaded(b.name)
    assert a.transport.core.stats().peers == 0
    a.lists(b)
    works(a, b)


def test_the_same_registration_again_changes_nothing(every: Sides) -> None:
    a, b = every.side("prefill"), every.side("decode")
    peer = a.lists(b)
    stats = a.transport.core.stats()
    assert a.load(b) == peer
    after = a.transport.core.stats()
    assert after.peer_adds == stats.peer_adds
    assert after.peer_reloads == stats.peer_reloads
    works(a, b)


def test_an_import_that_fails_can_be_tried_again(sides: Sides) -> None:
    a, b = sides.two()
    a.fault("load_fail=1")
    with pytest.raises(nixlBackendError):
        a.load(b)
    assert not a.transport.is_loaded(b.name)
    with pytest.raises(nixlNotFoundError):
        a.transport.reload(b.name)
    a.lists(b)
    works(a, b)


# ---------------------------------------------------------------------- reload


def test_16_stale_list_unreachable(sides: Sides) -> None:
    a, b = sides.two()
    a.lists(b)
    drop(a, b)
    assert not_created(a, b)
    a.fault("load_hang=1")
    thread, result = in_thread(lambda: a.transport.reload(b.name))
    core = a.transport.core
    peer = core.find_peer(b.name)
    until(
        "it is being loaded",
        lambda: core.peer_info(peer).state == kvt.PeerState.RELOADING,
    )
    assert not_created(a, b)
    assert not a.transport.is_loaded(b.name)
    handle = a.transport.write(b.name, KV, 0, KV, 0, 8)
    assert handle is not None
    assert a.transport.status(handle).state is NixlState.NOT_CREATED
    a.fault("")
    thread.join(LIMIT)
    assert result == [None]
    works(a, b)


def test_17_reload_ok(sides: Sides) -> None:
    a, b = sides.two()
    a.lists(b)
    lists = dict(a.transport._lists)
    stats = a.transport.core.stats()
    drop(a, b)
    a.transport.reload(b.name)
    after = a.transport.core.stats()
    assert after.peer_reloads - stats.peer_reloads == 1
    assert after.layouts == stats.layouts
    assert after.runs == stats.runs
    assert a.transport._lists == lists
    works(a, b)


def test_17_a_loaded_peer_is_unloaded_first(every: Sides) -> None:
    """NIXL 1.5.1 does not repair a link by loading alone."""
    a, b = every.side("prefill"), every.side("decode")
    peer = a.lists(b)
    core = a.transport.core
    generation = core.peer_info(core.find_peer(b.name)).generation
    a.transport.reload(peer)
    assert core.peer_info(core.find_peer(b.name)).generation > generation
    works(a, b)


def test_18_reload_load_fails(sides: Sides) -> None:
    a, b = sides.two()
    a.lists(b)
    runs = a.transport.core.stats().runs
    drop(a, b)
    a.fault("load_fail=1-2")
    for _ in range(2):
        with pytest.raises(nixlBackendError, match="NIXL_ERR_BACKEND"):
            a.transport.reload(b.name)
        assert not a.transport.is_loaded(b.name)
        assert not_created(a, b)
    assert a.transport.core.stats().runs == runs
    a.transport.reload(b.name)
    works(a, b)


@pytest.mark.parametrize("bad", ["first", "second", "third"])
def test_19_reload_rebuild_fails(bad: str, sides: Sides) -> None:
    a, b = sides.two()
    names = ["first", "second", "third"]
    for name in names:
        a.lists(b, name)
    a.fault("disconnect=1")
    assert a.final(a.write(b, [1], [2], "first")).state is NixlState.UNREADABLE
    a.fault(f"layout_fail={bad}")
    with pytest.raises(nixlBackendError, match=bad):
        a.transport.reload(b.name)
    assert not a.transport.is_loaded(b.name)
    assert all(not_created(a, b, name) for name in names)
    a.fault("")
    a.transport.reload(b.name)
    for name in names:
        works(a, b, name)


def test_20_reload_state_fails(sides: Sides) -> None:
    """The whole peer is dropped, also for its other lists."""
    a, b = sides.two()
    peer = a.lists(b)
    assert a.transport.prepare("", "state", [a.run()], "DRAM", False)
    assert a.transport.prepare(peer, "state", [b.run()], "DRAM", False)
    drop(a, b)
    a.fault("layout_fail=state")
    with pytest.raises(nixlBackendError):
        a.transport.reload(b.name)
    assert not a.transport.is_loaded(b.name)
    assert not_created(a, b)
    a.fault("")
    a.transport.reload(b.name)
    works(a, b)
    works(a, b, "state")


def test_21_state_absent_stays_absent(sides: Sides) -> None:
    a, b = sides.two()
    peer = a.lists(b)
    assert a.transport.prepare("", "state", [a.run()], "DRAM", False)
    with pytest.raises(nixlInvalidParamError):
        a.transport.prepare(peer, "state", [b.run(count=999)], "DRAM", False)
    layouts = a.transport.core.stats().layouts
    drop(a, b)
    a.transport.reload(b.name)
    works(a, b)
    assert not_created(a, b, "state")
    assert a.transport.core.stats().layouts == layouts


def test_22_old_handle_after_reload(sides: Sides) -> None:
    a, b = sides.two(grace=0.001)
    a.lists(b)
    old = drop(a, b, "disconnect=1,hold=1")
    until("its bytes landed", lambda: b.arena.wrong() == 0)
    a.transport.reload(b.name)
    for _ in range(3):
        state, quiescent, _ = a.transport.status(old)
        assert (state, quiescent) == (NixlState.UNREADABLE, False)
        assert a.transport.is_loaded(b.name)
    works(a, b)
    a.fault("")
    assert a.settled(old)[:2] == (NixlState.UNREADABLE, True)
    works(a, b)


class Gate:
    """A lock that lets nobody in before so many have asked."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        self.barrier.wait(LIMIT)
        self.lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lock.release()


def test_23_reload_race(sides: Sides) -> None:
    """One reload serves all that ask at once. How often a caller may ask is
    the caller's own rule."""
    a, b = sides.two()
    a.lists(b)
    drop(a, b)
    a.transport._peers[b.name].lock = Gate(4)  # type: ignore[assignment]
    before = a.transport.core.stats().peer_reloads
    asked = [in_thread(lambda: a.transport.reload(b.name)) for _ in range(4)]
    for thread, result in asked:
        thread.join(LIMIT)
        assert result == [None]
    assert a.transport.core.stats().peer_reloads - before == 1
    works(a, b)


def test_23_who_waited_for_a_reload_that_failed_tries_itself(
    sides: Sides,
) -> None:
    a, b = sides.two()
    a.lists(b)
    drop(a, b)
    a.fault("load_fail=1")
    a.transport._peers[b.name].lock = Gate(2)  # type: ignore[assignment]
    asked = [in_thread(lambda: a.transport.reload(b.name)) for _ in range(2)]
    results = []
    for thread, result in asked:
        thread.join(LIMIT)
        results += result
    assert sorted(map(type, results), key=str) == sorted(
        [type(None), nixlBackendError], key=str
    )
    works(a, b)


def test_24_reimport_changed_blob(every: Sides) -> None:
    """Unloaded, loaded anew, lists checked: the new memory is reachable."""
    a, b = every.side("prefill"), every.side("decode")
    a.lists(b)
    core = a.transport.core
    generation = core.peer_info(core.find_peer(b.name)).generation
    more = Arena(4096, 7)
    late = BufferKey("staging", more.addr)
    b.transport.register_all({late: (more.addr, 4096, "DRAM", 0)})
    peer = a.transport.import_registration(
        b.name,
        b.transport.agent_metadata,
        {KV: b.arena.addr, late: more.addr},
        {KV: ("DRAM", 0), late: ("DRAM", 0)},
    )
    assert core.peer_info(core.find_peer(b.name)).generation > generation
    works(a, b)
    handle = a.transport.write(peer, KV, 5, late, 6, 100)
    more.expect(6, a.arena.read(5, 100))
    assert handle is not None
    assert a.settled(handle).done
    assert more.wrong() == 0


def restarted(sides: Sides, b: Side) -> Side:
    """A peer of the same name with other memory."""
    return sides.side("decode", agent_name=b.name)


def test_24_a_list_that_does_not_fit_the_new_blob_is_refused(
    sides: Sides,
) -> None:
    a, b = sides.two()
    a.lists(b)
    other = restarted(sides, b)
    with pytest.raises(nixlInvalidParamError, match="kv"):
        a.load(other)
    assert not a.transport.is_loaded(b.name)
    assert not_created(a, b)
    a.transport.reload(b.name)  # as it was: b is still there
    works(a, b)
    a.transport.unload(b.name)
    a.lists(other)
    works(a, other)
    assert b.arena.wrong() == 0


def test_24_the_new_blob_of_another_agent_is_refused(sides: Sides) -> None:
    a, b = sides.two()
    a.load(b)
    other = sides.side("decode")
    with pytest.raises(nixlInvalidParamError, match="not of"):
        a.transport.import_registration(
            b.name,
            other.transport.agent_metadata,
            {KV: other.arena.addr},
            {KV: ("DRAM", 0)},
        )
    assert not a.transport.is_loaded(b.name)
    with pytest.raises(nixlInvalidParamError):
        a.transport.import_registration(
            b.name,
            b.transport.agent_metadata,
            {KV: other.arena.addr},
            {KV: ("DRAM", 0)},
        )
    assert not a.transport.is_loaded(b.name)
    a.lists(b)
    works(a, b)
    assert other.arena.wrong() == 0


def test_24_damaged_metadata_leaves_a_peer_as_it_is(sides: Sides) -> None:
    a, b = sides.two()
    a.lists(b)
    bases, devices = {KV: b.arena.addr}, {KV: ("DRAM", 0)}
    for _ in range(2):
        with pytest.raises(nixlMismatchError):
            a.transport.import_registration(b.name, b"garbage", bases, devices)
        works(a, b)
    a.transport.reload(b.name)
    works(a, b)


# ---------------------------------------------------------------------- unload


def test_unload_drops_the_lists_and_can_be_repeated(every: Sides) -> None:
    a, b = every.side("prefill"), every.side("decode")
    a.lists(b)
    layouts = a.transport.core.stats().layouts
    for _ in range(2):
        a.transport.unload(b.name)
        assert not a.transport.is_loaded(b.name)
    assert a.transport.core.stats().layouts == layouts - 1
    assert not_created(a, b)
    a.transport.reload(b.name)
    assert a.transport.is_loaded(b.name)
    assert not_created(a, b)
    a.transport.unload(b.name)
    a.lists(b)  # the same registration, of a peer that is not loaded
    works(a, b)


def test_a_write_under_way_when_its_peer_is_unloaded(sides: Sides) -> None:
    a, b = sides.two(grace=0.001)
    a.lists(b)
    a.transport.post_wait = 0
    a.fault("hold=1")
    handle = a.write(b, [1], [2])
    a.transport.unload(b.name)
    assert a.transport.status(handle)[:2] == (NixlState.UNREADABLE, False)
    a.fault("")
    assert a.settled(handle)[:2] == (NixlState.UNREADABLE, True)
    assert b.arena.wrong() == 0


def test_a_finished_write_stays_done(sides: Sides) -> None:
    a, b = sides.two()
    a.lists(b)
    handle = a.write(b, [1], [2])
    assert a.settled(handle).done
    a.transport.unload(b.name)
    assert a.transport.status(handle).done


# --------------------------------------------------------------------- threads


def test_28_concurrency(every: Sides) -> None:
    """Four workers write to one peer and poll; others are imported, prepared,
    reloaded and unloaded meanwhile."""
    a, b = every.side("prefill"), every.side("decode")
    others = [every.side("decode") for _ in range(3)]
    a.lists(b)
    failed: list[BaseException] = []
    stop = threading.Event()
    counts = [0] * 4

    def write(number: int) -> None:
        slots = range(number * 16, number * 16 + 16)
        try:
            while not stop.is_set() or counts[number] == 0:
                handle = a.transport.write_prepared(
                    b.name, "kv", slots, "kv", slots
                )
                assert a.final(handle).done
                counts[number] += 1
        except BaseException as error:
            failed.append(error)

    b.arena.expect(0, a.arena.read(0, SLOTS * ITEM))
    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            for other in others:
                a.lists(other)
                assert a.settled(a.write(other, [1], [2])).done
                a.transport.reload(other.name)
                assert a.settled(a.write(other, [3], [4])).done
                a.transport.unload(other.name)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failed == []
    assert all(counts)
    for side in (b, *others):
        assert side.arena.wrong() == 0


def test_28_an_import_that_hangs_holds_nobody_up(sides: Sides) -> None:
    a, b = sides.two()
    peer = a.lists(b)
    c, d = sides.side("decode"), sides.side("decode")
    a.fault("load_hang=1")
    thread, result = in_thread(lambda: a.load(c))
    until("it is known", lambda: a.transport.core.stats().peers == 2)
    works(a, b)
    a.lists(d)
    works(a, d)
    a.transport.reload(peer)
    works(a, b)
    a.transport.unload(d.name)
    a.transport.register_all({"more": (a.arena.addr, 64, "DRAM", 0)})
    assert not a.transport.is_loaded(c.name)
    assert result == []
    a.fault("")
    thread.join(LIMIT)
    a.lists(c)
    works(a, c)


# ----------------------------------------------------------------------- close


def test_29_close(sides: Sides, caplog: pytest.LogCaptureFixture) -> None:
    a, b = sides.two()
    c = sides.side("decode")
    a.lists(b)
    a.lists(c)
    a.transport.post_wait = 0
    a.fault("hold=1")
    handle = a.write(b, [1], [2])
    done = a.write(c, [1], [2])
    assert a.settled(done).done
    with caplog.at_level(logging.WARNING, "kvt.sglang"):
        a.transport.close(0.01)
    assert "not" in caplog.text
    caplog.clear()
    for _ in range(2):
        a.transport.close()
    assert caplog.text == ""
    assert a.transport.core.closed
    assert a.transport.status(done).done
    assert a.transport.status(handle)[:2] == (NixlState.UNREADABLE, False)


def test_29_later_calls_fail_cleanly(every: Sides) -> None:
    a, b = every.side("prefill"), every.side("decode")
    peer = a.lists(b)
    a.transport.close()
    stats = a.transport.core.stats()
    assert (stats.peers, stats.layouts) == (0, 0)
    assert a.transport.agent_name == a.name
    assert not a.transport.is_loaded(peer)
    for handle in (
        a.transport.write_prepared(peer, "kv", [0], "kv", [0]),
        a.transport.write(peer, KV, 0, KV, 0, 8),
    ):
        assert handle is not None
        state, quiescent, error = a.transport.status(handle)
        assert (state, quiescent) == (NixlState.NOT_CREATED, True)
        assert isinstance(error, Exception)
    for call in (
        lambda: a.transport.agent_metadata,
        lambda: a.transport.reload(peer),
        lambda: a.transport.unload(peer),
        lambda: a.transport.prepare("", "kv", [a.run()], "DRAM"),
        lambda: a.transport.register_all({1: (a.arena.addr, 8, "DRAM", 0)}),
        lambda: a.load(every.side("decode")),
    ):
        with pytest.raises(RuntimeError):
            call()
    with pytest.raises(KeyError):
        a.transport.deregister([KV])
    assert b.arena.wrong() == 0


def test_29_close_lets_go_of_the_memory(every: Sides) -> None:
    a, b = every.side("prefill"), every.side("decode")
    a.lists(b)
    works(a, b)
    a.transport.close()
    b.transport.close()
    a.arena.map.close()
    b.arena.map.close()


LEAVE = """
import mmap, sys
import kvt
from kvt.sglang import NixlTransport
made = []
for role in ("prefill", "decode"):
    memory = mmap.mmap(-1, 4096)
    t = NixlTransport.create(role, engine="fault:local?RULES")
    addr = kvt.region_of(memory).addr
    t.register_all({"kv": (addr, 4096, "DRAM", 0)})
    made.append((t, memory, addr))
(a, _, here), (b, _, there) = made
peer = a.import_registration(
    b.agent_name, b.agent_metadata, {"kv": there}, {"kv": ("DRAM", 0)}
)
handles = [a.write(peer, "kv", 0, "kv", 64 * i, 64) for i in range(8)]
HOW
"""


@pytest.mark.parametrize("rules", ["", "hold=*", "hang=*"])
@pytest.mark.parametrize(
    "how",
    [
        "",
        "del a, b, made, handles, t",
        "handles.append(handles)",
        "sys.exit(0)",
    ],
)
def test_leaving_without_a_close_ends_well(how: str, rules: str) -> None:
    done = run_python(LEAVE.replace("RULES", rules).replace("HOW", how))
    words = set(done.stderr.splitlines())
    words.discard("a transfer is lost: its memory is quarantined")
    assert (done.returncode, done.stdout, words) == (0, "", set())
