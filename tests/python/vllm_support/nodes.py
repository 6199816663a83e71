# SPDX-License-Identifier: Apache-2.0

"""Starts nodes (node.py) and drives them."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from vllm_support.sides import need_nixl
from vllm_support.waits import LIMIT, until

HERE = Path(__file__).resolve().parent


class Raised(Exception):
    """The node's call raised; `names` are its class and that one's bases."""

    def __init__(self, names: list[str], text: str) -> None:
        super().__init__(f"{names[0]}: {text}")
        self.names = names
        self.text = text


def need_vllm() -> Path:
    """Where vLLM's P2P tier is; skips where it or NIXL's package is not, and
    fails where they must be."""
    need_nixl()
    place = os.environ.get("KVT_TEST_VLLM")
    why = None
    if not place:
        why = os.environ.get("KVT_TEST_VLLM_WHY") or (
            "KVT_TEST_VLLM is not set: see vllm_support/fetch.py"
        )
    elif not nixl_site() and importlib.util.find_spec("nixl") is None:
        why = "no package nixl here, and KVT_TEST_NIXL_15 names none"
    if why is None:
        assert place is not None
        return Path(place)
    if os.environ.get("KVT_REQUIRE_NIXL") == "1":
        pytest.fail(why)
    pytest.skip(why)


def nixl_site() -> list[str]:
    place = os.environ.get("KVT_TEST_NIXL_15")
    if not place:
        return []
    return [str(p) for p in Path(place).glob("lib/python3*/site-packages")]


def paths(vllm: Path) -> list[str]:
    """Where a node finds itself, ZeroMQ and NIXL."""
    return [str(HERE.parent), str(vllm), *nixl_site()]


class NodeProcess:
    """Calls of unknown methods go to the node of the same name."""

    def __init__(self, vllm: Path, *, kvt: bool, **env: str) -> None:
        here, there = multiprocessing.Pipe()
        settings = {
            **os.environ,
            "KVT_ENGINE": "",
            "KVT_SAME_HOST": "",
            # As kvt sets it, for nodes without kvt: the wheel's EFA module
            # and the system's libibverbs do not bear each other.
            "UCX_MODULES": "^efa",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "PYTHONPATH": os.pathsep.join(
                filter(None, [os.environ.get("PYTHONPATH"), *paths(vllm)])
            ),
            "KVT_VLLM": "1" if kvt else "",
            **env,
        }
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "vllm_support.node",
                str(there.fileno()),
                str(vllm),
            ],
            pass_fds=[there.fileno()],
            env=settings,
        )
        there.close()
        self.connection = here

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            return self.ask(name, args, more)

        return call

    def ask(
        self, name: str, args: tuple[Any, ...], more: dict[str, Any]
    ) -> Any:
        self.tell(name, args, more)
        return self.answer(name)

    def tell(
        self, name: str, args: tuple[Any, ...], more: dict[str, Any]
    ) -> None:
        self.connection.send((name, args, more))

    def answer(self, name: str) -> Any:
        if not self.connection.poll(LIMIT):
            raise AssertionError(f"no answer to {name} in {LIMIT} s")
        try:
            kind, answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            code = self.process.wait(timeout=LIMIT)
            raise AssertionError(
                f"the node ended with {code} in {name}"
            ) from None
        if kind == "raised":
            raise Raised(*answer)
        return answer

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

    def __init__(self, vllm: Path) -> None:
        self.vllm = vllm
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

    def node(self, *, kvt: bool, **env: str) -> NodeProcess:
        node = NodeProcess(self.vllm, kvt=kvt, **env)
        self.started.append(node)
        return node


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def results(
    node: NodeProcess, count: int, peer: str | None = None
) -> tuple[list, list]:
    """Polls until this many transfers ended."""
    done: list[int] = []
    failed: list[int] = []

    def ready() -> bool:
        more = node.call("poll", peer)
        done.extend(more[0])
        failed.extend(more[1])
        return len(done) + len(failed) >= count

    until(f"{count} transfers ended", ready)
    return done, failed
