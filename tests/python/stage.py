# SPDX-License-Identifier: Apache-2.0
"""Processes of a test: it starts them, calls their methods, and ends them.

A node is an object in a process of its own. The test has a `NodeProcess`,
whose unknown methods are the node's; the module that the process runs makes
the node and gives it to `serve`. Nodes run in environments without kvt and
pytest too, so this file needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT = 120.0
"""Seconds until a test that waits is called broken; never reached."""


def until(what: str, ready: Callable[[], Any]) -> Any:
    """Asks again and again until the answer is true, and returns it."""
    limit = time.monotonic() + LIMIT
    while time.monotonic() < limit:
        answer = ready()
        if answer:
            return answer
        time.sleep(0.001)
    raise AssertionError(f"not in {LIMIT} s: {what}")


class Raised(Exception):
    """The node's call raised; `names` are its class and that one's bases."""

    def __init__(self, names: list[str], text: str) -> None:
        super().__init__(f"{names[0]}: {text}")
        self.names = names
        self.name = names[0]
        self.text = text


class Ended(AssertionError):
    """The node's process is gone; `code` is how."""

    def __init__(self, code: int, method: str) -> None:
        super().__init__(f"the node ended with {code} in {method}")
        self.code = code


class NodeProcess:
    """Runs `module` with the arguments behind its connection's descriptor."""

    def __init__(
        self,
        module: str,
        *args: str,
        python: str = sys.executable,
        paths: Sequence[str] = (),
        env: Mapping[str, str],
    ) -> None:
        here, there = multiprocessing.Pipe()
        found = [os.environ.get("PYTHONPATH", ""), str(HERE), *paths]
        self.process = subprocess.Popen(
            [python, "-m", module, str(there.fileno()), *args],
            pass_fds=[there.fileno()],
            env={
                **os.environ,
                # As kvt sets it, for nodes without kvt: the wheel's EFA module
                # and the system's libibverbs do not bear each other.
                "UCX_MODULES": "^efa",
                "PYTHONPATH": os.pathsep.join(filter(None, found)),
                **env,
            },
        )
        there.close()
        self.connection = here

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            return self.ask(method, args, options)

        return call

    def ask(
        self, method: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        self.tell(method, args, options)
        return self.answer(method)

    def tell(
        self, method: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        try:
            self.connection.send((method, args, options))
        except OSError:
            raise self._ended(method) from None

    def answer(self, method: str) -> Any:
        if not self.connection.poll(LIMIT):
            raise AssertionError(f"no answer to {method} in {LIMIT} s")
        try:
            kind, answer = self.connection.recv()
        except (EOFError, OSError):
            raise self._ended(method) from None
        if kind == "raised":
            raise Raised(*answer)
        return answer

    def _ended(self, method: str) -> Ended:
        return Ended(self.process.wait(timeout=LIMIT), method)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Lets it run to its end; its exit code."""
        self.connection.close()
        return self.process.wait(timeout=LIMIT)


class Stage:
    """The nodes of one test; those still alive are ended with it."""

    def __init__(self) -> None:
        self._nodes: list[NodeProcess] = []

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in self._nodes:
            node.kill()
            node.connection.close()

    def enter(self, node: NodeProcess) -> None:
        """From now on the stage ends it."""
        self._nodes.append(node)


def cut_links() -> int:
    """Shuts this process's TCP connections down; their number."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            made = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # no socket, or the listing's own
        with made, contextlib.suppress(OSError):
            if made.family in (socket.AF_INET, socket.AF_INET6):
                made.getpeername()  # raises where it listens
                made.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def serve(node: Any, descriptor: str) -> None:
    """Does what the node is told over the connection, until that is closed or
    the process at the other end is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    connection = Connection(int(descriptor))
    while True:
        try:
            method, args, options = connection.recv()
        except EOFError:
            return
        # Says where it hangs before the other end gives up.
        faulthandler.dump_traceback_later(LIMIT * 0.9)
        try:
            answer = "done", getattr(node, method)(*args, **options)
        except Exception as error:
            traceback.print_exc()
            names = [made.__name__ for made in type(error).__mro__]
            answer = "raised", (names, str(error))
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)
