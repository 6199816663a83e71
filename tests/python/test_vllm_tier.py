# SPDX-License-Identifier: Apache-2.0
"""Proves that vLLM's own P2P tier works over kvt.vllm.NixlTransport.

Two processes run the P2PSecondaryTierManager of the wheel, unchanged, with its
ZeroMQ control plane, as a prefill and a decode node; this process is their
schedulers. Both nodes are on kvt, or one is on vLLM's own class over NIXL's
Python package. Every byte of both pools is compared with its image.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stage import NodeProcess, until
from vllm_support.nodes import (
    Stage,
    free_port,
    need_vllm,
)

BLOCKS = 256
BLOCK_LEN = 32768
OURS = "kvt.vllm._transport.NixlTransport"

WAYS = {"shortcut": {}, "nixl": {"KVT_SAME_HOST": "0"}}
KINDS = {
    "both on kvt": (True, True),
    "prefill on kvt": (True, False),
    "decode on kvt": (False, True),
}
CASES = [
    (kinds, way)
    for kinds in KINDS
    for way in WAYS
    # kvt's own way needs kvt on both sides.
    if kinds == "both on kvt" or way == "nixl"
]


class Member:
    """A node with its tier, and the jobs that ended on it."""

    def __init__(self, node: NodeProcess, seed: int) -> None:
        self.node = node
        self.port = free_port()
        self.kind = node.open_tier(self.port, BLOCKS, BLOCK_LEN, seed)
        self.ended: dict[int, bool] = {}

    def step(self) -> None:
        for job, success in self.node.step():
            assert job not in self.ended
            self.ended[job] = success


class Pair:
    def __init__(
        self,
        stage: Stage,
        kinds: tuple[bool, bool],
        prefill_env: dict[str, str],
        decode_env: dict[str, str],
    ) -> None:
        self.prefill = Member(stage.node(kvt=kinds[0], **prefill_env), 1)
        self.decode = Member(stage.node(kvt=kinds[1], **decode_env), 2)
        assert (self.prefill.kind == OURS) == kinds[0]
        assert (self.decode.kind == OURS) == kinds[1]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.prefill.step()
            self.decode.step()

    def run(self, prefill: set[int], decode: set[int]) -> None:
        """Steps both schedulers until these jobs ended."""

        def ready() -> bool:
            self.steps(1)
            return prefill <= set(self.prefill.ended) and decode <= set(
                self.decode.ended
            )

        until(f"the jobs {prefill} and {decode} ended", ready)

    def shutdown(self) -> None:
        for node in self.prefill.node, self.decode.node:
            node.shutdown()
            assert node.end() == 0

    def check(self) -> None:
        assert self.prefill.node.wrong() == []
        assert self.decode.node.wrong() == []


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage(need_vllm()) as made:
        yield made


def keys(request: int, count: int) -> list[bytes]:
    return [bytes([request, i]) * 18 for i in range(count)]


def expect(
    source: Member, ours: list[int], target: Member, theirs: list[int]
) -> None:
    target.node.expect(theirs, source.node.blocks(ours))


@pytest.mark.parametrize(("kinds", "way"), CASES)
def test_blocks_of_many_requests_arrive(
    kinds: str, way: str, stage: Stage
) -> None:
    pair = Pair(stage, KINDS[kinds], WAYS[way], WAYS[way])
    jobs = set()
    for request in range(8):
        ours = [request * 16 + i for i in range(16)]
        theirs = [255 - request * 17 - i for i in range(16)]
        named = keys(request, 16)
        job = 100 + request
        store = (job, f"r{request}", named, ours)
        load = (job, f"r{request}", named, theirs, pair.prefill.port)
        # In every second request decode asks before prefill has anything.
        if request % 2:
            pair.decode.node.load(*load)
            pair.steps(3)
            pair.prefill.node.store(*store)
        else:
            pair.prefill.node.store(*store)
            pair.decode.node.load(*load)
        expect(pair.prefill, ours, pair.decode, theirs)
        jobs.add(job)
    pair.run(jobs, jobs)
    assert all(pair.prefill.ended.values())
    assert all(pair.decode.ended.values())
    pair.check()
    pair.shutdown()


@pytest.mark.parametrize(("kinds", "way"), CASES)
def test_both_nodes_can_be_source_and_target(
    kinds: str, way: str, stage: Stage
) -> None:
    pair = Pair(stage, KINDS[kinds], WAYS[way], WAYS[way])
    there, back = keys(1, 8), keys(2, 8)
    low, high = list(range(8)), list(range(100, 116, 2))
    pair.prefill.node.store(1, "there", there, low)
    pair.decode.node.load(1, "there", there, high, pair.prefill.port)
    expect(pair.prefill, low, pair.decode, high)
    pair.run({1}, {1})
    pair.decode.node.store(2, "back", back, low)
    pair.prefill.node.load(2, "back", back, high, pair.decode.port)
    expect(pair.decode, low, pair.prefill, high)
    pair.run({2}, {2})
    assert pair.prefill.ended == pair.decode.ended == {1: True, 2: True}
    pair.check()


@pytest.mark.parametrize("engine", ["fault:local", "fault:nixl"])
def test_an_abort_is_answered_when_no_byte_can_land_any_more(
    engine: str, stage: Stage
) -> None:
    """With vLLM's class 1 GB landed after the aborted job was reported."""
    env = {"KVT_ENGINE": engine, "KVT_SAME_HOST": ""}
    decode = {**env, "KVT_ENGINE": engine.removeprefix("fault:")}
    pair = Pair(stage, (True, True), env, decode)
    ours, theirs, named = list(range(8)), list(range(50, 58)), keys(1, 8)
    pair.prefill.node.fault("hold=*")
    pair.prefill.node.store(1, "r", named, ours)
    pair.decode.node.load(1, "r", named, theirs, pair.prefill.port)
    expect(pair.prefill, ours, pair.decode, theirs)

    def there() -> bool:
        pair.steps(1)
        return pair.decode.node.wrong() == []

    until("the bytes are there", there)
    pair.decode.node.finish("r")
    pair.steps(50)
    assert pair.decode.ended == {}
    pair.prefill.node.fault("")
    pair.run({1}, {1})
    assert pair.decode.ended == {1: False}
    # The blocks belong to somebody else now.
    pair.decode.node.fill(theirs, [bytes(BLOCK_LEN)] * 8)
    pair.prefill.node.fill(ours, [bytes([1]) * BLOCK_LEN] * 8)
    pair.steps(50)
    pair.check()


