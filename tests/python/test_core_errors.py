# SPDX-License-Identifier: Apache-2.0
"""Every error class of the package, raised by what it is for.

The fault engine provokes what a healthy one does not do. The codes are read
from the public header, so that a new one without a class is noticed.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import kvt
from conftest import PATIENCE, Pair, collect
from kvt import _errors

HEADER = Path(__file__).parents[2] / "include/kvt/kvt.h"
MakePair = Callable[..., Pair]

BUILT_IN = {
    kvt.InvalidArgument: ValueError,
    kvt.OutOfRange: ValueError,
    kvt.NotFound: LookupError,
    kvt.OutOfMemory: MemoryError,
    kvt.TimedOut: TimeoutError,
    kvt.BadMetadata: ValueError,
    kvt.Mismatch: ValueError,
    kvt.PeerDisconnected: ConnectionError,
    kvt.AccessDenied: PermissionError,
    kvt.SystemCallFailed: OSError,
}


def test_every_code_of_the_header_has_its_class() -> None:
    codes = re.findall(r"X\((E\w+), (-\d+),", HEADER.read_text())
    assert len(codes) > 20
    by_name = {cls.name: cls.code for cls in _errors.CLASSES}
    assert by_name == {f"KVT_{name}": int(code) for name, code in codes}
    for i, cls in enumerate(_errors.CLASSES):
        assert cls.code == -1 - i
        assert getattr(kvt, cls.__name__) is cls
        assert cls.__doc__


@pytest.mark.parametrize("cls", _errors.CLASSES, ids=lambda cls: cls.__name__)
def test_a_class_has_a_base_and_survives_pickle(cls: type[kvt.Error]) -> None:
    assert issubclass(cls, kvt.Error)
    assert issubclass(cls, BUILT_IN.get(cls, Exception))
    error = cls("what was wrong")
    error.os_errno = 5
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is cls
        assert str(twin) == "what was wrong"
        assert twin.code == cls.code
        assert twin.os_errno == 5


def test_a_call_that_fails_says_why(local_pair: Pair) -> None:
    with pytest.raises(kvt.InvalidArgument) as caught:
        local_pair.write([0], [0], tag=kvt.TAG_MAX + 1)
    error = caught.value
    assert error.code == -1
    assert error.name == "KVT_EINVAL"
    assert error.text == str(error) != ""
    assert error.os_errno == 0
    assert error.result is None
    assert error.scope == kvt.Scope.NONE


def test_mismatch_limit_and_range(fault_pair: MakePair) -> None:
    pair = fault_pair("hang=*", inflight_max=2)
    with pytest.raises(kvt.Mismatch):
        pair.write([0, 1], [0])
    with pytest.raises(kvt.OutOfRange):
        pair.write([0], [0], note=bytes(2**20))
    pair.write([0], [0])
    pair.write([0], [0])
    with pytest.raises(kvt.LimitReached):
        pair.write([0], [0])


def test_busy_and_timed_out(fault_pair: MakePair) -> None:
    pair = fault_pair("hang=*")
    pair.write([0], [0])
    with pytest.raises(kvt.Busy):
        pair.source.deregister(pair.source_memory, timeout=0.05)
    pair.source.set_fault("mem_hang=*")
    memory = bytearray(64)
    with pytest.raises(kvt.TimedOut) as caught:
        pair.source.register(memory, timeout=0.01)
    assert isinstance(caught.value, TimeoutError)


def test_unsupported_and_system_call() -> None:
    with kvt.Transport("local") as transport:
        with pytest.raises(kvt.Unsupported):
            transport.register((4096, 4096, kvt.VRAM, 0))
        with pytest.raises(kvt.Unsupported):
            transport.set_fault("reject=1")
    with pytest.raises(kvt.SystemCallFailed) as caught:
        kvt.SharedMemory(2**62)
    assert isinstance(caught.value, OSError)
    assert caught.value.os_errno > 0


def test_superseded(fault_pair: MakePair) -> None:
    pair = fault_pair("load_hang=*")
    metadata = pair.target.metadata()
    _, xfer = pair.source.start_add_peer("again", metadata)
    pair.source.start_add_peer("again", metadata)
    with pytest.raises(kvt.Superseded):
        pair.source.wait(xfer, PATIENCE)


def test_stale_memory(local_pair: Pair) -> None:
    local_pair.target.deregister(local_pair.target_memory)
    xfer = local_pair.write([0], [0])
    with pytest.raises(kvt.StaleMemory) as caught:
        local_pair.source.wait(xfer, PATIENCE)
    assert caught.value.result is not None
    assert caught.value.result.id == xfer


@pytest.mark.parametrize(
    ("rules", "cls", "state", "scope"),
    [
        ("reject=*", kvt.Rejected, kvt.State.REJECTED, kvt.Scope.REQUEST),
        ("fail=*", kvt.EngineError, kvt.State.FAILED, kvt.Scope.REQUEST),
        (
            "disconnect=*",
            kvt.PeerDisconnected,
            kvt.State.DISCONNECTED,
            kvt.Scope.PEER,
        ),
        ("never=*", kvt.Lost, kvt.State.LOST, None),
        ("unreadable=*", kvt.Lost, kvt.State.LOST, None),
    ],
)
def test_a_transfer_that_fails_raises_its_class(
    fault_pair: MakePair,
    rules: str,
    cls: type[kvt.Error],
    state: kvt.State,
    scope: kvt.Scope | None,
) -> None:
    pair = fault_pair(rules)
    first = pair.write([0], [0], tag=3)
    with pytest.raises(cls) as caught:
        pair.source.wait(first, PATIENCE)
    error = caught.value
    assert error.result is not None
    assert error.result.state is state
    assert error.result.tag == 3
    assert error.result.quiescent is (state is not kvt.State.LOST)
    assert error.text == error.result.text != ""
    assert error.code == error.result.code == cls.code
    assert error.engine_code == error.result.engine_code
    if scope is not None:
        assert error.scope is scope
    assert "<kvt.Result" in repr(error.result)


def test_results_that_poll_reports_have_their_error(
    fault_pair: MakePair,
) -> None:
    pair = fault_pair("reject=1,fail=2")
    xfers = [pair.write([0], [0]), pair.write([1], [1]), pair.write([2], [2])]
    results = {r.id: r for r in collect(pair.source, 3)}
    assert isinstance(results[xfers[0]].error, kvt.Rejected)
    assert isinstance(results[xfers[1]].error, kvt.EngineError)
    assert results[xfers[2]].error is None
    with pytest.raises(kvt.Rejected):
        results[xfers[0]].check()


def test_cancelled_and_timed_out_transfers(fault_pair: MakePair) -> None:
    pair = fault_pair("hang=*")
    late = pair.write([0], [0], timeout=0.01)
    moving = pair.write([1], [1])
    while pair.source.status(moving).state is not kvt.State.IN_PROGRESS:
        pass
    with pytest.raises(kvt.Busy, match="not finished"):
        pair.source.status(moving).check()
    assert pair.source.cancel([moving], mode="wait") == [moving]
    while pair.source.status(late).state is not kvt.State.TIMED_OUT:
        pass
    pair.source.set_fault("")
    with pytest.raises(kvt.Cancelled) as caught:
        pair.source.wait(moving, PATIENCE)
    assert caught.value.result is not None
    assert caught.value.result.state is kvt.State.CANCELLED
    with pytest.raises(kvt.TimedOut) as timed_out:
        pair.source.wait(late, PATIENCE)
    assert timed_out.value.result is not None
    assert timed_out.value.result.state is kvt.State.TIMED_OUT


def test_a_notification_that_fails_is_told_from_the_data(
    fault_pair: MakePair,
) -> None:
    pair = fault_pair("notify_fail=*")
    data = pair.fill(0, 5)
    xfer = pair.write([0], [0], note=b"x")
    with pytest.raises(kvt.NotificationFailed) as caught:
        pair.source.wait(xfer, PATIENCE)
    assert caught.value.result is not None
    assert caught.value.result.ok
    assert pair.landed(0) == data


def test_a_fault_rule_that_is_wrong_is_named(fault_pair: MakePair) -> None:
    pair = fault_pair()
    with pytest.raises(kvt.InvalidArgument, match="colour"):
        pair.source.set_fault("colour=1")
