# SPDX-License-Identifier: Apache-2.0
"""Starts nodes (node.py) and drives them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from vllm_support.waits import LIMIT

HERE = Path(__file__).resolve().parent


class Ended(Exception):
    """The node's process is gone; `code` is how."""

    def __init__(self, code: int, name: str) -> None:
        super().__init__(f"the node ended with {code} in {name}")
        self.code = code


class Raised(Exception):
    """The node's call raised."""


def nixl_of(version: str) -> str:
    """The library of KVT_TEST_NIXL_15 or _13; skips where there is none, and
    fails where it must be."""
    variable = f"KVT_TEST_NIXL_{version}"
    place = os.environ.get(variable)
    found = (
        sorted(Path(place).glob("lib/python3*/**/libnixl_capi.so"))
        if (place)
        else []
    )
    if not found:
        why = f"{variable} names no venv with NIXL"
        if os.environ.get("KVT_REQUIRE_NIXL") == "1":
            pytest.fail(why)
        pytest.skip(why)
    return str(found[0])


class NodeProcess:
    """Calls of unknown methods go to the node of the same name."""

    def __init__(self, **env: str) -> None:
        here, there = multiprocessing.Pipe()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "sglang_support.node",
                str(there.fileno()),
            ],
            pass_fds=[there.fileno()],
            env={**os.environ, "PYTHONPATH": str(HERE.parent), **env},
        )
        there.close()
        self.connection = here
        self.name = ""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            try:
                self.connection.send((name, args))
                if not self.connection.poll(LIMIT):
                    raise AssertionError(f"no answer to {name} in {LIMIT} s")
                kind, answer = self.connection.recv()
            except (EOFError, OSError):
                code = self.process.wait(timeout=LIMIT)
                raise Ended(code, name) from None
            if kind == "raised":
                raise Raised(answer)
            return answer

        return call

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

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
        self.started: list[NodeProcess] = []

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in self.started:
            node.kill()

    def two(
        self, block: int, count: int, **env: str
    ) -> tuple[NodeProcess, NodeProcess]:
        """A prefill that has loaded a decode, and the decode."""
        a, b = NodeProcess(**env), NodeProcess(**env)
        self.started += [a, b]
        a.open("prefill", block * count, block, 1)
        b.open("decode", block * count, block, 2)
        a.load(*b.registration())
        b.name = b.registration()[0]
        return a, b
