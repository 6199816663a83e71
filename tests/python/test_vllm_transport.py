# SPDX-License-Identifier: Apache-2.0
"""Proves kvt.vllm.NixlTransport's interface where nothing goes wrong, and its
answers to wrong arguments.

Two or three transports in this process, over the local engine, the fault engine
without rules, NIXL with kvt's way for peers on the same host, and NIXL alone.
Pools hold seeded random bytes with guard zones; after each move every byte of
both sides is compared with its image.
"""

from __future__ import annotations

import array
import ctypes
import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvt.vllm import DataTransport, NixlTransport, PollResult
from stage import LIMIT, until
from vllm_support.sides import (
    BLOCK_LEN,
    BLOCKS,
    ENGINES,
    Side,
    Sides,
    choose,
    need_nixl,
)

LOGGER = "vllm.v1.kv_offload.tiering.p2p.data.nixl"


@pytest.fixture(params=list(ENGINES))
def sides(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Sides]:
    choose(request.param, monkeypatch)
    with Sides() as made:
        yield made


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    """Where the engine makes no difference."""
    choose("local", monkeypatch)
    with Sides() as made:
        yield made


def no_byte_is_wrong(*made: Side) -> None:
    for side in made:
        assert side.pool.wrong() == [], side.name


# ------------------------------------------------------------------ properties


def test_the_view_gives_address_count_and_length(local: Sides) -> None:
    side = local.side()
    view = side.pool.view
    assert side.transport.base_addr == ctypes.addressof(
        ctypes.c_char.from_buffer(view)
    )
    assert side.transport.num_blocks == BLOCKS
    assert side.transport.block_len == BLOCK_LEN
    assert isinstance(side.transport, DataTransport)
    assert side.transport.available


def bad_views() -> dict[str, Any]:
    good = bytearray(64 * 64)
    square = np.zeros((64, 64), np.uint8)
    return {
        "one dimension": memoryview(good),
        "three dimensions": memoryview(good).cast("B", shape=[4, 16, 64]),
        "no bytes": memoryview(np.zeros((8, 8), np.int32)),
        "read-only": memoryview(bytes(64)).cast("B", shape=[8, 8]),
        "columns": memoryview(square.T[:, :8]),
        "rows with gaps": memoryview(square[::2]),
        "no blocks": memoryview(square[:0]),
        "not a buffer": "view",
    }


@pytest.mark.parametrize("what", list(bad_views()))
def test_any_other_view_is_refused(what: str, local: Sides) -> None:
    with pytest.raises(ValueError, match="view"):
        NixlTransport("agent", bad_views()[what])


def test_signed_bytes_and_chars_are_bytes(local: Sides) -> None:
    for kind in "b", "c":
        view = memoryview(bytearray(4096)).cast(kind, shape=[4, 1024])
        transport = NixlTransport("agent", view)
        assert transport.num_blocks == 4
        transport.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"b": 1, "a": [1, 2.5, None, True]},
        {"name": "ключ", "nested": {"z": {}, "y": "ü\n"}},
    ],
)
def test_the_fingerprint_is_vllms(fields: dict[str, Any], local: Sides) -> None:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    expected = hashlib.sha256(text.encode()).hexdigest()[:16]
    side = local.side(config_fields=fields)
    assert side.transport.config_fingerprint == expected


@pytest.mark.parametrize("fields", [None, {}])
def test_without_fields_the_fingerprint_is_empty(
    fields: dict[str, Any] | None, local: Sides
) -> None:
    side = local.side(config_fields=fields)
    assert side.transport.config_fingerprint == ""


