# SPDX-License-Identifier: Apache-2.0
"""Each call of kvt.nixl's agent: what it takes, answers and refuses.

Two agents of one process, over the engine local and over NIXL. The expected
answers and the classes of errors are those that NIXL 1.5.1 gave to the same
calls, but where docs/nixl_agent.md says that kvt's differ.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvt.nixl as nixl
from nixl_agent_support.agents import BLOCK, COUNT, GUARD, SIZE, Two, notes, run
from nixl_agent_support.nodes import environment


@pytest.fixture(scope="module", params=["local", "nixl"])
def pair(request: pytest.FixtureRequest) -> Iterator[Two]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(request.param).items():
            patch.setenv(name, value)
        yield Two()


@pytest.fixture
def two(pair: Two) -> Two:
    pair.clean()
    return pair


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """For agents of a test's own."""
    monkeypatch.setenv("KVT_ENGINE", "local")


# -------------------------------------------------------------- configuration


def test_the_configuration_has_nixls_fields() -> None:
    sync = nixl.nixl_thread_sync_t
    conf = nixl.nixl_agent_config(
        True, False, 1234, True, 3, ["UCX"], sync.NIXL_THREAD_SYNC_STRICT
    )
    assert vars(conf) == {
        "enable_pthread": True,
        "enable_listen": False,
        "port": 1234,
        "capture_telemetry": True,
        "num_threads": 3,
        "backends": ["UCX"],
        "sync_mode": sync.NIXL_THREAD_SYNC_STRICT,
    }
    assert nixl.nixl_agent_config().port == nixl.DEFAULT_COMM_PORT
    assert sync["NIXL_THREAD_SYNC_DEFAULT"] is sync["NIXL_THREAD_SYNC_NONE"]
    with pytest.raises(TypeError):
        nixl.nixl_agent_config(sync_mode=1)  # type: ignore[arg-type]


def test_backends_are_told_by_plugin_and_by_backend(two: Two) -> None:
    one = two.one
    assert "UCX" in one.get_plugin_list()
    assert list(one.backends) == ["UCX"]
    assert "DRAM_SEG" in one.get_plugin_mem_types("UCX")
    assert "DRAM_SEG" in one.get_backend_mem_types("UCX")
    assert one.get_backend_params("UCX") == {}
    assert one.get_plugin_params("UCX") == {}


