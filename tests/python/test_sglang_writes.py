# SPDX-License-Identifier: Apache-2.0
"""Proves that kvt.sglang.NixlTransport puts bytes exactly where they belong,
and nothing elsewhere, for every layout that SGLang makes, on every engine.

Both sides are in this process. Each arena is compared with its image, guard
zones and gaps between blocks too. Numbers are those of the table in
docs/sglang.md.
"""

from __future__ import annotations

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
    nixlInvalidParamError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)
from kvt.sglang._types import address
from sglang_support.arena import Arena
from sglang_support.sides import ITEM, KV, SLOTS, Side, Sides, counted

np = pytest.importorskip("numpy", reason="numpy is not there")


@pytest.fixture
def sides(engine: Engine) -> Iterator[Sides]:
    with Sides(engine) as made:
        yield made


def check_done(a: Side, handle: Any) -> None:
    result = a.settled(handle)
    assert result.done
    assert result == (NixlState.DONE, True, None)
    assert handle.error is None


def test_01_equal_tp_write(sides: Sides) -> None:
    """Two regions of 16 slots; ours lie at a stride of two items."""
    a = sides.side("prefill", size=2 * 16 * 128)
    b = sides.side("decode", size=2 * 16 * ITEM)
    peer = a.load(b)
    a.transport.prepare(
        "",
        "kv",
        [a.run(region * 16 * 128, ITEM, 128, 16) for region in range(2)],
        "DRAM",
    )
    theirs = [b.run(region * 16 * ITEM, count=16) for region in range(2)]
    a.transport.prepare(peer, "kv", theirs, "DRAM")
    src, dst = [0, 1, 16], [2, 3, 17]
    for here, there in zip(src, dst, strict=True):
        b.arena.expect(there * ITEM, a.arena.read(here * 128, ITEM))
    handle = a.transport.write_prepared(
        peer, "kv", np.array(src, np.int32), "kv", np.array(dst, np.int32)
    )
    check_done(a, handle)
    assert b.arena.wrong() == a.arena.wrong() == 0


def test_02_dst_stride_above_the_length(sides: Sides) -> None:
    a, b = sides.side("prefill"), sides.side("decode", size=96 * 16)
    peer = a.load(b)
    a.transport.prepare("", "kv", [a.run(count=16)], "DRAM")
    a.transport.prepare(peer, "kv", [b.run(0, ITEM, 96, 16)], "DRAM")
    for k in range(16):
        b.arena.expect(k * 96, a.arena.read((15 - k) * ITEM, ITEM))
    handle = a.transport.write_prepared(
        peer, "kv", range(15, -1, -1), "kv", range(16)
    )
    check_done(a, handle)
    assert b.arena.wrong() == 0


def test_02_a_length_above_the_stride_is_refused_before_kvt(
    sides: Sides,
) -> None:
    a, b = sides.two()
    peer = a.load(b)
    calls, stop = counted(a.transport, "prepare")
    with pytest.raises(ValueError, match="97 bytes overlap"):
        a.transport.prepare(peer, "kv", [b.run(0, 97, 96, 16)], "DRAM")
    stop()
    assert calls == []


def test_03_slice_groups(sides: Sides) -> None:
    """2 pages of 4 tokens; a token has the heads of 2 groups here, and those of
    group 1 alone there."""
    pages, page, groups, head = 2, 4, 2, 32
    a = sides.side("prefill", size=pages * page * groups * head)
    b = sides.side("decode", size=pages * page * head)
    peer = a.load(b)
    a.transport.prepare(
        "", "slice", [a.run(0, head, head, pages * page * groups)], "DRAM"
    )
    a.transport.prepare(
        peer, "slice", [b.run(0, head, head, pages * page)], "DRAM"
    )
    src, dst = [], []
    for slot in range(pages):
        for token in range(page):
            src.append(slot * page * groups + token * groups + 1)
            dst.append((pages - 1 - slot) * page + token)
            b.arena.expect(dst[-1] * head, a.arena.read(src[-1] * head, head))
    handle = a.transport.write_prepared(peer, "slice", src, "slice", dst)
    check_done(a, handle)
    assert b.arena.wrong() == 0


