# SPDX-License-Identifier: Apache-2.0
"""Every form in which prepare() takes runs names the same blocks.

The blocks of a layout are scattered, and what is written through it must lie
where the rows say. What is wrong with a buffer is an error that names the row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

import kvt
from conftest import BLOCK, COUNT, PATIENCE, Pair

np = pytest.importorskip("numpy")

RUN = np.dtype(
    [
        ("addr", np.uint64),
        ("block_bytes", np.uint64),
        ("stride_bytes", np.uint64),
        ("count", np.uint64),
        ("kind", np.uint32),
        ("device", np.uint32),
    ]
)

PLACES = [(7, 1, 1), (3, 2, 1), (40, 3, 4), (0, 1, 9)]
"""Runs: first block, how many, and the distance in blocks."""

BLOCKS = [7, 3, 4, 40, 44, 48, 0]


def table(addr: int, columns: int = 6, dtype: Any = np.uint64) -> Any:
    rows = [
        (addr + at * BLOCK, BLOCK, count, BLOCK * apart, 0, 0)
        for at, count, apart in PLACES
    ]
    return np.array(rows, dtype=dtype)[:, :columns]


def structs(addr: int) -> Any:
    made = np.zeros(len(PLACES), dtype=RUN)
    for i, (at, count, apart) in enumerate(PLACES):
        made[i] = (addr + at * BLOCK, BLOCK, apart * BLOCK, count, 0, 0)
    return made


def read_only(addr: int) -> Any:
    made = structs(addr)
    made.flags.writeable = False
    return made


def odd_address(addr: int) -> Any:
    data = b"x" + structs(addr).tobytes()
    return np.frombuffer(data, dtype=RUN, offset=1)


class CRun(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in "abcd"),
        ("kind", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
    ]


def c_array(addr: int) -> Any:
    return (CRun * len(PLACES)).from_buffer_copy(structs(addr).tobytes())


def with_gaps(addr: int) -> Any:
    made = np.full((2 * len(PLACES), 9), -1, dtype=np.int64)
    made[::2, 1:7] = table(addr, dtype=np.int64)
    return made[::2, 1:7]


def backwards(addr: int) -> Any:
    return np.ascontiguousarray(table(addr)[::-1, ::-1])[::-1, ::-1]


def with_memoryview(addr: int) -> Any:
    data = table(addr, 4).tobytes()
    return memoryview(data).cast("Q", (len(PLACES), 4))


FORMS: list[Callable[[int], Any]] = [
    lambda addr: [tuple(row) for row in table(addr).tolist()],
    lambda addr: table(addr, 4),
    lambda addr: table(addr, 5, np.int64),
    lambda addr: table(addr, 6, np.int64),
    lambda addr: np.asfortranarray(table(addr)),
    with_gaps,
    backwards,
    with_memoryview,
    structs,
    read_only,
    odd_address,
    lambda addr: structs(addr).repeat(2)[::2],
    lambda addr: read_only(addr)[::-1][::-1],
    c_array,
]


@pytest.mark.parametrize("form", FORMS)
def test_a_layout_is_what_its_rows_say(
    local_pair: Pair, form: Callable[[int], Any]
) -> None:
    pair = local_pair
    runs = form(pair.target_addr)
    layout = pair.source.prepare("form", runs, pair.peer)
    if isinstance(runs, np.ndarray) and runs.flags.writeable:
        runs[:] = np.zeros(1, dtype=runs.dtype)  # nothing of it is kept
    wanted = {block: pair.fill(i, i) for i, block in enumerate(BLOCKS)}
    every = range(len(BLOCKS))
    xfer = pair.source.write_blocks(pair.peer, pair.local, every, layout, every)
    pair.source.wait(xfer, PATIENCE)
    for block in range(COUNT):
        assert pair.landed(block) == wanted.get(block, bytes(BLOCK)), block


def test_blocks_lie_end_to_end_without_a_stride(local_pair: Pair) -> None:
    pair = local_pair
    rows = np.array([[pair.target_addr, BLOCK, 3]], dtype=np.uint64)
    layout = pair.source.prepare("short", rows, pair.peer)
    data = pair.fill(0, 5)
    pair.source.wait(
        pair.source.write_blocks(pair.peer, pair.local, [0], layout, [2]),
        PATIENCE,
    )
    assert pair.landed(2) == data


def many(addr: int, dtype: Any = np.uint64) -> Any:
    """More rows than are converted under the GIL."""
    made = np.zeros((10_000, 6), dtype=dtype)
    made[:, 0] = addr + np.arange(10_000) % COUNT * BLOCK
    made[:, 1] = made[:, 3] = BLOCK
    made[:, 2] = 1
    return made


def test_many_rows_are_as_good_as_few(local_pair: Pair) -> None:
    pair = local_pair
    layout = pair.source.prepare("many", many(pair.target_addr), pair.peer)
    data = pair.fill(0, 5)
    place = 9_999
    pair.source.wait(
        pair.source.write_blocks(pair.peer, pair.local, [0], layout, [place]),
        PATIENCE,
    )
    assert pair.landed(place % COUNT) == data


@pytest.mark.parametrize("row", [2, 9_999])
@pytest.mark.parametrize(
    ("column", "value", "name"),
    [
        (0, -1, "addr"),
        (2, -5, "count"),
        (4, 1 << 32, "kind"),
        (5, 1 << 40, "device"),
    ],
)
def test_a_number_that_does_not_fit_is_an_error_with_its_row(
    local_pair: Pair, row: int, column: int, value: int, name: str
) -> None:
    rows = many(local_pair.source_addr, np.int64)[: max(row + 1, 10)]
    rows[row, column] = value
    with pytest.raises(kvt.OutOfRange, match=f"run {row}: {name}"):
        local_pair.source.prepare("x", rows)


@pytest.mark.parametrize("form", [table, structs, read_only])
def test_a_run_outside_memory_is_an_error_with_its_row(
    local_pair: Pair, form: Callable[[int], Any]
) -> None:
    runs = form(local_pair.source_addr).copy()
    runs.view(np.uint64).reshape(len(PLACES), -1)[3, 0] += COUNT * BLOCK
    with pytest.raises(kvt.OutOfRange, match="run 3 "):
        local_pair.source.prepare("x", runs)


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (lambda: np.zeros((3, 2), dtype=np.uint64), kvt.InvalidArgument),
        (lambda: np.zeros((3, 7), dtype=np.uint64), kvt.InvalidArgument),
        (lambda: np.zeros(6, dtype=np.uint64), kvt.InvalidArgument),
        (lambda: np.zeros((3, 4, 2), dtype=np.uint64), kvt.InvalidArgument),
        (lambda: np.zeros((0, 4), dtype=np.uint64), kvt.InvalidArgument),
        (lambda: np.zeros(0, dtype=RUN), kvt.InvalidArgument),
        (lambda: np.zeros((3, 4), dtype=np.int32), TypeError),
        (lambda: np.zeros((3, 4), dtype=float), TypeError),
        (lambda: np.zeros((3, 4), dtype=bool), TypeError),
        (lambda: np.zeros((3, 4), dtype=object), TypeError),
        (lambda: np.zeros((3, 4), dtype=">u8"), TypeError),
        (lambda: np.zeros(3, dtype=RUN.newbyteorder(">")), TypeError),
        (lambda: np.zeros((3, 1), dtype=RUN), TypeError),
        (lambda: np.zeros(3, dtype="u8,u8,u8,u8,u8"), TypeError),
        (lambda: np.zeros(3, dtype="u8,u8,u8,u8,u4,f4"), TypeError),
        (lambda: np.zeros(3, dtype="u8,u8,u8,u8,u4,u4,u8"), TypeError),
        (lambda: b"x" * 40, TypeError),
    ],
)
def test_other_buffers_are_refused(
    local_pair: Pair, made: Callable[[], Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        local_pair.source.prepare("x", made())
    with pytest.raises(kvt.NotFound):
        local_pair.source.find_layout("x")


@pytest.mark.parametrize(
    "names",
    [
        ["addr", "block_bytes", "count", "stride_bytes", "kind", "device"],
        ["a", "b", "count", "d", "e", "f"],
        ["a", "b", "c", "stride", "e", "f"],
    ],
)
def test_fields_in_the_order_of_tuples_are_not_taken_for_cs(
    local_pair: Pair, names: list[str]
) -> None:
    kinds = [np.uint64] * 4 + [np.uint32] * 2
    row = (local_pair.source_addr, BLOCK, BLOCK, 1, 0, 0)
    runs = np.array([row], dtype=list(zip(names, kinds, strict=True)))
    with pytest.raises(kvt.InvalidArgument, match="stride_bytes, then count"):
        local_pair.source.prepare("x", runs)
    other = [f"{name}_count_of_stride" for name in "abcdef"]
    runs.dtype.names = tuple(other)
    local_pair.source.prepare("y", runs)


def test_a_buffer_is_free_after_the_call(local_pair: Pair) -> None:
    good = bytearray(structs(local_pair.source_addr).tobytes())
    bad = bytearray(len(good))
    for data in (good, bad):
        runs = np.frombuffer(data, dtype=RUN)
        rows = np.frombuffer(data, dtype=np.uint64).reshape(-1, 5)
        for each in (runs, rows):
            try:
                local_pair.source.prepare("x", each)
            except kvt.InvalidArgument:
                assert data is bad or each is rows
        del runs, rows, each
        data.append(0)  # BufferError while anybody has a view of it
