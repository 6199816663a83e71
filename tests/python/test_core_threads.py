# SPDX-License-Identifier: Apache-2.0
"""One transport in many threads: nothing is lost, nothing is reported twice.

Rounds are bounded by counts. That the GIL is released in calls that wait is
proved by a second thread that must run for the call to end.
"""

from __future__ import annotations

import contextlib
import gc
import select
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import kvt
from conftest import BLOCK, COUNT, PATIENCE, Engine, Pair

MakePair = Callable[..., Pair]
ROUNDS = 200


def run_all(*functions: Callable[[], object]) -> None:
    """Runs functions in threads of their own and passes errors on."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=guarded, args=(function,))
        for function in functions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_writers_pollers_and_waiters_share_a_transport(pair: Pair) -> None:
    polled: list[int] = []
    waited: list[int] = []
    written: list[int] = []
    done = threading.Event()

    def write() -> None:
        for i in range(ROUNDS):
            block = i % COUNT
            written.append(pair.write([block], [block]))

    def wait() -> None:
        for i in range(ROUNDS):
            xfer = pair.write([i % COUNT], [i % COUNT])
            try:
                waited.append(pair.source.wait(xfer, PATIENCE).id)
            except (kvt.NotFound, kvt.Cancelled):
                # A poller was faster than our claim.
                written.append(xfer)

    def poll() -> None:
        poller = select.poll()
        poller.register(pair.source.fileno(), select.POLLIN)
        while not done.is_set() or pair.source.stats().undrained:
            poller.poll(10)
            polled.extend(result.id for result in pair.source.poll())
            pair.source.stats()
            pair.source.poll(pair.peer)
            pair.source.notifications()

    def mover() -> None:
        run_all(write, write, wait, wait)
        done.set()

    # poll(peer) above takes results as well: those are the ones not polled.
    run_all(mover, poll)
    pair.source.poll()
    assert not Counter(polled + waited) - Counter(written + waited)
    assert len(set(waited)) == len(waited)
    assert pair.source.stats().done == 4 * ROUNDS
    assert pair.source.stats().undrained == 0


def test_each_result_goes_to_one_of_two_pollers(local_pair: Pair) -> None:
    written: list[int] = []
    polled: list[int] = []

    def write() -> None:
        for i in range(ROUNDS):
            written.append(local_pair.write([i % COUNT], [i % COUNT]))

    def poll() -> None:
        while len(polled) < ROUNDS:
            polled.extend(r.id for r in local_pair.source.poll(limit=3))

    run_all(write, poll, poll)
    assert sorted(polled) == sorted(written)


def test_waits_find_their_results_while_others_wait(local_pair: Pair) -> None:
    def wait() -> None:
        for i in range(ROUNDS):
            xfer = local_pair.write([i % COUNT], [i % COUNT])
            assert local_pair.source.wait(xfer, PATIENCE).id == xfer

    def wait_in_batches() -> None:
        for _ in range(ROUNDS // 10):
            xfers = [local_pair.write([i], [i]) for i in range(10)]
            for xfer in reversed(xfers):
                assert local_pair.source.wait(xfer, PATIENCE).id == xfer

    run_all(wait, wait, wait_in_batches, wait_in_batches)
    assert local_pair.source.poll() == []
    assert local_pair.source.stats().undrained == 0


def test_a_wait_is_ended_by_another_thread(
    fault_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = fault_pair("hang=*")
    xfer = pair.write([0], [0])
    polled: list[kvt.Result] = []
    waiting = threading.Event()
    claim = kvt.Transport._claim

    def tell(*args: Any) -> Any:
        made = claim(*args)
        waiting.set()
        return made

    def let_go() -> None:
        assert waiting.wait(PATIENCE)
        pair.source.set_fault("")
        # Takes the result away from the waiter: it is delivered all the same.
        while not pair.source.stats().done:
            polled.extend(pair.source.poll())

    def wait() -> None:
        assert pair.source.wait(xfer, PATIENCE).id == xfer

    monkeypatch.setattr(kvt.Transport, "_claim", tell)
    run_all(let_go, wait)
    assert polled == []


def test_blocking_calls_let_others_run(fault_pair: MakePair) -> None:
    pair = fault_pair("mem_hang=*,load_hang=*,export_hang=*")
    memory, metadata = bytearray(64), pair.target.metadata()

    def let_go() -> None:
        pair.source.set_fault("")

    # Each ends only when the other thread gets to set_fault().
    for call in (
        lambda: pair.source.register(memory, timeout=PATIENCE),
        lambda: pair.source.add_peer("two", metadata, timeout=PATIENCE),
        lambda: pair.source.metadata(),
        lambda: pair.source.reload_peer(pair.peer, timeout=PATIENCE),
    ):
        pair.source.set_fault("mem_hang=*,load_hang=*,export_hang=*")
        run_all(call, let_go)


def test_a_close_that_waits_lets_others_run(fault_pair: MakePair) -> None:
    pair = fault_pair("hang=*")
    pair.write([0], [0])
    seen: list[bool] = []

    def look() -> None:
        try:
            while True:
                pair.source.warm_up(pair.peer)
        except kvt.LimitReached:
            pass
        except kvt.Closed:
            seen.append(pair.source.closed)

    def close() -> None:
        with contextlib.suppress(kvt.Busy):
            pair.source.close(timeout=0.5)

    run_all(look, close)
    # It was refused while close() had not returned.
    assert seen in ([False], [])


def test_close_while_others_work() -> None:
    for _ in range(10):
        pair = Pair(Engine("local", {}))
        started = threading.Barrier(4)

        def work(
            pair: Pair = pair, started: threading.Barrier = started
        ) -> None:
            started.wait()
            try:
                while True:
                    xfer = pair.write([0], [0])
                    memory = bytearray(64)
                    pair.source.register(memory)
                    pair.source.deregister(memory)
                    pair.source.poll()
                    pair.source.wait(xfer, PATIENCE)
            except (kvt.Closed, kvt.Cancelled, kvt.NotFound, kvt.LimitReached):
                pass

        def close(
            pair: Pair = pair, started: threading.Barrier = started
        ) -> None:
            started.wait()
            pair.source.close()

        run_all(work, work, work, close)
        pair.close()


def test_registrations_from_many_threads(local_pair: Pair) -> None:
    shared = bytearray(BLOCK)

    def work() -> None:
        for _ in range(50):
            own = bytearray(64)
            local_pair.source.register([own, shared])
            local_pair.source.deregister([shared, own])
            own.append(0)

    run_all(work, work, work)
    shared.append(0)
    assert local_pair.source.stats().regions == 1


def test_transports_come_and_go_in_threads() -> None:
    def work() -> None:
        for _ in range(10):
            pair = Pair(Engine("local", {}))
            pair.source.wait(pair.write([1], [1]), PATIENCE)
            pair.close()
            del pair
            gc.collect()

    run_all(work, work, work)


def test_two_inits_at_once_open_one() -> None:
    transport = kvt.Transport.__new__(kvt.Transport)
    outcomes: list[str] = []

    def init() -> None:
        try:
            transport.__init__("local")  # type: ignore[misc]
            outcomes.append("open")
        except kvt.Busy:
            outcomes.append("busy")

    run_all(init, init, init)
    assert sorted(outcomes) == ["busy", "busy", "open"]
    transport.close()


@pytest.mark.parametrize("calls", [50])
def test_cancel_races_with_waits(fault_pair: MakePair, calls: int) -> None:
    pair = fault_pair("delay=1")
    xfers = [pair.write([i % COUNT], [i % COUNT]) for i in range(calls)]

    def wait() -> None:
        for xfer in xfers:
            with contextlib.suppress(kvt.Cancelled, kvt.NotFound):
                pair.source.wait(xfer, PATIENCE)

    def cancel() -> None:
        for xfer in reversed(xfers):
            pair.source.cancel([xfer])

    run_all(wait, cancel)


class Stop(Exception):
    """Out of a signal's handler."""


