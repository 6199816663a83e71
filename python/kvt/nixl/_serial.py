# SPDX-License-Identifier: Apache-2.0
"""Descriptor lists as bytes, the way NIXL writes them.

The bytes of a list are fields like those of NIXL's metadata: a tag, a length
of 8 bytes, so many bytes, and "|". NIXL's callers exchange lists as pickles of
its classes, so such a pickle is written and read here, as a fixed frame around
those bytes. Nothing in a pickle is run.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Container
from typing import Any

import numpy as np

from ._errors import nixlMismatchError
from ._runs import Words

INTRO = b"nixlSerDes|"
_ROW_BYTES = 24


class Fields:
    """Reads NIXL's fields one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.at = 0

    def left(self) -> int:
        return len(self._data) - self.at

    def word(self, text: bytes) -> None:
        end = self.at + len(text)
        if bytes(self._data[self.at : end]) != text:
            raise nixlMismatchError("the bytes are not NIXL's, or damaged")
        self.at = end

    def take(self, tag: bytes) -> bytes:
        self.word(tag)
        head = self._data[self.at : self.at + 8]
        length = int.from_bytes(head, "little")
        begin = self.at + 8
        end = begin + length
        if len(head) != 8 or bytes(self._data[end : end + 1]) != b"|":
            raise nixlMismatchError("the bytes are cut short or damaged")
        self.at = end + 1
        return bytes(self._data[begin:end])

    def number(self, tag: bytes, size: int = 8) -> int:
        value = self.take(tag)
        if len(value) != size:
            raise nixlMismatchError("a number in the bytes is damaged")
        return int.from_bytes(value, "little")


def field(tag: bytes, value: bytes) -> bytes:
    return tag + struct.pack("<Q", len(value)) + value + b"|"


def list_bytes(
    word: str, kind: int, rows: Words, metas: list[bytes] | None = None
) -> bytes:
    """A list with its rows; `metas` go behind each row where there are any."""
    parts = [
        INTRO,
        field(b"nixlDList", word.encode()),
        field(b"t", struct.pack("<I", kind)),
        field(b"n", struct.pack("<Q", len(rows))),
    ]
    if metas is None:
        parts.append(field(b"", rows.astype("<u8", order="C").tobytes()))
    else:
        for row, meta in zip(rows.tolist(), metas, strict=True):
            parts.append(field(b"", struct.pack("<3Q", *row) + meta))
    return b"".join(parts)


def read_list(word: str, data: bytes) -> tuple[int, Words, list[bytes] | None]:
    fields = Fields(data)
    fields.word(INTRO)
    if fields.take(b"nixlDList") != word.encode():
        raise nixlMismatchError("the bytes are of another kind of list")
    kind = fields.number(b"t", 4)
    count = fields.number(b"n")
    if word == "nixlBDList":
        flat = fields.take(b"")
        if len(flat) != count * _ROW_BYTES:
            raise nixlMismatchError("the list's length is damaged")
        return kind, _rows(flat), None
    if count > len(data) // _ROW_BYTES:
        raise nixlMismatchError("the list's length is damaged")
    each = [fields.take(b"") for _ in range(count)]
    if any(len(desc) < _ROW_BYTES for desc in each):
        raise nixlMismatchError("a descriptor is damaged")
    rows = _rows(b"".join(desc[:_ROW_BYTES] for desc in each))
    return kind, rows, [desc[_ROW_BYTES:] for desc in each]


def _rows(flat: bytes) -> Words:
    words: Words = np.frombuffer(flat, dtype="<u8").astype(np.uint64)
    return words.reshape(-1, 3)


_MODULE = b"nixl._bindings"
"""Where every wheel of NIXL has its classes; NIXL's own pickles name one wheel,
and cannot be loaded where another is installed."""


def pickled(name: str, state: bytes) -> bytes:
    """A pickle of protocol 4: an object of NIXL's class `name` with a state."""
    body = b"".join(
        [
            b"\x8c" + bytes([len(_MODULE)]) + _MODULE + b"\x94",
            b"\x8c" + bytes([len(name)]) + name.encode() + b"\x94",
            b"\x93\x94)\x81\x94",
            b"B" + struct.pack("<I", len(state)) + state
            if len(state) < 1 << 32
            else b"\x8e" + struct.pack("<Q", len(state)) + state,
            b"\x94b.",
        ]
    )
    return b"\x80\x04\x95" + struct.pack("<Q", len(body)) + body


class _Loader(pickle.Unpickler):
    """Finds our own stand-ins for NIXL's classes, and nothing else."""

    def __init__(
        self,
        data: bytes,
        restore: Callable[[str, bytes], Any],
        names: Container[str],
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._restore = restore
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        if module == "kvt.nixl._descs" and name == "_restore":
            return self._restore
        if name in self._names and module.endswith("._bindings"):
            return type("_Stub", (_Stub,), {"name": name})
        raise nixlMismatchError(f"{module}.{name} is no descriptor list")


class _Stub:
    """Takes the state that the pickle gives the object."""

    name = ""
    state = b""

    def __setstate__(self, state: bytes) -> None:
        self.state = state


def unpickled(
    data: bytes, restore: Callable[[str, bytes], Any], names: Container[str]
) -> Any:
    try:
        found = _Loader(data, restore, names).load()
        if isinstance(found, _Stub):
            found = restore(found.name, found.state)
    except (nixlMismatchError, MemoryError):
        raise
    except Exception as error:  # pickle raises many for damaged bytes
        raise nixlMismatchError(f"no descriptor list: {error}") from error
    if type(found).__name__ not in names:
        raise nixlMismatchError("the bytes hold something else")
    return found
