# SPDX-License-Identifier: Apache-2.0
"""Every call of kvt.Transport does what its docstring says, on every engine.

Two agents of one process move blocks of known patterns; what landed is compared
byte by byte, and what should not have moved as well.
"""

from __future__ import annotations

import asyncio
import select
import threading
from collections.abc import Callable
from typing import Any

import pytest

import kvt
from conftest import BLOCK, COUNT, PATIENCE, Engine, Pair, collect

MakePair = Callable[..., Pair]


def test_write_blocks_moves_these_blocks_and_no_others(pair: Pair) -> None:
    wanted = {
        target: pair.fill(source, source)
        for source, target in [(0, 5), (1, 6), (9, 2)]
    }
    xfer = pair.write([0, 1, 9], (5, 6, 2))
    result = pair.source.wait(xfer, PATIENCE)
    assert result.id == xfer
    assert result.state is kvt.State.DONE
    assert result.op is kvt.Op.WRITE
    assert result.peer == pair.peer
    assert result.blocks == 3
    assert result.bytes == result.bytes_done == 3 * BLOCK
    assert result.ok and result.finished and result.quiescent
    assert result.local_final and result.peer_final
    assert result.error is None
    assert result.check() is result
    for block in range(COUNT):
        assert pair.landed(block) == wanted.get(block, bytes(BLOCK))


