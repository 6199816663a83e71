# SPDX-License-Identifier: Apache-2.0
"""The forms of descriptor lists of kvt.nixl, and the runs they become.

Every form that NIXL takes is turned into a list and read back descriptor by
descriptor; random lists are compared with the rows they were made of. What a
list costs is counted in runs: a cache of millions of blocks must be a handful.
No engine is needed: the lists know nothing of agents.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from typing import Any

import numpy as np
import pytest

import kvt
import kvt.nixl as nixl
from kvt.nixl import _descs, _forms, _handles, _runs
from kvt.nixl._enums import MEMORY_BY_NAME

BLOCK = 4096
HIGH = 1 << 63


def xfer_descs(descs: Any, mem_type: str | None) -> Any:
    return _forms.list_of(nixl.nixlXferDList, descs, mem_type, MEMORY_BY_NAME)


def reg_descs(descs: Any, mem_type: str | None) -> Any:
    return _forms.list_of(nixl.nixlRegDList, descs, mem_type, MEMORY_BY_NAME)


def remote_descs(descs: Any, mem_type: str | None) -> Any:
    return _forms.list_of(nixl.nixlRemoteDList, descs, mem_type, MEMORY_BY_NAME)


def rows_of(*rows: tuple[int, int, int]) -> Any:
    return np.array(rows, dtype=np.uint64).reshape(-1, 3)


def read(descs: Any) -> list[tuple[Any, ...]]:
    return [descs[i] for i in range(len(descs))]


class Tensor:
    """What is asked of a torch tensor."""

    def __init__(
        self,
        addr: int,
        count: int,
        size: int = 2,
        gpu: int = -1,
        contiguous: bool = True,
    ) -> None:
        self.addr, self.count, self.size, self.gpu = addr, count, size, gpu
        self.contiguous = contiguous

    @property
    def device(self) -> str:
        return "cpu" if self.gpu == -1 else f"cuda:{self.gpu}"

    def data_ptr(self) -> int:
        return self.addr

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return self.size

    def get_device(self) -> int:
        return self.gpu

    def is_contiguous(self) -> bool:
        return self.contiguous


# ------------------------------------------------------------------- the forms


def test_tuples_and_arrays_become_the_same_list() -> None:
    rows = [(HIGH + 7, 16, 2), (0, 0, 0), (5, 6, 7)]
    of_tuples = xfer_descs(rows, "VRAM")
    of_array = xfer_descs(rows_of(*rows), "VRAM")
    assert read(of_tuples) == read(of_array) == rows
    assert of_tuples == of_array
    assert of_tuples.getType() == nixl.VRAM_SEG
    assert of_tuples.descCount() == 3 and not of_tuples.isEmpty()


def test_signed_arrays_are_taken_by_their_bits() -> None:
    rows = np.array([[-1, 8, 0], [3, 4, 5]], dtype=np.int64)
    descs = xfer_descs(rows, "DRAM")
    assert read(descs) == [((1 << 64) - 1, 8, 0), (3, 4, 5)]


def test_a_list_keeps_nothing_of_the_callers_array() -> None:
    rows = rows_of((1, 2, 3), (9, 9, 9))
    descs = xfer_descs(rows, "DRAM")
    rows[:] = 0
    assert read(descs) == [(1, 2, 3), (9, 9, 9)]


def test_tensors_become_regions_of_their_bytes() -> None:
    one = xfer_descs(Tensor(64, 10), None)
    assert read(one) == [(64, 20, 0)] and one.getType() == nixl.DRAM_SEG
    two = reg_descs([Tensor(64, 10, gpu=3), Tensor(8, 1, gpu=3)], None)
    assert read(two) == [(64, 20, 3, b""), (8, 2, 3, b"")]
    assert two.getType() == nixl.VRAM_SEG


def test_registrations_keep_their_meta_and_can_be_trimmed() -> None:
    descs = reg_descs([(1, 2, 3, "a"), (4, 5, 6, b"b")], "DRAM")
    assert read(descs) == [(1, 2, 3, b"a"), (4, 5, 6, b"b")]
    assert read(descs.trim()) == [(1, 2, 3), (4, 5, 6)]
    assert isinstance(descs.trim(), nixl.nixlXferDList)
    blank = reg_descs(rows_of((1, 2, 3)), "DRAM")
    assert read(blank) == [(1, 2, 3, b"")]


def test_remote_lists_name_an_agent_for_each() -> None:
    descs = remote_descs([(1, 2, 3, "there")], "VRAM")
    assert read(descs) == [(1, 2, 3, "there")]
    assert remote_descs(descs, None) is descs


def test_a_list_is_passed_along_and_the_wrong_kind_is_none() -> None:
    xfer = xfer_descs([(1, 2, 3)], "DRAM")
    reg = reg_descs([(1, 2, 3, "")], "DRAM")
    assert xfer_descs(xfer, None) is xfer
    assert reg_descs(reg, None) is reg
    assert xfer_descs(reg, None) is None
    assert reg_descs(xfer, None) is None


@pytest.mark.parametrize(
    ("descs", "mem_type"),
    [
        ([(1, 2, 3)], None),
        ([(1, 2, 3, "")], "DRAM"),
        ([[1, 2, 3]], "DRAM"),
        (["text"], "DRAM"),
        (rows_of((1, 2, 3)), None),
        (np.zeros((2, 4), dtype=np.uint64), "DRAM"),
        (np.zeros(3, dtype=np.uint64), "DRAM"),
        (Tensor(1, 1, contiguous=False), None),
        ([Tensor(1, 1), Tensor(1, 1, gpu=0)], None),
        ([Tensor(1, 1), Tensor(1, 1, contiguous=False)], None),
    ],
)
def test_what_is_no_form_gives_none_as_in_nixl(
    descs: Any, mem_type: str | None
) -> None:
    assert xfer_descs(descs, mem_type) is None


@pytest.mark.parametrize(
    ("descs", "error"),
    [
        ([], IndexError),
        (rows_of(), IndexError),
        (5, TypeError),
        ([(1, 2, 3), (1, 2)], ValueError),
        ([(-1, 2, 3)], ValueError),
        ([(1 << 64, 2, 3)], ValueError),
        ([(1.0, 2, 3)], ValueError),
        ([("a", 2, 3)], ValueError),
        (rows_of((1, 2, 3)).astype(np.int32), ValueError),
        (rows_of((1, 2, 3)).astype(float), ValueError),
        (rows_of((1, 2, 3), (4, 5, 6))[::-1], ValueError),
        (np.asfortranarray(rows_of((1, 2, 3), (4, 5, 6))), ValueError),
    ],
)
def test_what_cannot_be_read_raises(descs: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        xfer_descs(descs, "DRAM")


def test_an_unknown_kind_of_memory_is_a_keyerror() -> None:
    with pytest.raises(KeyError):
        xfer_descs([(1, 2, 3)], "HBM")


# ------------------------------------------------------------------- the lists


def test_a_list_can_be_changed() -> None:
    descs = nixl.nixlXferDList(nixl.DRAM_SEG)
    for i in range(5):
        descs.append((i * 8, 8, 0))
    descs.addDesc((100, 1, 0))
    descs[1] = (7, 7, 7)
    descs.remDesc(0)
    assert read(descs) == [
        (7, 7, 7),
        (16, 8, 0),
        (24, 8, 0),
        (32, 8, 0),
        (100, 1, 0),
    ]
    assert descs.index((24, 8, 0)) == 2
    with pytest.raises(nixl.nixlNotFoundError):
        descs.index((24, 9, 0))
    descs.clear()
    assert descs.isEmpty() and read(descs) == []


def test_a_registration_list_can_be_changed() -> None:
    descs = nixl.nixlRegDList(nixl.DRAM_SEG, [(0, 8, 0, "a"), (8, 8, 0, "b")])
    descs.append((16, 8, 0, "c"))
    descs[0] = (1, 1, 1, "x")
    descs.remDesc(1)
    assert read(descs) == [(1, 1, 1, b"x"), (16, 8, 0, b"c")]
    assert descs.index((16, 8, 0, "c")) == 1


@pytest.mark.parametrize("i", [-1, 2, 1 << 70])
def test_positions_outside_a_list_are_an_indexerror(i: int) -> None:
    descs = nixl.nixlXferDList(nixl.DRAM_SEG, [(0, 8, 0), (8, 8, 0)])
    with pytest.raises(IndexError):
        descs[i]
    with pytest.raises(IndexError):
        descs.remDesc(i)


def test_lists_are_equal_by_content_and_type() -> None:
    rows = [(0, 8, 0), (8, 8, 0), (16, 8, 0)]
    one = nixl.nixlXferDList(nixl.DRAM_SEG, rows)
    slow = nixl.nixlXferDList(nixl.DRAM_SEG)
    for row in rows:
        slow.append(row)
    assert one == slow
    assert one != nixl.nixlXferDList(nixl.VRAM_SEG, rows)
    assert one != nixl.nixlXferDList(nixl.DRAM_SEG, rows[:2])
    assert one != rows
    reg = [(0, 8, 0, "a")]
    assert nixl.nixlRegDList(nixl.DRAM_SEG, reg) == nixl.nixlRegDList(
        nixl.DRAM_SEG, reg
    )
    assert nixl.nixlRegDList(nixl.DRAM_SEG, reg) != nixl.nixlRegDList(
        nixl.DRAM_SEG, [(0, 8, 0, "b")]
    )


@pytest.mark.parametrize(
    "descs",
    [
        nixl.nixlXferDList(nixl.VRAM_SEG, [(HIGH, 8, 1), (8, 8, 1)]),
        nixl.nixlRegDList(nixl.DRAM_SEG, [(0, 8, 0, "meta"), (8, 0, 0, "")]),
    ],
)
def test_lists_survive_serialization_and_pickle(descs: Any) -> None:
    assert _descs.loads(_descs.dumps(descs)) == descs
    assert pickle.loads(pickle.dumps(descs)) == descs
    assert _descs.loads(pickle.dumps(descs)) == descs


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("the pickle was run",)


@pytest.mark.parametrize(
    "data",
    [b"", b"junk", pickle.dumps(Trap()), pickle.dumps([1, 2]), b"\x80\x04."],
)
def test_bytes_that_are_no_list_are_refused_and_not_run(data: bytes) -> None:
    with pytest.raises(nixl.nixlMismatchError):
        _descs.loads(data)


def test_damaged_lists_are_refused_or_lists() -> None:
    good = _descs.dumps(
        nixl.nixlXferDList(nixl.DRAM_SEG, [(1, 2, 3), (4, 5, 6)])
    )
    rng = random.Random(8)
    for _ in range(500):
        bad = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        del bad[len(bad) - rng.choice([0, 0, 1, 20]) :]
        with contextlib.suppress(nixl.nixlMismatchError):
            assert _descs.loads(bytes(bad)) is not None


# -------------------------------------------------------------------- the runs


def test_random_lists_are_the_rows_they_were_made_of() -> None:
    rng = random.Random(6)
    for _ in range(2000):
        rows = []
        for _ in range(rng.randrange(12)):
            start = rng.randrange(1 << 20) * 16
            length = rng.choice([0, 16, 32])
            device = rng.choice([0, 0, 1])
            stride = rng.choice([length, length, length * 2, -length, 0])
            for i in range(rng.randrange(1, 6)):
                addr = (start + i * stride) % (1 << 64)
                rows.append((addr, length, device))
        runs = _runs.from_rows(rows_of(*rows))
        assert _runs.to_rows(runs).tolist() == [list(row) for row in rows]
        assert (runs[:, _runs.STRIDE] >= runs[:, _runs.LENGTH]).all()
        apart = _runs.without_gaps(runs)
        assert _runs.to_rows(apart).tolist() == [list(row) for row in rows]
        assert (apart[:, _runs.STRIDE] == apart[:, _runs.LENGTH]).all()


def test_the_blocks_of_a_cache_are_one_run_a_layer() -> None:
    layers, blocks = 61, 1000
    rows = np.zeros((layers * blocks, 3), dtype=np.uint64)
    at = np.arange(blocks, dtype=np.uint64) * np.uint64(2 * BLOCK)
    for i in range(layers):
        rows[i * blocks : (i + 1) * blocks, 0] = at + np.uint64(i << 32)
    rows[:, 1] = BLOCK
    descs = nixl.nixlXferDList(nixl.DRAM_SEG, rows)
    assert len(descs) == layers * blocks
    assert len(descs.runs()) == layers
    assert descs[blocks * 7 + 3] == ((7 << 32) + 3 * 2 * BLOCK, BLOCK, 0)


def test_two_blocks_at_any_distance_are_no_run() -> None:
    rng = random.Random(3)
    rows = [(rng.randrange(1 << 50) * 64, 16, 0) for _ in range(20)]
    assert len(_runs.from_rows(rows_of(*rows))) == 20
    beside = [(addr + 16, 16, 0) for addr, _, _ in rows]
    pairs = [row for both in zip(rows, beside, strict=True) for row in both]
    assert len(_runs.from_rows(rows_of(*pairs))) == 20


@pytest.mark.parametrize("column", [1, 2])
def test_equal_distances_are_no_run_across_lengths_or_devices(
    column: int,
) -> None:
    rows = np.zeros((20, 3), dtype=np.uint64)
    rows[:, 0] = np.arange(20) * 64
    rows[:, 1] = 16
    rows[11:, column] = 8
    runs = _runs.from_rows(rows)
    assert len(runs) == 2
    assert (_runs.to_rows(runs) == rows).all()


def test_lengths_are_found_by_index() -> None:
    runs = np.array(
        [[0, 8, 8, 3, 0], [100, 16, 32, 2, 0], [500, 8, 8, 1, 0]],
        dtype=np.uint64,
    )
    known, one = _runs.facts(runs), _runs.facts(runs[:1])
    assert known == (6, None, False)
    assert one == (3, 8, False)
    assert _runs.facts(runs[:0]) == (0, None, False)
    every = _runs.Lengths(runs, known).at(np.arange(6))
    assert every.tolist() == [8, 8, 8, 16, 16, 8]
    assert _runs.Lengths(runs[:1], one).at(np.arange(3)) == 8
    runs[1, _runs.DEVICE] = 3
    assert _runs.facts(runs).devices
    assert _runs.expanded_lengths(runs).tolist() == every.tolist()


# ------------------------------------------------- runs over several regions


class Memory:
    """What a layout asks of a transport."""

    def __init__(self, *regions: tuple[int, int]) -> None:
        self.regions = regions
        self.prepared: list[int] = []  # how many runs, each time
        self.dropped: list[int] = []

    def prepare(self, name: str, runs: Any, side: int) -> int:
        for i, (addr, length, stride, count, *_) in enumerate(runs.tolist()):
            end = addr + stride * (count - 1) + length
            if not any(at <= addr and end <= to for at, to in self.regions):
                raise kvt.OutOfRange(f"run {i} is outside")
        self.prepared.append(len(runs))
        return len(self.prepared)

    def drop_layout(self, ident: int) -> None:
        self.dropped.append(ident)


def layout(core: Any, *rows: tuple[int, int, int, int]) -> Any:
    runs = np.array([(*row, 0) for row in rows], dtype=np.uint64)
    return _handles.Layout(core, None, runs, 0, _runs.facts(runs))


APART = [(at, at + 64) for at in range(0, 8 * 256, 256)]


@pytest.mark.parametrize("addr", [1 << 20, 256])
def test_a_long_run_outside_memory_is_not_taken_apart(
    addr: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may begin in memory: a billion blocks would take all of this."""
    monkeypatch.setattr(_runs, "without_gaps", lambda runs: 1 / 0)
    core = Memory(*APART)
    with pytest.raises(kvt.OutOfRange, match="run 1 is outside"):
        layout(core, (0, 64, 64, 1), (addr, 64, 256, 10**9))
    assert core.prepared == []


