# SPDX-License-Identifier: Apache-2.0
"""Proves that the table of a NixlTransport's flights (flights.c) is one.

Transfers to two peers, which the fault engine holds, are started and forgotten
in a seeded random order; after each step the table says what a dictionary says.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import random
import signal
import weakref
from collections.abc import Callable, Iterator

import pytest

import kvt
from kvt.vllm import PollResult, _flights
from stage import until
from vllm_support.sides import Side, Sides, choose


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    choose("fault", monkeypatch)
    with Sides() as made:
        yield made
        for side in made.made:
            side.fault("")


def table(side: Side) -> _flights.Flights:
    assert side.transport._flights is not None
    return side.transport._flights


@pytest.mark.parametrize("seed", range(4))
def test_each_flight_is_found_until_it_is_forgotten(
    seed: int, sides: Sides
) -> None:
    a, _ = sides.two()
    a.add(sides.side())
    a.fault("hold")
    flights = table(a)
    peers = a.transport._peers
    model: dict[int, str] = {}
    rng = random.Random(seed)
    for turn in range(1200):
        # Old ones remain while numbers go on, so that slots collide.
        if rng.random() < 0.6 or not model:
            name = rng.choice("bc")
            number = a.transport.write_blocks(name, [1], [1])
            assert number is not None
            model[number] = name
        else:
            number = rng.choice([*model][-40:])
            assert flights.forget(number)
            assert not flights.forget(number)
            del model[number]
        assert flights.count == len(model)
        if turn % 50 == 0:
            for other in range(max(model, default=0) + 2):
                found = flights.find(other)
                assert (found is not None) == (other in model)
                if found is not None:
                    assert found[0] is peers[model[other]]
    of_b = [number for number, name in model.items() if name == "b"]
    assert sorted(number for number, _ in peers["b"].clear()) == of_b
    assert peers["b"].count == 0 and peers["b"].clear() == []
    assert flights.count == peers["c"].count == len(model) - len(of_b)
    for number, name in model.items():
        assert (flights.find(number) is None) == (name == "b")


def test_the_ids_are_kvts_own(sides: Sides) -> None:
    a, _ = sides.two()
    a.fault("hold")
    number = a.transport.write_blocks("b", [1], [1])
    peer, xfer = table(a).find(number) or (None, 0)
    assert peer is a.transport._peers["b"]
    status = a.inner().status(xfer)
    assert (status.user_data, status.peer) == (number, peer.id)
    assert peer.clear() == [(number, xfer)]


def test_what_is_no_number_is_not_found(sides: Sides) -> None:
    a, _ = sides.two()
    for wrong in -1, 2**64, 2**80, "1", None, 1.0, 0:
        assert table(a).find(wrong) is None
        assert table(a).forget(wrong) is False


def test_results_of_others_are_no_flights(sides: Sides) -> None:
    """Whoever writes by the transport underneath may use our numbers."""
    a, b = sides.two()
    a.fault("hold=1")
    number = a.write(b, [1], [11])
    until("the bytes are there", lambda: b.pool.wrong() == [])
    inner = a.inner()
    peer = inner.find_peer("b")
    theirs = inner.find_layout("blocks", peer)
    b.pool.expect(12, a.pool.block(2))
    other = inner.write_blocks(
        peer, a.transport._layout, [2], theirs, [12], user_data=number
    )
    until("it is done", lambda: inner.status(other).ok)
    assert a.transport.poll() == ((), ())
    with pytest.raises(kvt.NotFound):
        inner.status(other)
    a.fault("")
    done, failed = a.results(1)
    assert done + failed == [number]
    assert b.pool.wrong() == []


def test_what_is_cancelled_before_it_is_reported_is_not(sides: Sides) -> None:
    """As when another thread cancels in the middle of a poll."""
    a, _ = sides.two()
    a.fault("fail=1")
    number = a.transport.write_blocks("b", [1], [1])
    assert number is not None
    until("it is over", lambda: a.inner().stats().undrained == 1)
    peer = a.transport._peers["b"]
    assert peer.look()
    assert [result.user_data for result in peer.odd] == [number]
    assert a.transport.cancel([number]) == []
    table(a).settle(peer)
    assert peer.odd == []
    assert a.transport.poll("b") == ((), ())


@pytest.mark.parametrize("again", [True, False])
def test_a_peer_that_is_about_to_go_takes_no_writes(
    again: bool, sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write of another thread may have found it just before."""
    a, b = sides.two()
    peer = a.transport._peers["b"]
    remove = a.inner().remove_peer
    refused: list[int] = []

    def write_first(which: int) -> None:
        with pytest.raises(kvt.NotFound, match="removed"):
            peer.write([1], [1])
        refused.append(which)
        remove(which)

    monkeypatch.setattr(a.inner(), "remove_peer", write_first)
    if again:
        a.add(b)
    else:
        a.transport.remove_remote_peer("b")
    assert refused == [peer.id]
    assert b.pool.wrong() == []


