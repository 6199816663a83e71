# SPDX-License-Identifier: Apache-2.0
"""Proves what a handle of kvt.sglang says in every way that a write can end:
its state, whether it is quiescent, its error's class and text.

The fault engine makes each ending on order, so that it is there every time.
Whatever is called quiescent has its bytes compared. Numbers are those of the
table in docs/sglang.md.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvt
from conftest import Engine, run_python
from kvt.sglang import (
    NixlHandle,
    NixlState,
    _NixlPostError,
    nixlBackendError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
    nixlUnknownError,
)
from kvt.sglang._errors import translate
from kvt.sglang._status import look
from sglang_support.sides import ITEM, PATIENT, Side, Sides, counted
from stage import until


@pytest.fixture
def sides() -> Iterator[Sides]:
    with Sides(Engine("fault:local", {})) as made:
        yield made


def two(sides: Sides, rules: str = "", **options: object) -> tuple[Side, Side]:
    a, b = sides.two(rules, **options)
    a.lists(b)
    a.transport.post_wait = PATIENT
    return a, b


def refused(a: Side, b: Side, rules: str) -> NixlHandle:
    a.fault(rules)
    return a.transport.write_prepared(b.name, "kv", [1], "kv", [2])


def test_09_rejected_post(sides: Sides) -> None:
    """Known when the write returns; never called quiescent."""
    a, b = two(sides)
    handle = refused(a, b, "reject=1")
    error = handle.error
    assert isinstance(error, nixlBackendError)
    assert "NIXL_ERR_BACKEND" in str(error)
    assert isinstance(error.__cause__, kvt.Rejected)
    result = a.transport.status(handle)
    assert result == (NixlState.REJECTED, False, error)
    with pytest.raises(_NixlPostError) as info:
        raise _NixlPostError("KV transfer failed to post", error)
    assert str(info.value) == f"KV transfer failed to post: {error}"
    assert info.value.__cause__ is error
    assert b.arena.wrong() == 0


def test_09_a_refused_post_that_moves_is_known_at_once(sides: Sides) -> None:
    a, b = two(sides)
    a.fault("reject_dirty=1,hold=1")
    handle = a.write(b, [1], [2])
    assert isinstance(handle.error, nixlBackendError)
    assert a.transport.status(handle).state is NixlState.REJECTED
    assert not a.transport.status(handle).quiescent
    a.fault("")
    until("it landed", lambda: b.arena.wrong() == 0)


def test_10_a_post_error_without_a_cause() -> None:
    error = _NixlPostError("state transfer failed to post")
    assert str(error) == "state transfer failed to post"
    assert error.__cause__ is None
    assert isinstance(error, RuntimeError)


def test_11_failed_status(sides: Sides) -> None:
    a, b = two(sides)
    a.fault("fail=1")
    handle = a.write(b, [1], [2])
    result = a.settled(handle)
    assert result[:2] == (NixlState.FAILED, True)
    assert isinstance(result.error, nixlBackendError)
    assert result.error is handle.error
    calls, stop = counted(a.transport, "status")
    assert a.transport.status(handle) is result
    stop()
    assert calls == []
    assert b.arena.wrong() == 0


def test_11_a_failure_is_settled_only_with_its_other_parts(
    sides: Sides,
) -> None:
    a, b = two(sides, "chunk_copies=1,window=2")
    a.transport.post_wait = 0
    a.fault("fail=1,hold=2")
    handle = a.write(b, [1, 3], [11, 14])
    until("the first failed", lambda: handle.error or not ask(a, handle))
    assert a.transport.status(handle)[:2] == (NixlState.IN_PROGRESS, False)
    a.fault("")
    assert a.settled(handle)[:2] == (NixlState.FAILED, True)
    assert b.arena.wrong() == 0


def ask(a: Side, handle: NixlHandle) -> bool:
    """Always true."""
    return isinstance(a.transport.status(handle), tuple)


def test_12_unreadable(sides: Sides) -> None:
    """Quiescent when the proof comes, and the state stays what it was."""
    a, b = two(sides, grace=3600)
    a.fault("unreadable=1")
    handle = a.write(b, [1], [2])
    result = a.final(handle)
    assert result[:2] == (NixlState.UNREADABLE, False)
    assert isinstance(result.error, Exception)
    for _ in range(3):
        assert a.transport.status(handle) == result
    a.fault("")
    assert a.settled(handle) == (NixlState.UNREADABLE, True, result.error)
    assert b.arena.wrong() == 0


def test_12_what_is_lost_is_unreadable_until_it_is_proven(
    sides: Sides,
) -> None:
    a, b = two(sides, grace=0.001)
    a.fault("unreadable=1")
    handle = a.write(b, [1], [2])
    until("it is lost", lambda: a.transport.core.stats().lost == 1)
    result = a.transport.status(handle)
    assert result[:2] == (NixlState.UNREADABLE, False)
    assert isinstance(result.error, nixlUnknownError)
    a.fault("")
    assert a.settled(handle)[:2] == (NixlState.UNREADABLE, True)
    assert b.arena.wrong() == 0


def test_12_a_broken_link_is_unreadable_at_once(sides: Sides) -> None:
    a, b = two(sides, grace=3600)
    a.fault("disconnect=1,hold=1")
    handle = a.write(b, [1], [2])
    assert isinstance(handle.error, nixlRemoteDisconnectError)
    assert "NIXL_ERR_REMOTE_DISCONNECT" in str(handle.error)
    result = a.transport.status(handle)
    assert result == (NixlState.UNREADABLE, False, handle.error)
    assert not a.transport.is_loaded(b.name)
    a.fault("")
    assert a.settled(handle)[:2] == (NixlState.UNREADABLE, True)
    assert b.arena.wrong() == 0


def test_13_inline_done(sides: Sides) -> None:
    a, b = two(sides)
    a.fault("inline=1")
    handle = a.write(b, [1], [2])
    calls, stop = counted(a.transport, "status")
    result = a.transport.status(handle)
    stop()
    assert (result, calls) == ((NixlState.DONE, True, None), [])
    assert b.arena.wrong() == 0


# B08
def test_14_partial_multi_post(sides: Sides) -> None:
    """Three parts: the first moves, the second is refused, and the third is
    never posted. `vram.py` has the same with three pairs of kinds."""
    a, b = two(sides, "chunk_copies=1,window=2")
    a.fault("hold=1,reject=2")
    before = a.transport.core.stats().chunks
    handle = a.transport.write_prepared(
        b.name, "kv", [1, 3, 5], "kv", [11, 14, 17]
    )
    b.arena.expect(11 * ITEM, a.arena.read(ITEM, ITEM))
    assert isinstance(handle.error, nixlBackendError)
    assert a.transport.status(handle)[:2] == (NixlState.REJECTED, False)
    until("the first part landed", lambda: b.arena.wrong() == 0)
    a.fault("")
    core = a.transport.core
    until("all is over", lambda: core.stats().inflight == 0)
    assert a.transport.status(handle)[:2] == (NixlState.REJECTED, False)
    assert core.stats().chunks - before == 2
    assert b.arena.wrong() == 0


def test_a_write_goes_on_when_its_first_part_takes_its_time(
    sides: Sides,
) -> None:
    """And what is refused later is said by status()."""
    a, b = two(sides, "chunk_copies=1,window=1")
    a.transport.post_wait = 0
    a.fault("hang=1")
    handle = a.transport.write_prepared(b.name, "kv", [1], "kv", [2])
    assert handle.error is None
    assert a.transport.status(handle) == (NixlState.IN_PROGRESS, False, None)
    assert a.transport.status(handle).in_progress
    core = a.transport.core
    until("it is posted", lambda: core.stats().chunks == 1)
    a.fault("reject=1")
    late = a.transport.write_prepared(b.name, "kv", [3], "kv", [4])
    assert a.final(late).state is NixlState.REJECTED
    b.arena.expect(2 * ITEM, a.arena.read(ITEM, ITEM))
    assert a.settled(handle).done
    assert b.arena.wrong() == 0


def test_letting_go_of_a_handle_lets_its_write_go_on(sides: Sides) -> None:
    a, b = two(sides)
    a.transport.post_wait = 0
    a.fault("hold=1")
    handle = a.write(b, [1], [2])
    del handle
    gc.collect()
    core = a.transport.core
    assert core.stats().inflight == 1
    a.fault("")
    until("it is over", lambda: core.stats().inflight == 0)
    assert core.stats().undrained == 0
    assert b.arena.wrong() == 0


def test_a_handle_that_is_final_costs_kvt_nothing(sides: Sides) -> None:
    a, b = two(sides, inflight_max=4)
    kept = [a.write(b, [i], [i]) for i in range(20)]
    for handle in kept:
        assert a.settled(handle).done
    assert a.transport.core.stats().undrained == 0
    assert b.arena.wrong() == 0


def test_too_many_writes_are_not_created(sides: Sides) -> None:
    a, b = two(sides, inflight_max=2)
    a.transport.post_wait = 0
    a.fault("hold=*")
    held = [a.write(b, [i], [i]) for i in range(2)]
    handle = a.transport.write_prepared(b.name, "kv", [5], "kv", [5])
    assert a.transport.status(handle)[:2] == (NixlState.NOT_CREATED, True)
    assert handle.error is not None
    assert isinstance(handle.error.__cause__, kvt.LimitReached)
    a.fault("")
    for each in held:
        assert a.settled(each).done
    assert b.arena.wrong() == 0


def test_writes_leave_nothing_behind(sides: Sides) -> None:
    """No object and no finalizer of Python's, whatever became of them."""
    a, b = two(sides)

    def some() -> int:
        for rules in ("", "fail=*", "reject=*"):
            a.fault(rules)
            for _ in range(50):
                a.final(
                    a.transport.write_prepared(b.name, "kv", [1], "kv", [2])
                )
                a.transport.write_prepared(b.name, "kv", [-1], "kv", [2])
        gc.collect()
        return len(gc.get_objects())

    b.arena.expect(2 * ITEM, a.arena.read(ITEM, ITEM))
    some()
    first = some()
    finalizers = len(weakref.finalize._registry)  # type: ignore[attr-defined]
    for _ in range(3):
        last = some()
    assert last - first < 50
    assert len(weakref.finalize._registry) == finalizers  # type: ignore[attr-defined]
    assert a.transport.core.stats().undrained == 0
    assert b.arena.wrong() == 0


