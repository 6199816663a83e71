# SPDX-License-Identifier: Apache-2.0
"""Each call that released programs make on NIXL's agent is offered.

Their modules are read, not run, so that calls on paths which the other tests
do not come by count too: the name must be there, and take these arguments.
"""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvt.nixl as nixl

CLIENTS = {
    "vLLM": (
        "KVT_TEST_VLLM",
        "vllm/distributed/kv_transfer/kv_connector/v1/nixl",
        "nixl_wrapper",
    ),
    "SGLang": (
        "KVT_TEST_SGLANG",
        "sglang/srt/disaggregation/nixl",
        "agent",
    ),
}
"""Where the modules are, and the attribute that holds the agent."""


def calls(place: Path, holder: str) -> Iterator[tuple[str, ast.Call | None]]:
    """What is taken from the agent, and how it is called where it is."""
    for module in sorted(place.glob("*.py")):
        tree = ast.parse(module.read_text())
        called = {
            id(node.func): node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Attribute)
                and node.value.attr == holder
            ):
                yield node.attr, called.get(id(node))


@pytest.mark.parametrize("client", CLIENTS)
def test_each_call_of_a_client_is_offered(
    client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable, folder, holder = CLIENTS[client]
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no folder with {client}'s files")
    monkeypatch.setenv("KVT_ENGINE", "local")
    agent = nixl.nixl_agent("offers")
    found = set()
    for name, call in calls(Path(os.environ[variable]) / folder, holder):
        found.add(name)
        offered = getattr(agent, name)
        if call is not None:
            keywords = {word.arg: None for word in call.keywords if word.arg}
            inspect.signature(offered).bind(*call.args, **keywords)
    assert {"make_prepped_xfer", "transfer", "add_remote_agent"} <= found