def test_08_faults_in_indices_are_not_created(sides: Sides) -> None:
    a, b = sides.two()
    peer = a.lists(b)
    a.transport.prepare("", "half", [a.run(length=32)], "DRAM")
    cases: list[tuple[Any, Any, str]] = [
        (np.array([-1], np.int32), [0], "kv"),
        ([0], np.array([-1], np.int32), "kv"),
        ([SLOTS], [0], "kv"),
        ([0], [SLOTS], "kv"),
        ([2**31], [0], "kv"),
        ([], [], "kv"),
        ([0, 1], [0], "kv"),
        ([0], [0], "half"),
    ]
    before = a.transport.core.stats()
    for src, dst, layout in cases:
        handle = a.transport.write_prepared(peer, layout, src, "kv", dst)
        state, quiescent, error = a.transport.status(handle)
        assert (state, quiescent) == (NixlState.NOT_CREATED, True)
        assert isinstance(error, nixlInvalidParamError)
        assert "NIXL_ERR_INVALID_PARAM" in str(error)
        assert handle.error is error
        assert isinstance(error.__cause__, kvt.Error)
    assert a.transport.core.stats().chunks == before.chunks
    assert b.arena.wrong() == 0


def test_08_a_missing_list_or_peer_is_not_created(sides: Sides) -> None:
    a, b = sides.two()
    peer = a.lists(b)
    for name, src, dst in (
        (peer, "none", "kv"),
        (peer, "kv", "none"),
        ("nobody", "kv", "kv"),
    ):
        handle = a.transport.write_prepared(name, src, [0], dst, [0])
        state, quiescent, error = a.transport.status(handle)
        assert (state, quiescent) == (NixlState.NOT_CREATED, True)
        assert isinstance(error, nixlNotFoundError)
        assert "NIXL_ERR_NOT_FOUND" in str(error)
    assert b.arena.wrong() == 0


def test_write_all_by_key_and_offset(sides: Sides) -> None:
    a, b = sides.two()
    peer = a.load(b)
    copies = [(KV, 10, KV, 1000, 77), (KV, 500, KV, 2000, 1), (KV, 0, KV, 0, 0)]
    for _, src, _, dst, length in copies:
        b.arena.expect(dst, a.arena.read(src, length))
    handle = a.transport.write_all(peer, copies, note=b"7_kv_0")
    check_done(a, handle)
    assert b.arena.wrong() == 0
    one = a.transport.write(peer.agent_name, KV, 64, KV, 64, 64)
    b.arena.expect(64, a.arena.read(64, 64))
    check_done(a, one)
    assert b.arena.wrong() == 0


def test_a_note_comes_once_after_all_parts(sides: Sides) -> None:
    from stage import until

    a, b = sides.two()
    peer = a.lists(b)
    before = [b.arena.read(9 * ITEM, ITEM)]
    handle = a.transport.write_prepared(
        peer, "kv", [5], "kv", [9], note=b"7_state_0_1"
    )
    b.arena.expect(9 * ITEM, a.arena.read(5 * ITEM, ITEM))
    notes: list[kvt.Notification] = []

    def come() -> bool:
        notes.extend(b.transport.core.notifications())
        return bool(notes)

    until("the note is there", come)
    assert (notes[0].agent_name, notes[0].data) == (a.name, b"7_state_0_1")
    assert b.arena.wrong() == 0
    assert before != [b.arena.read(9 * ITEM, ITEM)]
    check_done(a, handle)
    assert b.transport.core.notifications() == []


def test_nothing_to_write_is_none(sides: Sides) -> None:
    a, b = sides.two()
    peer = a.load(b)
    nothing = np.zeros((3, 3), np.uint64)
    assert a.transport.write_all(peer, []) is None
    assert a.transport.write_all(peer, [("no key", 0, "none", 0, 0)]) is None
    assert a.transport.write(peer, KV, 0, KV, 0, 0) is None
    empty: list[Any] = [nothing, nothing[:0], []]
    for rows in empty:
        made = a.transport.write_arrays(peer, rows, "DRAM", rows, "DRAM")
        assert made is None


