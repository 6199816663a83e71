# SPDX-License-Identifier: Apache-2.0
"""Agents of NIXL's interface in processes of their own.

Each is driven by the same code (nixl_agent_support/node.py), over kvt.nixl and
over plain NIXL, 1.5 and 1.3: two of kvt's, and mixed pairs both ways. Contents
are compared block by block, and what lies beside them must stay as it was. Then
a peer is killed, and restarted under its name: with kvt the disconnect is seen
by check_remote_metadata(), and adding it again repairs everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nixl_agent_support.nodes import Stage, pattern
from stage import Raised

BLOCK = 1024
COUNT = 32
SIZE = BLOCK * COUNT
GUARD = b"\xee" * BLOCK

PAIRS = [
    ("kvt", "kvt", "local"),
    ("kvt", "kvt", "nixl"),
    ("kvt", "kvt", "tcp"),
    ("kvt", "plain", "nixl"),
    ("plain", "kvt", "nixl"),
    ("kvt-13", "kvt-13", "nixl"),
    ("kvt-13", "plain-13", "nixl"),
    ("plain-13", "kvt-13", "nixl"),
    ("kvt", "plain-13", "mixed"),
    ("plain-13", "kvt", "mixed"),
    ("kvt-13", "plain", "mixed"),
]
"""The last word is the engine of those on kvt; "-13": over NIXL 1.3."""


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as made:
        yield made


class Two:
    """`one` moves to and from `other`."""

    def __init__(self, stage: Stage, pair: tuple[str, str, str]) -> None:
        self.one = stage.start(pair[0], pair[2])
        self.other = stage.start(pair[1], pair[2])
        self.one_addr = self.one.open("one", SIZE)
        self.other_addr = self.other.open("other", SIZE)
        self.reset()
        assert self.one.add(self.other.metadata()) == b"other"
        assert self.other.add(self.one.metadata()) == b"one"

        self.strided = pair[0] != "plain-13"

    def prepare(self, key: str, side: str, addr: int) -> None:
        """All blocks; NIXL 1.3 has no strided lists."""
        if self.strided:
            self.one.prepare(key, side, [(addr, BLOCK, 0, BLOCK, COUNT)])
        else:
            self.one.prepare(key, side, rows(addr, list(range(COUNT))))

    def reset(self) -> None:
        for i in range(COUNT):
            self.one.fill(i * BLOCK, pattern(i + 1, BLOCK))
            self.other.fill(i * BLOCK, GUARD)


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[Two]:
    with Stage() as stage:
        yield Two(stage, request.param)


@pytest.fixture
def two(pair: Two) -> Two:
    pair.reset()
    return pair


def rows(addr: int, blocks: list[int]) -> list[tuple[int, int, int]]:
    return [(addr + i * BLOCK, BLOCK, 0) for i in blocks]


def test_a_write_moves_its_blocks_and_no_byte_beside_them(two: Two) -> None:
    moved = {3: 9, 4: 10, 7: 2, 30: 31}
    two.one.initialize(
        "write",
        "WRITE",
        rows(two.one_addr, list(moved)),
        rows(two.other_addr, list(moved.values())),
        "other",
        b"written",
    )
    assert two.one.run("write") == "DONE"
    assert two.other.notes(1) == {"one": [b"written"]}
    for i in range(COUNT):
        expected = GUARD
        for source, target in moved.items():
            if target == i:
                expected = pattern(source + 1, BLOCK)
        assert two.other.look(i * BLOCK, BLOCK) == expected
    two.one.forget("write")


def test_a_read_fetches_by_index_of_strided_lists(two: Two) -> None:
    for i in range(COUNT):
        two.other.fill(i * BLOCK, pattern(100 + i, BLOCK))
    two.prepare("ours", "", two.one_addr)
    two.prepare("theirs", "other", two.other_addr)
    two.one.make("read", "READ", "ours", [0, 1, 5], "theirs", [20, 21, 0])
    assert two.one.run("read") == "DONE"
    fetched = {0: 20, 1: 21, 5: 0}
    for i in range(COUNT):
        expected = (
            pattern(100 + fetched[i], BLOCK)
            if i in fetched
            else pattern(i + 1, BLOCK)
        )
        assert two.one.look(i * BLOCK, BLOCK) == expected


def test_a_transfer_is_posted_again_with_its_note(two: Two) -> None:
    two.one.initialize(
        "again",
        "WRITE",
        rows(two.one_addr, [0]),
        rows(two.other_addr, [0]),
        "other",
        b"note",
    )
    for i in range(3):
        two.one.fill(0, pattern(50 + i, BLOCK))
        assert two.one.run("again") == "DONE"
        assert two.other.notes(1) == {"one": [b"note"]}
        assert two.other.look(0, BLOCK) == pattern(50 + i, BLOCK)


def test_messages_go_both_ways_in_order(two: Two) -> None:
    texts = [b"first", b"", b"\x00\xff", b"x" * 5000]
    for text in texts:
        two.one.send("other", text)
        two.other.send("one", text)
    assert two.other.notes(len(texts)) == {"one": texts}
    assert two.one.notes(len(texts)) == {"other": texts}


def test_lists_are_serialized_for_the_other_side(two: Two) -> None:
    descs = [(1 << 40, 16, 0), (1 << 63, 1, 3), (5, 0, 0)]
    assert two.other.deserialize(two.one.serialize(descs)) == descs
    with_meta = [(1 << 40, 16, 0, "meta"), (8, 9, 1, "")]
    assert two.other.deserialize(two.one.serialize_reg(with_meta)) == [
        (1 << 40, 16, 0, b"meta"),
        (8, 9, 1, b""),
    ]


@pytest.mark.parametrize(
    "kinds",
    [
        ("kvt", "plain"),
        ("plain", "kvt"),
        ("kvt-13", "plain-13"),
        ("plain-13", "kvt-13"),
    ],
    ids="-".join,
)
def test_partial_metadata_opens_memory_piece_by_piece(
    stage: Stage, kinds: tuple[str, str]
) -> None:
    one, other = (stage.start(kind) for kind in kinds)
    ours = one.open("one", SIZE)
    theirs = other.open("other", SIZE)
    one.fill(0, pattern(1, SIZE))
    for offset in (0, 4 * BLOCK):
        other.register(offset, BLOCK)
    with pytest.raises(Raised, match="nixlNotFoundError"):
        one.add(other.partial(0, BLOCK, False))
    assert one.add(other.partial(0, 0, True)) == b"other"
    assert one.check("other")
    assert not one.check("other", theirs, BLOCK)
    one.add(other.partial(0, BLOCK, False))
    assert one.check("other", theirs, BLOCK)
    assert not one.check("other", theirs + 4 * BLOCK, BLOCK)
    one.add(other.partial(4 * BLOCK, BLOCK, False))
    assert one.check("other", theirs, BLOCK)
    assert one.check("other", theirs + 4 * BLOCK, BLOCK)
    one.initialize(
        "write", "WRITE", rows(ours, [1, 2]), rows(theirs, [0, 4]), "other"
    )
    assert one.run("write") == "DONE"
    expected = pattern(1, SIZE)
    assert other.look(0, BLOCK) == expected[BLOCK : 2 * BLOCK]
    assert other.look(4 * BLOCK, BLOCK) == expected[2 * BLOCK : 3 * BLOCK]


def test_every_name_and_argument_of_nixl_is_there(stage: Stage) -> None:
    ours = stage.start("kvt", "local").names()
    for key, theirs in stage.start("plain").names().items():
        absent = set(theirs) - set(ours.get(key, []))
        if key == "bindings":
            absent -= {"nixlAgent", "nixlAgentConfig"}
        assert not absent, key
        if "." in key:
            assert ours[key] == theirs


# ------------------------------------------------------------ a peer that dies


def restart(stage: Stage, kind: str, engine: str) -> tuple[Any, int]:
    node = stage.start(kind, engine)
    return node, node.open("other", SIZE)


def fails(node: Any, key: str) -> str:
    """The class of the error with which a transfer ends."""
    with pytest.raises(Raised) as caught:
        node.run(key)
    return caught.value.name


@pytest.mark.parametrize(
    ("kind", "engine"),
    [("kvt", "local"), ("kvt", "nixl"), ("kvt", "tcp"), ("kvt-13", "only")],
)
def test_a_killed_peer_is_not_loaded_and_comes_back(
    stage: Stage, kind: str, engine: str
) -> None:
    two = Two(stage, (kind, kind, engine))
    one = two.one
    two.prepare("ours", "", two.one_addr)
    two.prepare("theirs", "other", two.other_addr)
    one.make("old", "WRITE", "ours", [1], "theirs", [1])
    assert one.run("old") == "DONE"
    assert one.check("other")

    two.other.kill()
    assert fails(one, "old") == "nixlRemoteDisconnectError"
    assert not one.check("other")
    with pytest.raises(Raised, match="nixlRemoteDisconnectError"):
        one.state("old")

    other, addr = restart(stage, kind, engine)
    assert one.add(other.metadata()) == b"other"
    assert one.check("other")
    with pytest.raises(Raised, match="nixlNotFoundError"):
        one.make("stale", "WRITE", "ours", [1], "theirs", [1])
    one.forget("old")
    one.forget("theirs")
    two.prepare("theirs", "other", addr)
    one.make("new", "WRITE", "ours", [1], "theirs", [2])
    assert one.run("new") == "DONE"
    assert other.look(2 * BLOCK, BLOCK) == pattern(2, BLOCK)


def test_a_peer_under_the_same_name_replaces_a_dead_one_unseen(
    stage: Stage,
) -> None:
    """Nothing was posted since the peer died; the new metadata says it."""
    two = Two(stage, ("kvt", "kvt", "nixl"))
    two.other.kill()
    other, addr = restart(stage, "kvt", "nixl")
    assert two.one.add(other.metadata()) == b"other"
    two.one.initialize(
        "write",
        "WRITE",
        rows(two.one_addr, [5]),
        rows(addr, [6]),
        "other",
    )
    assert two.one.run("write") == "DONE"
    assert other.look(6 * BLOCK, BLOCK) == pattern(6, BLOCK)


def test_plain_nixl_does_not_see_that_its_peer_died(stage: Stage) -> None:
    """What kvt's agent makes better: SGLang reloads a peer only when
    check_remote_metadata() says that it is gone."""
    two = Two(stage, ("plain", "plain", "nixl"))
    two.one.initialize(
        "write",
        "WRITE",
        rows(two.one_addr, [5]),
        rows(two.other_addr, [6]),
        "other",
    )
    assert two.one.run("write") == "DONE"
    two.other.kill()
    assert fails(two.one, "write") == "nixlRemoteDisconnectError"
    assert two.one.check("other")
