# SPDX-License-Identifier: Apache-2.0
"""Cases with memory of a GPU, or with a NIXL that goes wrong on order: NIXL is
a stand-in (tests/support/fake_nixl_capi.c), which never touches VRAM, so that
its addresses may be anything.

    KVT_NIXL_LIBRARY=…/libfake_nixl_capi.so python -m sglang_support.vram CASE

One process, one library: hence a process for each case.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
import threading

import kvt
from conftest import Engine
from kvt.sglang import (
    BufferKey,
    NixlHandle,
    NixlState,
    NixlTransport,
    PeerBuffers,
    StridedRun,
    nixlBackendError,
)
from sglang_support.sides import ITEM, KV, PATIENT, Side, Sides
from stage import until

VRAM = 0x7F0000000000
"""Ours; XPU's have bit 63 set."""
THEIRS = 0xFF00000000000000
SIZE = 1 << 20
GPU = BufferKey("kv", 1)


class StandIn:
    """What the library offers beside NIXL's functions."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ["KVT_NIXL_LIBRARY"])
        self.library.fake_nixl_line.restype = ctypes.c_bool

    def script(self, what: str, value: int, times: int = 1) -> None:
        self.library.fake_nixl_script(what.encode(), value, times)

    def block(self, what: str, on: bool) -> None:
        self.library.fake_nixl_block(what.encode(), on)

    def lines(self, prefix: str) -> list[str]:
        found: list[str] = []
        text = ctypes.create_string_buffer(16384)
        while self.library.fake_nixl_line(
            prefix.encode(), len(found), text, len(text)
        ):
            found.append(text.value.decode())
        return found


def pair(sides: Sides, rules: str = "") -> tuple[Side, Side, PeerBuffers]:
    """Each with host memory and memory of a GPU of its own."""
    a = sides.side("prefill", rules)
    b = sides.side("decode")
    a.transport.register_all({GPU: (VRAM, SIZE, "VRAM", 1)})
    b.transport.register_all({GPU: (THEIRS, SIZE, "VRAM", 3)})
    a.transport.post_wait = PATIENT
    peer = a.transport.import_registration(
        b.name,
        b.transport.agent_metadata,
        {KV: b.arena.addr, GPU: THEIRS},
        {KV: ("DRAM", 0), GPU: ("VRAM", 3)},
    )
    return a, b, peer


def three_kinds(a: Side, b: Side, peer: PeerBuffers) -> NixlHandle:
    """Five pieces of three pairs of kinds."""
    handle = a.transport.write_all(
        peer,
        [
            (GPU, 0, GPU, 4096, 512),
            (KV, 0, KV, 128, ITEM),
            (GPU, 64, KV, 1024, ITEM),
            (GPU, 1024, GPU, 64, 512),
            (KV, 512, KV, 768, ITEM),
        ],
    )
    assert handle is not None
    for src, dst in ((0, 128), (512, 768)):
        b.arena.expect(dst, a.arena.read(src, ITEM))
    return handle


def mixed_kinds(nixl: StandIn, sides: Sides) -> None:
    """(f)4: one transfer for each pair of kinds, one handle."""
    a, b, peer = pair(sides, "hold=3")
    handle = three_kinds(a, b, peer)
    until("all is posted", lambda: a.transport.core.stats().chunks == 3)
    kinds = sorted(line.split()[2] for line in nixl.lines("create op=1"))
    assert kinds == ["0>0", "1>0", "1>1"], kinds
    until("the host's landed", lambda: b.arena.wrong() == 0)
    assert a.transport.status(handle).in_progress
    a.fault("")
    assert a.settled(handle) == (NixlState.DONE, True, None)
    assert a.transport.core.stats().chunks == 3


def partial_post(nixl: StandIn, sides: Sides) -> None:
    """(f)14: of three pairs of kinds the second is refused."""
    a, _, peer = pair(sides, "window=2")
    a.fault("hold=1,reject=2")
    handle = a.transport.write_all(
        peer,
        [
            (KV, 0, KV, 128, ITEM),
            (GPU, 0, GPU, 4096, 512),
            (GPU, 64, KV, 1024, ITEM),
        ],
    )
    assert handle is not None
    assert isinstance(handle.error, nixlBackendError)
    assert a.transport.status(handle)[:2] == (NixlState.REJECTED, False)
    a.fault("")
    core = a.transport.core
    until("it is over", lambda: core.stats().inflight == 0)
    assert a.transport.status(handle)[:2] == (NixlState.REJECTED, False)
    assert core.stats().chunks == 2
    assert len(nixl.lines("create op=1")) == 1


def register_order(nixl: StandIn, sides: Sides) -> None:
    """(f)5: VRAM before DRAM; no call for what is empty."""
    b = sides.side("decode", size=4096)
    before = len(nixl.lines("register"))
    more = sides.side("decode").arena
    before = len(nixl.lines("register"))
    b.transport.register_all(
        {
            "host": (more.addr, 64, "DRAM", 0),
            "one": (VRAM, 4096, "VRAM", 1),
            "empty": (0, 0, "VRAM", 1),
            "two": (VRAM + 8192, 4096, "VRAM", 1),
            "again": (VRAM, 4096, "VRAM", 1),
        }
    )
    made = nixl.lines("register")[before:]
    assert [line.split()[1] for line in made] == ["1", "0"], made
    assert made[0].count("+1000@1") == 2, made
    b.transport.deregister(["one"])
    assert nixl.lines("deregister") == []
    b.transport.deregister(["again"])
    assert len(nixl.lines("deregister")) == 1


def vram_lists(nixl: StandIn, sides: Sides) -> None:
    """Prepared lists of a GPU, with addresses that use all 64 bits."""
    import numpy as np

    a, _, peer = pair(sides)
    ours = np.array([[VRAM, 64, 1, 128, 512]], np.uint64)
    theirs = np.array([[THEIRS, 64, 3, 64, 512]], np.uint64).view(np.int64)
    assert theirs[0, 0] < 0
    assert a.transport.prepare("", "kv", ours, "VRAM")
    assert a.transport.prepare(peer, "kv", theirs, "VRAM")
    handle = a.transport.write_prepared(
        peer, "kv", np.array([0, 3], np.int32), "kv", np.array([9, 2], np.int32)
    )
    assert a.settled(handle).done
    (made,) = nixl.lines("create op=1")
    assert made.endswith(f" {VRAM:x}+40@1 {VRAM + 384:x}+40@1"), made
    there = f" {THEIRS + 576:x}+40@3 {THEIRS + 128:x}+40@3"
    assert any(line.endswith(there) for line in nixl.lines("remote of"))
    rows = np.array([[VRAM, 64, 1]], np.uint64)
    other = np.array([[THEIRS, 64, 3]], np.uint64).view(np.int64)
    made_of = a.transport.write_arrays(peer, rows, "VRAM", other, "VRAM")
    assert made_of is not None
    assert a.settled(made_of).done
    for bad in (ours[:, :3], [StridedRun(VRAM, 64, 0, 64, 1)]):
        try:
            a.transport.prepare("", "bad", bad, "VRAM")
        except ValueError:
            continue
        raise AssertionError(bad)


def post_fails(nixl: StandIn, sides: Sides) -> None:
    """(f)9 and 12 as NIXL makes them: -1 refuses, -2 breaks the link."""
    a, b, peer = pair(sides)
    nixl.script("post", -2)
    handle = a.transport.write(peer, KV, 0, KV, 0, ITEM)
    assert handle is not None
    result = a.final(handle)
    assert not result.quiescent
    assert result.state in (NixlState.REJECTED, NixlState.UNREADABLE)
    assert type(handle.error).__name__ == "nixlRemoteDisconnectError", repr(
        handle.error
    )
    text = "NIXL_ERR_REMOTE_DISCONNECT or NIXL_ERR_BACKEND"
    assert text in str(handle.error), handle.error
    until("it is dropped", lambda: not a.transport.is_loaded(peer))
    loads = len(nixl.lines("load"))
    drops = len(nixl.lines("invalidate"))
    a.transport.reload(peer)
    assert len(nixl.lines("load")) == loads + 1
    assert len(nixl.lines("invalidate")) == drops + 1
    assert a.transport.is_loaded(peer)
    again = a.transport.write(peer, KV, 64, KV, 64, ITEM)
    b.arena.expect(64, a.arena.read(64, ITEM))
    assert again is not None
    assert a.settled(again).done
    assert b.arena.wrong() == 0


def params(nixl: StandIn, sides: Sides) -> None:
    """(f)26: what the backend gets."""
    for role, backend, wanted in (
        ("prefill", "UCX", ""),
        ("prefill", "OBJ", " num_threads=8"),
        ("decode", "UCX", ""),
        ("prefill", "GDS_MT", " thread_count=8"),
    ):
        before = len(nixl.lines(f"backend {backend}"))
        NixlTransport.create(role, 0, backend, {"a": "b"}).close()
        (made,) = nixl.lines(f"backend {backend}")[before:]
        assert wanted in made and " a=b" in made, made
        if not wanted:
            assert "num_threads" not in made, made
    nixl.script("backend", -6)
    try:
        NixlTransport.create("prefill", 0, "NO_SUCH")
    except ValueError as error:
        assert "NO_SUCH" in str(error) and "UCX" in str(error), error
    else:
        raise AssertionError("a backend that is not there")


def hang(nixl: StandIn, sides: Sides) -> None:
    """(f)25: a backend that does not come back ends the wait, and only it."""
    nixl.block("UCX", True)
    try:
        NixlTransport.create("prefill", init_timeout=0.05)
    except RuntimeError as error:
        text = str(error)
        assert "UCX" in text and "0.05 s" in text, text
        assert socket.gethostname() in text, text
    else:
        raise AssertionError("it came back")
    nixl.block("UCX", False)
    made = NixlTransport.create("prefill", init_timeout=30)
    assert made.agent_name
    made.close()


def threads(nixl: StandIn, sides: Sides) -> None:
    """(f)25: the backend is made in a thread that is not the caller's."""
    nixl.block("UCX", True)
    made: list[NixlTransport] = []

    def work() -> None:
        made.append(NixlTransport.create("decode", init_timeout=60))

    thread = threading.Thread(target=work)
    thread.start()
    until("it waits", lambda: nixl.library.fake_nixl_waiting(b"UCX") == 1)
    assert kvt.Transport("local").agent_name  # the caller's process goes on
    nixl.block("UCX", False)
    thread.join(60)
    made[0].close()


def main() -> None:
    logging.disable(logging.CRITICAL)
    engine = Engine("fault:nixl", {"same_host": False})
    with Sides(engine) as sides:
        globals()[sys.argv[1]](StandIn(), sides)
    print("done")


if __name__ == "__main__":
    main()
