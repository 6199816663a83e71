# SPDX-License-Identifier: Apache-2.0
"""Starts nodes (node.py)."""

from __future__ import annotations

from typing import Any

import stage
from stage import NodeProcess


class Stage(stage.Stage):
    def two(self, block: int, count: int, **env: str) -> tuple[Any, Any]:
        """A prefill that has loaded a decode, and the decode; a node's `name`
        is its agent's."""
        nodes: list[Any] = []
        for _ in range(2):
            nodes.append(NodeProcess("sglang_support.node", env=env))
            self.enter(nodes[-1])
        a, b = nodes
        a.open("prefill", block * count, block, 1)
        b.open("decode", block * count, block, 2)
        registration = b.registration()
        a.load(*registration)
        b.name = registration[0]
        return a, b
