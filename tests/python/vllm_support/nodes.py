# SPDX-License-Identifier: Apache-2.0

"""Starts nodes (node.py), and what its tests do with them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

import stage
from conftest import absent, need_library
from stage import NodeProcess, until

PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def need_vllm() -> Path:
    """Where vLLM's P2P tier is; skips where it or NIXL's package is not, and
    fails where they must be."""
    need_library()
    place = os.environ.get("KVT_TEST_VLLM")
    if not place:
        absent(
            os.environ.get("KVT_TEST_VLLM_WHY")
            or "KVT_TEST_VLLM is not set: see vllm_support/fetch.py"
        )
    return Path(place)


def nixl_site() -> list[str]:
    place = Path(os.environ["KVT_TEST_NIXL_15"])
    return [str(p) for p in place.glob("lib/python3*/site-packages")]


def paths(vllm: Path) -> list[str]:
    """Where a node finds ZeroMQ and NIXL."""
    return [str(vllm), *nixl_site()]


class Stage(stage.Stage):
    def __init__(self, vllm: Path) -> None:
        super().__init__()
        self.vllm = vllm

    def node(self, *, kvt: bool, **env: str) -> NodeProcess:
        settings = {
            "KVT_ENGINE": "",
            "KVT_SAME_HOST": "",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "KVT_VLLM": "1" if kvt else "",
            **env,
        }
        node = NodeProcess(
            "vllm_support.node",
            str(self.vllm),
            paths=paths(self.vllm),
            env=settings,
        )
        self.enter(node)
        return node


def free_port() -> int:
    """A port below those that the kernel hands out to whoever asks for any, as
    UCX does all the time: nobody takes it between here and its listener."""
    lowest = int(PORTS.read_text().split()[0])
    while True:
        port = random.randrange(lowest // 2, lowest)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def results(
    node: NodeProcess, count: int, peer: str | None = None
) -> tuple[list[int], list[int]]:
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
