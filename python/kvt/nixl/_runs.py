# SPDX-License-Identifier: Apache-2.0
"""Rows of descriptors, and the runs that they are.

A row is (address, length, device). A run is (address, length, device, stride,
count): `count` blocks, `stride` from start to start. Lists of a KV cache are
millions of rows and a handful of runs, so runs are what is kept. Both are
arrays of uint64, since addresses may have the highest bit set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]

ADDR, LENGTH, DEVICE, STRIDE, COUNT = range(5)

NO_RUNS: Words = np.empty((0, 5), dtype=np.uint64)

_FEW = 8
"""Rows that are not worth a search for runs: it costs more than they do."""

_GAPS_MIN = 2
"""Equal distances in a row that make a run of blocks with gaps between them.
One is nothing: any two blocks have a distance, and if it leaves a region the
run cannot be prepared."""


def from_rows(rows: Words) -> Words:
    """The runs of N x 3 rows, in order: block i of the runs is row i."""
    count = len(rows)
    if count < _FEW:
        return _single(rows, slice(None))
    distance = rows[1:, ADDR] - rows[:-1, ADDR]  # wraps for one that goes back
    length = rows[:-1, LENGTH]
    link = (
        (distance >= length)
        & (distance < np.uint64(1 << 62))
        & (length != 0)
        & (length == rows[1:, LENGTH])
        & (rows[:-1, DEVICE] == rows[1:, DEVICE])
    )
    # Groups of links with the same distance; link i joins rows i and i + 1.
    new = np.ones(count - 1, dtype=bool)
    np.not_equal(distance[1:], distance[:-1], out=new[1:])
    new[1:] |= ~(link[1:] & link[:-1])
    first = np.flatnonzero(new)
    size = np.diff(first, append=count - 1)
    dense = distance[first] == length[first]
    strong = link[first] & (dense | (size >= _GAPS_MIN))
    if not strong.any():
        return _single(rows, slice(None))
    # A row between two groups belongs to the second of them.
    ends = first + size + 1
    return _gather(rows, distance, first[strong], ends[strong])


def _gather(
    rows: Words,
    distance: Words,
    starts: npt.NDArray[Any],
    ends: npt.NDArray[Any],
) -> Words:
    """Runs over rows starts[i] to ends[i], and one for each row between."""
    steps = np.zeros(len(rows) + 1, dtype=np.int8)
    steps[starts] = 1
    steps[ends] -= 1
    is_head = np.cumsum(steps[:-1], dtype=np.int8) == 0
    is_head[starts] = True
    heads = np.flatnonzero(is_head)
    counts = np.diff(heads, append=len(rows))
    runs = _single(rows, heads)
    long = np.flatnonzero(counts > 1)
    runs[long, STRIDE] = distance[heads[long]]
    runs[:, COUNT] = counts
    return runs


def _single(rows: Words, which: npt.NDArray[Any] | slice) -> Words:
    chosen = rows[which]
    runs = np.empty((len(chosen), 5), dtype=np.uint64)
    runs[:, :3] = chosen
    runs[:, STRIDE] = runs[:, LENGTH]
    runs[:, COUNT] = 1
    return runs


def to_rows(runs: Words) -> Words:
    """The rows of runs, one a block."""
    counts = runs[:, COUNT].astype(np.intp)
    rows = np.repeat(runs[:, :3], counts, axis=0)
    inside = np.arange(len(rows), dtype=np.uint64)
    inside -= np.repeat(positions(runs)[:-1], counts).astype(np.uint64)
    rows[:, ADDR] += inside * np.repeat(runs[:, STRIDE], counts)
    return rows


def without_gaps(runs: Words) -> Words:
    """The same blocks, in runs that lie end to end."""
    gaps = (runs[:, COUNT] > 1) & (runs[:, STRIDE] != runs[:, LENGTH])
    pieces = []
    at = 0
    for i in np.flatnonzero(gaps).tolist():
        pieces.append(runs[at:i])
        rows = to_rows(runs[i : i + 1])
        pieces.append(_single(rows, slice(None)))
        at = i + 1
    pieces.append(runs[at:])
    return np.concatenate(pieces)


def positions(runs: Words) -> npt.NDArray[np.intp]:
    """The index of each run's first block, and the number of all blocks."""
    return np.concatenate([[0], np.cumsum(runs[:, COUNT].astype(np.intp))])


def uniform_length(runs: Words) -> int | None:
    """The length that all blocks have, or None."""
    if len(runs) == 0 or (runs[:, LENGTH] != runs[0, LENGTH]).any():
        return None
    return int(runs[0, LENGTH])


def lengths_at(runs: Words, indices: npt.NDArray[Any]) -> Words:
    """The lengths of the blocks with these indices."""
    which = np.searchsorted(positions(runs)[1:], indices, side="right")
    return np.asarray(runs[which, LENGTH])


def expanded_lengths(runs: Words) -> Words:
    """The length of each block."""
    return np.repeat(runs[:, LENGTH], runs[:, COUNT].astype(np.intp))


def for_kvt(runs: Words, kind: int) -> Iterator[tuple[int, ...]]:
    """The tuples that prepare() takes. Short ones where they say it all: a
    scattered list has one for each block."""
    columns = [runs[:, i].tolist() for i in (ADDR, LENGTH, COUNT)]
    plain = kind == 0 and not runs[:, DEVICE].any()
    if plain and (runs[:, STRIDE] == runs[:, LENGTH]).all():
        return zip(*columns, strict=True)
    columns += [
        runs[:, STRIDE].tolist(),
        [kind] * len(runs),
        runs[:, DEVICE].tolist(),
    ]
    return zip(*columns, strict=True)