def test_many_threads_may_ask_for_one_handle(sides: Sides) -> None:
    a, b = two(sides)
    a.transport.post_wait = 0
    for _ in range(30):
        a.fault("hold=1")
        handle = a.write(b, [1], [2])
        answers: list[NixlState] = []

        def work(
            handle: NixlHandle = handle, to: list[NixlState] = answers
        ) -> None:
            to.append(a.final(handle).state)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        a.fault("")
        for thread in threads:
            thread.join()
        assert answers == [NixlState.DONE] * 4
    assert b.arena.wrong() == 0


def test_an_answer_may_come_while_another_thread_asks(sides: Sides) -> None:
    """The other thread's last answer lets kvt forget the transfer."""
    a, b = two(sides)
    a.transport.post_wait = 0
    a.fault("hold=1")
    handle = a.write(b, [1], [2])
    core = a.transport.core

    class Late:
        def status(self, xfer: int) -> kvt.Result:
            a.fault("")
            until("it is done", lambda: core.status(xfer).finished)
            assert look(core, handle).done
            return core.status(xfer)

    assert look(Late(), handle).done  # type: ignore[arg-type]
    with pytest.raises(kvt.NotFound):
        core.status(handle._xfer)
    assert b.arena.wrong() == 0


# ---------------------------------------------------------------------- errors


