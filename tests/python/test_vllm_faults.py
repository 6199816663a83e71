# SPDX-License-Identifier: Apache-2.0
"""Proves what kvt.vllm.NixlTransport does when transfers and peers go wrong,
and when calls race.

The fault engine around the local one holds, breaks and loses posts on order, so
each case is there every time. The peer's pool is compared with its image
byte by byte: what must not land any more must not have landed.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

import kvt
from kvt.vllm import _flights, _transport
from stage import LIMIT, until
from vllm_support.sides import Side, Sides, choose

LOGGER = "vllm.v1.kv_offload.tiering.p2p.data.nixl"
NOTHING = ((), ())


@pytest.fixture
def sides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Sides]:
    choose("fault", monkeypatch)
    caplog.set_level(logging.DEBUG, LOGGER)
    with Sides() as made:
        yield made
        for side in made.made:
            if side.transport.available:
                side.fault("")


def lines(caplog: pytest.LogCaptureFixture, level: str, text: str) -> int:
    """How many such lines were logged."""
    return sum(
        record.levelname == level and text in record.getMessage()
        for record in caplog.records
    )


def held(a: Side, b: Side, rules: str = "hold=1") -> int:
    """A transfer whose bytes are there and whose end is not."""
    a.fault(rules)
    number = a.write(b, [1, 2], [11, 12])
    until("the bytes are there", lambda: b.pool.wrong() == [])
    assert a.transport.poll() == NOTHING
    return number


# ---------------------------------------------------------------------- cancel


def test_cancel_wait_names_what_can_still_touch_memory(
    sides: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's class returned [] here while bytes went on landing."""
    a, b = sides.two()
    number = held(a, b)
    for _ in range(3):
        assert a.transport.cancel([number], mode="wait") == [number]
        assert a.transport.poll("b") == NOTHING
    assert lines(caplog, "DEBUG", "cancel pending") == 3
    a.fault("")
    done, failed = a.results(1, "b")
    assert done + failed == [number]
    assert a.transport.cancel([number], mode="wait") == []


def test_cancel_wait_keeps_unposted_parts_from_landing(sides: Sides) -> None:
    rules = "chunk_copies=1,window=1,hold=1"
    a, b = sides.side(engine=f"fault:local?{rules}"), sides.side()
    a.add(b)
    number = a.transport.write_blocks("b", [1, 3, 5], [11, 14, 17])
    assert number is not None
    b.pool.expect(11, a.pool.block(1))
    until("the first is there", lambda: b.pool.wrong() == [])
    assert a.transport.cancel(iter([number]), mode="wait") == [number]
    a.fault("")
    assert a.results(1) == ([], [number])
    assert b.pool.wrong() == []


def test_cancel_wait_forgets_what_was_never_posted(sides: Sides) -> None:
    rules = "chunk_copies=1,window=1,hold=1"
    a, b = sides.side(engine=f"fault:local?{rules}"), sides.side()
    a.add(b)
    first = a.write(b, [1], [11])
    until("the first is there", lambda: b.pool.wrong() == [])
    second = a.transport.write_blocks("b", [2], [22])
    assert a.transport.cancel([first, second], mode="wait") == [first]
    a.fault("")
    a.results(1)
    assert a.transport.poll() == NOTHING
    assert b.pool.wrong() == []


def test_cancel_immediate_returns_nothing_and_reports_nothing(
    sides: Sides,
) -> None:
    a, b = sides.two()
    number = held(a, b)
    assert a.transport.cancel([number]) == []
    assert a.transport.poll() == NOTHING
    assert a.inner().stats().inflight == 1
    a.fault("")
    until("it is over", lambda: a.inner().stats().inflight == 0)
    assert a.transport.poll() == NOTHING
    assert a.inner().stats().undrained == 0


def test_a_second_cancel_can_be_immediate(sides: Sides) -> None:
    """What vLLM does when waiting has taken too long."""
    a, b = sides.two()
    number = held(a, b)
    assert a.transport.cancel([number], mode="wait") == [number]
    assert a.transport.cancel([number, number], mode="immediate") == []
    assert a.transport.cancel([number], mode="wait") == []
    a.fault("")
    until("it is over", lambda: a.inner().stats().inflight == 0)
    assert a.transport.poll() == NOTHING


