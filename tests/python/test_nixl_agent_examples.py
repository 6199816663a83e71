# SPDX-License-Identifier: Apache-2.0
"""The sequences of calls of NIXL's own Python examples.

Each half runs in a process of its own (nixl_agent_support/example_node.py),
over kvt.nixl and over plain NIXL, and over pairs of them: the same code, and
the same assertions. NIXL 1.3 is a peer too, and a library below kvt.nixl.
Left out are the examples for files, objects and GPUs, and the ways of NIXL to
send metadata (its listener and etcd), which kvt.nixl does not offer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nixl_agent_support.example_node import COLUMNS, ROWS
from nixl_agent_support.nodes import Stage

PAIRS = [
    ("kvt", "kvt", "local"),
    ("kvt", "kvt", "nixl"),
    ("plain", "plain", "nixl"),
    ("kvt", "plain", "nixl"),
    ("plain", "kvt", "nixl"),
    ("kvt-13", "kvt-13", "nixl"),
    ("kvt-13", "plain-13", "nixl"),
    ("plain-13", "kvt-13", "nixl"),
    ("kvt", "plain-13", "mixed"),
    ("plain-13", "kvt", "mixed"),
]
"""Target, initiator, and the engine. Versions meet over TCP only."""

TARGETS = [[float(i + 1)] * 2 for i in range(ROWS)]
INITIATORS = [[-float(i + 1)] * 2 for i in range(ROWS)]
"""The halves of each row, as they are at first."""


class Two:
    def __init__(self, stage: Stage, kinds: tuple[str, str, str]) -> None:
        self.target, self.initiator = (
            stage.start(kind, kinds[2], "example_node") for kind in kinds[:2]
        )

    def meet(self, **config: Any) -> None:
        ours = self.target.open("target", 1, **config)
        theirs = self.initiator.open("initiator", -1, **config)
        self.target.meet(theirs)
        self.initiator.meet(ours)

    def play(self, example: str, *args: Any) -> tuple[Any, Any]:
        """Both halves side by side; what they say."""
        self.target.tell(f"{example}_target", args, {})
        said = self.initiator.ask(f"{example}_initiator", args, {})
        return self.target.answer(f"{example}_target"), said


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    with Stage() as stage:
        yield Two(stage, request.param)


def test_a_target_is_read(two: Two) -> None:
    two.meet()
    two.play("basic")
    assert two.initiator.halves() == TARGETS
    assert two.target.halves() == TARGETS


def test_reads_by_index_and_writes_side_by_side(two: Two) -> None:
    two.meet(backends=["UCX"])
    heard, _ = two.play("expanded")
    reads = [f"read {i}{more}" for i in range(4) for more in ("", " again")]
    writes = [f"write {[12, 13]}", f"write {[14, 15]}"]
    assert heard == sorted(note.encode() for note in reads + writes)
    backwards = TARGETS[8:12] + TARGETS[4:8] + TARGETS[:4]
    assert two.initiator.halves() == backwards + INITIATORS[12:]
    ours, theirs = TARGETS, INITIATORS
    expected = [
        [ours[i][0], theirs[i][1]] if i % 2 == 0 else [theirs[i][0], ours[i][1]]
        for i in range(12, 16)
    ]
    assert two.target.halves() == TARGETS[:12] + expected


def test_a_sender_and_a_receiver_wait_for_each_other(two: Two) -> None:
    two.meet()
    two.play("blocking")
    assert two.target.halves() == INITIATORS
    for node in (two.target, two.initiator):
        node.leave()


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_a_server_moves_for_its_client(two: Two, operation: str) -> None:
    two.meet()
    two.play("asked", operation)
    moved = INITIATORS if operation == "READ" else TARGETS
    assert two.target.halves() == moved
    assert two.initiator.halves() == moved


def test_the_figures_of_a_transfer(two: Two) -> None:
    two.meet(capture_telemetry=True)
    _, (moved, descs, backend) = two.play("figures")
    assert moved == ROWS * COLUMNS * 4
    assert 1 <= descs <= ROWS
    assert backend == "UCX"


@pytest.mark.parametrize("kind", ["kvt", "plain", "kvt-13", "plain-13"])
def test_what_metadata_does_not_have_is_not_found(kind: str) -> None:
    with Stage() as stage:
        node = stage.start(kind, "nixl", "example_node")
        missing = "nixlNotFoundError"
        assert node.partial() == [missing, "[1]", missing, "[2]"]
