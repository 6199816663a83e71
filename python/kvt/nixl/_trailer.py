# SPDX-License-Identifier: Apache-2.0
"""kvt's part of metadata, behind NIXL's: fields and a footer.

What they hold, and in which order, is said in the library's metadata.c. The
footer has a checksum over NIXL's part and kvt's, so whoever changes one of them
writes the footer anew, and must have looked at the old one before.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvt import _kvt

from ._errors import nixlMismatchError, nixlNotFoundError

_MAGIC = b"kvt\xa5md\r\n"
_HEAD = struct.Struct("<II")
_TAIL = struct.Struct("<Q8s")
_VERSION = 1
_FIELD = struct.Struct("<HI")
_AGENT_NAME, _ENGINE, _INCARNATION, _LOCAL, _REGIONS = range(1, 6)
_REQUIRED = {_AGENT_NAME, _ENGINE, _INCARNATION, _REGIONS}
_INCARNATION_BYTES = 16
_PART = 256
"""Not the library's, which skips it: these are some of the agent's regions."""

_REGION = struct.Struct("<QQBBHIII")
_HAS_FILE = 1
_FILE_BYTES = 28


class Region(NamedTuple):
    """In the order in which the library wants them."""

    kind: int
    device: int
    addr: int
    length: int
    record: bytes

    def covers(self, kind: int, row: tuple[int, ...]) -> bool:
        addr, length, device = row
        return (
            (self.kind, self.device) == (kind, device)
            and self.addr <= addr
            and addr + length <= self.addr + self.length
        )


class Trailer(NamedTuple):
    """kvt's part of metadata."""

    fields: dict[int, bytes]  # but for the regions
    regions: list[Region]

    @property
    def name(self) -> bytes:
        return self.fields[_AGENT_NAME]

    @property
    def incarnation(self) -> bytes:
        return self.fields[_INCARNATION]

    @property
    def place(self) -> bytes:
        """How to reach the process on its host; b"": not said."""
        return self.fields.get(_LOCAL, b"")

    @property
    def is_part(self) -> bool:
        return _PART in self.fields

    def only(self, kind: int, rows: list[list[int]], connect: bool) -> Trailer:
        """The same agent with these regions of it."""
        wanted = {(kind, row[2], row[0], row[1]) for row in rows}
        regions = [region for region in self.regions if region[:4] in wanted]
        if len({region[:4] for region in regions}) != len(wanted):
            raise nixlNotFoundError(
                f"not all of the {len(wanted)} descriptors are registered"
            )
        fields = {**self.fields, _PART: b""}
        if not connect:
            fields.pop(_LOCAL, None)
        return Trailer(fields, regions)

    def joined(self, more: Trailer) -> Trailer:
        """What both say of an agent; of a region the later one."""
        if self.fields[_ENGINE] != more.fields[_ENGINE]:
            raise nixlMismatchError("the metadata is of another engine")
        known = {region[:4]: region for region in self.regions}
        known.update((region[:4], region) for region in more.regions)
        fields = dict(self.fields)
        if more.place:
            fields.setdefault(_LOCAL, more.place)
        return Trailer(fields, sorted(known.values()))

    def behind(self, prefix: bytes) -> bytes:
        """Metadata: NIXL's part, and this."""
        records = [region.record for region in self.regions]
        count = struct.pack("<I", len(records))
        fields = {**self.fields, _REGIONS: count + b"".join(records)}
        section = b"".join(
            _FIELD.pack(tag, len(value)) + value
            for tag, value in sorted(fields.items())
        )
        data = prefix + section + _HEAD.pack(len(section), _VERSION)
        return data + _TAIL.pack(_kvt._checksum(data), _MAGIC)


def is_there(metadata: bytes) -> bool:
    return metadata.endswith(_MAGIC)


def read(metadata: bytes) -> Trailer | None:
    """kvt's part, if the metadata has one."""
    foot = len(metadata) - _HEAD.size - _TAIL.size
    if foot < 0 or not is_there(metadata):
        return None
    length, version = _HEAD.unpack_from(metadata, foot)
    checksum, _ = _TAIL.unpack_from(metadata, foot + _HEAD.size)
    data = memoryview(metadata)[: foot + _HEAD.size]
    if checksum != _kvt._checksum(data) or length > foot:
        raise nixlMismatchError("the metadata is damaged")
    if version != _VERSION:
        raise nixlMismatchError(f"the metadata has kvt's format {version}")
    fields = _fields(metadata[foot - length : foot])
    if (
        not fields.keys() >= _REQUIRED
        or len(fields[_INCARNATION]) != _INCARNATION_BYTES
    ):
        raise nixlMismatchError("the metadata is damaged")
    regions = fields.pop(_REGIONS)
    return Trailer(fields, _regions(regions))


def _fields(section: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    at = 0
    while at + _FIELD.size <= len(section):
        tag, size = _FIELD.unpack_from(section, at)
        at += _FIELD.size
        if tag in found and _AGENT_NAME <= tag <= _REGIONS:
            raise nixlMismatchError("the metadata is damaged")
        found[tag] = section[at : at + size]
        at += size
    if at != len(section):
        raise nixlMismatchError("the metadata is damaged")
    return found


def _regions(field: bytes) -> list[Region]:
    found = []
    at = 4
    while at + _REGION.size <= len(field):
        addr, length, kind, flags, _, device, _, _ = _REGION.unpack_from(
            field, at
        )
        size = _REGION.size + (_FILE_BYTES if flags & _HAS_FILE else 0)
        found.append(Region(kind, device, addr, length, field[at : at + size]))
        at += size
    if at != len(field) or len(found) != int.from_bytes(field[:4], "little"):
        raise nixlMismatchError("the metadata is damaged")
    return found