def test_read_blocks_is_the_other_direction(pair: Pair) -> None:
    data = bytes(range(256)) * (BLOCK // 256)
    pair.target_memory[3 * BLOCK : 4 * BLOCK] = data
    xfer = pair.source.read_blocks(pair.peer, pair.local, [8], pair.remote, [3])
    assert pair.source.wait(xfer, PATIENCE).op is kvt.Op.READ
    assert pair.source_memory[8 * BLOCK : 9 * BLOCK] == data


def test_write_and_read_move_pieces(pair: Pair) -> None:
    data = pair.fill(0, 1)
    copies = [
        kvt.Copy(pair.source_addr, pair.target_addr + 10, 100),
        (pair.source_addr + 100, pair.target_addr + 200, 50),
        (pair.source_addr, pair.target_addr, 0),
    ]
    result = pair.source.wait(pair.source.write(pair.peer, copies), PATIENCE)
    assert result.bytes == 150
    assert pair.target_memory[10:110] == data[:100]
    assert pair.target_memory[200:250] == data[100:150]
    assert pair.target_memory[110:200] == bytes(90)
    back = [(pair.source_addr + BLOCK, pair.target_addr + 10, 100)]
    pair.source.wait(pair.source.read(pair.peer, back), PATIENCE)
    assert pair.source_memory[BLOCK : BLOCK + 100] == data[:100]


def test_poll_takes_each_result_once(pair: Pair) -> None:
    xfers = [pair.write([i], [i], user_data=i + 1, tag=i) for i in range(10)]
    results = collect(pair.source, 10)
    assert sorted(result.id for result in results) == sorted(xfers)
    assert {result.user_data for result in results} == set(range(1, 11))
    assert {result.tag for result in results} == set(range(10))
    assert pair.source.poll() == []
    with pytest.raises(kvt.NotFound):
        pair.source.status(xfers[0])


def test_poll_takes_one_peer_and_no_more_than_the_limit(
    local_pair: Pair,
) -> None:
    other = local_pair.source.add_peer("again", local_pair.target.metadata())
    remote = local_pair.source.prepare(
        "kv", [kvt.Run(local_pair.target_addr, BLOCK, COUNT)], other
    )
    for i in range(6):
        local_pair.write([i], [i])
    theirs = local_pair.source.write_blocks(
        other, local_pair.local, [7], remote, [7]
    )
    while not local_pair.source.status(theirs).finished:
        pass
    assert [r.id for r in local_pair.source.poll(other)] == [theirs]
    taken = 0
    while taken < 6:
        batch = local_pair.source.poll(limit=2)
        assert len(batch) <= 2
        taken += len(batch)
    assert local_pair.source.poll(limit=0) == []


def test_status_never_consumes(local_pair: Pair) -> None:
    xfer = local_pair.write([1], [1])
    while not local_pair.source.status(xfer).finished:
        pass
    assert local_pair.source.status(xfer).state is kvt.State.DONE
    assert [r.id for r in local_pair.source.poll()] == [xfer]


def test_a_transfer_without_event_is_released(local_pair: Pair) -> None:
    source = local_pair.source
    xfer = local_pair.write([1], [1], event=False)
    while not source.status(xfer).finished:
        pass
    assert source.poll() == []
    source.release(xfer)
    with pytest.raises(kvt.NotFound):
        source.release(xfer)
    xfer = local_pair.write([1], [1], event=False)
    assert source.wait(xfer, PATIENCE).ok
    with pytest.raises(kvt.NotFound):
        source.status(xfer)


def test_notifications_come_after_the_data(pair: Pair) -> None:
    data = pair.fill(4, 9)
    xfer = pair.write([4], [4], note=b"block 4")
    pair.source.wait(xfer, PATIENCE)
    poller = select.poll()
    poller.register(pair.target.fileno(), select.POLLIN)
    assert poller.poll(PATIENCE * 1000)
    (note,) = pair.target.notifications()
    assert note.data == b"block 4"
    assert note.agent_name == pair.source.agent_name
    assert note.peer == 0
    assert pair.landed(4) == data
    assert poller.poll(0) == []
    assert pair.target.notifications() == []


def test_notify_of_any_size_keeps_its_order(local_pair: Pair) -> None:
    sent = [bytes([i]) * size for i, size in enumerate([0, 1, 4096, 50000])]
    for message in sent:
        local_pair.source.notify(local_pair.peer, message)
    poller = select.poll()
    poller.register(local_pair.target.fileno(), select.POLLIN)
    received: list[bytes] = []
    while len(received) < len(sent):
        assert poller.poll(PATIENCE * 1000)
        received += [n.data for n in local_pair.target.notifications(limit=1)]
    assert received == sent


def test_cancel_of_finished_and_unknown_ids(pair: Pair) -> None:
    xfer = pair.write([1], [1])
    while not pair.source.status(xfer).finished:
        pass
    assert pair.source.cancel([xfer, 12345], mode="wait") == []
    assert pair.source.poll() == []
    assert pair.source.cancel(iter([xfer])) == []
    assert pair.source.cancel(xfer) == []
    with pytest.raises(ValueError, match="immediate"):
        pair.source.cancel([], mode="later")  # type: ignore[arg-type]


def test_peers_are_found_reloaded_unloaded_and_removed(pair: Pair) -> None:
    source, peer = pair.source, pair.peer
    assert source.find_peer("target") == peer
    assert source.peer_loaded(peer)
    info = source.peer_info(peer)
    assert info.name == "target"
    assert info.agent_name == pair.target.agent_name
    assert info.state is kvt.PeerState.LOADED
    assert info.code == 0
    assert info.region_count >= 1
    assert info.path in ("local", "nixl")
    source.unload_peer(peer, timeout=PATIENCE)
    assert not source.peer_loaded(peer)
    with pytest.raises(kvt.PeerDisconnected):
        pair.write([0], [0])
    source.reload_peer(peer, timeout=PATIENCE)
    source.wait(pair.write([0], [0]), PATIENCE)
    source.reload_peer(peer, pair.target.metadata(), timeout=PATIENCE)
    source.wait(pair.write([0], [0]), PATIENCE)
    assert source.peer_info(peer).generation > info.generation
    source.remove_peer(peer)
    assert not source.peer_loaded(peer)
    for call in (source.peer_info, source.remove_peer, source.unload_peer):
        with pytest.raises(kvt.NotFound):
            call(peer)
    with pytest.raises(kvt.NotFound):
        source.find_peer("target")


def test_start_add_peer_completes_like_a_transfer(pair: Pair) -> None:
    peer, xfer = pair.source.start_add_peer(
        "later", pair.target.metadata(), user_data=77
    )
    result = pair.source.wait(xfer, PATIENCE)
    assert result.op is kvt.Op.ADD
    assert result.user_data == 77
    assert result.peer == peer
    assert pair.source.peer_loaded(peer)


def test_add_peer_checks_what_it_was_told(pair: Pair) -> None:
    metadata = bytearray(pair.target.metadata())
    region = kvt.region_of(pair.target_memory)
    peer = pair.source.add_peer(
        b"told",
        metadata,
        agent_name=pair.target.agent_name,
        regions=[region, (region.addr, 10)],
    )
    assert pair.source.peer_loaded(peer)
    with pytest.raises(kvt.Mismatch):
        pair.source.add_peer("t2", metadata, agent_name="somebody")
    with pytest.raises(kvt.OutOfRange):
        pair.source.add_peer("t3", metadata, regions=[(region.addr, 2**40)])
    with pytest.raises(kvt.BadMetadata):
        pair.source.add_peer("t4", b"nonsense")


def test_layouts_are_found_and_dropped(local_pair: Pair) -> None:
    source = local_pair.source
    assert source.find_layout("kv") == local_pair.local
    assert source.find_layout("kv", local_pair.peer) == local_pair.remote
    wide = source.prepare(
        "wide",
        [
            (local_pair.source_addr, 16, 4, 64),
            [local_pair.source_addr + BLOCK, 16, 4, 0, kvt.DRAM, 0],
        ],
    )
    narrow = source.prepare(
        "narrow", [(local_pair.target_addr, 16, 8)], local_pair.peer
    )
    local_pair.source_memory[3 * 64 : 3 * 64 + 16] = b"x" * 16
    xfer = source.write_blocks(local_pair.peer, wide, [3, 4], narrow, [0, 1])
    source.wait(xfer, PATIENCE)
    assert local_pair.target_memory[:17] == b"x" * 16 + b"\0"
    source.drop_layout(wide)
    with pytest.raises(kvt.NotFound):
        source.drop_layout(wide)
    with pytest.raises(kvt.NotFound):
        source.find_layout("wide")


def test_warm_up_is_a_transfer_of_no_bytes(pair: Pair) -> None:
    result = pair.source.wait(pair.source.warm_up(pair.peer), PATIENCE)
    assert result.op is kvt.Op.WARM_UP
    assert result.bytes == 0


def test_stats_and_metrics_count(pair: Pair) -> None:
    pair.source.wait(pair.write([0, 1], [0, 1]), PATIENCE)
    stats = pair.source.stats()
    assert stats.done >= 1
    assert stats.blocks == 2
    assert stats.bytes_written == 2 * BLOCK
    assert stats.peers == stats.peers_loaded == 1
    assert stats.regions == 1
    assert stats.layouts == 2
    assert stats.complete_ns.count >= 1
    assert sum(stats.complete_ns.buckets) == stats.complete_ns.count
    assert stats.complete_ns.sum_ns > 0
    assert stats.post_ns.count >= 1
    text = pair.source.metrics()
    assert "# TYPE" in text
    assert "target" in text


def test_names_and_versions() -> None:
    assert kvt.__version__.count(".") == 2
    engines = {engine.name: engine for engine in kvt.engines()}
    assert engines["local"].available
    assert engines["local"].code == 0
    assert engines["local"].kinds == (kvt.DRAM,)
    assert engines["local"].text
    with kvt.Transport("local", agent_name="näme") as transport:
        assert transport.agent_name == "näme"
        assert "open" in repr(transport)
    assert "closed" in repr(transport)


def test_a_name_of_any_bytes_comes_back() -> None:
    with (
        kvt.Transport("local", agent_name=b"\xff\xfe") as one,
        kvt.Transport("local") as two,
    ):
        assert one.agent_name.encode("utf-8", "surrogateescape") == b"\xff\xfe"
        peer = two.add_peer(b"\xfd", one.metadata(), agent_name=one.agent_name)
        assert two.find_peer(two.peer_info(peer).name) == peer


def test_close_is_idempotent_and_leaves_what_answers(engine: Engine) -> None:
    pair = Pair(engine)
    xfer = pair.write([0], [0])
    while not pair.source.status(xfer).finished:
        pass
    pair.close()
    pair.close()
    assert pair.source.closed
    assert pair.source.status(xfer).ok
    assert [result.id for result in pair.source.poll()] == [xfer]
    assert pair.source.stats().done == 1
    assert pair.source.notifications() == []
    with pytest.raises(kvt.Closed):
        pair.write([0], [0])
    with pytest.raises(kvt.Closed):
        pair.source.register(bytearray(10))
    with pytest.raises(kvt.Closed):
        pair.source.metadata()


def test_the_context_manager_closes() -> None:
    with (
        pytest.raises(RuntimeError, match="mine"),
        kvt.Transport("local") as transport,
    ):
        raise RuntimeError("mine")
    assert transport.closed


def test_options_reach_the_library() -> None:
    with kvt.Transport(
        "local",
        workers=1,
        inflight_max=2,
        notify_bytes_max=8,
        regions_max=1,
        grace=1,
        call_timeout=30.5,
        backends=["UCX"],
        params={"UCX": {"num_threads": 1}},
        telemetry=False,
        allow_ptrace=False,
    ) as transport:
        transport.register(bytearray(64))
        with pytest.raises(kvt.LimitReached, match="regions_max"):
            transport.register(bytearray(64))


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "none"},
        {"engine": 5},
        {"workers": -1},
        {"workers": 2**32},
        {"workers": 1.5},
        {"workers": True},
        {"inflight_max": 2**31},
        {"grace": -1},
        {"grace": float("nan")},
        {"grace": "1"},
        {"agent_name": "x" * 300},
        {"agent_name": "a\0b"},
        {"agent_name": "\ud800"},
        {"backends": "UCX"},
        {"backends": [1]},
        {"params": ["UCX"]},
        {"params": {"UCX": "num_threads=1"}},
        {"params": {1: {}}},
        {"unknown": 1},
    ],
)
def test_wrong_options_open_nothing(options: dict[str, object]) -> None:
    with pytest.raises((kvt.Error, TypeError)):
        kvt.Transport(**{"engine": "local", **options})  # type: ignore[arg-type]