def test_an_unknown_backend_is_a_warning_and_nothing(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvt.nixl"):
        assert two.one.get_plugin_mem_types("NONE") == []
        assert two.one.get_backend_mem_types("NONE") == []
        assert two.one.get_backend_params("NONE") == {}
        made = nixl.nixl_agent(
            "three", nixl.nixl_agent_config(backends=["NONE"])
        )
    assert made.backends == {}
    assert len(caplog.records) == 4
    with pytest.raises(nixl.nixlNotFoundError):
        made.create_backend("NONE")


def test_a_backend_is_created_once_and_before_all_else(local: None) -> None:
    agent = nixl.nixl_agent("late", nixl.nixl_agent_config(backends=[]))
    memory = np.zeros(64, dtype=np.uint8)
    rows = [(int(memory.ctypes.data), 64, 0, "")]
    with pytest.raises(nixl.nixlNotFoundError):
        agent.register_memory(rows, "DRAM")
    with pytest.raises(nixl.nixlNotFoundError):
        agent.get_agent_metadata()
    assert not agent.check_remote_metadata("other")
    agent.create_backend("UCX", {"num_threads": "2"})
    assert agent.get_backend_params("UCX") == {"num_threads": "2"}
    with pytest.raises(nixl.nixlInvalidParamError):
        agent.create_backend("UCX")
    agent.register_memory(rows, "DRAM")
    agent.plugin_list = ["UCX", "POSIX"]
    with pytest.raises(nixl.nixlNotSupportedError, match="before you register"):
        agent.create_backend("POSIX")


def test_an_agent_needs_a_name(local: None) -> None:
    with pytest.raises(ValueError):
        nixl.nixl_agent("")
    assert nixl.nixl_agent("é").name == "é"


def test_an_engine_that_is_not_there_is_a_backend_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVT_ENGINE", "nowhere")
    with pytest.raises(nixl.nixlBackendError, match="nowhere"):
        nixl.nixl_agent("none")


# --------------------------------------------------------------------- memory


def test_memory_is_registered_and_taken_back_once_each(two: Two) -> None:
    memory = np.zeros(4096, dtype=np.uint8)
    addr = int(memory.ctypes.data)
    for given in (
        [(addr, 4096, 0, "")],
        np.array([[addr, 4096, 0]], dtype=np.uint64),
    ):
        descs = two.one.register_memory(given, "DRAM", backends=["UCX"])
        assert isinstance(descs, nixl.nixlRegDList)
        assert descs[0] == (addr, 4096, 0, b"")
        two.one.deregister_memory(descs, ["UCX"])
        with pytest.raises(nixl.nixlNotFoundError):
            two.one.deregister_memory(descs)


@pytest.mark.parametrize(
    ("given", "mem_type", "error"),
    [
        ([(4096, 1, 0)], "DRAM", TypeError),
        ([(4096, 1, 0, "")], None, TypeError),
        ([(4096, 1, 0, "")], "HBM", KeyError),
        ([(4096, 1, 0, "")], "FILE", nixl.nixlNotSupportedError),
        ([(0, 1, 0, "")], "DRAM", nixl.nixlInvalidParamError),
        ([((1 << 64) - 8, 16, 0, "")], "DRAM", nixl.nixlInvalidParamError),
    ],
)
def test_what_cannot_be_registered_raises(
    two: Two, given: Any, mem_type: str | None, error: type[Exception]
) -> None:
    with pytest.raises(error):
        two.one.register_memory(given, mem_type)


def test_backends_that_are_named_must_be_started(two: Two) -> None:
    with pytest.raises(KeyError):
        two.one.register_memory(two.reg["one"], backends=["NONE"])
    with pytest.raises(KeyError):
        two.one.get_new_notifs(["NONE"])
    with pytest.raises(ValueError, match="NONE"):
        two.one.query_memory(two.reg["one"], "NONE")


# ---------------------------------------------------------------------- peers


def test_an_agent_is_added_again_and_removed(two: Two) -> None:
    metadata = two.other.get_agent_metadata()
    assert isinstance(metadata, bytes)
    ours, theirs = two.lists()
    assert two.one.add_remote_agent(metadata) == b"other"
    assert two.one.check_remote_metadata("other")
    assert two.one.check_remote_metadata(b"other")
    handle = two.one.make_prepped_xfer("WRITE", ours, [0], theirs, [0])
    two.one.remove_remote_agent("other")
    assert not two.one.check_remote_metadata("other")
    two.one.remove_remote_agent("other")
    for call in (
        lambda: two.one.transfer(handle),
        lambda: two.one.make_prepped_xfer("WRITE", ours, [0], theirs, [0]),
        lambda: two.one.prep_xfer_dlist("other", two.descs("other", 0)),
        two.write,
        lambda: two.one.send_notif("other", b""),
        lambda: two.one.make_connection("other"),
    ):
        with pytest.raises(nixl.nixlNotFoundError):
            call()
    handle.release()
    assert two.one.add_remote_agent(metadata) == b"other"
    assert run(two.one, two.write()) == "DONE"


def test_newer_metadata_keeps_lists_and_adds_memory(two: Two) -> None:
    ours, theirs = two.lists()
    more = np.zeros(BLOCK, dtype=np.uint8)
    addr = int(more.ctypes.data)
    descs = two.one.get_xfer_descs([(addr, BLOCK, 0)], "DRAM")
    assert not two.one.check_remote_metadata("other", descs)
    reg = two.other.register_memory([(addr, BLOCK, 0, "")], "DRAM")
    two.one.add_remote_agent(two.other.get_agent_metadata())
    assert two.one.check_remote_metadata("other", descs)
    data = two.fill("one", 3, 8)
    old = two.one.make_prepped_xfer("WRITE", ours, [3], theirs, [4])
    new = two.one.initialize_xfer("WRITE", two.descs("one", 3), descs, "other")
    assert run(two.one, old) == run(two.one, new) == "DONE"
    assert two.block("other", 4) == bytes(more) == data
    two.other.deregister_memory(reg)


@pytest.mark.parametrize("metadata", [b"", b"junk", b"nixlSerDes|", "text"])
def test_bytes_that_are_no_metadata_are_a_mismatch(
    two: Two, metadata: Any
) -> None:
    with pytest.raises(nixl.nixlMismatchError):
        two.one.add_remote_agent(metadata)


def test_an_agent_cannot_add_itself(two: Two) -> None:
    with pytest.raises(nixl.nixlInvalidParamError):
        two.one.add_remote_agent(two.one.get_agent_metadata())
    with pytest.raises(nixl.nixlNotSupportedError, match="itself"):
        two.one.prep_xfer_dlist("one", two.descs("one", 0))


def test_metadata_is_checked_with_a_list(two: Two) -> None:
    check = two.one.check_remote_metadata
    assert check("other", two.descs("other", 0, 3))
    assert not check("other", two.descs("one", 0))
    assert check("other", nixl.nixlXferDList(nixl.DRAM_SEG))
    assert not check("nobody")


def test_a_connection_can_be_made_before(two: Two) -> None:
    two.one.make_connection("other")
    two.one.make_connection("other", ["UCX"])


def test_partial_metadata_has_what_is_asked_for(two: Two) -> None:
    reg = two.reg["other"]
    whole = two.other.get_partial_agent_metadata(reg, True)
    bare = two.other.get_partial_agent_metadata(reg)
    empty = two.other.get_reg_descs([(1, 1, 0, "")], "DRAM")
    with pytest.raises(nixl.nixlNotFoundError):
        two.other.get_partial_agent_metadata(empty)
    empty.clear()
    link = two.other.get_partial_agent_metadata(empty)
    assert len(bare) < len(whole) and len(link) < len(whole)
    assert two.one.add_remote_agent(bare) == b"other"
    assert two.one.add_remote_agent(link) == b"other"
    handle = two.write()
    assert run(two.one, handle) == "DONE"


def test_partial_metadata_is_checked_like_whole(two: Two) -> None:
    part = two.other.get_partial_agent_metadata(two.reg["other"])
    for at in range(len(part)):
        bad = bytearray(part)
        bad[at] ^= 1
        with pytest.raises(nixl.nixlMismatchError):
            two.one.add_remote_agent(bytes(bad))
    assert run(two.one, two.write()) == "DONE"


# ------------------------------------------------------------------ transfers


def test_a_transfer_writes_pair_by_pair(two: Two) -> None:
    data = {i: two.fill("one", i, i) for i in (0, 1, 5)}
    handle = two.write()
    assert repr(handle).endswith("released=False)")
    with pytest.raises(nixl.nixlNotPostedError):
        two.one.check_xfer_state(handle)
    assert two.one.query_xfer_backend(handle) == "UCX"
    assert two.one.estimate_xfer_cost(handle) == (0, 0, "UNKNOWN")
    assert run(two.one, handle) == "DONE"
    assert two.one.check_xfer_state(handle) == "DONE"
    for source, target in ((0, 2), (1, 3), (5, 9)):
        assert two.block("other", target) == data[source]
    for i in set(range(COUNT)) - {2, 3, 9}:
        assert two.block("other", i) == bytes([GUARD]) * BLOCK
    two.one.release_xfer_handle(handle)
    handle.release()
    assert repr(handle).endswith("released=True)")
    with pytest.raises(nixl.nixlInvalidParamError, match="released"):
        two.one.transfer(handle)


def test_a_transfer_reads(two: Two) -> None:
    data = {i: two.fill("other", i, 40 + i) for i in (2, 3, 9)}
    handle = two.one.initialize_xfer(
        "READ",
        two.descs("one", 0, 1, 5),
        two.descs("other", 2, 3, 9),
        b"other",
    )
    assert run(two.one, handle) == "DONE"
    for target, source in ((0, 2), (1, 3), (5, 9)):
        assert two.block("one", target) == data[source]
    assert two.block("one", 2) == bytes([GUARD]) * BLOCK


@pytest.mark.parametrize(
    "indices",
    [
        list,
        tuple,
        lambda i: np.array(i, dtype=np.int8),
        lambda i: np.array(i, dtype=np.int32),
        lambda i: np.array(i, dtype=np.int64),
        lambda i: np.array(i, dtype=np.uint64),
    ],
)
def test_a_prepared_transfer_takes_indices_of_any_integer_type(
    two: Two, indices: Callable[[list[int]], Any]
) -> None:
    data = [two.fill("one", i, 60 + i) for i in range(4)]
    ours, theirs = two.lists()
    handle = two.one.make_prepped_xfer(
        "WRITE", ours, indices([0, 2, 3]), theirs, indices([9, 1, 15]), "done"
    )
    assert run(two.one, handle) == "DONE"
    assert [two.block("other", i) for i in (9, 1, 15)] == [
        data[0],
        data[2],
        data[3],
    ]
    assert notes(two.other, 1) == {"one": [b"done"]}


def test_indices_are_the_callers_again_once_a_transfer_is_made(
    two: Two,
) -> None:
    data = two.fill("one", 1, 5)
    ours, theirs = two.lists()
    indices = np.array([1], dtype=np.int32)
    handle = two.one.make_prepped_xfer("WRITE", ours, indices, theirs, indices)
    indices[:] = 7
    assert run(two.one, handle) == "DONE"
    assert two.block("other", 1) == data
    assert two.block("other", 7) == bytes([GUARD]) * BLOCK


@pytest.mark.parametrize(
    ("ours", "theirs", "error"),
    [
        ([], [], nixl.nixlInvalidParamError),
        ([0], [1, 2], nixl.nixlInvalidParamError),
        ([-1], [0], nixl.nixlInvalidParamError),
        ([0], [COUNT], nixl.nixlInvalidParamError),
        ([COUNT], [0], nixl.nixlInvalidParamError),
        ([0.0], [0], TypeError),
        ([True], [0], TypeError),
        ([[0]], [0], TypeError),
        ("0", [0], TypeError),
    ],
)
def test_wrong_indices_are_refused_when_a_transfer_is_made(
    two: Two, ours: Any, theirs: Any, error: type[Exception]
) -> None:
    lists = two.lists()
    with pytest.raises(error):
        two.one.make_prepped_xfer("WRITE", lists[0], ours, lists[1], theirs)


def test_lists_must_be_of_the_right_sides_and_lengths(two: Two) -> None:
    ours, theirs = two.lists()
    make = two.one.make_prepped_xfer
    for lists in ((theirs, ours), (ours, ours), (theirs, theirs)):
        with pytest.raises(nixl.nixlInvalidParamError):
            make("WRITE", lists[0], [0], lists[1], [0])
    addr = two.addr["one"]
    mixed = two.one.prep_xfer_dlist(
        "NIXL_INIT_AGENT", [(addr, 16, 0), (addr + 64, BLOCK, 0)], "DRAM"
    )
    with pytest.raises(nixl.nixlInvalidParamError, match="length"):
        make("WRITE", mixed, [0], theirs, [0])
    assert run(two.one, make("WRITE", mixed, [1], theirs, [0])) == "DONE"
    with pytest.raises(KeyError):
        make("COPY", ours, [0], theirs, [0])
    ours.release()
    ours.release()
    with pytest.raises(nixl.nixlInvalidParamError, match="released"):
        make("WRITE", ours, [0], theirs, [0])


def test_a_released_list_serves_the_transfers_made_of_it(two: Two) -> None:
    gc.collect()
    before = two.core.stats().layouts
    data = two.fill("one", 0, 77)
    ours, theirs = two.lists()
    handle = two.one.make_prepped_xfer("WRITE", ours, [0], theirs, [0])
    two.one.release_dlist_handle(ours)
    theirs.release()
    assert run(two.one, handle) == "DONE"
    assert two.block("other", 0) == data
    assert two.core.stats().layouts == before + 2
    handle.release()
    assert two.core.stats().layouts == before


def test_strided_lists_are_prepared_from_runs(two: Two) -> None:
    gc.collect()
    before = two.core.stats().runs
    stride = 2 * BLOCK
    ours = np.array([[two.addr["one"], BLOCK, 0, stride, 8]], dtype=np.uint64)
    theirs = np.array(
        [
            [two.addr["other"], BLOCK, 0, BLOCK, 3],
            [two.addr["other"] + 8 * BLOCK, BLOCK, 0, stride, 4],
        ],
        dtype=np.int64,
    )
    data = [two.fill("one", i, i) for i in range(COUNT)]
    handle = two.one.make_prepped_xfer(
        "WRITE",
        two.one.prep_xfer_dlist("", ours, "DRAM"),
        [7, 1, 0],
        two.one.prep_xfer_dlist("other", theirs, "DRAM"),
        [0, 2, 6],
    )
    assert run(two.one, handle) == "DONE"
    assert two.block("other", 0) == data[14]
    assert two.block("other", 2) == data[2]
    assert two.block("other", 14) == data[0]
    assert two.core.stats().runs == before + 3


@pytest.mark.parametrize(
    "run_of",
    [(BLOCK, 0, BLOCK - 1, 2), (BLOCK, 0, 0, 2), (BLOCK, 0, BLOCK, 0)],
)
def test_runs_that_overlap_or_are_empty_are_refused(
    two: Two, run_of: tuple[int, ...]
) -> None:
    rows = np.array([[two.addr["one"], *run_of]], dtype=np.uint64)
    with pytest.raises(nixl.nixlNotFoundError):
        two.one.prep_xfer_dlist("", rows, "DRAM")
    with pytest.raises(ValueError, match="mem_type"):
        two.one.prep_xfer_dlist("", rows)
    with pytest.raises(nixl.nixlNotFoundError):
        two.one.prep_xfer_dlist("", rows[:0], "DRAM")


def test_lists_outside_registered_memory_are_not_found(two: Two) -> None:
    outside = [(two.addr["one"] + SIZE - 8, 16, 0)]
    with pytest.raises(nixl.nixlNotFoundError):
        two.one.prep_xfer_dlist("", outside, "DRAM")
    with pytest.raises(nixl.nixlNotFoundError):
        two.one.prep_xfer_dlist("other", outside, "DRAM")
    with pytest.raises(nixl.nixlNotFoundError):
        two.one.prep_xfer_dlist("nobody", outside, "DRAM")
    with pytest.raises(TypeError):
        two.one.prep_xfer_dlist("", outside)
    with pytest.raises(nixl.nixlNotSupportedError):
        two.one.prep_xfer_dlist("", [(1, 1, 0)], "OBJ")


def test_blocks_of_separate_regions_at_equal_distances_are_prepared(
    two: Two,
) -> None:
    """They look like one run, but what lies between is not registered."""
    memory = np.zeros(24 * BLOCK, dtype=np.uint8)
    rows = [
        (int(memory.ctypes.data) + i * 2 * BLOCK, BLOCK, 0) for i in range(12)
    ]
    reg = two.one.register_memory([(*row, "") for row in rows], "DRAM")
    memory[2 * BLOCK : 3 * BLOCK] = 9
    ours = two.one.prep_xfer_dlist("", rows, "DRAM")
    theirs = two.lists()[1]
    handle = two.one.make_prepped_xfer("WRITE", ours, [1], theirs, [1])
    assert run(two.one, handle) == "DONE"
    assert two.block("other", 1) == bytes([9]) * BLOCK
    handle.release()
    ours.release()
    two.one.deregister_memory(reg)


def test_a_transfer_of_lists_is_checked_when_it_is_made(two: Two) -> None:
    make = two.one.initialize_xfer
    ours, theirs = two.descs("one", 0, 1), two.descs("other", 0, 1)
    with pytest.raises(KeyError):
        make("W", ours, theirs, "other")
    with pytest.raises(nixl.nixlNotFoundError):
        make("WRITE", ours, theirs, "nobody")
    with pytest.raises(nixl.nixlNotSupportedError):
        make("WRITE", ours, ours, "one")
    with pytest.raises(nixl.nixlNotFoundError):
        make("WRITE", theirs, ours, "other")
    with pytest.raises(nixl.nixlInvalidParamError):
        make("WRITE", ours, two.descs("other", 0), "other")
    with pytest.raises(TypeError):
        make("WRITE", None, theirs, "other")  # type: ignore[arg-type]
    short = two.one.get_xfer_descs(
        [two.rows("other", 0)[0], (two.addr["other"], 8, 0)], "DRAM"
    )
    with pytest.raises(nixl.nixlInvalidParamError, match="1 have different"):
        make("WRITE", ours, short, "other")


def test_descriptors_of_no_length_are_left_out(two: Two) -> None:
    data = two.fill("one", 1, 3)
    ours = [(two.addr["one"], 0, 0), *two.rows("one", 1)]
    theirs = [(two.addr["other"], 0, 0), *two.rows("other", 4)]
    get = two.one.get_xfer_descs
    handle = two.one.initialize_xfer(
        "WRITE", get(ours, "DRAM"), get(theirs, "DRAM"), "other"
    )
    assert run(two.one, handle) == "DONE"
    assert two.block("other", 4) == data
    with pytest.raises(nixl.nixlInvalidParamError, match="no length"):
        two.one.initialize_xfer(
            "WRITE", get(ours[:1], "DRAM"), get(theirs[:1], "DRAM"), "other"
        )


def test_blocks_of_different_lengths_go_in_one_transfer(two: Two) -> None:
    sizes = [1, 100, 37, BLOCK, 8]
    for i in range(5):
        two.fill("one", i, i)
    get = two.one.get_xfer_descs
    pairs = [
        [(two.addr[name] + i * BLOCK, size, 0) for i, size in enumerate(sizes)]
        for name in ("one", "other")
    ]
    handle = two.one.initialize_xfer(
        "WRITE", get(pairs[0], "DRAM"), get(pairs[1], "DRAM"), "other"
    )
    assert run(two.one, handle) == "DONE"
    for i, size in enumerate(sizes):
        found = two.block("other", i)
        assert found[:size] == two.block("one", i)[:size]
        assert found[size:] == bytes([GUARD]) * (BLOCK - size)


# -------------------------------------------------------------- notifications


def test_notifications_come_by_sender_in_order(two: Two) -> None:
    two.one.send_notif("other", b"first\0")
    two.one.send_notif(b"other", "zweité", "UCX")
    two.one.send_notif("other", b"")
    found = notes(two.other, 3)
    assert found == {"one": [b"first\0", "zweité".encode(), b""]}
    assert two.other.get_new_notifs() == {}


def test_a_note_of_transfer_replaces_the_one_it_was_made_with(
    two: Two,
) -> None:
    handle = two.write(b"made")
    assert run(two.one, handle) == "DONE"
    assert run(two.one, handle, "posted") == "DONE"
    assert run(two.one, handle) == "DONE"
    assert notes(two.other, 3) == {"one": [b"made", b"posted", b"posted"]}


def test_a_note_is_found_by_its_start_or_inside(two: Two) -> None:
    for text in (b"room-1 done", b"room-2 done", b"other"):
        two.one.send_notif("other", text)
    while sum(map(len, two.other.update_notifs().values())) < 3:
        pass
    done = two.other.check_remote_xfer_done
    assert done("one", b"room-2")
    assert not done("one", b"room-2")
    assert not done("one", b"done")
    assert done("one", b"done", tag_is_prefix=False)
    assert not done("nobody", b"other")
    assert two.other.notifs == {"one": [b"other"]}


def test_messages_that_are_too_long_are_refused(two: Two) -> None:
    with pytest.raises(nixl.nixlInvalidParamError, match="131072"):
        two.one.send_notif("other", b"x" * 131073)
    handle = two.write(b"x" * 131073)
    with pytest.raises(nixl.nixlInvalidParamError, match="131072"):
        two.one.transfer(handle)


# ---------------------------------------------------------------- not offered


def test_what_is_not_offered_says_so(two: Two) -> None:
    one, descs = two.one, two.descs("one", 0)
    for call in (
        lambda: nixl.nixl_agent(
            "l", nixl.nixl_agent_config(enable_listen_thread=True)
        ),
        one.send_local_metadata,
        lambda: one.send_local_metadata("127.0.0.1", 8888),
        lambda: one.send_partial_agent_metadata(two.reg["one"]),
        lambda: one.fetch_remote_metadata("other"),
        one.invalidate_local_metadata,
        lambda: one.query_memory(two.reg["one"], "UCX"),
        lambda: one.prep_mem_view(descs),
        lambda: one.release_mem_view(1),
    ):
        with pytest.raises(nixl.nixlNotSupportedError, match="kvt does not"):
            call()