def test_what_is_taken_apart_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_handles, "_APART_MAX", 6)
    core = Memory(*APART)
    kept = layout(core, (0, 64, 256, 3), (64 * 4, 64, 64, 1), (0, 32, 512, 3))
    assert core.prepared == [4, 7] and core.dropped == [1]
    assert kept.ident == 2
    with pytest.raises(nixl.nixlInvalidParamError, match="more than 6 blocks"):
        layout(core, (0, 64, 256, 3), (0, 32, 512, 4))
    with pytest.raises(nixl.nixlInvalidParamError, match="more than 6 blocks"):
        layout(Memory((0, 64), (64 * 10**9, 1 << 63)), (0, 64, 65, 1 << 40))


def test_a_run_that_wraps_is_not_taken_apart() -> None:
    core = Memory(*APART)
    back = (1 << 64) - 256
    with pytest.raises(kvt.OutOfRange, match="run 0 is outside"):
        layout(core, (0, 64, 256, 3), (512, 64, back, 3))
    assert core.prepared == []


def test_many_runs_are_taken_apart_at_once() -> None:
    rows = [(i * 4096, 16, 64 + i, 1 + i % 4, i % 3) for i in range(1000)]
    runs = np.array(rows, dtype=np.uint64)
    runs[::7, _runs.STRIDE] = 16
    apart = _runs.without_gaps(runs)
    assert _runs.to_rows(apart).tolist() == _runs.to_rows(runs).tolist()
    assert (apart[:, _runs.STRIDE] == 16)[apart[:, _runs.COUNT] > 1].all()
    assert _runs.without_gaps(apart).tolist() == apart.tolist()
