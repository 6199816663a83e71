# SPDX-License-Identifier: Apache-2.0
"""Transfers of kvt.nixl's agent that do not just succeed.

Two agents of one process over the fault engine, which holds, refuses and fails
requests on order: what a caller of NIXL sees then, at each check, and that an
agent can be added again and used afterwards. No case depends on time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvt
import kvt.nixl as nixl
from kvt.nixl import _handles, _peers
from kvt.nixl._errors import translate
from nixl_agent_support.agents import BLOCK, Two, notes, run


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVT_ENGINE", "local")


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    """Its transport takes fault rules, at the end none."""
    monkeypatch.setenv("KVT_ENGINE", "fault:local")
    monkeypatch.setattr("kvt.nixl._engine.GRACE_S", 600.0)
    made = Two(capture_telemetry=True)
    yield made
    made.core.set_fault("")


def held(two: Two, note: bytes = b"") -> Any:
    """A write that was posted; what becomes of it is not reported."""
    two.core.set_fault("hold=1")
    posted = two.core.stats().chunks
    handle = two.write(note)
    assert two.one.transfer(handle) == "PROC"
    while two.core.stats().chunks == posted:
        pass
    return handle


def release(handle: Any) -> None:
    """As soon as it can be."""
    while True:
        with contextlib.suppress(nixl.nixlRepostActiveError):
            handle.release()
            return


def test_memory_of_a_transfer_under_way_is_not_taken_back(faulty: Two) -> None:
    handle = held(faulty)
    with pytest.raises(nixl.nixlNotAllowedError):
        faulty.one.deregister_memory(faulty.reg["one"])
    faulty.core.set_fault("")
    while faulty.one.check_xfer_state(handle) == "PROC":
        pass
    faulty.one.deregister_memory(faulty.reg["one"])


# ---------------------------------------------------- transfers that are held


def test_a_transfer_under_way_is_not_posted_again(faulty: Two) -> None:
    handle = held(faulty, b"once")
    assert faulty.one.check_xfer_state(handle) == "PROC"
    with pytest.raises(nixl.nixlRepostActiveError):
        faulty.one.transfer(handle)
    with pytest.raises(nixl.nixlNoTelemetryError):
        faulty.one.get_xfer_telemetry(handle)
    faulty.core.set_fault("")
    while faulty.one.check_xfer_state(handle) == "PROC":
        pass
    assert run(faulty.one, handle) == "DONE"
    assert notes(faulty.other, 2) == {"one": [b"once", b"once"]}


def test_a_release_that_cannot_stop_a_transfer_says_so(faulty: Two) -> None:
    handle = held(faulty)
    with pytest.raises(nixl.nixlRepostActiveError, match="release it again"):
        handle.release()
    assert repr(handle).endswith("released=False)")
    faulty.core.set_fault("")
    release(handle)
    assert repr(handle).endswith("released=True)")


def test_a_failed_one_is_released_when_its_end_is_proven(faulty: Two) -> None:
    """vLLM takes a release for the proof that its blocks are free."""
    handle = faulty.write()
    faulty.core.set_fault("disconnect=1,hold=1")
    with pytest.raises(nixl.nixlRemoteDisconnectError):
        run(faulty.one, handle)
    with pytest.raises(nixl.nixlRepostActiveError, match="still move"):
        handle.release()
    faulty.core.set_fault("")
    release(handle)
    assert repr(handle).endswith("released=True)")


def failed(two: Two) -> Any:
    """A write that has failed; what was posted of it may still move."""
    handle = two.write()
    two.core.set_fault("disconnect=1,hold=1")
    with pytest.raises(nixl.nixlRemoteDisconnectError) as caught:
        run(two.one, handle)
    assert not caught.value.quiescent
    return handle


def test_a_failed_one_is_posted_again_when_its_end_is_proven(
    faulty: Two,
) -> None:
    handle = failed(faulty)
    for _ in range(2):
        with pytest.raises(nixl.nixlRepostActiveError, match="still move"):
            faulty.one.transfer(handle)
    with pytest.raises(nixl.nixlRepostActiveError):
        handle.release()  # the handle still knows what it waits for
    faulty.core.set_fault("")
    release(handle)


def test_a_release_gives_a_failed_one_time_to_end(
    faulty: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = failed(faulty)
    real = _handles.time.sleep

    def end_it(seconds: float) -> None:
        faulty.core.set_fault("")
        real(seconds)

    monkeypatch.setattr(_handles, "_CANCEL_WAIT_S", 60.0)
    monkeypatch.setattr(_handles.time, "sleep", end_it)
    handle.release()
    assert repr(handle).endswith("released=True)")


def test_only_what_is_unknown_to_kvt_is_over(
    faulty: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = failed(faulty)

    def refuse(error: type[kvt.Error]) -> None:
        def status(xfer: int) -> None:
            raise error("no answer")

        monkeypatch.setattr(faulty.core, "status", status)

    for error in (kvt.Busy, kvt.Closed, kvt.SystemCallFailed):
        refuse(error)
        with pytest.raises(nixl.nixlRepostActiveError):
            handle.release()
    refuse(kvt.NotFound)
    handle.release()


@pytest.mark.parametrize("make", [failed, held])
def test_a_close_that_proves_all_lets_handles_be_released(
    faulty: Two, make: Callable[[Two], Any]
) -> None:
    two = Two()  # the fixture's must live to its end
    handle = make(two)
    two.core.set_fault("")
    two.core.close()
    handle.release()
    assert repr(handle).endswith("released=True)")


def test_a_handle_that_is_dropped_leaves_nothing_behind(local: None) -> None:
    two = Two()
    for _ in range(50):
        handle = two.write()
        two.one.transfer(handle)
        del handle
    while two.core.stats().inflight:
        pass
    assert two.core.stats().layouts == 0
    assert two.core.stats().undrained == 0


def test_removing_an_agent_ends_its_transfers(faulty: Two) -> None:
    handle = held(faulty)
    faulty.one.remove_remote_agent("other")
    faulty.core.set_fault("")
    with pytest.raises((nixl.nixlNotFoundError, nixl.nixlCancelledError)):
        while faulty.one.check_xfer_state(handle) == "PROC":
            pass
    release(handle)


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        ("reject=1", nixl.nixlBackendError),
        ("fail=1", nixl.nixlBackendError),
        ("disconnect=1", nixl.nixlRemoteDisconnectError),
    ],
)
def test_a_failure_is_raised_at_each_check(
    faulty: Two, rule: str, error: type[Exception]
) -> None:
    handle = faulty.write()
    faulty.core.set_fault(rule)
    with pytest.raises(error):
        run(faulty.one, handle)
    for _ in range(3):
        with pytest.raises(error, match="NIXL_ERR_") as caught:
            faulty.one.check_xfer_state(handle)
        assert isinstance(caught.value.__cause__, kvt.Error)
    loaded = error is not nixl.nixlRemoteDisconnectError
    assert faulty.one.check_remote_metadata("other") is loaded
    faulty.core.set_fault("")
    release(handle)
    faulty.one.add_remote_agent(faulty.other.get_agent_metadata())
    assert faulty.one.check_remote_metadata("other")
    assert run(faulty.one, faulty.write()) == "DONE"


def test_a_lost_link_that_only_nixls_number_tells_unloads_the_peer(
    local: None,
) -> None:
    """kvt lets a peer be loaded after a refused post with NIXL's -2."""
    two = Two()
    handle = two.write()
    assert run(two.one, handle) == "DONE"
    error = kvt.Rejected("NIXL refused a post")
    error.engine_code = -2
    made = translate(error)
    assert isinstance(made, nixl.nixlRemoteDisconnectError)
    handle._failed(made)
    assert two.core.peer_loaded(two.core.find_peer("other"))
    assert not two.one.check_remote_metadata("other")
    old = two.core.find_peer("other")
    two.one.add_remote_agent(two.other.get_agent_metadata())
    assert two.core.find_peer("other") != old
    assert two.one.check_remote_metadata("other")
    with pytest.raises(nixl.nixlNotFoundError):
        two.one.transfer(handle)
    assert run(two.one, two.write()) == "DONE"