def test_wrong_calls_are_type_errors(local_pair: Pair) -> None:
    source = local_pair.source
    for call in (
        lambda: source.poll(1, 2, 3),  # type: ignore[call-arg]
        lambda: source.poll("target"),  # type: ignore[arg-type]
        lambda: source.status("1"),  # type: ignore[arg-type]
        lambda: source.status(1.0),  # type: ignore[arg-type]
        lambda: source.write_blocks(local_pair.peer),  # type: ignore[call-arg]
        lambda: source.write_blocks(1, 2, [3], 4, [5], peer=1),  # type: ignore[call-arg]
        lambda: source.write_blocks(1, 2, [3], 4, [5], colour=1),  # type: ignore[call-arg]
        lambda: source.write(local_pair.peer, [(1, 2, "3")]),  # type: ignore[list-item]
        lambda: source.write(local_pair.peer, [5]),  # type: ignore[list-item]
        lambda: source.write(local_pair.peer, 5),  # type: ignore[arg-type]
        lambda: source.notify(local_pair.peer, "text"),  # type: ignore[arg-type]
        lambda: source.add_peer("x", "text"),  # type: ignore[arg-type]
        lambda: source.register(5),  # type: ignore[arg-type]
        lambda: source.register("text"),  # type: ignore[arg-type]
        lambda: source.prepare("x", [5]),  # type: ignore[list-item]
        lambda: source.cancel("12"),  # type: ignore[arg-type]
        lambda: source.register(bytearray(1), fd="x"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError):
            call()


def test_init_twice_is_refused(local_pair: Pair) -> None:
    with pytest.raises(kvt.Busy):
        local_pair.source.__init__("local")  # type: ignore[misc]
    assert not local_pair.source.closed


def test_a_transport_without_init_answers_closed() -> None:
    transport = kvt.Transport.__new__(kvt.Transport)
    assert transport.closed
    transport.close()
    for name in (
        "poll",
        "metadata",
        "stats",
        "metrics",
        "fileno",
        "notifications",
    ):
        with pytest.raises(kvt.Closed):
            getattr(transport, name)()


def test_wait_ends_at_its_timeout_and_can_be_repeated(
    fault_pair: MakePair,
) -> None:
    pair = fault_pair("hang=*")
    xfer = pair.write([0], [0])
    with pytest.raises(kvt.TimedOut):
        pair.source.wait(xfer, 0.01)
    with pytest.raises(TimeoutError):
        pair.source.wait(xfer, 0)
    pair.source.set_fault("")
    assert pair.source.wait(xfer, PATIENCE).ok
    with pytest.raises(kvt.NotFound):
        pair.source.wait(xfer, 1)


def test_wait_of_a_cancelled_transfer_raises(fault_pair: MakePair) -> None:
    pair = fault_pair("hang=*")
    xfer = pair.write([0], [0])
    while pair.source.status(xfer).state is not kvt.State.IN_PROGRESS:
        pass
    caught: list[BaseException] = []
    started = threading.Event()

    def wait() -> None:
        started.set()
        try:
            pair.source.wait(xfer, PATIENCE)
        except kvt.Error as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    pair.source.cancel([xfer])
    thread.join(PATIENCE)
    assert len(caught) == 1
    assert type(caught[0]) in (kvt.Cancelled, kvt.NotFound)


def test_two_waits_for_one_transfer_are_refused(fault_pair: MakePair) -> None:
    pair = fault_pair("hang=*")
    xfer = pair.write([0], [0])
    claim = pair.source._claim(xfer)
    with pytest.raises(kvt.Busy):
        pair.source.wait(xfer, 1)
    # Who was refused has not taken the other's claim away.
    with pytest.raises(kvt.Busy):
        pair.source.wait(xfer, 1)
    claim.leave()
    with pytest.raises(kvt.TimedOut):
        pair.source.wait(xfer, 0)


def test_a_wait_leaves_the_results_of_others(local_pair: Pair) -> None:
    source = local_pair.source
    others = [local_pair.write([i], [i]) for i in range(20)]
    local_pair.target.notify(
        local_pair.target.add_peer("source", source.metadata()), b"hello"
    )
    mine = local_pair.write([30], [30])
    poller = select.poll()
    poller.register(source.fileno(), select.POLLIN)
    assert source.wait(mine, PATIENCE).id == mine
    for xfer in others:
        assert source.status(xfer).id == xfer
    # What the wait drained is still there, and the descriptor still says so.
    assert poller.poll(PATIENCE * 1000)
    assert source.cancel(others[0], mode="wait") in ([], [others[0]])
    source.release(others[1])
    assert source.wait(others[2], PATIENCE).id == others[2]
    results = collect(source, 17)
    assert {r.id for r in results} == set(others[3:])
    notes: list[bytes] = []
    while not notes:
        assert poller.poll(PATIENCE * 1000)
        notes = [note.data for note in source.notifications()]
    assert notes == [b"hello"]
    assert poller.poll(0) == []


@pytest.mark.parametrize(
    ("xfer", "error"),
    [
        (-1, kvt.OutOfRange),
        (2**64, kvt.OutOfRange),
        (1.5, TypeError),
        ("a", TypeError),
        (True, TypeError),
    ],
)
def test_a_wait_for_what_is_no_id_says_so(
    local_pair: Pair, xfer: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="^xfer"):
        local_pair.source.wait(xfer, 1)
    with pytest.raises(error, match="^xfer"):
        asyncio.run(local_pair.source.wait_async(xfer))


@pytest.mark.parametrize(
    ("timeout", "error"),
    [
        (float("nan"), kvt.InvalidArgument),
        (-1, kvt.InvalidArgument),
        ("x", TypeError),
    ],
)
def test_a_wait_checks_its_timeout(
    local_pair: Pair, timeout: Any, error: type[Exception]
) -> None:
    xfer = local_pair.write([0], [0])
    with pytest.raises(error):
        local_pair.source.wait(xfer, timeout)
    assert local_pair.source.wait(xfer, float("inf")).ok