def test_flights_are_collected_with_the_rest() -> None:
    class Flights(_flights.Flights):
        pass

    with kvt.Transport("local") as transport:
        memory = bytearray(4096)
        transport.register(memory)
        run = (kvt.region_of(memory).addr, 64, 64)
        ours = transport.prepare("ours", [run])
        peers: dict[str, _flights.Peer] = {}
        flights = Flights(transport, ours, peers, PollResult((), ()), "agent")
        peer = _flights.Peer(flights, 7, 7, "nobody")
        with pytest.raises(kvt.NotFound):
            peer.write([0], [0])
        flights.replaced["nobody"] = [peer]
        peers["nobody"] = peer
        gone = weakref.ref(flights)
        del flights, peer, peers
        gc.collect()
        assert gone() is None


# -------------------------------------------------- polls that fail half-way


class Stop(BaseException):
    pass


def ended(a: Side, rules: str = "") -> list[int]:
    """Three transfers that nobody has polled yet."""
    a.fault(rules)
    numbers = [a.transport.write_blocks("b", [n], [n]) for n in range(3)]
    until("they are over", lambda: a.inner().stats().undrained == 3)
    return [number for number in numbers if number is not None]


def no_memory(*_: object) -> None:
    raise MemoryError


def broken(why: str) -> Callable[..., object]:
    """A PollResult.__new__() by which a poll fails."""
    if why == "no memory":
        return no_memory
    # In C, so that no Python code runs in which the handler would come at once.
    strike = ctypes.CDLL(None)["raise"]
    strike.argtypes = [ctypes.c_int] + 3 * [ctypes.py_object]
    return functools.partial(strike, signal.SIGUSR1)


@pytest.mark.parametrize("asked", ["b", None])
@pytest.mark.parametrize("why", ["a handler", "no memory"])
def test_a_poll_that_fails_loses_nothing(
    why: str, asked: str | None, sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise Stop

    a, _ = sides.two()
    numbers = ended(a)
    former = signal.signal(signal.SIGUSR1, stop)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(PollResult, "__new__", staticmethod(broken(why)))
            with pytest.raises(Stop if why == "a handler" else MemoryError):
                a.transport.poll(asked)
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert table(a).count == 3
    assert a.transport.poll(asked) == (numbers, ())
    assert a.transport.poll(asked) == ((), ())
    assert table(a).count == 0


@pytest.mark.parametrize("asked", ["b", None])
@pytest.mark.parametrize("at", [1, 2])
def test_a_look_at_failures_that_fails_loses_nothing(
    at: int, asked: str | None, sides: Sides
) -> None:
    """The warning of one of them runs code that raises."""
    seen = []

    def raise_once(record: logging.LogRecord) -> bool:
        if "check_xfer_state failed" in record.getMessage():
            seen.append(record)
            if len(seen) == at:
                raise Stop
        return True

    a, _ = sides.two()
    first, *others = ended(a, "fail=2-3")
    _flights.logger.addFilter(raise_once)
    try:
        with pytest.raises(Stop):
            a.transport.poll(asked)
        assert a.transport.poll(asked) == ([first], others)
    finally:
        _flights.logger.removeFilter(raise_once)
    assert a.transport.poll(asked) == ((), ())
    assert table(a).count == 0


@pytest.mark.parametrize("asked", ["b", None])
@pytest.mark.parametrize("rules", ["", "fail=2-3"])
def test_a_poll_without_memory_loses_nothing(
    rules: str, asked: str | None, sides: Sides
) -> None:
    """Each of its allocations fails once. Python itself sometimes says
    SystemError then."""
    testcapi = pytest.importorskip("_testcapi")
    a, _ = sides.two()
    failed = 0
    for nth in range(1, 12 if not rules else 60):
        numbers = ended(a, rules)
        found: list[int] = []
        testcapi.set_nomemory(nth, nth + 1)
        try:
            answer = a.transport.poll(asked)
        except (MemoryError, SystemError):
            answer = None
        finally:
            testcapi.remove_mem_hooks()
        failed += answer is None
        if answer is not None:
            found += [*answer.done, *answer.failed]
        answer = a.transport.poll(asked)
        found += [*answer.done, *answer.failed]
        assert sorted(found) == numbers
        assert table(a).count == 0
    assert failed > 0


def test_a_peer_that_goes_takes_along_what_was_not_reported(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = sides.two()
    ended(a)
    with monkeypatch.context() as patch:
        patch.setattr(PollResult, "__new__", staticmethod(no_memory))
        with pytest.raises(MemoryError):
            a.transport.poll("b")
    a.transport.remove_remote_peer("b")
    assert table(a).count == 0
    assert a.transport.poll() == ((), ())
