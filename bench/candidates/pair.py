# SPDX-License-Identifier: Apache-2.0
"""A candidate with vLLM's interface: two nodes (node.py) and their driver."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PEER = "peer"
LIMIT = 120.0
"""Seconds after which a node that does not answer has failed."""


@dataclass(frozen=True)
class Kind:
    """A class and how it reaches its peer."""

    name: str
    made: str  # of transports.load()
    env: dict[str, str] = field(default_factory=dict, hash=False)
    waits: tuple[str, ...] = ("spin", "sleep")

    @property
    def ours(self) -> bool:
        return self.made.split()[0] in ("kvt", "regions")


ONLY_NIXL = {"KVT_SAME_HOST": "0"}
TCP = {"UCX_TLS": "tcp"}
MOONCAKE = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
OURS = ("fd", "spin")
KINDS = {
    kind.name: kind
    for kind in (
        Kind("kvt", "kvt", {}, OURS),
        Kind("kvt over NIXL", "kvt", ONLY_NIXL, OURS),
        Kind("kvt over TCP", "kvt", {**ONLY_NIXL, **TCP}, OURS),
        Kind("vLLM", "vllm"),
        Kind("vLLM over TCP", "vllm", TCP),
        Kind("vLLM strided", "strided"),
        Kind("kvt local, 1 region", "regions local 1", {}, OURS),
        Kind("kvt local, 61 regions", "regions local 61", {}, OURS),
        Kind("kvt NIXL, 1 region", "regions nixl 1", ONLY_NIXL, OURS),
        Kind("kvt NIXL, 61 regions", "regions nixl 61", ONLY_NIXL, OURS),
        Kind("Mooncake", "mooncake", MOONCAKE, ("spin",)),
    )
}


@dataclass(frozen=True)
class Places:
    """Where things are: the interpreter with kvt, vLLM's modules, NIXL."""

    python: str
    vllm: Path
    nixl: Path  # site-packages
    build: Path  # of the C programs

    def library(self) -> str:
        found = self.nixl.glob(".nixl_cu1*.mesonpy.libs/libnixl_capi.so")
        return str(next(found, ""))


class NodeFailed(Exception):
    pass


class NodeProcess:
    """Calls of unknown methods go to the Side in the node."""

    def __init__(
        self, kind: Kind, places: Places, prefix: tuple[str, ...] = ()
    ) -> None:
        here, there = multiprocessing.Pipe()
        paths = [str(ROOT)]
        if not kind.ours:
            paths += [str(places.vllm), str(places.nixl)]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "KVT_NIXL_LIBRARY": places.library(),
            # As kvt sets it: the wheel's EFA module and the system's
            # libibverbs do not bear each other.
            "UCX_MODULES": "^efa",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "NIXL_LOG_LEVEL": "ERROR",
            "UCX_LOG_LEVEL": "error",
            **kind.env,
        }
        self.process = subprocess.Popen(
            [
                *prefix,
                places.python if kind.ours else sys.executable,
                "-m",
                "bench.node",
                str(there.fileno()),
                kind.made,
                "" if kind.ours else str(places.vllm),
            ],
            pass_fds=[there.fileno()],
            # Between it and us may be a program that enters a namespace.
            start_new_session=True,
            env=env,
            cwd="/",
        )
        there.close()
        self.connection = here

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            self.tell(name, *args, **more)
            return self.answer()

        return call

    def tell(self, name: str, /, *args: Any, **more: Any) -> None:
        self.connection.send((name, args, more))

    def answer(self) -> Any:
        if not self.connection.poll(LIMIT):
            raise NodeFailed(f"no answer in {LIMIT} s")
        try:
            verdict, answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise NodeFailed(
                f"the node ended with {self.process.wait()}"
            ) from None
        if verdict == "raised":
            raise NodeFailed(answer)
        return answer

    def do(self, job: str, /, *args: Any, **more: Any) -> Any:
        return self.job(job, args, more)

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.wait()
        self.connection.close()


class Pair:
    """The initiator is timed, the target owns the blocks that are written."""

    def __init__(
        self,
        kind: Kind,
        places: Places,
        blocks: int,
        block_len: int,
        memory: str = "private",
        fill: bool = True,
        prefixes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    ) -> None:
        self.kind = kind
        self.size = 2 * blocks * block_len
        self.initiator = NodeProcess(kind, places, prefixes[0])
        self.target = NodeProcess(kind, places, prefixes[1])
        self.peers = 1
        self.checked: set[tuple[int, int]] = set()
        shape = blocks, block_len, memory, fill
        try:
            self.initiator.tell("open", "initiator", *shape)
            self.target.tell("open", "target", *shape)
            self.initiator.answer()
            self.target.answer()
            self.numbers = self.target.numbers()
            self.initiator.add(*self.numbers)
        except BaseException:
            self.end()
            raise
        self.rest()

    def nodes(self) -> tuple[NodeProcess, NodeProcess]:
        return self.initiator, self.target

    def rest(self) -> None:
        for node in self.nodes():
            node.signal(signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[Pair]:
        """Its turn: at all other times its processes are stopped."""
        for node in self.nodes():
            node.signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self.rest()

    def do(self, job: str, *args: Any, **more: Any) -> Any:
        with self.awake():
            return self.initiator.do(job, *args, **more)

    def add_more(self, count: int) -> None:
        """The same target under further names."""
        with self.awake():
            while self.peers < count:
                name = f"{PEER}{self.peers}"
                self.initiator.add(*self.numbers, name=name)
                self.peers += 1

    def check(self, count: int, run: int, wait: str = "spin") -> None:
        """Writes once, also to warm up, and compares both sides' bytes."""
        if (count, run) in self.checked:
            return
        with self.awake():
            self.target.do("scrub")
            self.initiator.do("writes", count, run, 1, wait)
            sides = [
                node.do("digest", which, count, run)
                for which, node in enumerate(self.nodes())
            ]
        if sides[0] != sides[1]:
            raise NodeFailed(
                f"{self.kind.name}: the target's bytes are not those that "
                f"were sent ({count} blocks, runs of {run})"
            )
        self.checked.add((count, run))

    def end(self) -> None:
        for node in self.nodes():
            node.end()
