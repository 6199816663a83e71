# SPDX-License-Identifier: Apache-2.0
"""SGLang's released NIXL connection over kvt.nixl and over plain NIXL.

`disaggregation/nixl/conn.py` of SGLang 0.5.23 runs as it is, in a prefill and a
decode process (nixl_agent_support/sglang_node.py): registration, its transfer
worker, prepared and plain lists of KV, state and aux buffers. The same rooms go
over kvt, over plain NIXL and over mixed pairs, and the bytes at the decode side
must be the same. Then the link is cut under a living peer: with plain NIXL 1.5
the peer stays broken, with kvt SGLang's own reload brings it back.

KVT_TEST_SGLANG names the folder that fetch_sglang.py fills.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from nixl_agent_support.nodes import Stage

SCRIPT = "sglang_node"
FAILED, SUCCESS = 0, 4
STATES = ["swa", "mamba", "request_row"]

KV = ([0, 1, 2, 7, 9, 8], [10, 11, 12, 3, 4, 40])
AUX = (2, 5)
STATE = ([[0, 1, 5], [4], [6, 7]], [[9, 8, 7], [3], [1, 0]])
"""What goes from where to where."""

PAIRS = [
    ("kvt", "kvt", False),
    ("kvt", "kvt", True),
    ("plain", "plain", False),
    ("kvt", "plain", False),
    ("plain", "kvt", False),
]
"""Prefill, decode, and whether the model keeps K and V in one buffer."""


@pytest.fixture
def place() -> str:
    found = os.environ.get("KVT_TEST_SGLANG")
    if not found:
        pytest.skip("KVT_TEST_SGLANG names no folder with SGLang's files")
    return found


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as made:
        yield made


class Two:
    def __init__(
        self,
        stage: Stage,
        place: str,
        pair: tuple[str, str],
        engine: str,
        mla: bool = False,
    ) -> None:
        self.stage, self.place, self.engine = stage, place, engine
        self.mla = mla
        self.prefill = stage.start(pair[0], engine, SCRIPT, place)
        self.prefill.open("prefill", mla)
        self.prefill.fill(1)
        self.flavour = pair[1]
        self.rooms = 0
        self.start_decode()

    def start_decode(self) -> None:
        self.decode = self.stage.start(
            self.flavour, self.engine, SCRIPT, self.place
        )
        self.name = self.decode.open("decode", self.mla)
        self.decode.fill(2)
        self.prefill.register(self.decode.registration())

    def room(self) -> int:
        self.rooms += 1
        frames = self.decode.want(self.rooms, KV[1], AUX[1], STATE[1])
        status, why = self.prefill.send(frames, KV[0], AUX[0], STATE[0])
        if status == FAILED:
            assert why
        self.prefill.settle()
        return int(status)


def contents(node: Any) -> dict[str, Any]:
    names = ["kv", "aux", *STATES]
    return {n: [node.item(n, i) for i in range(64)] for n in names}


def expected(source: Any, before: Any) -> Any:
    """The decode side's items after one room."""
    after = {name: list(items) for name, items in before.items()}
    moves = [("kv", *KV), ("aux", [AUX[0]], [AUX[1]])]
    moves += [
        (name, ours, theirs)
        for name, ours, theirs in zip(STATES, *STATE, strict=True)
    ]
    for name, ours, theirs in moves:
        for i, j in zip(ours, theirs, strict=True):
            after[name][j] = source[name][i]
    return after


@pytest.mark.parametrize(("prefill", "decode", "mla"), PAIRS)
def test_a_room_arrives_the_same_over_kvt_and_over_nixl(
    stage: Stage, place: str, prefill: str, decode: str, mla: bool
) -> None:
    two = Two(stage, place, (prefill, decode), "nixl", mla)
    source, before = contents(two.prefill), contents(two.decode)
    assert two.prefill.prepared() == {two.name: [0, 1]}
    assert two.room() == SUCCESS
    assert contents(two.decode) == expected(source, before)
    assert two.room() == SUCCESS
    assert contents(two.decode) == expected(source, before)


@pytest.mark.parametrize("flavour", ["kvt", "plain"])
def test_a_restarted_decode_is_served(
    stage: Stage, place: str, flavour: str
) -> None:
    two = Two(stage, place, (flavour, flavour), "nixl")
    assert two.room() == SUCCESS
    frames = two.decode.want(100, KV[1], AUX[1], STATE[1])
    two.decode.kill()
    status, _ = two.prefill.send(frames, KV[0], AUX[0], STATE[0])
    assert status == FAILED
    two.start_decode()
    source, before = contents(two.prefill), contents(two.decode)
    assert two.room() == SUCCESS
    assert contents(two.decode) == expected(source, before)


@pytest.mark.parametrize("flavour", ["kvt", "plain"])
def test_only_over_kvt_a_cut_link_to_a_living_peer_comes_back(
    stage: Stage, place: str, flavour: str
) -> None:
    two = Two(stage, place, (flavour, flavour), "tcp")
    assert two.room() == SUCCESS
    assert two.prefill.cut() > 0
    assert two.room() == FAILED
    repaired = flavour == "kvt"
    if repaired:
        assert two.prefill.loaded(two.name)
    source, before = contents(two.prefill), contents(two.decode)
    assert two.room() == (SUCCESS if repaired else FAILED)
    if repaired:
        assert contents(two.decode) == expected(source, before)
