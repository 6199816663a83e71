# SPDX-License-Identifier: Apache-2.0
"""Proves by what rules kvt.sglang.NixlTransport registers memory and keeps
lists, and what it does with an engine that takes no strided runs.

The calls that reach kvt are recorded; the fault engine's `no_strided` stands
for an engine that refuses. Numbers are those of the table in docs/sglang.md.
"""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

import kvt
from conftest import Engine
from kvt.sglang import (
    BufferKey,
    NixlState,
    StridedRun,
    nixlBackendError,
    nixlInvalidParamError,
    nixlNotFoundError,
    nixlNotSupportedError,
)
from sglang_support.arena import Arena
from sglang_support.sides import ITEM, KV, SLOTS, Sides, counted


@pytest.fixture
def sides() -> Iterator[Sides]:
    with Sides(Engine("fault:local", {})) as made:
        yield made


# ----------------------------------------------------------------- registering


def test_05_one_call_registers_each_region_once(sides: Sides) -> None:
    b = sides.side("decode")
    arena = Arena(8192, 5)
    calls, stop = counted(b.transport, "register")
    shared = (arena.addr, 4096, "DRAM", 0)
    b.transport.register_all(
        {
            BufferKey("kv", 1): shared,
            BufferKey("kv", 2): shared,
            BufferKey("state0", 0): (arena.addr + 4096, 4096, "DRAM", 0),
            BufferKey("state0", 1): (0, 0, "no kind", 3),
            BufferKey("kv", 3): (arena.addr, 0, "DRAM", 0),
        }
    )
    stop()
    ((regions,),) = calls
    assert [(r.addr, r.length) for r in regions] == [
        (arena.addr, 4096),
        (arena.addr + 4096, 4096),
    ]
    assert b.transport.core.stats().regions == 3


def test_05_nothing_to_register_is_no_call(sides: Sides) -> None:
    b = sides.side("decode")
    calls, stop = counted(b.transport, "register")
    b.transport.register_all({})
    b.transport.register_all({"empty": (0, 0, "VRAM", 0)})
    b.transport.register_all({KV: (b.arena.addr, ITEM * SLOTS, "DRAM", 0)})
    stop()
    assert calls == []


def test_05_a_region_goes_with_its_last_key(sides: Sides) -> None:
    b = sides.side("decode")
    arena = Arena(4096, 5)
    shared = (arena.addr, 4096, "DRAM", 0)
    b.transport.register_all({"one": shared, "two": shared})
    b.transport.register_all({"three": shared, "empty": (0, 0, "DRAM", 0)})
    assert b.transport.core.stats().regions == 2
    b.transport.deregister(["one", "empty"])
    b.transport.deregister(["two"])
    assert b.transport.core.stats().regions == 2
    b.transport.deregister(["three"])
    assert b.transport.core.stats().regions == 1
    for unknown in ("one", "empty", "never"):
        with pytest.raises(KeyError, match=unknown):
            b.transport.deregister([KV, unknown])
    assert b.transport.core.stats().regions == 1


def test_a_key_names_one_region(sides: Sides) -> None:
    b = sides.side("decode")
    arena = Arena(4096, 5)
    with pytest.raises(ValueError, match="names another region"):
        b.transport.register_all(
            {
                "new": (arena.addr, 64, "DRAM", 0),
                KV: (arena.addr, 64, "DRAM", 0),
            }
        )
    assert b.transport.core.stats().regions == 1
    with pytest.raises(KeyError):
        b.transport.deregister(["new"])


def test_an_error_names_the_kind(sides: Sides) -> None:
    b = sides.side("decode")
    with pytest.raises(RuntimeError, match="2 regions of VRAM failed"):
        b.transport.register_all(
            {i: (4096 << i, 4096, "VRAM", 0) for i in range(2)}
        )
    with pytest.raises(RuntimeError, match="1 regions of DRAM failed") as info:
        b.transport.register_all({"unmapped": (4096, 4096, "DRAM", 0)})
    assert isinstance(info.value.__cause__, nixlInvalidParamError)
    with pytest.raises(ValueError, match="neither DRAM nor VRAM"):
        b.transport.register_all({"odd": (4096, 4096, "FILE", 0)})
    assert b.transport.core.stats().regions == 1


