# SPDX-License-Identifier: Apache-2.0
"""Nothing grows: each kind of call is repeated, and afterwards there are as
many objects, references and descriptors, and about as much memory, as before.

Every loop first runs a while to fill caches. Memory is measured as resident
pages, with room for the allocator's moods; a leak of 100 bytes a round is far
beyond it.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable

import pytest

import kvt
from conftest import COUNT, PATIENCE, Engine, Pair

np = pytest.importorskip("numpy")

SLACK = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def check(rounds: int, call: Callable[[], object], *watched: object) -> None:
    """Runs `call` and compares before and after."""
    for _ in range(max(3, rounds // 4)):
        call()
    gc.collect()
    objects, memory, fds = len(gc.get_objects()), resident(), descriptors()
    references = [sys.getrefcount(item) for item in watched]
    for _ in range(rounds):
        call()
    gc.collect()
    grown = len(gc.get_objects()) - objects
    counts = [sys.getrefcount(item) for item in watched]
    assert counts == references
    assert abs(grown) < 50
    assert descriptors() == fds
    assert resident() - memory < SLACK


def test_writes_and_polls(local_pair: Pair) -> None:
    source = local_pair.source
    listed, array, span = [1, 2, 3], np.array([4, 5, 6]), range(7, 10)
    narrow, note = array.astype("i2"), b"note"
    many = list(range(COUNT)) * 4

    def call() -> None:
        for indices in (listed, array, span, narrow, many):
            xfer = local_pair.write(indices, indices, note=note, tag=1)
            result = source.wait(xfer, PATIENCE)
            repr(result), result.text, result.error, result.state
        local_pair.write(listed, array)
        while not source.poll(limit=5):
            pass
        local_pair.target.notifications()
        source.poll(local_pair.peer)

    check(3000, call, source, listed, array, span, narrow, many, note)


def test_refused_calls(local_pair: Pair) -> None:
    source = local_pair.source
    # A str of our own: others may refer to a literal.
    listed, text, pairs = [1], "".join(["own", "text"]), {"a": 1}

    def call() -> None:
        for wrong in (
            lambda: local_pair.write(listed, [99]),
            lambda: local_pair.write(text, listed),
            lambda: local_pair.write([1.5], listed),
            lambda: local_pair.write([2**70], listed),
            lambda: local_pair.write(listed, listed, tag=99),
            lambda: local_pair.write(listed, listed, colour=1),
            lambda: source.write(local_pair.peer, [(1, 2)]),
            lambda: source.write(local_pair.peer, [(1, 2, "x")]),
            lambda: source.register([listed]),
            lambda: source.register(b"read-only"),
            lambda: source.register((0, 5)),
            lambda: source.add_peer(text, b"nonsense"),
            lambda: source.status(5),
            lambda: source.wait(5),
            lambda: source.prepare(text, [(1, 2, 3)]),
            lambda: source.prepare(text, [5]),
            lambda: kvt.Transport("none"),
            lambda: kvt.Transport("local", params=pairs),
            lambda: kvt.Transport("local", backends=text),
            lambda: kvt.SharedMemory(0),
        ):
            with pytest.raises((kvt.Error, TypeError)):
                wrong()

    check(200, call, source, listed, text, pairs)


def test_memory_peers_and_layouts(local_pair: Pair) -> None:
    source, metadata = local_pair.source, local_pair.target.metadata()
    memory, array = bytearray(4096), np.zeros(4096)
    addr = kvt.region_of(memory).addr

    def call() -> None:
        source.register([memory, array])
        layout = source.prepare("more", [(addr, 64, 64)])
        source.find_layout("more")
        source.drop_layout(layout)
        source.deregister([array, memory])
        source.metadata()
        peer = source.add_peer("more", metadata)
        source.peer_info(peer)
        source.find_peer("more")
        source.remove_peer(peer)
        source.stats()
        source.metrics()
        with kvt.SharedMemory(4096) as shared:
            bytes(shared)

    check(100, call, source, metadata, memory, array)


def test_failures_and_cancels(fault_pair: Callable[..., Pair]) -> None:
    pair = fault_pair("reject=*")
    source = pair.source

    def call() -> None:
        with pytest.raises(kvt.Rejected):
            source.wait(pair.write([0], [0]), PATIENCE)
        source.cancel([pair.write([1], [1])], mode="immediate")
        xfer = pair.write([2], [2], event=False)
        while not source.status(xfer).finished:
            pass
        source.release(xfer)

    check(500, call, source)


def test_transports(engine: Engine) -> None:
    rounds = 3 if engine.name == "nixl" else 30
    if engine.name == "nixl":
        pytest.skip("what NIXL itself leaves behind is not ours to count")

    def call() -> None:
        pair = Pair(engine)
        pair.source.wait(pair.write([0], [0]), PATIENCE)
        pair.source.fileno()
        pair.write([0], [0])
        pair.close()

    check(rounds, call)


def test_transports_that_nobody_closes() -> None:
    memory = bytearray(4096)

    def call() -> None:
        transport = kvt.Transport("local")
        transport.register(memory)
        transport.fileno()
        with pytest.warns(ResourceWarning):
            del transport
            gc.collect()

    check(20, call, memory)
    memory.append(0)