@pytest.mark.parametrize("way", list(WAYS))
def test_a_decode_node_that_dies_fails_its_jobs_only(
    way: str, stage: Stage
) -> None:
    pair = Pair(stage, (True, True), WAYS[way], WAYS[way])
    named = keys(1, 8)
    pair.prefill.node.store(1, "r1", named, list(range(8)))
    pair.decode.node.load(1, "r1", named, list(range(8)), pair.prefill.port)
    pair.run({1}, {1})
    # Demand for two blocks of which only one is ever stored.
    pair.decode.node.load(2, "r2", keys(2, 2), [20, 21], pair.prefill.port)
    pair.steps(20)
    pair.prefill.node.store(2, "r2", keys(2, 1), [9])
    pair.decode.node.kill()

    def ended() -> bool:
        pair.prefill.step()
        return 2 in pair.prefill.ended

    until("the job ended", ended)
    assert pair.prefill.ended[1] is True
    other = Member(stage.node(kvt=True, **WAYS[way]), 3)
    pair.decode = other
    pair.prefill.node.store(3, "r3", keys(3, 4), [1, 2, 3, 4])
    other.node.load(3, "r3", keys(3, 4), [9, 8, 7, 6], pair.prefill.port)
    expect(pair.prefill, [1, 2, 3, 4], other, [9, 8, 7, 6])
    pair.run({3}, {3})
    assert pair.prefill.ended[3] is True
    assert other.ended == {3: True}
    pair.check()


def test_a_submission_that_fails_ends_the_fetch(stage: Stage) -> None:
    env = {"KVT_ENGINE": "fault:local"}
    pair = Pair(stage, (True, True), env, {"KVT_ENGINE": "local"})
    pair.prefill.node.fault("reject=1")
    named = keys(1, 4)
    pair.prefill.node.store(1, "r1", named, [0, 1, 2, 3])
    pair.decode.node.load(1, "r1", named, [4, 5, 6, 7], pair.prefill.port)
    pair.run({1}, {1})
    assert pair.prefill.ended == pair.decode.ended == {1: False}
    named = keys(2, 4)
    pair.prefill.node.store(2, "r2", named, [0, 1, 2, 3])
    pair.decode.node.load(2, "r2", named, [4, 5, 6, 7], pair.prefill.port)
    expect(pair.prefill, [0, 1, 2, 3], pair.decode, [4, 5, 6, 7])
    pair.run({2}, {2})
    assert pair.decode.ended[2] is True
    pair.check()


def test_drain_and_shutdown_come_to_an_end(stage: Stage) -> None:
    pair = Pair(stage, (True, True), {}, {})
    for request in range(4):
        named = keys(request, 32)
        ours = [request * 32 + i for i in range(32)]
        theirs = [255 - block for block in ours]
        pair.prefill.node.store(request, f"r{request}", named, ours)
        pair.decode.node.load(
            request, f"r{request}", named, theirs, pair.prefill.port
        )
        expect(pair.prefill, ours, pair.decode, theirs)
    pair.run({0}, set())
    pair.prefill.node.drain()
    pair.run({0, 1, 2, 3}, {0, 1, 2, 3})
    pair.check()
    pair.shutdown()
