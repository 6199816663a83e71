# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python package share.

The `engine` fixture runs a test on every engine: `local`, the fault engine
around it, and NIXL where the library is found, through the same-host shortcut
and without it. KVT_TEST_NIXL_15 names a virtual environment with the wheel
nixl-cu12; without it those runs are skipped, and with KVT_REQUIRE_NIXL=1 they
fail.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

import kvt

try:
    import numpy as np
except ImportError:
    np = None  # type: ignore[assignment]

# Whoever starts the tests in the background of a script has them ignore SIGINT,
# and so would every program that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

BLOCK = 4096
COUNT = 64
PATIENCE = 60.0
"""Seconds until a test that waits is called broken; never reached."""


def nixl_library(version: str = "15") -> str | None:
    """The NIXL library in the environment of KVT_TEST_NIXL_15 or _13."""
    venv = os.environ.get(f"KVT_TEST_NIXL_{version}")
    if not venv:
        return None
    found = sorted(Path(venv).glob("lib/python3*/**/libnixl_capi.so"))
    return str(found[0]) if found else None


def absent(why: str) -> NoReturn:
    """Skips for want of something, and fails where it must be there."""
    if os.environ.get("KVT_REQUIRE_NIXL") == "1":
        pytest.fail(why)
    pytest.skip(why)


def need_library(version: str = "15") -> str:
    library = nixl_library(version)
    if library is None:
        absent(f"KVT_TEST_NIXL_{version} names no environment with NIXL")
    return library


def need_python(version: str) -> str:
    """The interpreter that has NIXL's own package."""
    need_library(version)
    return os.environ[f"KVT_TEST_NIXL_{version}"] + "/bin/python"


class Engine(NamedTuple):
    """How to open one engine."""

    name: str
    options: dict[str, Any]

    def open(self, **options: Any) -> kvt.Transport:
        return kvt.Transport(self.name, **{**self.options, **options})


ENGINES = ["local", "fault", "nixl", "nixl-only"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "local":
        return Engine("local", {})
    if request.param == "fault":
        return Engine("fault:local", {})
    options = {
        "nixl_library": need_library(),
        "same_host": request.param == "nixl",
    }
    return Engine("nixl", options)


class Pair:
    """Two agents of one process: `source` writes into `target`'s blocks."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.source_memory = bytearray(BLOCK * COUNT)
        self.target_memory = bytearray(BLOCK * COUNT)
        self.source = engine.open(**options)
        self.target = engine.open(**options)
        self.source.register(self.source_memory)
        self.target.register(self.target_memory)
        self.peer = self.source.add_peer("target", self.target.metadata())
        self.source_addr = kvt.region_of(self.source_memory).addr
        self.target_addr = kvt.region_of(self.target_memory).addr
        self.local = self.source.prepare(
            "kv", [kvt.Run(self.source_addr, BLOCK, COUNT)]
        )
        self.remote = self.source.prepare(
            "kv", [kvt.Run(self.target_addr, BLOCK, COUNT)], self.peer
        )

    def fill(self, block: int, seed: int) -> bytes:
        """Puts a pattern into a block of the source and returns it."""
        data = bytes((seed * 31 + i * 7) & 0xFF for i in range(BLOCK))
        self.source_memory[block * BLOCK : (block + 1) * BLOCK] = data
        return data

    def landed(self, block: int) -> bytes:
        """A block of the target."""
        return bytes(self.target_memory[block * BLOCK : (block + 1) * BLOCK])

    def write(self, local: Any, remote: Any, **options: Any) -> int:
        return self.source.write_blocks(
            self.peer, self.local, local, self.remote, remote, **options
        )

    def close(self) -> None:
        self.source.close()
        self.target.close()


@pytest.fixture
def pair(engine: Engine) -> Iterator[Pair]:
    made = Pair(engine)
    yield made
    made.close()


@pytest.fixture
def local_pair() -> Iterator[Pair]:
    made = Pair(Engine("local", {}))
    yield made
    made.close()


@pytest.fixture
def fault_pair() -> Iterator[Callable[..., Pair]]:
    """Makes pairs whose source follows fault rules."""
    pairs: list[Pair] = []

    def make(rules: str = "", **options: Any) -> Pair:
        made = Pair(Engine("fault:local", {}), grace=0.05, **options)
        pairs.append(made)
        made.source.set_fault(rules)
        return made

    yield make
    for made in pairs:
        if not made.source.closed:
            made.source.set_fault("")
        with contextlib.suppress(kvt.Busy):
            made.source.close()  # some tests lose a transfer for ever
        made.target.close()


def collect(transport: kvt.Transport, count: int) -> list[kvt.Result]:
    """Polls until `count` results are there."""
    poller = select.poll()
    poller.register(transport.fileno(), select.POLLIN)
    results: list[kvt.Result] = []
    while len(results) < count:
        assert poller.poll(PATIENCE * 1000), f"{len(results)} of {count}"
        results += transport.poll()
    return results


def run_python(
    code: str, *args: str, timeout: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
