# SPDX-License-Identifier: Apache-2.0
"""Proves that kvt.vllm.NixlTransport and vLLM's own class are peers, and what
becomes of transfers when the peer's process is stopped or dies.

Each side is a process with the real NIXL. The class is taken from vLLM's own
modules, and put there by kvt's plugin as vLLM loads it. Ways: "shortcut", kvt's
own between kvt nodes on one host; "nixl", NIXL alone; "tcp", NIXL over TCP,
where a peer that is stopped keeps a transfer under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stage import NodeProcess, until
from vllm_support.nodes import (
    Stage,
    need_vllm,
    results,
)

BLOCKS = 64
BLOCK_LEN = 65536

WAYS = {
    "shortcut": {},
    "nixl": {"KVT_SAME_HOST": "0"},
    "tcp": {"KVT_SAME_HOST": "0", "UCX_TLS": "tcp"},
}
KINDS = {
    "kvt to kvt": (True, True),
    "kvt to vllm": (True, False),
    "vllm to kvt": (False, True),
}
OURS = "kvt.vllm._transport.NixlTransport"
THEIRS = "vllm.v1.kv_offload.tiering.p2p.data.nixl.NixlTransport"


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage(need_vllm()) as made:
        yield made


class Two:
    """Two open nodes; the first knows the second as "b"."""

    def __init__(
        self,
        stage: Stage,
        way: str,
        kinds: tuple[bool, bool] = (True, True),
        **more: Any,
    ) -> None:
        self.stage = stage
        self.way = way
        self.size = {"blocks": BLOCKS, "block_len": BLOCK_LEN, **more}
        self.a = self.node("a", kvt=kinds[0], seed=1)
        self.b = self.node("b", kvt=kinds[1], seed=2)
        self.add(self.a, self.b)

    def node(self, name: str, *, kvt: bool, seed: int) -> NodeProcess:
        node = self.stage.node(kvt=kvt, **WAYS[self.way])
        made = node.open(name, seed=seed, **self.size)
        assert made == (OURS if kvt else THEIRS)
        return node

    @staticmethod
    def add(a: NodeProcess, b: NodeProcess, name: str = "b") -> None:
        numbers = [b.call(n) for n in ("base_addr", "num_blocks", "block_len")]
        a.call("add_remote_peer", name, b.call("get_agent_metadata"), *numbers)


def write(
    a: NodeProcess,
    b: NodeProcess,
    ours: list[int],
    theirs: list[int],
    name: str = "b",
) -> int:
    """Starts a write; the receiver will expect its blocks."""
    number = a.call("write_blocks", name, ours, theirs)
    assert number is not None
    b.expect(theirs, a.blocks(ours))
    return number


def scattered(count: int) -> tuple[list[int], list[int]]:
    """Blocks of which no two are adjacent on both sides."""
    return [i * 2 for i in range(count)], [i * 2 + i % 2 for i in range(count)]


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("kinds", list(KINDS))
def test_each_class_writes_into_the_others_pool(
    kinds: str, way: str, stage: Stage
) -> None:
    two = Two(stage, way, KINDS[kinds])
    two.add(two.b, two.a, "a")
    there = write(two.a, two.b, *scattered(16))
    back = write(two.b, two.a, [33, 35, 36, 37], [60, 1, 2, 3], name="a")
    assert results(two.a, 1, "b") == ([there], [])
    assert results(two.b, 1, "a") == ([back], [])
    assert two.a.wrong() == []
    assert two.b.wrong() == []
    for node in two.a, two.b:
        node.call("close")
        assert node.end() == 0


@pytest.mark.parametrize("way", ["shortcut", "nixl"])
def test_kvt_takes_its_own_way_unless_told_not_to(
    way: str, stage: Stage
) -> None:
    two = Two(stage, way)
    assert two.a.path("b") == {"shortcut": "local", "nixl": "nixl"}[way]
    number = write(two.a, two.b, [1, 2], [3, 4])
    results(two.a, 1)
    assert number == 0
    moved = 2 * BLOCK_LEN
    shares = {"shortcut": (moved, 0), "nixl": (0, moved)}[way]
    assert two.a.stats("bytes_local") == shares[0]
    assert two.a.stats("bytes_nixl") == shares[1]


def test_the_plugin_is_off_unless_it_is_asked_for(stage: Stage) -> None:
    node = stage.node(kvt=False)
    assert node.open("a", BLOCKS, BLOCK_LEN, 1) == THEIRS


def test_being_named_in_vllms_list_is_asking(stage: Stage) -> None:
    node = stage.node(kvt=False, VLLM_PLUGINS="kvt")
    assert node.open("a", BLOCKS, BLOCK_LEN, 1) == OURS


def test_it_is_a_data_transport_of_vllms_own(stage: Stage) -> None:
    home = "vllm.v1.kv_offload.tiering.p2p.data.base"
    node = stage.node(kvt=True)
    node.open("a", BLOCKS, BLOCK_LEN, 1)
    assert f"{home}.DataTransport" in node.bases()
    assert node.poll_type() == home


def test_both_classes_have_the_same_fingerprint(stage: Stage) -> None:
    fields = {"model": "ключ", "list": [1, None, True], "deep": {"b": 1.5}}
    prints = []
    for kvt in True, False:
        node = stage.node(kvt=kvt)
        node.open("a", BLOCKS, BLOCK_LEN, 1, config_fields=fields)
        prints.append(node.call("config_fingerprint"))
    assert prints[0] == prints[1] != ""


# ----------------------------------------------------------- stopped and killed


@pytest.mark.parametrize("way", list(WAYS))
def test_a_dead_peer_gets_none_or_a_failure(way: str, stage: Stage) -> None:
    """vLLM's class raises NIXL's error."""
    two = Two(stage, way)
    write(two.a, two.b, [1], [2])
    results(two.a, 1)
    two.b.kill()

    def refused() -> bool:
        number = two.a.call("write_blocks", "b", [1], [2])
        if number is not None:
            assert results(two.a, 1) == ([], [number])
        return number is None

    until("writes are refused", refused)
    two.a.call("close")
    assert two.a.end() == 0


@pytest.mark.parametrize("kind", ["kvt to kvt", "kvt to vllm"])
def test_what_is_under_way_to_a_peer_that_dies_is_reported(
    kind: str, stage: Stage
) -> None:
    """vLLM's class never reports transfers to a peer stopped, then killed."""
    two = Two(stage, "tcp", KINDS[kind], blocks=512)
    write(two.a, two.b, [1], [2])
    results(two.a, 1)
    two.b.stop()
    numbers = [
        two.a.call("write_blocks", "b", *scattered(256)) for _ in range(4)
    ]
    assert numbers == [1, 2, 3, 4]
    assert two.a.call("poll", "b") == ([], [])
    two.b.kill()
    done, failed = results(two.a, 4, "b")
    assert (done, sorted(failed)) == ([], numbers)
    two.a.call("close")
    assert two.a.end() == 0


