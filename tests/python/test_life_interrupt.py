# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a call waits inside the library: each call that waits.

The fault engine holds the call back, so that without the interrupt it would
wait until its time is over and fail with TimedOut or Busy. A timer asks again
and again; its handler raises once the call is seen to be under way, so that no
case depends on how fast anything is. Then what the call would have brought must
not be there, and the transport must work on, or end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

import kvt
from conftest import BLOCK, PATIENCE, Pair, run_python

EACH = 0.005
HELD = 30.0
"""Seconds that a call which is not interrupted waits before it fails."""
CLOSING = 5.0
"""The same for a close, which takes half of it also when it was interrupted:
a transfer that hangs is given that time."""


class Interrupt(Exception):
    """Not KeyboardInterrupt, which would end all tests if it went astray."""


@contextmanager
def interrupt_when(under_way: Callable[[], bool]) -> Iterator[None]:
    """Raises Interrupt, once, when the condition holds: not before the body has
    begun."""
    raised = False
    go_on()

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if not raised and under_way():
            raised = True
            raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, EACH, EACH)
    try:
        with pytest.raises(Interrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def errands() -> list[threading.Thread]:
    """The threads that make calls for the main one."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "kvt-call" and thread.ident is not None
    ]


def in_a_call() -> bool:
    """A thread that has not reached the library yet does no harm: its call is
    made, and undone, all the same."""
    return bool(errands())


def go_on() -> None:
    """Waits for the calls that were left alone."""
    for thread in errands():
        thread.join(PATIENCE)
        assert not thread.is_alive()


def let_go(pair: Pair) -> None:
    """Ends what the rules hold back."""
    pair.source.set_fault("")
    go_on()


@pytest.fixture
def pair(fault_pair: Callable[..., Pair]) -> Pair:
    return fault_pair("")


def works(pair: Pair) -> None:
    data = pair.fill(3, 17)
    pair.source.wait(pair.write([3], [5]), PATIENCE)
    assert pair.landed(5) == data


def test_register_answers_and_is_undone(pair: Pair) -> None:
    memory = bytearray(BLOCK)
    regions = pair.source.stats().regions
    pair.source.set_fault("mem_hang=*")
    with interrupt_when(in_a_call):
        pair.source.register(memory, timeout=HELD)
    let_go(pair)
    assert pair.source.stats().regions == regions
    memory.append(0)  # nobody holds the buffer
    works(pair)


def test_deregister_answers_and_goes_on(pair: Pair) -> None:
    memory = bytearray(BLOCK)
    regions = pair.source.stats().regions
    pair.source.register(memory)
    pair.source.set_fault("drop_hang=*")
    with interrupt_when(in_a_call):
        pair.source.deregister(memory, timeout=HELD)
    let_go(pair)
    assert pair.source.stats().regions == regions
    memory.append(0)
    works(pair)


def test_metadata_answers(pair: Pair) -> None:
    pair.source.set_fault("export_hang=*")
    with interrupt_when(in_a_call):
        pair.source.metadata()
    let_go(pair)
    assert pair.source.metadata()
    works(pair)


def test_add_peer_answers_and_is_undone(pair: Pair) -> None:
    pair.source.set_fault("load_hang=*")
    with interrupt_when(in_a_call):
        pair.source.add_peer("late", pair.target.metadata(), timeout=HELD)
    let_go(pair)
    with pytest.raises(kvt.NotFound):
        pair.source.find_peer("late")
    works(pair)


def test_unload_peer_answers_and_goes_on(pair: Pair) -> None:
    pair.source.set_fault("unload_hang=*")
    with interrupt_when(in_a_call):
        pair.source.unload_peer(pair.peer, timeout=HELD)
    let_go(pair)
    assert not pair.source.peer_loaded(pair.peer)
    pair.source.reload_peer(pair.peer)
    works(pair)


def test_reload_peer_answers_and_goes_on(pair: Pair) -> None:
    pair.source.set_fault("load_hang=*")
    with interrupt_when(in_a_call):
        pair.source.reload_peer(pair.peer, timeout=HELD)
    let_go(pair)
    assert pair.source.peer_loaded(pair.peer)
    works(pair)


# B38
def test_close_answers_and_goes_on(pair: Pair) -> None:
    pair.source.set_fault("hang=*")
    xfer = pair.write([0], [0])
    with interrupt_when(in_a_call):
        pair.source.close(CLOSING)
    go_on()
    assert pair.source.closed
    assert pair.source.status(xfer).quiescent


def test_wait_answers_and_its_transfer_is_left_alone(pair: Pair) -> None:
    pair.source.set_fault("hang=*")
    xfer = pair.write([0], [0])
    begun: list[bool] = []
    with interrupt_when(lambda: bool(begun)):
        begun.append(True)
        pair.source.wait(xfer, HELD)
    pair.source.set_fault("")
    assert pair.source.wait(xfer, PATIENCE).ok


def test_errors_are_those_of_the_call(pair: Pair) -> None:
    with pytest.raises(kvt.InvalidArgument, match="null"):
        pair.source.register((0, 5))
    with pytest.raises(kvt.BadMetadata):
        pair.source.add_peer("bad", b"nonsense")
    with pytest.raises(TypeError):
        pair.source.add_peer("bad", 5)  # type: ignore[arg-type]
    assert errands() == []


def test_other_threads_call_the_library_themselves(pair: Pair) -> None:
    pair.source.set_fault("export_hang=*")
    caught: list[BaseException] = []

    def call() -> None:
        try:
            pair.source.metadata()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert errands() == []
    let_go(pair)
    thread.join(PATIENCE)
    assert caught == []


CTRL_C = """
import os, signal, threading
import kvt
memory = bytearray(4096)
t = kvt.Transport("fault:local", call_timeout=30)
u = kvt.Transport("local")
t.register(memory)
u.register(memory)
peer = t.add_peer("u", u.metadata())
addr = kvt.region_of(memory).addr
t.set_fault("hang=*")
xfer = t.write(peer, [(addr, addr + 64, 64)])
def interrupt():
    while not any(x.name == "kvt-call" for x in threading.enumerate()):
        pass
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
CALL
"""


# B38
@pytest.mark.parametrize(
    "call", ["t.close()", "t.reload_peer(peer)", "t.unload_peer(peer)"]
)
def test_ctrl_c_ends_the_program(call: str) -> None:
    """By the interpreter's own way, although the call is still held: Python
    answers an interrupt that nobody catches by ending through SIGINT."""
    done = run_python(CTRL_C.replace("CALL", call))
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "KeyboardInterrupt" in done.stderr.splitlines()
