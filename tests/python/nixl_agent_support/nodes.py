# SPDX-License-Identifier: Apache-2.0
"""Starts nodes, each an agent in a process of its own.

A node's flavour is "kvt" or "plain": kvt.nixl, or NIXL itself. "kvt-13" and
"plain-13" take the NIXL of KVT_TEST_NIXL_13, the others that of _15.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import stage
from conftest import absent, need_library, need_python
from stage import NodeProcess


def environment(engine: str, version: str = "15") -> dict[str, str]:
    """What makes an agent of kvt.nixl take an engine: "local", "nixl", "only"
    (NIXL without the way by the same host), "tcp" (that, over TCP), "mixed"
    (that, for peers with another version of NIXL), or a fault engine."""
    if engine not in ("nixl", "only", "tcp", "mixed"):
        return {"KVT_ENGINE": engine}
    env = {"KVT_ENGINE": "nixl", "KVT_NIXL_LIBRARY": need_library(version)}
    if engine != "nixl":
        env["KVT_SAME_HOST"] = "0"
    if engine in ("tcp", "mixed"):
        env["UCX_TLS"] = "tcp"
    if engine == "mixed":
        # Over several devices UCX aborts in one of the two.
        env["UCX_NET_DEVICES"] = network()
    return env


def network() -> str:
    """The device of the default route."""
    for line in Path("/proc/net/route").read_text().splitlines():
        device, target, *_ = line.split()
        if target == "00000000":
            return device
    absent("there is no network")


class Stage(stage.Stage):
    def start(
        self,
        flavour: str,
        engine: str = "nixl",
        script: str = "node",
        *args: str,
        paths: tuple[str, ...] = (),
    ) -> Any:
        kind, _, version = flavour.partition("-")
        version = version or "15"
        env = environment(engine, version)
        python = sys.executable if kind == "kvt" else need_python(version)
        node = NodeProcess(
            f"nixl_agent_support.{script}",
            kind,
            *args,
            python=python,
            paths=paths,
            env=env,
        )
        self.enter(node)
        return node


def pattern(seed: int, length: int) -> bytes:
    """Bytes that differ from those of another seed."""
    return bytes((seed * 37 + i * 11 + (i >> 8)) & 0xFF for i in range(length))
