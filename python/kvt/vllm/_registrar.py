# SPDX-License-Identifier: Apache-2.0
"""The thread in which asynchronous registrations wait for their end.

It is one for all transports of a process, started by the first registration,
and waits for all of them at once: a peer that does not answer keeps no other
waiting. A thread for each would be simpler, but starting one takes longer than
the rest of the call. Callbacks of the futures run in it: one that blocks holds
up the others, and a thread or process that one starts is scheduled as this
thread is (SCHED_BATCH).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine

from kvt import _kvt

Work = Callable[[], Coroutine[None, None, None]]

_starting = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_bell = -1  # an eventfd; call_soon_threadsafe() takes longer
_todo: collections.deque[Work] = collections.deque()
_tasks: set[asyncio.Task[None]] = set()  # the loop itself does not hold them
_parents: list[asyncio.AbstractEventLoop] = []  # not ours to close


def _forget() -> None:
    """A forked child starts its own, and must leave that of its parent alone,
    whose descriptors they share."""
    global _starting, _loop
    _starting = threading.Lock()
    if _loop is not None:
        _parents.append(_loop)
    _loop = None
    _tasks.clear()
    _todo.clear()


os.register_at_fork(after_in_child=_forget)


def _give_way() -> None:
    """Has this thread wait until a processor is free. Who wakes it, in
    add_remote_peer_async(), would else be kept from its own until we are done
    with ours: a hundred microseconds in the midst of a call."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    _give_way()
    while True:
        # Comes back only by what a callback raises that is meant to end a
        # program, as SystemExit; other registrations still wait.
        try:
            loop.run_forever()
        except BaseException as error:
            loop.call_exception_handler(
                {
                    "message": "a callback of a kvt registration failed",
                    "exception": error,
                }
            )


def _start() -> None:
    global _bell, _loop
    with _starting:
        if _loop is not None:
            return
        with contextlib.ExitStack() as undo:
            loop = asyncio.new_event_loop()
            undo.callback(loop.close)
            bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, bell)
            loop.add_reader(bell, _begin, bell)
            # It must not keep the process from ending.
            threading.Thread(
                target=_serve, args=(loop,), name="kvt-vllm-add", daemon=True
            ).start()
            _loop, _bell = loop, bell
            undo.pop_all()


def run(work: Work) -> None:
    """Runs a coroutine in the thread, where no other may be kept waiting.
    RuntimeError if the thread cannot be started, OSError if there is no
    descriptor for it."""
    if _loop is None:
        _start()
    _todo.append(work)
    _kvt._ring(_bell)


def _begin(bell: int) -> None:
    os.eventfd_read(bell)
    while _todo:
        task = asyncio.get_running_loop().create_task(_todo.popleft()())
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)