def test_memory_that_a_write_uses_stays_registered(sides: Sides) -> None:
    a, b = sides.two()
    a.lists(b)
    a.fault("hold=1")
    handle = a.write(b, [1], [2])
    with pytest.raises(nixlBackendError):
        a.transport.deregister([KV])
    a.fault("")
    assert a.settled(handle).done
    a.transport.deregister([KV])
    assert a.transport.core.stats().regions == 0
    assert b.arena.wrong() == 0


def test_metadata_has_what_is_registered_when_it_is_asked_for(
    sides: Sides,
) -> None:
    a, b = sides.two()
    early = b.transport.agent_metadata
    arena = Arena(4096, 5)
    b.transport.register_all({"late": (arena.addr, 4096, "DRAM", 0)})
    assert b.transport.agent_metadata != early
    bases, devices = {"late": arena.addr}, {"late": ("DRAM", 0)}
    with pytest.raises(nixlInvalidParamError):
        a.transport.import_registration(b.name, early, bases, devices)
    assert not a.transport.is_loaded(b.name)
    a.transport.import_registration(
        b.name, b.transport.agent_metadata, bases, devices
    )
    assert a.transport.is_loaded(b.name)


# ----------------------------------------------------------------------- lists


def test_a_malformed_list_leaves_nothing_behind(sides: Sides) -> None:
    a, b = sides.two()
    peer = a.lists(b)
    layouts = a.transport.core.stats().layouts
    for runs in (
        [],
        [b.run(), b.run(count=SLOTS + 1)],
        [b.run(count=0)],
        [b.run(length=0)],
        [b.run()._replace(dev_id=1)],
        [StridedRun(2**64 - 64, 64, 0, 64, 2)],
    ):
        for side in (peer, ""):
            with pytest.raises(nixlInvalidParamError, match="INVALID_PARAM"):
                a.transport.prepare(side, "new", runs, "DRAM")
    with pytest.raises(nixlNotFoundError):
        a.transport.prepare("nobody", "new", [b.run()], "DRAM")
    with pytest.raises(nixlNotSupportedError):
        a.transport.prepare(peer, "new", [b.run()], "VRAM")
    assert a.transport.supports_strided_runs
    assert a.transport.core.stats().layouts == layouts
    handle = a.transport.write_prepared(peer, "kv", [0], "new", [0])
    assert a.transport.status(handle).state is NixlState.NOT_CREATED


def test_the_same_name_again_replaces_a_list(sides: Sides) -> None:
    a, b = sides.two()
    peer = a.lists(b)
    layouts = a.transport.core.stats().layouts
    assert a.transport.prepare(peer, "kv", [b.run(ITEM, count=4)], "DRAM")
    assert a.transport.core.stats().layouts == layouts
    handle = a.transport.write_prepared(peer, "kv", [0], "kv", [0])
    b.arena.expect(ITEM, a.arena.read(0, ITEM))
    assert a.settled(handle).done
    assert b.arena.wrong() == 0


# ---------------------------------------------------------- an engine without


def test_06_strided_fallback(sides: Sides) -> None:
    """Learnt by the first list that is refused, and never tried again; the
    order of the blocks is that of the runs."""
    a, b = sides.side("prefill", "no_strided"), sides.side("decode")
    peer = a.load(b)
    assert a.transport.supports_strided_runs
    half = SLOTS // 2
    runs = [a.run(half * ITEM, count=half), a.run(0, count=half)]
    assert a.transport.prepare("", "kv", runs, "DRAM")
    assert not a.transport.supports_strided_runs
    calls, stop = counted(a.transport, "prepare")
    assert a.transport.prepare(peer, "kv", [b.run(0, 32, 64)], "DRAM")
    stop()
    assert len(calls) == 1
    assert a.transport.prepare("", "small", [a.run(0, 32, 64)], "DRAM")
    for here, there in ((half, 3), (0, 5), (SLOTS - 1, 7)):
        b.arena.expect(there * 64, a.arena.read(here * 64, 32))
    handle = a.transport.write_prepared(
        peer, "small", [half, 0, SLOTS - 1], "kv", [3, 5, 7]
    )
    assert a.settled(handle).done
    assert b.arena.wrong() == 0
    refused = a.transport.write_prepared(peer, "kv", [0], "kv", [SLOTS])
    assert a.transport.status(refused).state is NixlState.NOT_CREATED
    assert a.transport.supports_strided_runs is False
    assert type(a.transport).supports_strided_runs is True
    assert b.transport.supports_strided_runs is True


