# SPDX-License-Identifier: Apache-2.0
"""Proves that an unmodified NIXL agent and a kvt transport are peers.

The agent is the real Python package's, in another process; kvt is
tests/nixl/kvt_peer.c over the C library. Each side imports the other's
metadata as its own program would; then blocks go both ways by both sides'
requests. Memory is seeded random bytes with guard zones around each region, and
after each step every byte of both sides is compared with its image, those that
must not change among them.
"""

import random
import time

import pytest

from peers import Memory, Refused, move_image

SIZES = [65536, 8192, 300000]


def pieces_of(local, remote, seed, count=40):
    """Random pieces inside matching regions, that overlap nowhere."""
    rng = random.Random(seed)
    pieces = []
    for (here, size), (there, _) in zip(local.regions, remote.regions):
        cuts = sorted(rng.sample(range(1, size), min(2 * count, size // 128)))
        for low, high in zip(cuts[::2], cuts[1::2]):
            pieces.append((here + low, there + low, high - low))
    rng.shuffle(pieces)
    return pieces


def wait_for(claim, seconds=30):
    limit = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < limit, "it does not come true"


class Meeting:
    """Both sides with memory, each imported by the other where asked."""

    def __init__(self, stage, kvt_imports=True, plain_imports=True, flags=""):
        self.kvt = stage.kvt(flags=flags)
        self.plain = stage.plain()
        self.ours = Memory(self.kvt, SIZES, seed=1)
        self.theirs = Memory(self.plain, SIZES, seed=2)
        if plain_imports:
            assert self.plain.add(self.kvt.metadata()) == self.kvt.name
        if kvt_imports:
            self.kvt.add("peer", self.plain.metadata())

    def check(self, what):
        self.ours.check(f"kvt's memory after {what}")
        self.theirs.check(f"the agent's memory after {what}")


def test_a_plain_agent_imports_us_and_moves_blocks_both_ways(stage):
    at = Meeting(stage, kvt_imports=False)
    pieces = pieces_of(at.theirs, at.ours, seed=3)
    assert at.plain.move("WRITE", at.kvt.name, pieces) == "DONE"
    move_image(pieces, at.theirs, at.ours, source_first=True)
    at.check("its write")
    at.kvt.poke(at.ours.addr, bytes(at.ours.image[::-1]))
    at.ours.image.reverse()
    assert at.plain.move("READ", at.kvt.name, pieces) == "DONE"
    move_image(pieces, at.ours, at.theirs, source_first=False)
    at.check("its read")


def test_its_notifications_reach_us_after_their_bytes(stage):
    at = Meeting(stage, kvt_imports=False)
    at.plain.notify(at.kvt.name, b"hello")
    assert at.kvt.note() == (at.plain.name, b"hello")
    pieces = pieces_of(at.theirs, at.ours, seed=4)
    assert at.plain.move("WRITE", at.kvt.name, pieces, b"with bytes") == "DONE"
    assert at.kvt.note() == (at.plain.name, b"with bytes")
    move_image(pieces, at.theirs, at.ours, source_first=True)
    at.check("a write with a notification")


def test_nixl_ignores_whatever_follows_its_own_bytes(stage):
    """The trailer is one case: any bytes of any length will do."""
    kvt = stage.kvt()
    plain = stage.plain()
    ours = Memory(kvt, SIZES, seed=1)
    theirs = Memory(plain, SIZES, seed=2)
    metadata = kvt.metadata()
    for more in (b"", b"\0", b"|" * 7, random.Random(5).randbytes(10000)):
        assert plain.add(metadata + more) == kvt.name
        pieces = [(theirs.regions[0][0], ours.regions[0][0], 4096)]
        assert plain.move("WRITE", kvt.name, pieces) == "DONE"
        move_image(pieces, theirs, ours, source_first=True)
        ours.check(f"a write with {len(more)} bytes after the trailer")
        plain.remove(kvt.name)


def test_we_import_a_plain_agent_and_move_blocks_both_ways(stage):
    at = Meeting(stage, plain_imports=False)
    pieces = pieces_of(at.ours, at.theirs, seed=6)
    total = sum(piece[2] for piece in pieces)
    for op, source, target in (
        ("WRITE", at.ours, at.theirs),
        ("READ", at.theirs, at.ours),
    ):
        result = at.kvt.move(op, "peer", pieces)
        assert result["state"] == "done" and result["quiescent"], result
        assert result["bytes_done"] == total
        move_image(pieces, source, target, source_first=op == "WRITE")
        at.check(f"our {op}")
        at.kvt.poke(at.ours.addr, bytes(at.ours.image[::-1]))
        at.ours.image.reverse()
    info = at.kvt.peer("peer")
    assert (info["state"], info["path"], info["regions"]) == ("loaded", "nixl", 3)
    assert at.kvt.bytes_by_path() == {"nixl": 2 * total, "local": 0}


def test_our_notifications_reach_it_after_their_bytes(stage):
    at = Meeting(stage, plain_imports=False)
    at.kvt.notify("peer", b"alone")
    assert at.plain.notes() == [(at.kvt.name, b"alone")]
    for i in range(20):
        pieces = pieces_of(at.ours, at.theirs, seed=100 + i)
        note = b"write %d" % i
        result = at.kvt.move("WRITE", "peer", pieces, note)
        assert result["state"] == "done", result
        assert at.plain.notes() == [(at.kvt.name, note)]
        move_image(pieces, at.ours, at.theirs, source_first=True)
        at.check(f"write {i}")


def test_both_import_each_other_and_write_at_once(stage):
    at = Meeting(stage)
    half = [(a, b, n) for a, b, n in pieces_of(at.ours, at.theirs, seed=7)]
    mine, yours = half[::2], [(b, a, n) for a, b, n in half[1::2]]
    assert at.kvt.move("WRITE", "peer", mine, b"k")["state"] == "done"
    assert at.plain.move("WRITE", at.kvt.name, yours, b"p") == "DONE"
    move_image(mine, at.ours, at.theirs, source_first=True)
    move_image(yours, at.theirs, at.ours, source_first=True)
    assert at.plain.notes() == [(at.kvt.name, b"k")]
    assert at.kvt.note() == (at.plain.name, b"p")
    at.check("both writes")


def test_a_killed_agent_comes_back_under_its_name(stage):
    """A plain agent's metadata names no process whose death could be watched:
    a write that NIXL refuses is lost until somebody confirms the death."""
    stage.may_be_busy = True
    at = Meeting(stage, flags="grace=100")
    pieces = pieces_of(at.ours, at.theirs, seed=8)
    assert at.kvt.move("WRITE", "peer", pieces)["state"] == "done"
    name = at.plain.name
    for life in range(3):
        at.plain.kill()
        gone = at.kvt.move("WRITE", "peer", pieces[:1])
        assert (gone["state"], gone["quiescent"]) == ("lost", False), gone
        assert at.kvt.peer("peer")["state"] == "disconnected"
        with pytest.raises(Refused, match="KVT_EDISCONNECTED"):
            at.kvt.move("WRITE", "peer", pieces[:1])
        assert at.kvt.quarantined() == 1
        at.kvt.confirm_dead("peer")
        wait_for(lambda: at.kvt.quarantined() == 0)
        at.plain = stage.plain(name)
        at.theirs = Memory(at.plain, SIZES, seed=20 + life)
        at.plain.add(at.kvt.metadata())
        at.kvt.reload("peer", at.plain.metadata())
        assert at.kvt.peer("peer")["state"] == "loaded"
        pieces = pieces_of(at.ours, at.theirs, seed=30 + life)
        assert at.kvt.move("WRITE", "peer", pieces, b"back")["state"] == "done"
        move_image(pieces, at.ours, at.theirs, source_first=True)
        assert at.plain.notes() == [(at.kvt.name, b"back")]
        back = [(b, a, n) for a, b, n in pieces]
        assert at.plain.move("READ", at.kvt.name, back) == "DONE"
        at.check(f"life {life}")


def test_we_come_back_under_our_name(stage):
    at = Meeting(stage)
    name = at.kvt.name
    at.kvt.kill()
    at.plain.remove(name)
    at.kvt = stage.kvt(name)
    at.ours = Memory(at.kvt, SIZES, seed=9)
    assert at.plain.add(at.kvt.metadata()) == name
    at.kvt.add("peer", at.plain.metadata())
    pieces = pieces_of(at.theirs, at.ours, seed=10)
    assert at.plain.move("WRITE", name, pieces, b"again") == "DONE"
    assert at.kvt.note() == (at.plain.name, b"again")
    move_image(pieces, at.theirs, at.ours, source_first=True)
    ours = [(b, a, n) for a, b, n in pieces]
    assert at.kvt.move("READ", "peer", ours)["state"] == "done"
    at.check("our second life")


def test_blocks_of_61_regions_with_layers(stage):
    """As SGLang's callers have it: a region for each layer and head, blocks
    that are strided runs through all of them."""
    layers, blocks, block_bytes, stride = 61, 32, 768, 1024
    kvt = stage.kvt()
    plain = stage.plain()
    ours = Memory(kvt, [blocks * stride] * layers, seed=11)
    theirs = Memory(plain, [blocks * stride] * layers, seed=12)
    kvt.add("peer", plain.metadata())
    assert kvt.peer("peer")["regions"] == layers
    for side, memory in ((None, ours), ("peer", theirs)):
        runs = [(addr, block_bytes, stride, blocks) for addr, _ in memory.regions]
        kvt.prepare(side, "kv", runs)
    rng = random.Random(13)
    for op, source, target in (("push", ours, theirs), ("pull", theirs, ours)):
        here = rng.sample(range(blocks), 20)
        there = rng.sample(range(blocks), 20)
        pairs = [
            (layer * blocks + a, layer * blocks + b)
            for layer in range(layers)
            for a, b in zip(here, there)
        ]
        result = kvt.blocks(op, "peer", "kv", "kv", pairs, op.encode())
        assert result["state"] == "done", result
        assert result["bytes_done"] == len(pairs) * block_bytes
        pieces = [
            (
                ours.regions[a // blocks][0] + a % blocks * stride,
                theirs.regions[b // blocks][0] + b % blocks * stride,
                block_bytes,
            )
            for a, b in pairs
        ]
        move_image(pieces, source, target, source_first=op == "push")
        assert plain.notes() == [(kvt.name, op.encode())]
        ours.check(f"our {op}")
        theirs.check(f"our {op}")


def test_a_plain_agent_that_adds_memory_is_reloaded(alike):
    """Other bytes are another incarnation, under the same name."""
    at = Meeting(alike, plain_imports=False)
    before = at.plain.metadata()
    extra = Memory(at.plain, [10000], seed=14)
    after = at.plain.metadata()
    assert before != after
    pieces = [(at.ours.regions[0][0], extra.regions[0][0], 10000)]
    with pytest.raises(Refused, match="KVT_ERANGE"):
        at.kvt.move("WRITE", "peer", pieces)
    at.kvt.reload("peer", after)
    assert at.kvt.peer("peer")["regions"] == len(SIZES) + 1
    assert at.kvt.move("WRITE", "peer", pieces)["state"] == "done"
    move_image(pieces, at.ours, extra, source_first=True)
    extra.check("a write to the memory it added")
    # The same bytes again, and its first ones: both are loads like any other.
    for metadata in (after, before, after):
        at.kvt.reload("peer", metadata)
        old = pieces_of(at.ours, at.theirs, seed=15)
        assert at.kvt.move("WRITE", "peer", old)["state"] == "done"
        move_image(old, at.ours, at.theirs, source_first=True)
    at.check("the reloads")


def test_its_name_must_not_be_ours(alike):
    kvt = alike.kvt("twin")
    plain = alike.plain("twin")
    with pytest.raises(Refused, match="KVT_EINVAL.*twin"):
        kvt.add("peer", plain.metadata())