def test_an_exception_out_of_a_handler_ends_a_wait_and_loses_nothing(
    local_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = local_pair.source
    swallowed: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", swallowed.append)
    raised = 0

    def handler(*_: object) -> None:
        nonlocal raised
        raised += 1
        raise Stop

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for i in range(3000):
            xfer = local_pair.write(range(COUNT), range(COUNT))
            seen = raised
            result = None
            caught = 0
            try:
                signal.setitimer(signal.ITIMER_REAL, (i % 100 + 1) * 3e-6)
                result = source.wait(xfer, PATIENCE)
            except Stop:
                caught += 1
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Stop:
                caught += 1
            assert caught == raised - seen
            if result is None:
                result = source.wait(xfer, PATIENCE)
            assert result.id == xfer
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert swallowed == []
    assert source.poll() == []


def test_a_lack_of_memory_does_not_come_between_a_result_and_its_wait(
    local_pair: Pair,
) -> None:
    testcapi = pytest.importorskip("_testcapi")
    source = local_pair.source
    for _ in range(20):
        xfer = local_pair.write([0], [0])
        claim = source._claim(xfer)
        poller = select.poll()
        poller.register(source._raw_fileno(), select.POLLIN)
        assert poller.poll(PATIENCE * 1000)
        drain = source._drain
        failed = False
        testcapi.set_nomemory(0, 0)
        try:
            drain()
        except MemoryError:
            failed = True
        testcapi.remove_mem_hooks()
        assert claim.done or not failed
        while not claim.look():
            pass
        assert claim.outcome.id == xfer
