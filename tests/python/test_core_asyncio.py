# SPDX-License-Identifier: Apache-2.0
"""Transports in event loops: fileno() with selectors and asyncio, and the
coroutines. Waits, polls and readers of one transport are mixed freely."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import kvt
from conftest import COUNT, PATIENCE, Pair

MakePair = Callable[..., Pair]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, PATIENCE)

    return asyncio.run(bounded())


def test_many_transfers_are_awaited_at_once(pair: Pair) -> None:
    async def main() -> None:
        data = [pair.fill(i, i) for i in range(COUNT)]
        xfers = [pair.write([i], [COUNT - 1 - i]) for i in range(COUNT)]
        results = await asyncio.gather(*map(pair.source.wait_async, xfers))
        assert [result.id for result in results] == xfers
        assert [pair.landed(COUNT - 1 - i) for i in range(COUNT)] == data

    run(main())
    assert pair.source.poll() == []


def test_awaited_failures_raise_their_class(fault_pair: MakePair) -> None:
    pair = fault_pair("reject=2")

    async def main() -> None:
        assert (await pair.source.wait_async(pair.write([0], [0]))).ok
        with pytest.raises(kvt.Rejected):
            await pair.source.wait_async(pair.write([0], [0]))
        with pytest.raises(kvt.NotFound):
            await pair.source.wait_async(12345)

    run(main())


def test_a_task_that_is_cancelled_leaves_the_transfer(
    fault_pair: MakePair,
) -> None:
    pair = fault_pair("hang=*")

    async def main() -> None:
        xfer = pair.write([0], [0])
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pair.source.wait_async(xfer), 0.01)
        pair.source.set_fault("")
        assert (await pair.source.wait_async(xfer)).ok

    run(main())


def test_an_awaited_transfer_that_is_cancelled_raises(
    fault_pair: MakePair,
) -> None:
    pair = fault_pair("hang=*")

    async def main() -> None:
        xfer = pair.write([0], [0])
        task = asyncio.ensure_future(pair.source.wait_async(xfer))
        await asyncio.sleep(0)
        pair.source.cancel([xfer])
        with pytest.raises(kvt.Cancelled):
            await task

    run(main())


def test_transfers_without_event_are_awaited(pair: Pair) -> None:
    async def main() -> None:
        xfers = [pair.write([i], [i], event=False) for i in range(4)]
        results = await asyncio.gather(*map(pair.source.wait_async, xfers))
        assert all(result.ok for result in results)

    run(main())


def test_add_and_reload_are_awaited(pair: Pair) -> None:
    async def main() -> None:
        metadata = pair.target.metadata()
        peers = await asyncio.gather(
            *(pair.source.add_peer_async(f"p{i}", metadata) for i in range(4))
        )
        assert all(map(pair.source.peer_loaded, peers))
        await pair.source.reload_peer_async(peers[0], timeout=PATIENCE)
        assert pair.source.peer_loaded(peers[0])
        with pytest.raises(kvt.BadMetadata):
            await pair.source.add_peer_async("bad", b"nonsense")

    run(main())


def test_a_cancelled_add_removes_the_peer(fault_pair: MakePair) -> None:
    pair = fault_pair("load_hang=*")

    async def main() -> None:
        adding = pair.source.add_peer_async("late", pair.target.metadata())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(adding, 0.01)
        with pytest.raises(kvt.NotFound):
            pair.source.find_peer("late")

    run(main())


def test_a_reader_sees_results_and_notifications(pair: Pair) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        seen: list[int] = []
        notes: list[bytes] = []
        done = asyncio.Event()

        def on_source() -> None:
            seen.extend(result.id for result in pair.source.poll())
            if len(seen) == 10 and notes:
                done.set()

        def on_target() -> None:
            notes.extend(n.data for n in pair.target.notifications())
            if len(seen) == 10 and notes:
                done.set()

        loop.add_reader(pair.source.fileno(), on_source)
        loop.add_reader(pair.target.fileno(), on_target)
        xfers = [pair.write([i], [i]) for i in range(10)]
        pair.source.notify(pair.peer, b"hi")
        await done.wait()
        loop.remove_reader(pair.source.fileno())
        loop.remove_reader(pair.target.fileno())
        assert sorted(seen) == sorted(xfers)
        assert notes == [b"hi"]

    run(main())


def test_readers_and_awaits_share_a_transport(local_pair: Pair) -> None:
    source = local_pair.source

    async def main() -> None:
        loop = asyncio.get_running_loop()
        seen: list[int] = []
        loop.add_reader(
            source.fileno(), lambda: seen.extend(r.id for r in source.poll())
        )
        for i in range(50):
            other = local_pair.write([1], [1])
            mine = local_pair.write([i], [i])
            assert (await source.wait_async(mine)).id == mine
            while other not in seen:
                await asyncio.sleep(0)
            assert mine not in seen
        loop.remove_reader(source.fileno())

    run(main())


def test_more_unread_notifications_than_are_kept(local_pair: Pair) -> None:
    back = local_pair.target.add_peer("back", local_pair.source.metadata())
    sent = 0
    while sent < 17000:
        try:
            local_pair.target.notify(back, b"x")
            sent += 1
        except kvt.LimitReached:
            pass

    async def main() -> None:
        for i in range(20):
            xfer = local_pair.write([i], [i])
            assert (await local_pair.source.wait_async(xfer)).ok
            xfer = local_pair.write([i], [i])
            assert local_pair.source.wait(xfer, PATIENCE).ok

    run(main())
    received = 0
    while received < sent:
        received += len(local_pair.source.notifications())


def test_loops_in_threads_share_a_transport(local_pair: Pair) -> None:
    failures: list[BaseException] = []

    async def main() -> None:
        for i in range(100):
            xfer = local_pair.write([i % COUNT], [i % COUNT])
            assert (await local_pair.source.wait_async(xfer)).id == xfer

    def work() -> None:
        try:
            run(main())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert failures == []


@pytest.mark.parametrize(
    "kind",
    [
        selectors.SelectSelector,
        selectors.PollSelector,
        selectors.EpollSelector,
    ],
)
def test_a_selector_sees_what_a_wait_kept(
    local_pair: Pair, kind: type[selectors.BaseSelector]
) -> None:
    source = local_pair.source
    with kind() as selector:
        selector.register(source, selectors.EVENT_READ)
        assert selector.select(0) == []
        other, mine = local_pair.write([0], [0]), local_pair.write([1], [1])
        source.wait(mine, PATIENCE)
        assert selector.select(PATIENCE)
        # Level-triggered: it is so until it is read.
        assert selector.select(0)
        while not (results := source.poll()):
            pass
        assert [result.id for result in results] == [other]
        assert selector.select(0) == []


@pytest.mark.parametrize("event", [True, False])
def test_a_cancel_between_a_result_and_its_task_loses_nothing(
    local_pair: Pair, event: bool
) -> None:
    source = local_pair.source

    async def main() -> None:
        for _ in range(50):
            xfer = local_pair.write([0], [0], event=event)
            task = asyncio.ensure_future(source.wait_async(xfer))
            await asyncio.sleep(0)
            # The task is told in this turn of the loop, and runs in the next.
            while not task.done() and not task._fut_waiter.done():
                await asyncio.sleep(0)
            if task.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert (await source.wait_async(xfer)).id == xfer
        assert source.poll() == []

    run(main())


def test_waits_that_time_out_at_any_moment_lose_nothing(
    local_pair: Pair,
) -> None:
    source = local_pair.source

    async def main() -> None:
        for i in range(300):
            xfer = local_pair.write(range(COUNT), range(COUNT))
            task = asyncio.ensure_future(source.wait_async(xfer))
            for _ in range(i % 7):
                await asyncio.sleep(0)
            task.cancel()
            try:
                result = await task
            except asyncio.CancelledError:
                result = await source.wait_async(xfer)
            assert result.id == xfer
        assert source.poll() == []

    run(main())


def test_what_is_awaited_in_a_closed_loop_goes_to_poll(
    fault_pair: MakePair,
) -> None:
    pair = fault_pair("hang=*")
    xfer = pair.write([0], [0])
    loop = asyncio.new_event_loop()
    task = loop.create_task(pair.source.wait_async(xfer))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    pair.source.set_fault("")
    while not (results := pair.source.poll()):
        pass
    assert [result.id for result in results] == [xfer]
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_an_exception_while_a_loop_is_woken_is_raised_and_loses_nothing(
    fault_pair: MakePair,
) -> None:
    pair = fault_pair("hang=*")
    xfers = [pair.write([i], [i]) for i in range(3)]
    calls: list[int] = []

    def wake() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("out of a handler")

    claims = [pair.source._claim(xfer, wake) for xfer in xfers[:2]]
    pair.source.set_fault("")
    results: list[kvt.Result] = []
    raised = 0
    while not (results and all(claim.done for claim in claims)):
        try:
            results += pair.source.poll()
        except KeyError:
            raised += 1
    assert raised == 1
    assert len(calls) == 3  # the first one was tried again
    assert [result.id for result in results] == xfers[2:]
    assert [claim.outcome.id for claim in claims] == xfers[:2]
