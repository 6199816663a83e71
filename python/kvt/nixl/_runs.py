# SPDX-License-Identifier: Apache-2.0
"""Rows of descriptors, and the runs that they are.

A row is (address, length, device). A run is (address, length, stride, count,
device): `count` blocks, `stride` from start to start. Lists of a KV cache are
millions of rows and a handful of runs, so runs are what is kept. Both are
arrays of uint64, since addresses may have the highest bit set; nothing is
written into one that is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

import kvt
from kvt import _kvt

Words: TypeAlias = npt.NDArray[np.uint64]

ADDR, LENGTH, STRIDE, COUNT, DEVICE = range(5)

_ROW = (ADDR, LENGTH, DEVICE)

_LAST = 0xFFFF_FFFF_FFFF_FFFF

_RUN = np.dtype(
    [
        ("addr", np.uint64),
        ("block_bytes", np.uint64),
        ("stride_bytes", np.uint64),
        ("count", np.uint64),
        ("kind", np.uint32),
        ("device", np.uint32),
    ]
)
"""struct kvt_run, which prepare() reads where it lies. A run of host memory is
one as it is: its device, 0, takes the place of kind and device."""

NO_RUNS: Words = np.empty((0, 5), dtype=np.uint64)


def rows_of(descs: Iterable[tuple[Any, ...]]) -> Words:
    """Three-element tuples of ints as rows; ValueError for other ones."""
    if not isinstance(descs, list):
        descs = list(descs)
    rows = np.empty((len(descs), 3), dtype=np.uint64)
    _kvt._desc_rows(descs, rows)
    return rows


def from_rows(rows: Words) -> Words:
    """The runs of N x 3 rows, in order: block i of the runs is row i."""
    runs = np.empty((_kvt._desc_runs(rows, None), 5), dtype=np.uint64)
    if _kvt._desc_runs(rows, runs) != len(runs):
        raise ValueError("the descriptors were changed during the call")
    runs.flags.writeable = False
    return runs


def from_strided(descs: Words) -> Words:
    """The same of NIXL's N x 5: (address, length, device, stride, count)."""
    runs = np.ascontiguousarray(descs[:, (0, 1, 3, 4, 2)])
    runs.flags.writeable = False
    return runs


def to_rows(runs: Words) -> Words:
    """The rows of runs, one a block."""
    counts = runs[:, COUNT].astype(np.intp)
    rows = np.repeat(runs[:, _ROW], counts, axis=0)
    inside = np.arange(len(rows), dtype=np.uint64)
    inside -= np.repeat(positions(runs)[:-1], counts).astype(np.uint64)
    rows[:, ADDR] += inside * np.repeat(runs[:, STRIDE], counts)
    return rows


def gaps(runs: Words) -> npt.NDArray[np.bool_]:
    """Of each run, whether its blocks lie apart."""
    apart: npt.NDArray[np.bool_] = runs[:, STRIDE] != runs[:, LENGTH]
    return apart & (runs[:, COUNT] > 1)


def wrap(runs: Words) -> bool:
    """Whether a block of runs with gaps begins behind the last address."""
    room = (np.uint64(_LAST) - runs[:, ADDR]) // runs[:, STRIDE]
    return bool((runs[:, COUNT] - np.uint64(1) > room).any())


def ends(runs: Words) -> Words:
    """The first and the last block of each run."""
    first, last = runs.copy(), runs.copy()
    last[:, ADDR] += (runs[:, COUNT] - np.uint64(1)) * runs[:, STRIDE]
    made = np.concatenate((first, last))
    made[:, STRIDE] = made[:, LENGTH]
    made[:, COUNT] = 1
    return made


def without_gaps(runs: Words) -> Words:
    """The same blocks, in runs that lie end to end."""
    apart = gaps(runs)
    counts = np.where(apart, runs[:, COUNT], np.uint64(1)).astype(np.intp)
    made = np.repeat(runs, counts, axis=0)
    inside = np.arange(len(made), dtype=np.uint64)
    inside -= np.repeat(np.cumsum(counts) - counts, counts).astype(np.uint64)
    made[:, ADDR] += inside * made[:, STRIDE]
    split = np.repeat(apart, counts)
    made[split, STRIDE] = made[split, LENGTH]
    made[split, COUNT] = 1
    return made


def positions(runs: Words) -> npt.NDArray[np.intp]:
    """The index of each run's first block, and the number of all blocks."""
    made = np.zeros(len(runs) + 1, dtype=np.intp)
    np.cumsum(runs[:, COUNT].astype(np.intp), out=made[1:])
    return made


class Facts(NamedTuple):
    """What there is to know of runs as a whole."""

    blocks: int  # how many
    length: int | None  # that all blocks have
    devices: bool  # any that is not 0


def facts(runs: Words) -> Facts:
    return Facts(*_kvt._desc_facts(runs))


def total(runs: Words) -> int:
    """The number of all blocks."""
    return int(runs[:, COUNT].sum())


class Lengths:
    """The lengths of a list's blocks: one for all, or found by index."""

    def __init__(self, runs: Words, known: Facts) -> None:
        self._one = known.length
        if self._one is None:
            self._each = runs[:, LENGTH].copy()
            self._ends = positions(runs)[1:]

    def at(self, indices: npt.NDArray[Any]) -> Any:
        """One number, or an array of them."""
        if self._one is not None:
            return self._one
        return self._each[np.searchsorted(self._ends, indices, side="right")]


def expanded_lengths(runs: Words) -> Words:
    """The length of each block."""
    return np.repeat(runs[:, LENGTH], runs[:, COUNT].astype(np.intp))


def for_kvt(runs: Words, kind: int, known: Facts) -> npt.NDArray[Any]:
    """What prepare() takes."""
    if kind != 0 or known.devices:
        devices = runs[:, DEVICE]
        if (devices > np.uint64(0xFFFFFFFF)).any():
            raise kvt.OutOfRange("a device must be below 2**32")
        made = runs.copy().view(_RUN)
        made["kind"] = kind
        made["device"][:, 0] = devices
        runs = made.view(np.uint64)
        runs.flags.writeable = False
    return runs.view(_RUN)[:, 0]
