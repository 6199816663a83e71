# SPDX-License-Identifier: Apache-2.0
"""Indices in every form that is one, and none in any form that is not.

What is taken is proved by the blocks that land; that large arrays are not
copied on the way by tracemalloc, which sees the extension's own allocations.
"""

from __future__ import annotations

import array
import collections
import ctypes
import tracemalloc
from typing import Any

import pytest

import kvt
from conftest import BLOCK, COUNT, PATIENCE, Pair

np = pytest.importorskip("numpy")

INTEGERS = [
    "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i2", ">u4", ">i8", "intp"
]  # fmt: skip


class Index:
    """An integer to operator.index() only."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Tensor:
    """What of a torch tensor matters here."""

    def __init__(self, values: list[int], dtype: str = "i8") -> None:
        self.values = np.array(values, dtype)

    def data_ptr(self) -> int:
        raise AssertionError("indices are not memory")

    def numpy(self) -> Any:
        return self.values


def forms(values: list[int]) -> list[Any]:
    """These indices in every form."""
    spread = np.zeros((len(values), 3), "i4")
    spread[:, 1] = values
    unaligned = np.zeros(len(values) * 8 + 1, "u1")[1:].view("i8")
    unaligned[:] = values
    return [
        values,
        tuple(values),
        [Index(value) for value in values],
        [np.int32(value) for value in values],
        collections.deque(values),
        array.array("i", values),
        array.array("Q", values),
        memoryview(array.array("h", values)),
        (ctypes.c_int64 * len(values))(*values),  # has no strides to show
        (ctypes.c_int16 * len(values))(*values),
        np.array(values[::-1])[::-1],
        spread[:, 1],
        unaligned,
        Tensor(values),
        *(np.array(values, dtype) for dtype in INTEGERS),
    ]


# B22
@pytest.mark.parametrize("form", range(len(forms([0]))))
def test_every_form_names_the_same_blocks(local_pair: Pair, form: int) -> None:
    sources, targets = [3, 0, 7, 8], [1, 9, 63, 0]
    data = [local_pair.fill(block, 40 + block) for block in sources]
    xfer = local_pair.write(forms(sources)[form], forms(targets)[form])
    result = local_pair.source.wait(xfer, PATIENCE)
    assert result.blocks == 4
    assert [local_pair.landed(block) for block in targets] == data
    assert local_pair.landed(2) == bytes(BLOCK)


@pytest.mark.parametrize(
    "span", [range(5), range(4, 64, 13), range(10, 0, -3), range(63, 64)]
)
def test_a_range_names_its_members(local_pair: Pair, span: range) -> None:
    data = {block: local_pair.fill(block, block) for block in span}
    local_pair.source.wait(local_pair.write(span, list(span)), PATIENCE)
    for block in range(COUNT):
        assert local_pair.landed(block) == data.get(block, bytes(BLOCK))


@pytest.mark.parametrize(
    "wrong",
    [
        [1.0],
        [1.7],
        ["1"],
        "1",
        [None],
        [True],
        (False,),
        b"\x01",
        bytearray(b"\x01"),
        {1},
        {1: 1},
        1,
        None,
        iter([1]),
        [1, [2]],
        [b"1"],
        Tensor([1], "f4"),
        Tensor([1], "?"),
        np.array([1.0]),
        np.array([True]),
        np.array(["1"]),
        np.array([1], "M8[s]"),
        np.array([(1, 2)], "i4,i4"),
        np.array([1 + 0j]),
        memoryview(b"1").cast("c"),
        [np.float32(1)],
        [np.bool_(True)],
    ],
    ids=repr,
)
def test_what_is_no_integer_is_a_type_error(
    local_pair: Pair, wrong: Any
) -> None:
    with pytest.raises(TypeError):
        local_pair.write(wrong, [1])
    with pytest.raises(TypeError):
        local_pair.write([1], wrong)
    assert local_pair.source.stats().accepted == 0


@pytest.mark.parametrize(
    "wrong",
    [
        [-1],
        [COUNT],
        [2**31],
        [2**32],
        [2**32 + 1],
        [2**63],
        [2**64],
        [-(2**63)],
        [1 << 20000],
        [0, 1],
        [],
        (),
        range(0),
        range(-1, 0),
        range(2**63, 2**63 + 1),
        range(2**70),
        range(2**40),
        np.array([-1], "i1"),
        np.array([-1], "i4"),
        np.array([2**32], "i8"),
        np.array([2**64 - 1], "u8"),
        np.array([[1]]),
        np.array(1),
        np.zeros(0, "i8"),
    ],
    ids=lambda value: str(type(value)),
)
def test_what_is_no_block_is_a_value_error(
    local_pair: Pair, wrong: Any
) -> None:
    with pytest.raises(ValueError) as caught:
        local_pair.write(wrong, [1])
    assert isinstance(caught.value, kvt.Error)
    with pytest.raises(ValueError):
        local_pair.write([1], wrong)
    assert local_pair.landed(1) == bytes(BLOCK)


def test_an_index_that_changes_its_list_is_noticed(local_pair: Pair) -> None:
    class Shrink:
        def __index__(self) -> int:
            indices.clear()
            return 0

    indices: list[Any] = [Shrink(), 1, 2]
    with pytest.raises(kvt.InvalidArgument):
        local_pair.write(indices, [0, 1, 2])


def test_an_index_that_raises_is_passed_on(local_pair: Pair) -> None:
    class Raise:
        def __index__(self) -> int:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        local_pair.write([Raise()], [0])


def many_pair() -> tuple[kvt.Transport, kvt.Transport, int, int, int]:
    source, target = kvt.Transport("local"), kvt.Transport("local")
    memory = kvt.SharedMemory(16 * 65536)
    source.register(memory)
    target.register(memory)
    peer = source.add_peer("target", target.metadata())
    run = [(memory.addr, 16, 65536)]
    local, remote = source.prepare("l", run), source.prepare("r", run, peer)
    return source, target, peer, local, remote


# B16
@pytest.mark.parametrize(
    ("dtype", "copied"),
    [("i4", 0), ("u4", 0), ("i8", 0), ("u8", 0), ("i2", 8), (">i8", 8)],
)
def test_65536_numpy_indices_are_not_copied(dtype: str, copied: int) -> None:
    source, target, peer, local, remote = many_pair()
    indices = np.arange(65536) % 32768
    indices = indices.astype(dtype)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        xfer = source.write_blocks(peer, local, indices, remote, indices)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert source.wait(xfer, PATIENCE).blocks == 65536
    # Both sides at once where they are copied.
    expected = 2 * copied * 65536
    assert expected <= peak < expected + 8192
    source.close()
    target.close()


def test_pieces_come_as_rows_of_a_buffer(local_pair: Pair) -> None:
    data = local_pair.fill(0, 3)
    rows = np.array(
        [
            [local_pair.source_addr, local_pair.target_addr, 10],
            [local_pair.source_addr + 20, local_pair.target_addr + 20, 10],
        ],
        np.uint64,
    )
    wide = np.zeros((2, 7), np.int64)
    wide[:, :3] = rows.astype(np.int64) + np.array([BLOCK, BLOCK, 0])
    source = local_pair.source
    source.wait(source.write(local_pair.peer, rows), PATIENCE)
    assert local_pair.target_memory[:30] == data[:10] + bytes(10) + data[20:30]
    assert (
        source.wait(source.write(local_pair.peer, wide), PATIENCE).bytes == 20
    )
    wide[1, 3] = kvt.VRAM
    with pytest.raises(kvt.Unsupported):
        source.write(local_pair.peer, wide)
    with pytest.raises(kvt.Unsupported):
        source.write(local_pair.peer, rows, peer_kind=kvt.VRAM)
    wide[1, 3] = 2**40
    with pytest.raises(kvt.OutOfRange):
        source.write(local_pair.peer, wide)
    with pytest.raises(kvt.InvalidArgument):
        source.write(local_pair.peer, rows[:, :2].copy())
    with pytest.raises(kvt.InvalidArgument):
        source.write(local_pair.peer, np.zeros((0, 3), "i8"))
    with pytest.raises((kvt.Error, TypeError, ValueError, BufferError)):
        source.write(local_pair.peer, wide[:, ::2])
    for dtype in ("f8", "i4", ">i8"):
        with pytest.raises(TypeError):
            source.write(local_pair.peer, rows.astype(dtype))


def test_many_pieces_are_one_transfer(local_pair: Pair) -> None:
    rows = np.zeros((10000, 3), np.uint64)
    steps = np.arange(10000, dtype=np.uint64) * np.uint64(8)
    rows[:, 0] = steps + np.uint64(local_pair.source_addr)
    rows[:, 1] = steps + np.uint64(local_pair.target_addr)
    rows[:, 2] = 4
    local_pair.source_memory[:] = bytes(range(256)) * (BLOCK * COUNT // 256)
    xfer = local_pair.source.write(local_pair.peer, rows)
    result = local_pair.source.wait(xfer, PATIENCE)
    assert (result.blocks, result.bytes) == (10000, 40000)
    got = np.frombuffer(local_pair.target_memory, "u4")[:20000]
    want = np.frombuffer(local_pair.source_memory, "u4")[:20000]
    assert (got[::2] == want[::2]).all()
    assert not got[1::2].any()


def test_what_a_buffer_says_of_itself_is_not_lost(local_pair: Pair) -> None:
    view = memoryview(bytearray(8))
    view.release()
    with pytest.raises(TypeError, match="memoryview") as caught:
        local_pair.write(view, [1])
    assert "released" in str(caught.value.__cause__)

    class Broken:
        @property
        def data_ptr(self) -> None:
            raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="the device is lost"):
        local_pair.write(Broken(), [1])