def test_metadata_with_less_memory_ends_the_lists_over_the_rest(
    local: None,
) -> None:
    two = Two()
    more = np.zeros(BLOCK, dtype=np.uint8)
    rows = [(int(more.ctypes.data), BLOCK, 0)]
    reg = two.other.register_memory([(*rows[0], "")], "DRAM")
    two.one.add_remote_agent(two.other.get_agent_metadata())
    ours, _ = two.lists()
    over = two.one.prep_xfer_dlist("other", rows, "DRAM")
    two.other.deregister_memory(reg)
    two.one.add_remote_agent(two.other.get_agent_metadata())
    assert two.one.check_remote_metadata("other")
    with pytest.raises(nixl.nixlNotFoundError):
        two.one.make_prepped_xfer("WRITE", ours, [0], over, [0])
    assert run(two.one, two.write()) == "DONE"


def one_part_more(two: Two) -> bytes:
    two.memory["more"] = np.zeros(BLOCK, dtype=np.uint8)
    row = (int(two.memory["more"].ctypes.data), BLOCK, 0, "")
    reg = two.other.register_memory([row], "DRAM")
    return two.other.get_partial_agent_metadata(reg)


def test_one_part_more_waits_for_what_is_under_way(
    faulty: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = one_part_more(faulty)
    handle = held(faulty, b"arrives")
    real = _peers.time.sleep

    def end_it(seconds: float) -> None:
        faulty.core.set_fault("")
        real(seconds)

    monkeypatch.setattr(_peers, "_SETTLE_S", 60.0)
    monkeypatch.setattr(_peers.time, "sleep", end_it)
    faulty.one.add_remote_agent(part)
    while faulty.one.check_xfer_state(handle) == "PROC":
        pass
    assert notes(faulty.other, 1) == {"one": [b"arrives"]}


def test_one_part_more_waits_not_for_ever(
    faulty: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvt.nixl._engine.GRACE_S", 0.1)
    two = Two()
    part = one_part_more(two)
    handle = held(two)
    two.one.add_remote_agent(part)
    with pytest.raises((nixl.nixlCancelledError, nixl.nixlUnknownError)):
        while two.one.check_xfer_state(handle) == "PROC":
            pass
    two.core.set_fault("")
    release(handle)
    assert run(two.one, two.write()) == "DONE"


# ------------------------------------------------------------------ telemetry


def test_telemetry_is_there_when_it_was_asked_for(
    faulty: Two,
) -> None:
    handle = faulty.write()
    with pytest.raises(nixl.nixlNotPostedError):
        faulty.one.get_xfer_telemetry(handle)
    assert run(faulty.one, handle) == "DONE"
    found = faulty.one.get_xfer_telemetry(handle)
    assert isinstance(found, nixl.nixlXferTelemetry)
    assert found.totalBytes == 3 * BLOCK
    assert found.descCount == 2  # neighbours went as one
    assert found.startTime > 0 and found.xferDuration >= 0
    assert found.postDuration >= 0
    two = Two()
    without = two.write()
    assert run(two.one, without) == "DONE"
    with pytest.raises(nixl.nixlNoTelemetryError):
        two.one.get_xfer_telemetry(without)