def test_what_is_outside_a_key_is_not_created(sides: Sides) -> None:
    """Also where it would hit other registered memory of ours."""
    a, b = sides.two()
    other = Arena(4096, 9)
    more = BufferKey("aux")
    a.transport.register_all(
        {
            more: (other.addr, 4096, "DRAM", 0),
            "part": (a.arena.addr + 64, 64, "DRAM", 0),
        }
    )
    peer = a.load(b)
    size = ITEM * SLOTS
    for copy in (
        (KV, size - 1, KV, 0, 2),
        (KV, -1, KV, 0, 2),
        (KV, 0, KV, size - 1, 2),
        (KV, 0, KV, -1, 2),
        (more, other.addr, KV, 0, 1),
        ("part", 63, KV, 0, 2),
        ("part", -1, KV, 0, 1),
        ("none", 0, KV, 0, 1),
        (KV, 0, "none", 0, 1),
    ):
        handle = a.transport.write_all(peer, [(KV, 0, KV, 0, 8), copy])
        assert handle is not None
        state, quiescent, _ = a.transport.status(handle)
        assert (state, quiescent) == (NixlState.NOT_CREATED, True)
    assert b.arena.wrong() == 0


@pytest.mark.parametrize("dtype", ["uint64", "int64"])
def test_write_arrays(dtype: str, sides: Sides) -> None:
    a, b = sides.two()
    peer = a.load(b)
    rows = [(7, 5), (100, 0), (300, 64), (500, 3)]
    src = np.array([[a.arena.addr + o, n, 0] for o, n in rows], dtype)
    dst = np.array([[b.arena.addr + 2 * o, n, 0] for o, n in rows], dtype)
    dst[1, 1], dst[3, 1] = 9, 0  # left out: no length on one side
    for offset, length in rows[:3]:
        b.arena.expect(2 * offset, a.arena.read(offset, length))
    check_done(a, a.transport.write_arrays(peer, src, "DRAM", dst, "DRAM"))
    assert b.arena.wrong() == 0


def test_arrays_that_do_not_fit_are_not_created(sides: Sides) -> None:
    a, b = sides.two()
    peer = a.load(b)
    src = np.array([[a.arena.addr, 8, 0]] * 2, np.uint64)
    longer = src + np.array([0, 1, 0], np.uint64)
    for ours, theirs in (
        (src, src[:1]),
        (src, longer),
        (src.astype(float), src),
        (src[:, :2], src[:, :2]),
        (src.ravel(), src.ravel()),
    ):
        handle = a.transport.write_arrays(peer, ours, "DRAM", theirs, "DRAM")
        assert handle is not None
        state, quiescent, error = a.transport.status(handle)
        assert (state, quiescent) == (NixlState.NOT_CREATED, True)
        assert isinstance(error, nixlInvalidParamError)
    assert b.arena.wrong() == 0


def test_a_peer_that_is_not_loaded_is_not_created(sides: Sides) -> None:
    a, b = sides.two()
    peer = a.lists(b)
    a.transport.core.unload_peer(a.transport.core.find_peer(b.name))
    assert not a.transport.is_loaded(peer)
    for handle in (
        a.transport.write(peer, KV, 0, KV, 0, 8),
        a.transport.write_prepared(peer, "kv", [0], "kv", [0]),
    ):
        assert handle is not None
        state, quiescent, error = a.transport.status(handle)
        assert (state, quiescent) == (NixlState.NOT_CREATED, True)
        assert isinstance(error, nixlRemoteDisconnectError)
    assert b.arena.wrong() == 0


# ---------------------------------------------------------------------- scale