# -------------------------------------------------------------- how things end


@pytest.mark.parametrize("rule", ["reject=1", "fail=1", "fail_unposted=1"])
def test_what_fails_is_reported_as_failed_and_logged(
    rule: str, sides: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = sides.two()
    a.fault(rule)
    number = a.transport.write_blocks("b", [1], [11])
    assert a.results(1, "b") == ([], [number])
    b.pool.expect(11, b.pool.block(11))
    text = f"check_xfer_state failed for transfer_id={number}: "
    assert lines(caplog, "WARNING", text) == 1
    again = a.write(b, [2], [12])
    assert a.results(1, "b") == ([again], [])
    assert b.pool.wrong() == []


def test_a_failure_is_not_reported_before_its_last_byte(sides: Sides) -> None:
    a, b = sides.two()
    number = held(a, b, "fail=1,hold=1")
    a.fault("")
    assert a.results(1) == ([], [number])


def test_what_nobody_can_tell_stays_in_flight(sides: Sides) -> None:
    a, b = sides.two()
    number = held(a, b, "unreadable=1")
    assert a.transport._flights is not None
    _, xfer = a.transport._flights.find(number) or (None, 0)
    assert a.inner().status(xfer).state == kvt.State.UNREADABLE
    assert a.transport.poll("b") == NOTHING
    assert a.transport.cancel([number], mode="wait") == [number]
    a.fault("")
    assert a.results(1) == ([], [number])


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """kvt gives a transfer up as lost after 1 ms, not 30 s."""
    short = functools.partial(kvt.Transport, grace=0.001)
    monkeypatch.setattr(kvt, "Transport", short)


@pytest.mark.usefixtures("short_grace")
def test_what_is_lost_is_not_reported_until_it_is_proven(
    sides: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = sides.two()
    number = held(a, b, "unreadable=1")
    until("it is lost", lambda: a.inner().stats().lost == 1)
    for _ in range(3):
        assert a.transport.poll("b") == NOTHING
        assert a.transport.cancel([number], mode="wait") == [number]
    assert lines(caplog, "WARNING", "check_xfer_state failed") == 1
    a.fault("")
    assert a.results(1) == ([], [number])
    assert a.transport.poll() == NOTHING


@pytest.mark.usefixtures("short_grace")
def test_a_lost_one_that_somebody_else_drained_is_still_reported(
    sides: Sides,
) -> None:
    a, b = sides.two()
    number = held(a, b, "unreadable=1")
    until("it is lost", lambda: a.inner().stats().lost == 1)
    # As a registration under way does: it waits, and keeps what is not its own.
    peer = a.transport._peers["b"]
    other = a.inner().warm_up(peer.id)
    a.inner().wait(other, timeout=30)
    assert a.transport.cancel([number], mode="wait") == [number]
    a.fault("")
    assert a.results(1) == ([], [number])
    assert a.transport.poll() == NOTHING


def test_at_the_limit_a_write_gets_none_and_a_warning(
    sides: Sides,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    few = functools.partial(kvt.Transport, inflight_max=2)
    monkeypatch.setattr(kvt, "Transport", few)
    a, b = sides.two()
    a.fault("hold")
    numbers = [a.write(b, [i], [i]) for i in range(2)]
    assert a.transport.write_blocks("b", [3], [3]) is None
    assert lines(caplog, "WARNING", "write_blocks to peer=b failed") == 1
    a.fault("")
    assert a.results(2) == (numbers, [])
    assert a.write(b, [3], [3]) == 2
    a.results(1)
    assert b.pool.wrong() == []


# ------------------------------------------------------------------ disconnect


def test_a_disconnected_peer_gets_none_until_it_is_added_again(
    sides: Sides,
) -> None:
    a, b = sides.two()
    a.fault("disconnect=1")
    number = a.write(b, [1], [11])
    assert a.results(1) == ([], [number])
    assert a.transport.write_blocks("b", [2], [12]) is None
    a.add(b)
    a.write(b, [2], [12])
    a.results(1)
    assert b.pool.wrong() == []


def test_polls_alone_see_a_disconnect(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = sides.two()
    number = held(a, b, "disconnect=1,hold=1")
    monkeypatch.setattr(_flights, "GRACE", 0)
    found: list[int] = []

    def reported() -> bool:
        found.extend(a.transport.poll("b").failed)
        return found == [number]

    until("it is reported", reported)
    a.fault("")


def test_an_unproven_disconnect_is_reported_after_the_grace(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = sides.two()
    number = held(a, b, "disconnect=1,hold=1")
    monkeypatch.setattr(_flights, "GRACE", 3600)
    assert a.transport.write_blocks("b", [2], [12]) is None
    assert a.transport.poll("b") == NOTHING
    assert a.transport.cancel([number], mode="wait") == [number]
    monkeypatch.setattr(_flights, "GRACE", 0)
    assert a.transport.poll("b") == ((), [number])
    assert a.transport.poll("b") == NOTHING
    # kvt itself goes on watching.
    assert a.inner().stats().inflight == 1
    a.fault("")
    until("it is over", lambda: a.inner().stats().inflight == 0)
    assert a.transport.poll() == NOTHING


def test_a_disconnect_counts_as_final_in_a_cancel_after_the_grace(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = sides.two()
    number = held(a, b, "disconnect=1,hold=1")
    monkeypatch.setattr(_flights, "GRACE", 0)
    assert a.transport.cancel([number], mode="wait") == []
    assert a.transport.poll("b") == NOTHING


def test_a_dead_peer_is_reported_without_a_grace(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_flights, "GRACE", 3600)
    a, b = sides.two()
    a.fault("dead=2")
    first = a.write(b, [1], [11])
    assert a.results(1) == ([first], [])
    second = a.transport.write_blocks("b", [2], [12])
    assert a.results(1) == ([], [second])
    assert b.pool.wrong() == []


# -------------------------------------------------------- removed, added again


def test_a_removed_peers_transfers_are_never_reported(sides: Sides) -> None:
    """vLLM's class neither reports nor forgets them."""
    a, b = sides.two()
    number = held(a, b)
    a.transport.remove_remote_peer("b")
    assert a.transport.poll() == NOTHING
    assert a.transport.cancel([number], mode="wait") == []
    a.fault("")
    until("it is over", lambda: a.inner().stats().inflight == 0)
    assert a.transport.poll() == NOTHING
    assert a.inner().stats().undrained == 0
    assert a.inner().stats().peers == 0
    a.add(b)
    a.write(b, [2], [12])
    a.results(1, "b")
    assert b.pool.wrong() == []


def test_a_peer_added_again_keeps_the_transfers_of_before(sides: Sides) -> None:
    a, b = sides.two()
    number = held(a, b)
    a.add(b)
    later = a.write(b, [3], [13])
    assert a.results(1, "b") == ([later], [])
    assert a.transport.cancel([number], mode="wait") == [number]
    a.fault("")
    done, failed = a.results(1, "b")
    assert done + failed == [number]
    assert b.pool.wrong() == []
    assert a.transport.poll("b") == NOTHING
    assert a.transport._flights is not None
    assert a.transport._flights.take_replaced("b") == []


def test_removing_forgets_what_was_replaced_too(sides: Sides) -> None:
    a, b = sides.two()
    held(a, b)
    a.add(b)
    a.transport.remove_remote_peer("b")
    assert a.transport.poll() == NOTHING
    a.fault("")
    until("it is over", lambda: a.inner().stats().inflight == 0)
    assert a.transport.poll() == NOTHING


def test_a_release_that_fails_is_logged_and_the_rest_happens(
    sides: Sides,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b = sides.two()
    held(a, b)

    def fail(*_: object) -> None:
        raise kvt.EngineError("the engine does not want to")

    with monkeypatch.context() as patch:
        patch.setattr(a.inner(), "remove_peer", fail)
        patch.setattr(a.inner(), "cancel", fail)
        a.transport.remove_remote_peer("b")
    assert lines(caplog, "WARNING", "release_xfer_handle failed") == 1
    assert lines(caplog, "WARNING", "removing peer=b failed") == 1
    assert a.transport.poll() == NOTHING
    assert a.transport.write_blocks("b", [0], [0]) is None


def test_what_could_not_be_released_is_not_reported_later(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = sides.two()
    number = held(a, b, "disconnect=1,hold=1")

    def fail(*_: object) -> None:
        raise kvt.EngineError("the engine does not want to")

    monkeypatch.setattr(_flights, "GRACE", 0)
    with monkeypatch.context() as patch:
        patch.setattr(a.inner(), "cancel", fail)
        assert a.results(1, "b") == ([], [number])
    later = a.inner().stats().undrained
    a.fault("")
    until("its end is there", lambda: a.inner().stats().undrained > later)
    assert a.transport.poll("b") == NOTHING


# --------------------------------------------------------------- registrations


def test_the_newest_registration_wins(
    sides: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = sides.side(), sides.side(), sides.side()
    a.fault("load_hang=1")
    first = a.transport.add_remote_peer_async("x", *b.arguments())
    second = a.transport.add_remote_peer_async("x", *c.arguments())
    assert second.result(LIMIT) is None
    error = first.exception(LIMIT)
    assert isinstance(error, RuntimeError)
    assert "x" in str(error)
    assert lines(caplog, "INFO", "discarding superseded registration") == 1
    a.write(c, [1], [2], name="x")
    a.results(1)
    a.fault("")
    until("the first is gone", lambda: a.inner().stats().peers == 1)
    a.write(c, [3], [4], name="x")
    a.results(1)
    assert b.pool.wrong() == c.pool.wrong() == []


def test_a_removed_registration_fails_by_the_peers_name(sides: Sides) -> None:
    a, b = sides.side(), sides.side()
    a.fault("load_hang=1")
    future = a.transport.add_remote_peer_async("b:1", *b.arguments())
    a.transport.remove_remote_peer("b:1")
    with pytest.raises(RuntimeError, match="b:1"):
        future.result(LIMIT)
    assert a.transport.write_blocks("b:1", [0], [0]) is None


def test_a_superseded_sync_registration_returns_in_silence(
    sides: Sides,
) -> None:
    a, b = sides.side(), sides.side()
    arguments = b.arguments()
    ended: list[BaseException | None] = []

    def add() -> None:
        try:
            a.transport.add_remote_peer("b", *arguments)
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    a.fault("load_hang=1")
    thread = threading.Thread(target=add)
    thread.start()
    until("it has begun", lambda: a.inner().stats().peers == 1)
    a.add(b)
    thread.join(LIMIT)
    assert ended == [None]
    a.write(b, [1], [2])
    a.results(1)
    assert b.pool.wrong() == []


def test_nothing_is_written_between_adding_again_and_its_end(
    sides: Sides,
) -> None:
    a, b = sides.two()
    a.fault("load_hang=1")
    future = a.transport.add_remote_peer_async("b", *b.arguments())
    assert a.transport.write_blocks("b", [0], [0]) is None
    a.fault("")
    future.result(LIMIT)
    a.write(b, [1], [2])
    a.results(1)
    assert b.pool.wrong() == []


# B48
def test_one_slow_peer_keeps_no_other_waiting(sides: Sides) -> None:
    a, b, c = sides.side(), sides.side(), sides.side()
    a.fault("load_hang=1")
    slow = a.transport.add_remote_peer_async("b", *b.arguments())
    a.transport.add_remote_peer_async("c", *c.arguments()).result(LIMIT)
    assert not slow.done()
    a.write(c, [1], [2])
    a.results(1)
    a.fault("")
    slow.result(LIMIT)
    assert c.pool.wrong() == []


def test_a_failed_load_is_raised_and_leaves_nothing(sides: Sides) -> None:
    a, b = sides.side(), sides.side()
    a.fault("load_fail=1;2")
    with pytest.raises(kvt.Error):
        a.add(b)
    future = a.transport.add_remote_peer_async("b", *b.arguments())
    assert isinstance(future.exception(LIMIT), kvt.Error)
    assert a.inner().stats().peers == 0
    a.add(b)
    a.write(b, [1], [2])
    a.results(1)
    assert b.pool.wrong() == []


def test_a_registration_that_takes_too_long_is_given_up(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_transport, "ADD_TIMEOUT", 0.01)
    a, b = sides.side(), sides.side()
    a.fault("load_hang=1")
    with pytest.raises(TimeoutError):
        a.add(b)
    a.fault("")
    until("it is gone", lambda: a.inner().stats().peers == 0)
    assert a.transport.write_blocks("b", [0], [0]) is None


def test_nobody_polls_and_a_registration_ends_all_the_same(
    sides: Sides,
) -> None:
    """vLLM's own work stood still until the scheduler's next step."""
    a, b = sides.side(), sides.side()
    ran: list[str] = []
    a.fault("load_delay=10")
    future = a.transport.add_remote_peer_async("b", *b.arguments())
    future.add_done_callback(
        lambda _: ran.append(threading.current_thread().name)
    )
    future.result(LIMIT)
    until("its callback ran", lambda: ran)
    assert ran == ["kvt-vllm-add"]


def test_a_future_cannot_be_cancelled(sides: Sides) -> None:
    a, b = sides.side(), sides.side()
    a.fault("load_hang=1")
    future = a.transport.add_remote_peer_async("b", *b.arguments())
    assert not future.cancel()
    a.fault("")
    assert future.result(LIMIT) is None


# ----------------------------------------------------------------------- close


def test_close_lets_a_registration_finish(sides: Sides) -> None:
    a, b = sides.side(), sides.side()
    a.fault("load_delay=20")
    future = a.transport.add_remote_peer_async("b", *b.arguments())
    a.transport.close()
    assert future.result(LIMIT) is None
    assert a.transport.write_blocks("b", [0], [0]) is None


def test_close_gives_up_a_registration_that_hangs(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_transport, "CLOSE_TIMEOUT", 0.1)
    a, b = sides.side(), sides.side()
    a.fault("load_hang=1")
    future = a.transport.add_remote_peer_async("b", *b.arguments())
    a.transport.close()
    with pytest.raises(RuntimeError):
        future.result(LIMIT)


def test_close_keeps_memory_that_can_still_be_touched(
    sides: Sides,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_transport, "CLOSE_TIMEOUT", 0.1)
    a, b = sides.two()
    held(a, b)
    a.transport.close()
    assert lines(caplog, "WARNING", "release_xfer_handle failed") == 1
    a.pool.view.release()
    with pytest.raises(BufferError):
        a.pool.map.close()
    assert a.transport.poll() == NOTHING


def test_close_ends_what_is_under_way(sides: Sides) -> None:
    a, b = sides.two()
    a.fault("late=*/20")
    for block in range(8):
        a.write(b, [block], [block])
    a.transport.close()
    assert a.transport.poll() == NOTHING
    a.pool.view.release()
    a.pool.map.close()


# --------------------------------------------------------------------- threads


# B34
def test_calls_of_many_threads_report_each_transfer_once(sides: Sides) -> None:
    """vLLM's class: dictionary changed size during iteration."""
    a, b = sides.two()
    c = sides.side()
    a.add(c)
    a.fault("delay=1")
    accepted: list[int] = []
    reported: list[int] = []
    errors: list[BaseException] = []
    writing = threading.Event()
    writing.set()

    def write(peer: Side, first: int) -> None:
        for turn in range(200):
            block = first + turn % 8
            number = a.transport.write_blocks(peer.name, [block], [block])
            if number is not None:
                accepted.append(number)

    def poll(name: str | None) -> None:
        while writing.is_set() or len(reported) < len(accepted):
            result = a.transport.poll(name)
            reported.extend([*result.done, *result.failed])

    def add() -> None:
        arguments = c.arguments()
        while writing.is_set():
            a.transport.add_remote_peer("other", *arguments)
            a.transport.remove_remote_peer("other")

    def guarded(work: object, *args: object) -> None:
        try:
            work(*args)  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)
            writing.clear()

    def start(work: object, *args: object) -> threading.Thread:
        thread = threading.Thread(target=guarded, args=(work, *args))
        thread.start()
        return thread

    pollers = [start(poll, name) for name in ("b", "c", None)] + [start(add)]
    writers = [start(write, b, 0), start(write, b, 8), start(write, c, 16)]
    for thread in writers:
        thread.join(LIMIT)
    until(
        "all are reported",
        lambda: errors or len(reported) == len(accepted) == 600,
    )
    writing.clear()
    for thread in pollers:
        thread.join(LIMIT)
    assert not errors
    assert Counter(reported) == Counter(range(600))
    assert not any(t.is_alive() for t in pollers + writers)
    for block in range(16):
        b.pool.expect(block, a.pool.block(block))
    for block in range(16, 24):
        c.pool.expect(block, a.pool.block(block))
    assert b.pool.wrong() == c.pool.wrong() == []


class Meddling:
    """An index that does something first: where a call of another thread, too,
    may come between a write's begin and its start."""

    def __init__(self, block: int, work: Callable[[], object]) -> None:
        self.block = block
        self.work = work

    def __index__(self) -> int:
        self.work()
        return self.block


def test_a_write_within_a_write_is_a_transfer_of_its_own(sides: Sides) -> None:
    a, b = sides.two()
    ended: list[int] = []

    def write() -> None:
        a.write(b, [3], [13])
        ended.extend(a.results(1, "b")[0])

    number = a.transport.write_blocks("b", [Meddling(5, write)], [15])
    b.pool.expect(15, a.pool.block(5))
    ended.extend(a.results(1, "b")[0])
    assert ended == [0, number] == [0, 1]
    assert b.pool.wrong() == []


def test_a_peer_that_is_removed_during_a_write_gets_none(
    sides: Sides,
) -> None:
    a, b = sides.two()
    index = Meddling(1, lambda: a.transport.remove_remote_peer("b"))
    assert a.transport.write_blocks("b", [index], [1]) is None
    assert a.transport.poll() == NOTHING
    assert a.inner().stats().accepted == 2  # the registration, the warm-up
    assert b.pool.wrong() == []


def test_a_peer_that_is_added_again_during_a_write_gets_none(
    sides: Sides,
) -> None:
    a, b = sides.two()
    before = held(a, b)
    index = Meddling(1, lambda: a.add(b))
    assert a.transport.write_blocks("b", [1], [index]) is None
    after = a.write(b, [2], [12])
    a.fault("")
    done, failed = a.results(2, "b")
    assert sorted(done + failed) == [before, after] == [0, 1]
    assert b.pool.wrong() == []


def test_a_transport_that_is_closed_during_a_write_gives_none(
    sides: Sides,
) -> None:
    a, b = sides.two()
    index = Meddling(1, a.transport.close)
    assert a.transport.write_blocks("b", [1], [index]) is None
    assert a.transport.poll() == NOTHING
    assert b.pool.wrong() == []


def test_cancel_racing_poll_reports_nothing_twice(sides: Sides) -> None:
    a, b = sides.two()
    reported: list[int] = []
    cancelled: list[int] = []
    ended = threading.Event()

    def poll() -> None:
        while not ended.is_set():
            result = a.transport.poll()
            reported.extend([*result.done, *result.failed])

    thread = threading.Thread(target=poll)
    thread.start()
    for turn in range(300):
        number = a.transport.write_blocks("b", [turn % 8], [turn % 8])
        assert number is not None
        if not a.transport.cancel([number], mode="wait"):
            cancelled.append(number)
    ended.set()
    thread.join(LIMIT)
    a.results(0)
    until(
        "nothing is under way",
        lambda: (
            a.transport.poll() == NOTHING and a.inner().stats().inflight == 0
        ),
    )
    assert max(Counter(reported).values(), default=1) == 1
    for block in range(8):
        b.pool.expect(block, b.pool.block(block))
    assert b.pool.wrong() == []
