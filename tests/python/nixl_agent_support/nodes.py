# SPDX-License-Identifier: Apache-2.0
"""Starts nodes (node.py) and drives them; engines for agents in a test."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
LIMIT = 120.0
"""Seconds until a test that waits is called broken; never reached."""


class Raised(Exception):
    """The node's call raised an exception of the class `name`."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


def venv() -> Path:
    """The one with NIXL 1.5; skips where there is none, and fails where there
    must be one."""
    place = os.environ.get("KVT_TEST_NIXL_15")
    if place and list(Path(place).glob("lib/python3*/**/libnixl_capi.so")):
        return Path(place)
    why = "KVT_TEST_NIXL_15 names no venv with NIXL"
    if os.environ.get("KVT_REQUIRE_NIXL") == "1":
        pytest.fail(why)
    pytest.skip(why)


def library() -> str:
    found = sorted(venv().glob("lib/python3*/**/libnixl_capi.so"))
    return str(found[0])


def environment(engine: str) -> dict[str, str]:
    """What makes an agent of kvt.nixl take an engine: "local", "nixl", "tcp"
    (NIXL without the way by the same host, over TCP), or a fault engine."""
    if engine in ("nixl", "tcp"):
        env = {"KVT_ENGINE": "nixl", "KVT_NIXL_LIBRARY": library()}
        if engine == "tcp":
            env |= {"KVT_SAME_HOST": "0", "UCX_TLS": "tcp"}
        return env
    return {"KVT_ENGINE": engine}


class Node:
    """Calls of unknown methods go to the node of the same name."""

    def __init__(
        self, flavour: str, env: dict[str, str], script: str, *args: str
    ) -> None:
        python = sys.executable
        if flavour == "plain":
            python = str(venv() / "bin" / "python")
        here, there = multiprocessing.Pipe()
        self.process = subprocess.Popen(
            [python, str(HERE / script), flavour, str(there.fileno()), *args],
            pass_fds=[there.fileno()],
            env={**os.environ, "UCX_MODULES": "^efa", **env},
        )
        there.close()
        self.connection = here

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.connection.send((method, args, options))
            if not self.connection.poll(LIMIT):
                raise AssertionError(f"no answer to {method} in {LIMIT} s")
            kind, answer = self.connection.recv()
            if kind == "raised":
                raise Raised(*answer)
            return answer

        return call

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Stage:
    """The nodes of one test; those still alive are ended with it."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in self.nodes:
            node.kill()

    def start(
        self,
        flavour: str,
        engine: str = "nixl",
        script: str = "node.py",
        *args: str,
    ) -> Node:
        env = environment(engine)
        if flavour == "plain":
            env.pop("KVT_NIXL_LIBRARY", None)
        node = Node(flavour, env, script, *args)
        self.nodes.append(node)
        return node


def pattern(seed: int, length: int) -> bytes:
    """Bytes that differ from those of another seed."""
    return bytes((seed * 37 + i * 11 + (i >> 8)) & 0xFF for i in range(length))
