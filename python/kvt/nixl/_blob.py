# SPDX-License-Identifier: Apache-2.0
"""Agent metadata: NIXL's part of it, and what kvt's part says of the agent.

kvt's part lies behind NIXL's and has a checksum over all of it, so what is cut
or put together here is NIXL's part alone. kvt checks every byte when it takes
metadata; here it is enough to find one's way.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ._errors import nixlMismatchError, nixlNotFoundError
from ._serial import INTRO, Fields, field

_MAGIC = b"kvt\xa5md\r\n"
_FOOTER = struct.Struct("<IIQ8s")
_FIELD = struct.Struct("<HI")
_AGENT_NAME, _INCARNATION = 1, 3
_ROW_BYTES = 24
_FEW = 64
"""Backends, and lists of registrations: far more than there are."""


class Life(NamedTuple):
    """Whose metadata it is, and of which life of that agent."""

    name: bytes
    incarnation: bytes  # of kvt's part; b"": there is none
    connections: bytes  # of NIXL's part; b"": it does not say where to connect

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

    def only(self, kind: int, rows: list[list[int]], connect: bool) -> Blob:
        """The same agent with these registrations of it."""
        wanted = {struct.pack("<3Q", *row) for row in rows}
        sections = []
        found = set()
        for section in self.sections:
            if section.kind != kind:
                continue
            descs = [d for d in section.descs if d[:_ROW_BYTES] in wanted]
            found |= {desc[:_ROW_BYTES] for desc in descs}
            if descs:
                sections.append(Section(section.backend, kind, descs))
        if found != wanted:
            raise nixlNotFoundError(
                f"{len(wanted - found)} of the descriptors are not registered"
            )
        return Blob(self.name, self.connections if connect else [], sections)

    def joined(self, more: Blob) -> Blob:
        """What both say of an agent."""
        sections = [
            Section(s.backend, s.kind, [*s.descs]) for s in self.sections
        ]
        for section in more.sections:
            for ours in sections:
                if ours[:2] == section[:2]:
                    known = {desc[:_ROW_BYTES] for desc in ours.descs}
                    ours.descs.extend(
                        d for d in section.descs if d[:_ROW_BYTES] not in known
                    )
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
    ours = _trailer(metadata)
    blob = parse(metadata)
    if blob is None:
        if not ours:
            raise nixlMismatchError("the bytes are no agent's metadata")
        return Life(ours[_AGENT_NAME], ours[_INCARNATION], b"")
    where = b"".join(
        field(backend, address) for backend, address in blob.connections
    )
    return Life(blob.name, ours.get(_INCARNATION, b""), where)


def _trailer(metadata: bytes) -> dict[int, bytes]:
    """kvt's fields, if the metadata has them."""
    end = len(metadata) - _FOOTER.size
    if end < 0 or not metadata.endswith(_MAGIC):
        return {}
    at = end - int(_FOOTER.unpack_from(metadata, end)[0])
    found = {}
    while at >= 0 and at + _FIELD.size <= end:
        tag, size = _FIELD.unpack_from(metadata, at)
        at += _FIELD.size
        found[tag] = metadata[at : at + size]
        at += size
    if at != end or _AGENT_NAME not in found or _INCARNATION not in found:
        raise nixlMismatchError("the metadata is damaged")
    return found
