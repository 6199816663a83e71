# SPDX-License-Identifier: Apache-2.0
"""Agent metadata: NIXL's part of it, parts of it, and whose it is.

kvt's part lies behind NIXL's (_trailer.py). kvt checks every byte when it takes
metadata; here it is enough to find one's way.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from . import _trailer
from ._errors import nixlMismatchError, nixlNotFoundError
from ._serial import INTRO, Fields, field

_ROW = struct.Struct("<3Q")
_ROW_BYTES = 24
_FEW = 64
"""Backends, and lists of registrations: far more than there are."""


class Life(NamedTuple):
    """Whose metadata it is, and of which life of that agent."""

    name: bytes
    incarnation: bytes  # of kvt's part; b"": there is none
    connections: bytes  # b"": it does not say where to connect
    is_part: bool  # of what the agent has

    def is_same(self, other: Life) -> bool:
        if self.name != other.name:
            return False
        if self.incarnation and other.incarnation:
            return self.incarnation == other.incarnation
        return not (self.connections and other.connections) or (
            self.connections == other.connections
        )


class Section(NamedTuple):
    """Registrations of one backend and kind, each as NIXL wrote it."""

    backend: bytes
    kind: int
    descs: list[bytes]


class Blob(NamedTuple):
    """NIXL's part of metadata."""

    name: bytes
    connections: list[tuple[bytes, bytes]]  # backend, address
    sections: list[Section]

    def to_bytes(self) -> bytes:
        parts = [INTRO, field(b"Agent", self.name)]
        parts.append(_number(b"Conns", len(self.connections)))
        for backend, address in self.connections:
            parts += [field(b"t", backend), field(b"c", address)]
        parts.append(field(b"", b"MemSection"))
        parts.append(_number(b"nixlSecElms", len(self.sections)))
        for section in self.sections:
            parts += [
                field(b"bknd", section.backend),
                field(b"nixlDList", b"nixlSDList"),
                field(b"t", struct.pack("<I", section.kind)),
                _number(b"n", len(section.descs)),
                *(field(b"", desc) for desc in section.descs),
            ]
        return b"".join(parts)

    def only(
        self,
        kind: int,
        rows: list[list[int]],
        connect: bool,
        is_own: Callable[[int, tuple[int, ...]], bool],
    ) -> Blob:
        """The same agent with these registrations of it, and kvt's own ones:
        the page that confirms a transfer (docs/nixl.md)."""
        wanted = {_ROW.pack(*row) for row in rows}
        sections = []
        found = set()
        for section in self.sections:
            descs = []
            for desc in section.descs:
                row = desc[:_ROW_BYTES]
                if section.kind == kind and row in wanted:
                    found.add(row)
                    descs.append(desc)
                elif is_own(section.kind, _ROW.unpack(row)):
                    descs.append(desc)
            if descs:
                sections.append(Section(section.backend, section.kind, descs))
        if found != wanted:
            raise nixlNotFoundError(
                f"{len(wanted - found)} of the descriptors are not registered"
            )
        return Blob(self.name, self.connections if connect else [], sections)

    def joined(self, more: Blob) -> Blob:
        """What both say of an agent; of a registration the later one, since
        memory that is registered anew has another key."""
        sections = [
            Section(s.backend, s.kind, [*s.descs]) for s in self.sections
        ]
        for section in more.sections:
            for ours in sections:
                if ours[:2] == section[:2]:
                    merged = {desc[:_ROW_BYTES]: desc for desc in ours.descs}
                    merged.update((d[:_ROW_BYTES], d) for d in section.descs)
                    ours.descs[:] = merged.values()
                    break
            else:
                sections.append(section)
        return Blob(self.name, self.connections or more.connections, sections)


def _number(tag: bytes, value: int) -> bytes:
    return field(tag, struct.pack("<Q", value))


def parse(metadata: bytes) -> Blob | None:
    """NIXL's part; None where there is none, as with the engine local."""
    if not metadata.startswith(INTRO):
        return None
    fields = Fields(metadata)
    fields.word(INTRO)
    name = fields.take(b"Agent")
    connections = []
    for _ in range(_few(fields.number(b"Conns"))):
        connections.append((fields.take(b"t"), fields.take(b"c")))
    if fields.take(b"") != b"MemSection":
        raise nixlMismatchError("the metadata is damaged")
    sections = [
        _section(fields) for _ in range(_few(fields.number(b"nixlSecElms")))
    ]
    if fields.left() > 0 and not _trailer.is_there(metadata):
        raise nixlMismatchError("the metadata is damaged")
    return Blob(name, connections, sections)


def _section(fields: Fields) -> Section:
    backend = fields.take(b"bknd")
    fields.take(b"nixlDList")
    kind = fields.number(b"t", 4)
    count = fields.number(b"n")
    if count > fields.left() // _ROW_BYTES:
        raise nixlMismatchError("the metadata is damaged")
    return Section(backend, kind, [fields.take(b"") for _ in range(count)])


def _few(count: int) -> int:
    if count > _FEW:
        raise nixlMismatchError("the metadata is damaged")
    return count


def life_of(metadata: bytes) -> Life:
    """nixlMismatchError if it is neither kvt's nor NIXL's."""
    ours = _trailer.read(metadata)
    blob = parse(metadata)
    if blob is None:
        if ours is None:
            raise nixlMismatchError("the bytes are no agent's metadata")
        return Life(ours.name, ours.incarnation, ours.place, ours.is_part)
    where = b"".join(
        field(backend, address) for backend, address in blob.connections
    )
    if ours is None:
        return Life(blob.name, b"", where, True)
    return Life(blob.name, ours.incarnation, where, ours.is_part)


def part(
    metadata: bytes, kind: int, rows: list[list[int]], connect: bool
) -> bytes:
    """Metadata with these regions of an agent of kvt's only. Its kinds have
    NIXL's numbers."""
    trailer = _trailer.read(metadata)
    assert trailer is not None
    blob = parse(metadata)
    prefix = b""
    if blob is not None:
        known = {region[:4] for region in trailer.regions}

        def is_own(kind: int, row: tuple[int, ...]) -> bool:
            addr, length, device = row
            return (kind, device, addr, length) not in known and not any(
                region.covers(kind, row) for region in trailer.regions
            )

        prefix = blob.only(kind, rows, connect, is_own).to_bytes()
    return trailer.only(kind, rows, connect).behind(prefix)


def joined(known: bytes, more: bytes) -> bytes:
    """NIXL adds what it learns of an agent to what it knows."""
    before, after = parse(known), parse(more)
    ours, theirs = _trailer.read(known), _trailer.read(more)
    if ours is not None and theirs is None:
        # Joined, they would be a plain agent's: of no known process.
        raise nixlMismatchError(
            "the agent's metadata had kvt's part, and this has none: get it "
            "from the agent again"
        )
    prefix = b""
    if before is not None and after is not None:
        both = before.joined(after)
        prefix = both.to_bytes()
        if both == before and ours is None:
            return known
    elif before is not None or after is not None:
        return more  # of another engine: nothing of the old one is left
    if ours is None or theirs is None:
        return prefix
    made = ours.joined(theirs)
    if made == ours and (before is None or both == before):
        return known
    return made.behind(prefix)