def test_registering_is_logged(
    local: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        local.side()
    lines = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert ("INFO", "NixlTransport a: registered 64 blocks") in lines


# -------------------------------------------------------------------- backends


def test_no_backends_means_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    choose("nixl", monkeypatch)
    with Sides() as made:
        for backends in None, [], ["UCX"]:
            assert made.side(backends=backends).transport.available


def test_a_missing_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    choose("nixl", monkeypatch)
    view = memoryview(bytearray(4096)).cast("B", shape=[4, 1024])
    with pytest.raises(Exception, match="NOTHERE"):
        NixlTransport("agent", view, backends=["UCX", "NOTHERE"])


# -------------------------------------------------------------------- exchange


def test_blocks_arrive_where_they_were_sent(sides: Sides) -> None:
    a, b = sides.two()
    number = a.write(b, [0, 3, 4, 5, 63], [5, 7, 8, 1, 0])
    assert a.results(1, "b") == ([number], [])
    no_byte_is_wrong(a, b)


def test_both_directions_work_at_once(sides: Sides) -> None:
    a, b = sides.two()
    b.add(a)
    there = a.write(b, list(range(8)), list(range(8, 16)))
    back = b.write(a, list(range(20, 28)), list(range(40, 48)))
    assert a.results(1, "b") == ([there], [])
    assert b.results(1, "a") == ([back], [])
    no_byte_is_wrong(a, b)


def test_numbers_count_the_accepted_calls_from_0(sides: Sides) -> None:
    a, b = sides.two()
    numbers = []
    for block in range(5):
        numbers.append(a.write(b, [block], [block]))
        assert a.transport.write_blocks("nobody", [0], [0]) is None
        with pytest.raises(ValueError, match=r"\w"):
            a.transport.write_blocks("b", [BLOCKS], [0])
    assert numbers == [0, 1, 2, 3, 4]
    assert sorted(a.results(5)[0]) == numbers
    no_byte_is_wrong(a, b)


def test_a_poll_for_one_peer_leaves_the_others_alone(sides: Sides) -> None:
    a, b = sides.two()
    c = sides.side()
    a.add(c)
    to_b = [a.write(b, [i], [i]) for i in range(4)]
    to_c = [a.write(c, [i], [i]) for i in range(4)]
    assert sorted(a.results(4, "c")[0]) == to_c
    assert a.transport.poll("c") == PollResult((), ())
    assert a.transport.poll("nobody") == PollResult((), ())
    assert sorted(a.results(4, "b")[0]) == to_b
    assert a.transport.poll() == PollResult((), ())
    no_byte_is_wrong(a, b, c)


def test_a_poll_for_all_takes_everyones(sides: Sides) -> None:
    a, b = sides.two()
    c = sides.side()
    a.add(c)
    numbers = [a.write(x, [i], [i]) for i in range(4) for x in (b, c)]
    assert sorted(a.results(8)[0]) == numbers
    no_byte_is_wrong(a, b, c)


def test_with_nothing_to_report_both_lists_are_empty_tuples(
    sides: Sides,
) -> None:
    a, b = sides.two()
    assert a.transport.poll("b") == ((), ())
    assert isinstance(a.transport.poll("b"), PollResult)
    a.write(b, [1], [1])
    a.results(1)
    assert a.transport.poll("b") == ((), ())


def test_two_names_for_one_peer_are_two_peers(sides: Sides) -> None:
    """vLLM's class: removing one breaks the other."""
    a, b = sides.two()
    a.add(b, "again")
    a.transport.remove_remote_peer("again")
    number = a.write(b, [1, 2], [3, 4])
    assert a.results(1, "b") == ([number], [])
    no_byte_is_wrong(a, b)


def test_a_peer_that_is_added_again_is_written_as_before(sides: Sides) -> None:
    a, b = sides.two()
    a.add(b)
    a.add(b)
    number = a.write(b, [1, 2], [3, 4])
    assert a.results(1, "b") == ([number], [])
    no_byte_is_wrong(a, b)


def test_a_removed_peer_can_be_added_again(sides: Sides) -> None:
    a, b = sides.two()
    a.transport.remove_remote_peer("b")
    assert a.transport.write_blocks("b", [0], [0]) is None
    a.add(b)
    a.write(b, [1, 2], [3, 4])
    a.results(1, "b")
    no_byte_is_wrong(a, b)


def test_an_async_registration_can_be_written_to(sides: Sides) -> None:
    a, b = sides.side(), sides.side()
    future = a.transport.add_remote_peer_async("b", *b.arguments())
    assert future.result(timeout=60) is None
    a.write(b, [1, 2], [3, 4])
    a.results(1, "b")
    no_byte_is_wrong(a, b)


# --------------------------------------------------------------------- indices

PAIRS = [
    ("list", lambda n: n),
    ("tuple", tuple),
    ("array", lambda n: array.array("q", n)),
    ("memoryview", lambda n: memoryview(array.array("I", n))),
    ("strided", lambda n: np.repeat(np.array(n), 2)[::2]),
    ("big endian", lambda n: np.array(n, ">i4")),
    *[
        (name, lambda n, name=name: np.array(n, name))
        for name in [
            "int8",
            "uint8",
            "int16",
            "uint16",
            "int32",
            "uint32",
            "int64",
            "uint64",
        ]
    ],
    ("numpy scalars", lambda n: [np.int32(i) for i in n]),
]


# B22
@pytest.mark.parametrize(
    "make", [m for _, m in PAIRS], ids=[n for n, _ in PAIRS]
)
def test_any_integers_are_indices(make: Any, local: Sides) -> None:
    a, b = local.two()
    ours, theirs = [0, 5, 63], [9, 1, 2]
    assert a.transport.write_blocks("b", make(ours), make(theirs)) == 0
    for here, there in zip(ours, theirs, strict=True):
        b.pool.expect(there, a.pool.block(here))
    assert a.results(1) == ([0], [])
    no_byte_is_wrong(a, b)


def test_a_range_is_indices(local: Sides) -> None:
    a, b = local.two()
    assert a.transport.write_blocks("b", range(8), range(8, 16)) == 0
    for block in range(8):
        b.pool.expect(8 + block, a.pool.block(block))
    assert a.results(1) == ([0], [])
    no_byte_is_wrong(a, b)


WRONG_TYPES = {
    "float": [1.0],
    "text in a list": ["1"],
    "text": "1",
    "bytes": b"\1",
    "bool": [True],
    "mask": np.array([True, False]),
    "numpy floats": np.array([1.7]),
    "None": [None],
    "no sequence": 1,
}
"""vLLM's class takes most of these, and overwrites the wrong block."""

WRONG_VALUES = {
    "negative": [-1],
    "one too far": [BLOCKS],
    "2**31": [2**31],
    "2**32": [2**32],
    "2**32 in numpy": np.array([2**32]),
    "2**32 + 1 in numpy": np.array([2**32 + 1], np.int64),
    "2**64": [2**64],
    "2**64 - 1 in numpy": np.array([2**64 - 1], np.uint64),
    "negative in numpy": np.array([-1], np.int8),
    "one of many": [*range(63), BLOCKS],
    "empty": [],
    "empty numpy": np.array([], np.int64),
}


# B22
@pytest.mark.parametrize("what", list(WRONG_TYPES))
@pytest.mark.parametrize("ours", [True, False])
def test_what_is_no_integer_is_a_type_error(
    what: str, ours: bool, local: Sides
) -> None:
    a, b = local.two()
    wrong = WRONG_TYPES[what]
    right = [2] * (len(wrong) if hasattr(wrong, "__len__") else 1)
    pair = (wrong, right) if ours else (right, wrong)
    with pytest.raises(TypeError):
        a.transport.write_blocks("b", *pair)
    nothing_was_sent(a, b)


# B22
@pytest.mark.parametrize("what", list(WRONG_VALUES))
@pytest.mark.parametrize("ours", [True, False])
def test_what_is_no_block_is_a_value_error(
    what: str, ours: bool, local: Sides
) -> None:
    a, b = local.two()
    wrong = WRONG_VALUES[what]
    right = list(range(len(wrong)))
    pair = (wrong, right) if ours else (right, wrong)
    with pytest.raises(ValueError, match=r"\w"):
        a.transport.write_blocks("b", *pair)
    nothing_was_sent(a, b)


@pytest.mark.parametrize("pair", [([1, 2], [1]), ([1], [1, 2]), ([1], [])])
def test_unequal_lengths_are_a_value_error(pair: Any, local: Sides) -> None:
    a, b = local.two()
    with pytest.raises(ValueError, match=r"\w"):
        a.transport.write_blocks("b", *pair)
    nothing_was_sent(a, b)


def nothing_was_sent(a: Side, b: Side) -> None:
    assert a.transport.poll() == ((), ())
    assert a.inner().stats().blocks == 0
    no_byte_is_wrong(a, b)
    assert a.write(b, [1], [1]) == 0
    a.results(1)
    no_byte_is_wrong(a, b)


def test_one_remote_block_may_be_named_twice(sides: Sides) -> None:
    a, b = sides.two()
    assert a.transport.write_blocks("b", [1, 2], [7, 7]) == 0
    assert a.results(1) == ([0], [])
    assert b.pool.block(7) in a.pool.blocks([1, 2])
    b.pool.expect(7, b.pool.block(7))
    no_byte_is_wrong(a, b)


# ----------------------------------------------------------------------- peers


def test_an_unknown_peer_gets_none_and_a_warning(
    local: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    a, _ = local.two()
    assert a.transport.write_blocks("nobody", [0], [0]) is None
    line = "NO REMOTE DLIST for peer=nobody (known peers=['b'])"
    assert any(
        line in r.getMessage() and r.levelname == "WARNING"
        for r in caplog.records
    )


def test_unknown_peers_are_removed_without_a_word(sides: Sides) -> None:
    a, _ = sides.two()
    a.transport.remove_remote_peer("nobody")
    a.transport.remove_remote_peer("b")
    a.transport.remove_remote_peer("b")


# B27
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_blocks": BLOCKS + 1}, "beyond the region"),
        ({"num_blocks": 2**40}, "2**40 blocks, on which vLLM's class hangs"),
        ({"num_blocks": 2**64}, "beyond the address space"),
        ({"num_blocks": 0}, "none"),
        ({"num_blocks": -1}, "negative"),
        ({"block_len": BLOCK_LEN // 2}, "shorter blocks"),
        ({"block_len": BLOCK_LEN * 2}, "longer blocks"),
        ({"block_len": 0}, "no blocks"),
        ({"base_addr": 0}, "no address"),
        ({"base_addr": 4096}, "somewhere else"),
        ({"base_addr": 2**64}, "no 64 bits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_wire_says_must_fit_the_metadata(
    change: dict[str, int], what: str, sides: Sides
) -> None:
    a, b = sides.side(), sides.side()
    metadata, *numbers = b.arguments()
    names = ["base_addr", "num_blocks", "block_len"]
    claim = {**dict(zip(names, numbers, strict=True)), **change}
    with pytest.raises(ValueError, match=r"\w"):
        a.transport.add_remote_peer("b", metadata, **claim)
    future = a.transport.add_remote_peer_async("b", metadata, **claim)
    assert isinstance(future.exception(timeout=60), ValueError)
    assert a.transport.write_blocks("b", [0], [0]) is None
    a.add(b)
    a.write(b, [1], [2])
    a.results(1)
    no_byte_is_wrong(a, b)


@pytest.mark.parametrize("metadata", [b"", b"nonsense", bytes(500)])
def test_bad_metadata_is_a_value_error(metadata: bytes, sides: Sides) -> None:
    a, b = sides.side(), sides.side()
    numbers = b.arguments()[1:]
    with pytest.raises(ValueError, match=r"\w"):
        a.transport.add_remote_peer("b", metadata, *numbers)
    with pytest.raises(TypeError):
        a.transport.add_remote_peer("b", "text", *numbers)
    with pytest.raises(TypeError):
        a.transport.add_remote_peer("b", b.arguments()[0], *map(str, numbers))


def test_fewer_blocks_than_the_peer_has_can_be_claimed(sides: Sides) -> None:
    a, b = sides.side(), sides.side()
    metadata, base_addr, _, block_len = b.arguments()
    a.transport.add_remote_peer(
        "b", metadata, base_addr + 8 * block_len, 8, block_len
    )
    with pytest.raises(ValueError, match=r"\w"):
        a.transport.write_blocks("b", [0], [8])
    assert a.transport.write_blocks("b", [0], [7]) == 0
    b.pool.expect(15, a.pool.block(0))
    a.results(1)
    no_byte_is_wrong(a, b)


def test_a_failed_registration_leaves_the_peer_torn_down(sides: Sides) -> None:
    a, b = sides.two()
    with pytest.raises(ValueError, match=r"\w"):
        a.transport.add_remote_peer("b", b"nonsense", *b.arguments()[1:])
    assert a.transport.write_blocks("b", [0], [0]) is None
    no_byte_is_wrong(a, b)


def test_our_own_metadata_is_refused_in_words(sides: Sides) -> None:
    a = sides.side()
    with pytest.raises(ValueError, match="own"):
        a.add(a)


# B46
def test_a_name_in_use_on_both_sides_is_refused_in_words(
    sides: Sides,
) -> None:
    """NIXL says NIXL_ERR_INVALID_PARAM."""
    a, b = sides.side(), sides.side(name="a")
    with pytest.raises(ValueError, match="name"):
        a.add(b, "b")


# ---------------------------------------------------------------------- cancel


def test_a_cancel_of_unknown_ids_does_nothing(sides: Sides) -> None:
    a, _ = sides.two()
    assert a.transport.cancel([]) == []
    assert a.transport.cancel(iter([7, -1, 2**80]), mode="wait") == []
    assert a.transport.cancel({9: None}.keys()) == []


def test_an_unknown_mode_is_a_value_error(sides: Sides) -> None:
    a, b = sides.two()
    number = a.write(b, [1], [1])
    with pytest.raises(ValueError, match="mode"):
        a.transport.cancel([number], mode="later")  # type: ignore[arg-type]
    assert a.results(1) == ([number], [])


@pytest.mark.parametrize("mode", ["immediate", "wait"])
def test_what_is_final_already_is_forgotten(mode: Any, sides: Sides) -> None:
    a, b = sides.two()
    numbers = [a.write(b, [i], [i]) for i in range(4)]
    last = a.write(b, [9], [9])
    inner = a.inner()
    until("all are done", lambda: inner.stats().undrained == 5)
    assert a.transport.cancel(iter(numbers), mode) == []
    assert a.transport.poll() == ([last], ())
    no_byte_is_wrong(a, b)


# ----------------------------------------------------------------------- close


def test_after_close_every_call_is_harmless(sides: Sides) -> None:
    a, b = sides.two()
    arguments = b.arguments()
    a.transport.close()
    a.transport.close()
    assert not a.transport.available
    assert a.transport.write_blocks("b", [0], [0]) is None
    assert a.transport.poll() == ((), ())
    assert a.transport.poll("b") == ((), ())
    assert a.transport.cancel([0, 1], mode="wait") == []
    a.transport.remove_remote_peer("b")
    with pytest.raises(RuntimeError):
        a.transport.add_remote_peer("b", *arguments)
    with pytest.raises(RuntimeError):
        a.transport.add_remote_peer_async("b", *arguments)
    with pytest.raises(RuntimeError):
        a.transport.get_agent_metadata()
    assert a.transport.num_blocks == BLOCKS
    assert a.transport.config_fingerprint == ""


def test_the_memory_is_held_until_close(sides: Sides) -> None:
    side = sides.side()
    pool = side.pool
    pool.view.release()
    with pytest.raises(BufferError):
        pool.map.close()
    side.transport.close()
    pool.map.close()


WITHOUT_NIXL = """
import logging, sys
logging.basicConfig(stream=sys.stdout)
from kvt.vllm import NixlTransport
view = memoryview(bytearray(4 * 4096)).cast("B", shape=[4, 4096])
t = NixlTransport("agent", view)
assert not t.available and t.num_blocks == 4
assert t.write_blocks("b", [0], [0]) is None
assert t.poll() == t.poll("b") == ((), ())
assert t.cancel([0], mode="wait") == []
t.remove_remote_peer("b")
for call in (
    t.get_agent_metadata,
    lambda: t.add_remote_peer("b", b"", 4096, 1, 4096),
    lambda: t.add_remote_peer_async("b", b"", 4096, 1, 4096),
):
    try:
        call()
    except RuntimeError as error:
        assert "not available" in str(error) and "nowhere" in str(error)
    else:
        raise AssertionError(call)
t.close()
view.release()
"""


# B40
def test_without_nixl_it_is_not_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The local engine is there, and is not taken in NIXL's place."""
    monkeypatch.setenv("KVT_ENGINE", "")
    monkeypatch.setenv("KVT_NIXL_LIBRARY", "/nowhere/libnixl_capi.so")
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_NIXL],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "NIXL is not available" in ended.stdout


def test_nixl_is_there_where_it_must_be() -> None:
    need_nixl()