def test_a_number_for_two_errors_names_both() -> None:
    for kind in (kvt.PeerDisconnected, kvt.Rejected, kvt.EngineError):
        lost = kind("NIXL lost the link")
        lost.engine_code = -2
        made = translate(lost)
        assert type(made) is nixlRemoteDisconnectError
        assert "NIXL_ERR_REMOTE_DISCONNECT or NIXL_ERR_BACKEND" in str(made)
        assert "NIXL lost the link" in str(made)
    error = kvt.EngineError("NIXL cannot tell")
    error.engine_code = -6
    assert type(translate(error)) is nixlNotFoundError


def test_every_error_of_kvt_has_a_class_of_nixls_name() -> None:
    from kvt import _errors

    for kind in _errors.CLASSES:
        made = translate(kind("the text"))
        assert type(made).__name__.startswith("nixl")
        assert "NIXL_ERR_" in str(made)
        assert str(made).endswith("the text")
        assert type(made.__cause__) is kind
    other = KeyError("x")
    assert translate(other) is other


def test_the_classes_are_nixls_own_where_it_is_there() -> None:
    venv = os.environ.get("KVT_TEST_NIXL_15")
    found = (
        sorted(Path(venv).glob("lib/python3*/site-packages")) if venv else []
    )
    if not found:
        pytest.skip("KVT_TEST_NIXL_15 names no venv with NIXL")
    done = run_python(
        """
import json, sys
sys.path.append(sys.argv[1])
try:
    from nixl import _bindings
except ImportError as error:
    print(json.dumps(f"this Python cannot import nixl: {error}"))
    raise SystemExit
import kvt.sglang
names = [n for n in kvt.sglang.__all__ if n.startswith("nixl")]
print(json.dumps({n: issubclass(getattr(kvt.sglang, n),
                                getattr(_bindings, n)) for n in names}))
""",
        str(found[0]),
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    if isinstance(answer, str):
        pytest.skip(answer)
    assert len(answer) == 8
    assert all(answer.values()), answer