def test_06_an_expanded_list_has_the_order_of_its_runs(sides: Sides) -> None:
    a, b = sides.side("prefill", "no_strided"), sides.side("decode")
    peer = a.load(b)
    half = SLOTS // 2
    swapped = [a.run(half * ITEM, count=half), a.run(0, count=half)]
    assert a.transport.prepare("", "kv", swapped, "DRAM")
    assert a.transport.prepare(peer, "kv", [b.run()], "DRAM")
    for slot in range(SLOTS):
        ours = (slot + half) % SLOTS
        b.arena.expect(slot * ITEM, a.arena.read(ours * ITEM, ITEM))
    every = range(SLOTS)
    handle = a.transport.write_prepared(peer, "kv", every, "kv", every)
    assert a.settled(handle).done
    assert b.arena.wrong() == 0


def test_07_what_may_not_be_expanded_is_unavailable(sides: Sides) -> None:
    size = 10_000_000
    a = sides.side("prefill", "no_strided", size=size)
    rows = [StridedRun(a.arena.addr, 1, 0, 1, size)]
    layouts = a.transport.core.stats().layouts
    tracemalloc.start()
    first = a.transport.prepare("", "state", rows, "DRAM", False)
    calls, stop = counted(a.transport, "prepare")
    second = a.transport.prepare("", "state", rows, "DRAM", False)
    stop()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (first, second) == (False, False)
    assert calls == []
    assert peak < 1 << 20
    assert a.transport.supports_strided_runs is False
    assert a.transport.core.stats().layouts == layouts


def test_a_kind_that_is_refused_says_nothing_of_strides(sides: Sides) -> None:
    a = sides.side("prefill", "no_strided")
    for count in (1, 2):
        with pytest.raises(nixlNotSupportedError, match="VRAM"):
            a.transport.prepare("", "kv", [a.run(count=count)], "VRAM")
    assert a.transport.supports_strided_runs


def test_lists_survive_a_reload_without_strides(sides: Sides) -> None:
    a, b = sides.side("prefill", "no_strided"), sides.side("decode")
    a.lists(b)
    a.transport.reload(b.name)
    assert a.settled(a.write(b, [3], [4])).done
    assert b.arena.wrong() == 0


def test_every_engine_takes_strided_runs(engine: Engine) -> None:
    with Sides(engine) as sides:
        a, b = sides.two()
        peer = a.load(b)
        assert a.transport.prepare("", "kv", [a.run()], "DRAM", False)
        assert a.transport.prepare(peer, "kv", [b.run()], "DRAM", False)
        assert a.transport.supports_strided_runs


# --------------------------------------------------------------------- threads


def test_threads_register_and_prepare_at_once(sides: Sides) -> None:
    a, b = sides.two()
    peer = a.load(b)
    arenas = [Arena(4096, i) for i in range(4)]
    failed: list[BaseException] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        key: Any = ("staging", number)
        addr = arenas[number].addr
        start.wait()
        try:
            for _ in range(50):
                a.transport.register_all({key: (addr, 4096, "DRAM", 0)})
                a.transport.prepare(peer, "same", [b.run()], "DRAM")
                a.transport.deregister([key])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert a.transport.core.stats().regions == 1
    assert a.transport.core.stats().layouts == 1
    handle = a.transport.write_prepared(peer, "none", [0], "same", [0])
    error = handle.error
    assert isinstance(error, nixlNotFoundError)
    assert isinstance(error.__cause__, kvt.NotFound)
