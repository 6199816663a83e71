# SPDX-License-Identifier: Apache-2.0
"""From keys and arrays to the pieces of kvt's write()."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import kvt

from ._memory import Memory
from ._types import PeerBuffers, kind_of, whole


def from_copies(
    own: Memory, theirs: PeerBuffers, copies: Iterable[tuple[Any, ...]]
) -> list[kvt.Copy]:
    """(src key, offset, dst key, offset, length) tuples, but those of no
    length. How long the peer's buffers are is kvt's to check."""
    pieces = []
    for src_key, src_offset, dst_key, dst_offset, length in copies:
        for number in (src_offset, dst_offset, length):
            whole(number, "an offset or length", -(2**63))
        if length == 0:
            continue
        src = own.find(src_key, src_offset, length)
        if dst_key not in theirs.buffers:
            raise kvt.NotFound(
                f"peer {theirs.agent_name!r} has no buffer {dst_key!r}"
            )
        base, kind, device = theirs.buffers[dst_key]
        if base == 0 or dst_offset < 0:
            raise kvt.OutOfRange(
                f"offset {dst_offset} of {dst_key!r} is no memory of peer "
                f"{theirs.agent_name!r}"
            )
        pieces.append(
            kvt.Copy(
                src.addr + src_offset,
                base + dst_offset,
                length,
                src.kind,
                src.device,
                kind,
                device,
            )
        )
    return pieces


def from_arrays(
    src: Any, src_kind: str | int, dst: Any, dst_kind: str | int
) -> Any:
    """Two N x 3 arrays of (addr, len, dev_id) as N x 7 of uint64; pairs with no
    length on either side are left out."""
    import numpy

    sides = []
    for side in (src, dst):
        rows = numpy.asarray(side)
        if rows.size == 0:
            rows = numpy.empty((0, 3), dtype=numpy.uint64)
        if rows.dtype.kind not in "iu" or rows.ndim != 2 or rows.shape[1] != 3:
            raise kvt.InvalidArgument(
                "rows must be integers (addr, len, dev_id), not "
                f"{rows.dtype} of shape {rows.shape}"
            )
        # Addresses use all 64 bits: those of an int64 array may be below 0.
        sides.append(rows.astype(numpy.uint64))
    ours, theirs = sides
    if len(ours) != len(theirs):
        raise kvt.Mismatch(
            f"{len(ours)} rows of the source and {len(theirs)} of the "
            "destination"
        )
    some = (ours[:, 1] > 0) & (theirs[:, 1] > 0)
    ours, theirs = ours[some], theirs[some]
    if (ours[:, 1] != theirs[:, 1]).any():
        at = int((ours[:, 1] != theirs[:, 1]).argmax())
        raise kvt.Mismatch(
            f"a source of {ours[at, 1]} bytes and a destination of "
            f"{theirs[at, 1]}: each pair must be equally long"
        )
    pieces = numpy.empty((len(ours), 7), dtype=numpy.uint64)
    pieces[:, 0] = ours[:, 0]
    pieces[:, 1] = theirs[:, 0]
    pieces[:, 2] = ours[:, 1]
    pieces[:, 3] = kind_of(src_kind)
    pieces[:, 4] = ours[:, 2]
    pieces[:, 5] = kind_of(dst_kind)
    pieces[:, 6] = theirs[:, 2]
    return pieces