# B01
@pytest.mark.parametrize("way", list(WAYS))
def test_a_restarted_peer_is_added_again_under_its_name(
    way: str, stage: Stage
) -> None:
    two = Two(stage, way)
    for turn in range(3):
        write(two.a, two.b, [turn, 9], [2, 3 + turn])
        results(two.a, 1)
        assert two.b.wrong() == []
        two.b.kill()
        two.b = two.node("b", kvt=True, seed=3 + turn)
        two.add(two.a, two.b)
    write(two.a, two.b, [1], [2])
    results(two.a, 1)
    assert two.b.wrong() == []


# B09
def test_cancel_wait_tells_the_truth_of_a_stopped_peer(stage: Stage) -> None:
    """vLLM's class said that nothing moves, and then bytes landed."""
    two = Two(stage, "tcp", blocks=512)
    write(two.a, two.b, [1], [2])
    results(two.a, 1)
    before = two.b.blocks(list(range(512)))
    two.b.stop()
    ours, theirs = scattered(256)
    number = two.a.call("write_blocks", "b", ours, theirs)
    sent = two.a.blocks(ours)
    still = two.a.call("cancel", [number], "wait")
    if still:
        assert still == [number]
        assert two.a.call("poll", "b") == ([], [])
        two.b.go_on()
        results(two.a, 1, "b")
    else:
        two.b.go_on()
    # From here on our program uses the blocks for something else.
    two.a.fill(ours, [bytes(BLOCK_LEN)] * len(ours))
    after = two.b.blocks(list(range(512)))
    for block, there in enumerate(theirs):
        old, new = before[there], sent[block]
        for at in range(0, BLOCK_LEN, 64):
            part = slice(at, at + 64)
            assert after[there][part] in (old[part], new[part])
    two.b.expect(list(range(512)), after)
    write(two.a, two.b, [0], [0])
    results(two.a, 1)
    assert two.b.wrong() == []


# B15
def test_write_blocks_returns_although_the_peer_does_not(stage: Stage) -> None:
    two = Two(stage, "tcp", blocks=512)
    two.b.stop()
    numbers = [
        two.a.call("write_blocks", "b", *scattered(256)) for _ in range(16)
    ]
    assert numbers == list(range(16))
    assert two.a.call("poll", "b") == ([], [])
    two.b.go_on()
    assert sorted(results(two.a, 16, "b")[0]) == numbers
    ours, theirs = scattered(256)
    two.b.expect(theirs, two.a.blocks(ours))
    assert two.b.wrong() == []


# B06
def test_close_with_transfers_to_a_stopped_peer_ends_well(
    stage: Stage,
) -> None:
    """vLLM's class: SIGABRT inside UCX."""
    two = Two(stage, "tcp", blocks=2048, block_len=4096)
    two.b.stop()
    for _ in range(4):
        assert two.a.call("write_blocks", "b", *scattered(1024)) is not None
    two.a.call("close")
    assert two.a.call("poll") == ([], [])
    assert two.a.end() == 0


@pytest.mark.parametrize("way", list(WAYS))
def test_leaving_without_a_close_ends_well(way: str, stage: Stage) -> None:
    two = Two(stage, way, blocks=512)
    for _ in range(4):
        two.a.call("write_blocks", "b", *scattered(256))
    assert two.a.end() == 0
    two.b.call("close")
    assert two.b.end() == 0


# ----------------------------------------------------------------------- names


def test_a_second_peer_with_a_name_in_use_takes_it_over(stage: Stage) -> None:
    """And in no case does a write reach the wrong one."""
    two = Two(stage, "shortcut")
    other = two.node("b", kvt=True, seed=5)
    two.add(two.a, other, "c")
    write(two.a, other, [1], [2], name="c")
    results(two.a, 1, "c")
    number = two.a.call("write_blocks", "b", [5], [6])
    if number is not None:
        done, _ = results(two.a, 1, "b")
        if done:
            two.b.expect([6], two.a.blocks([5]))
    assert two.b.wrong() == []
    assert other.wrong() == []


@pytest.mark.parametrize("way", ["shortcut", "nixl"])
def test_its_memory_can_be_unmapped_after_close(way: str, stage: Stage) -> None:
    two = Two(stage, way)
    write(two.a, two.b, [1], [2])
    results(two.a, 1)
    assert not two.a.forget()
    two.a.call("close")
    assert two.a.forget()
    assert two.a.end() == 0