def test_27_a_list_costs_its_runs_not_its_blocks(sides: Sides) -> None:
    """160 runs of 1.2 M blocks each, over one region, as rows of an array."""
    a, b = sides.two()
    peer = a.load(b)
    rows = np.array([[a.arena.addr, 1, 0, 1, 4096]] * 160, np.uint64)
    theirs = np.array([[b.arena.addr, 1, 0, 1, 4096]] * 160, np.int64)
    tracemalloc.start()
    a.transport.prepare("", "big", rows, "DRAM")
    a.transport.prepare(peer, "big", theirs, "DRAM")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    count = 4096 * 160
    handle = a.transport.write_prepared(
        peer, "big", [count - 1], "big", [count - 1]
    )
    b.arena.expect(4095, a.arena.read(4095, 1))
    check_done(a, handle)
    for beyond in (count, 2**32, 2**32 + 5, 2**63):
        handle = a.transport.write_prepared(peer, "big", [beyond], "big", [0])
        assert a.transport.status(handle).state is NixlState.NOT_CREATED
    assert b.arena.wrong() == 0


def test_27_more_blocks_than_32_bits_hold() -> None:
    """192 M blocks in 160 runs, and 2^32 and more in others; 1.31 M indices."""
    size = 1_200_000
    with Sides(Engine("local", {})) as sides:
        a = sides.side("prefill", size=size)
        b = sides.side("decode", size=size)
        peer = a.load(b)
        for side, name in ((a, ""), (b, b.name)):
            run = StridedRun(side.arena.addr, 1, 0, 1, size)
            a.transport.prepare(name, "big", [run] * 160, "DRAM")
            a.transport.prepare(name, "huge", [run] * 3600, "DRAM")
        wide = 2**32 + 17
        assert wide < 3600 * size
        handle = a.transport.write_prepared(
            peer, "huge", np.array([wide]), "huge", np.array([wide + 1])
        )
        at = wide % size
        b.arena.expect(at + 1, a.arena.read(at, 1))
        check_done(a, handle)
        assert b.arena.wrong() == 0
        indices = np.arange(1_310_720, dtype=np.int32)
        handle = a.transport.write_prepared(
            peer, "big", indices, "big", indices
        )
        b.arena.expect(0, a.arena.read(0, size))
        check_done(a, handle)
        assert b.arena.wrong() == 0
        handle = a.transport.write_prepared(
            peer, "big", np.array([160 * size]), "big", np.array([0])
        )
        assert a.transport.status(handle).state is NixlState.NOT_CREATED


WRONG = [1.0, "1", True, None, 2**64, -(2**63) - 1]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_address_is_refused(wrong: Any) -> None:
    with Sides(Engine("local", {})) as sides:
        a, b = sides.two()
        metadata = b.transport.agent_metadata
        with pytest.raises((TypeError, ValueError)):
            a.transport.import_registration(
                b.name, metadata, {KV: wrong}, {KV: ("DRAM", 0)}
            )
        with pytest.raises((TypeError, ValueError)):
            a.transport.import_registration(
                b.name, metadata, {KV: b.arena.addr}, {KV: ("DRAM", wrong)}
            )
        with pytest.raises((TypeError, ValueError)):
            a.transport.register_all({"x": (wrong, 64, "DRAM", 0)})
        run = list(a.run())
        for i in range(len(run)):
            bad = [*run[:i], wrong, *run[i + 1 :]]
            with pytest.raises((TypeError, ValueError)):
                a.transport.prepare("", "kv", [bad], "DRAM")


@pytest.mark.parametrize("wrong", [1.0, "1", True, None])
def test_what_is_no_offset_is_refused(wrong: Any) -> None:
    with Sides(Engine("local", {})) as sides:
        a, b = sides.two()
        a.load(b)
        copy = [KV, 0, KV, 0, 1]
        for i in (1, 3, 4):
            bad = [*copy[:i], wrong, *copy[i + 1 :]]
            with pytest.raises(TypeError):
                a.transport.write_all(b.name, [tuple(bad)])


def test_addresses_have_all_64_bits() -> None:
    high = 2**63 + 4096
    assert address(high) == high
    assert address(high - 2**64) == high
    assert address(2**64 - 1) == 2**64 - 1
