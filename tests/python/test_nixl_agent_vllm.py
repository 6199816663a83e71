# SPDX-License-Identifier: Apache-2.0
"""vLLM's NixlConnector over kvt.nixl and over plain NIXL.

The connector of vLLM 0.32 runs as it is, in a prefill and a decode process
(nixl_agent_support/vllm_node.py): handshake over ZeroMQ, registration, reads
("Pull") and writes ("Push") of whole requests, heartbeats, shutdown. The same
requests go over kvt, over plain NIXL and over mixed pairs, and the KV cache
must be the same. Then the prefill side dies, or the link to it is cut while it
lives: what was under way is reported as blocks to compute anew, and with kvt
vLLM's own repair comes; with plain NIXL 1.5 the peer stays broken.

KVT_TEST_VLLM names the folder that vllm_support/fetch.py fills.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nixl_agent_support.nodes import Stage
from stage import until
from vllm_support.nodes import free_port, need_vllm

PAIRS = [
    ("kvt", "kvt", "local"),
    ("kvt", "kvt", "nixl"),
    ("kvt", "kvt", "only"),
    ("plain", "plain", "nixl"),
    ("kvt", "plain", "nixl"),
    ("plain", "kvt", "nixl"),
]
"""Prefill, decode, and the engine of those on kvt."""

OURS, THEIRS = [3, 4, 5, 17, 30, 0], [20, 21, 22, 1, 2, 31]
"""Blocks of a request at the prefill and at the decode side."""


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as made:
        yield made


class Two:
    def __init__(
        self,
        stage: Stage,
        kinds: tuple[str, str],
        engine: str,
        way: str = "Pull",
    ) -> None:
        self.stage, self.engine, self.way = stage, engine, way
        self.kinds = kinds
        self.decode = self.node(kinds[1], "decode", "kv_consumer", 2)
        self.start_prefill("prefill")

    def start_prefill(self, name: str) -> None:
        self.prefill = self.node(self.kinds[0], name, "kv_producer", 1)

    def node(self, kind: str, name: str, role: str, seed: int) -> Any:
        place = str(need_vllm())
        node = self.stage.start(
            kind, self.engine, "vllm_node", place, paths=(place,)
        )
        node.open(name, role, self.way, free_port())
        node.fill(seed)
        return node

    def request(self, name: str) -> set[int]:
        """The blocks that did not come."""
        offer = self.prefill.offer(name, OURS)
        self.decode.want(name, THEIRS, offer)
        if self.way == "Push":
            self.until_sent(name)
        failed: set[int] = self.decode.wait(name)
        return failed

    def until_sent(self, name: str) -> None:
        until(f"{name} is sent", lambda: name in self.prefill.step()[0])

    def expected(self) -> list[list[bytes]]:
        """The decode's cache after a request."""
        after: list[list[bytes]] = self.decode.blocks()
        for ours, theirs in zip(self.prefill.blocks(), after, strict=True):
            for i, j in zip(OURS, THEIRS, strict=True):
                theirs[j] = ours[i]
        return after


@pytest.mark.parametrize("way", ["Pull", "Push"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_request_arrives_the_same_over_kvt_and_over_nixl(
    stage: Stage, pair: tuple[str, str, str], way: str
) -> None:
    two = Two(stage, pair[:2], pair[2], way)
    expected = two.expected()
    for name in ("first", "second"):
        assert two.request(name) == set()
        assert two.decode.blocks() == expected
        two.until_sent(name)
        two.prefill.fill(ord(name[0]))
        expected = two.expected()
    reader = two.decode if way == "Pull" else two.prefill
    moved = reader.stats()
    assert sum(moved["bytes_transferred"]) == 2 * 3 * len(OURS) * 2048
    assert moved["num_failed_transfers"] == []
    for node in (two.decode, two.prefill):
        node.close()
        assert node.end() == 0


@pytest.mark.parametrize("kind", ["kvt", "plain"])
def test_a_heartbeat_makes_the_producer_keep_its_blocks(
    stage: Stage, kind: str
) -> None:
    two = Two(stage, (kind, kind), "nixl")
    offer = two.prefill.offer("kept", OURS)
    before = two.prefill.lease("kept")

    def longer() -> bool:
        two.decode.heartbeat(offer)  # the first connects
        two.prefill.step()
        return bool(two.prefill.lease("kept") > before)

    until("the lease is longer", longer)


@pytest.mark.parametrize("kind", ["kvt", "plain"])
@pytest.mark.parametrize("way", ["Pull", "Push"])
def test_a_prefill_that_was_killed_is_replaced(
    stage: Stage, way: str, kind: str
) -> None:
    two = Two(stage, (kind, kind), "nixl", way)
    assert two.request("first") == set()
    offer = two.prefill.offer("lost", OURS)
    two.prefill.kill()
    if way == "Pull":
        before = two.decode.blocks()
        two.decode.want("lost", THEIRS, offer)
        assert two.decode.wait("lost") == set(THEIRS)
        assert two.decode.blocks() == before
    two.start_prefill("prefill again")
    expected = two.expected()
    assert two.request("second") == set()
    assert two.decode.blocks() == expected


@pytest.mark.parametrize("kind", ["kvt", "plain"])
def test_a_read_from_a_prefill_that_dies_is_reported(
    stage: Stage, kind: str
) -> None:
    two = Two(stage, (kind, kind), "tcp")
    assert two.request("first") == set()
    offer = two.prefill.offer("lost", OURS)
    two.prefill.stop()
    two.decode.want("lost", THEIRS, offer)
    assert "lost" not in two.decode.step()[1]
    two.prefill.kill()
    assert two.decode.wait("lost") == set(THEIRS)


@pytest.mark.parametrize("kind", ["kvt", "plain"])
def test_only_over_kvt_a_cut_link_to_a_living_prefill_comes_back(
    stage: Stage, kind: str
) -> None:
    """vLLM drops a peer that failed once check_remote_metadata() says that it
    is gone, and shakes hands again."""
    two = Two(stage, (kind, kind), "tcp")
    assert two.request("first") == set()
    assert two.decode.cut() > 0
    assert two.request("failed") == set(THEIRS)
    repaired = kind == "kvt"
    assert two.decode.peers() == ([] if repaired else ["prefill"])
    expected = two.expected()
    assert two.request("second") == (set() if repaired else set(THEIRS))
    if repaired:
        assert two.decode.blocks() == expected
