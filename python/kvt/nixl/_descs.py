# SPDX-License-Identifier: Apache-2.0
"""Descriptor lists: NIXL's three classes, kept as runs.

A list costs memory for its runs, not for its blocks. What changes single
descriptors of a list (append() apart) expands it for the moment.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from . import _runs, _serial
from ._enums import nixl_mem_t
from ._errors import nixlInvalidParamError, nixlNotFoundError
from ._runs import Words


def rows_of_array(descs: Any, width: int = 3) -> Words:
    """An N x `width` array as uint64. ValueError for another type or order, as
    in NIXL."""
    shape = f"Nx{width}"
    if descs.ndim != 2 or descs.shape[1] != width:
        raise ValueError(f"descs must be a {shape} numpy array")
    if descs.dtype not in (np.dtype(np.uint64), np.dtype(np.int64)):
        raise ValueError(
            f"descs must be a {shape} numpy array of uint64 or int64"
        )
    if not descs.flags.c_contiguous:
        raise ValueError("descs must be a C-contiguous numpy array")
    rows: Words = descs.view(np.uint64)
    return rows


class _List:
    """What the classes have in common. Not for several threads at once."""

    _word: ClassVar[str]
    width: ClassVar[int] = 4
    """How many elements its tuples have."""

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __init__(
        self, type: nixl_mem_t, descs: Any = 0, *, init_size: int = 0
    ) -> None:
        """`descs` are descriptors, or a number, which is only a hint."""
        self._type = nixl_mem_t(type)
        self._runs = _runs.NO_RUNS
        self._clear_extra()
        if not isinstance(descs, int):
            self._fill(descs)

    def _fill(self, descs: Any) -> None:
        if isinstance(descs, np.ndarray):
            self._runs = _runs.from_rows(rows_of_array(descs))
            self._blank_extra(len(descs))
        else:
            rows = [self._split(desc) for desc in descs]
            self._runs = _runs.from_rows(_runs.rows_of([r[0] for r in rows]))
            self._set_extra([r[1] for r in rows])

    # What a class keeps beside address, length and device.

    def _split(self, desc: Any) -> tuple[tuple[Any, ...], Any]:
        """The three numbers, and what is kept beside them."""
        return desc, None

    def _join(self, row: tuple[int, ...], i: int) -> tuple[Any, ...]:
        return row

    def _clear_extra(self) -> None: ...

    def _blank_extra(self, count: int) -> None: ...

    def _set_extra(self, extra: list[Any]) -> None: ...

    def _splice_extra(self, i: int, end: int, extra: list[Any]) -> None: ...

    # NIXL's calls.

    def __len__(self) -> int:
        return _runs.total(self._runs)

    def __bool__(self) -> bool:
        return True  # as NIXL's, which have no length

    def runs(self) -> Words:
        """What is kept: (address, length, stride, count, device) rows. Not
        NIXL's, and not to be changed."""
        return self._runs

    def rows(self) -> Words:
        """An (address, length, device) row for each descriptor. Not NIXL's."""
        return _runs.to_rows(self._runs)

    def descCount(self) -> int:
        return len(self)

    def isEmpty(self) -> bool:
        return len(self) == 0

    def getType(self) -> nixl_mem_t:
        return self._type

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        i = self._place(i)
        starts = _runs.positions(self._runs)
        which = int(np.searchsorted(starts[1:], i, side="right"))
        addr, length, stride, _, device = self._runs[which].tolist()
        row = (addr + (i - int(starts[which])) * stride, length, device)
        return self._join(row, i)

    def __setitem__(self, i: int, desc: tuple[Any, ...]) -> None:
        i = self._place(i)
        self._replace(i, i + 1, [desc])

    def _place(self, i: int) -> int:
        """NIXL reads past the end of its list; this is an IndexError."""
        if not 0 <= i < len(self):
            raise IndexError(f"the list has {len(self)} descriptors, not {i}")
        return i

    def _replace(self, i: int, end: int, descs: list[Any]) -> None:
        split = [self._split(desc) for desc in descs]
        put = _runs.rows_of([row for row, _ in split])
        rows = _runs.to_rows(self._runs)
        self._runs = _runs.from_rows(
            np.concatenate([rows[:i], put, rows[end:]])
        )
        self._splice_extra(i, end, [extra for _, extra in split])

    def append(self, desc: tuple[Any, ...]) -> None:
        row, extra = self._split(desc)
        put = _runs.from_rows(_runs.rows_of([row]))
        end = len(self)
        # Not joined with the last run: who appends a million, builds a list.
        self._runs = np.concatenate([self._runs, put])
        self._splice_extra(end, end, [extra])

    def addDesc(self, desc: tuple[Any, ...]) -> None:
        self.append(desc)

    def remDesc(self, i: int) -> None:
        i = self._place(i)
        self._replace(i, i + 1, [])

    def clear(self) -> None:
        self._runs = _runs.NO_RUNS
        self._clear_extra()

    def index(self, desc: tuple[Any, ...]) -> int:
        """The position of a descriptor: its address, length and device."""
        row = _runs.rows_of([self._split(desc)[0]])[0]
        found = np.flatnonzero((_runs.to_rows(self._runs) == row).all(axis=1))
        if len(found) == 0:
            raise nixlNotFoundError("the list has no such descriptor")
        return int(found[0])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _List) or type(other) is not type(self):
            return NotImplemented
        if self._type != other._type or len(self) != len(other):
            return False
        mine, theirs = _runs.to_rows(self._runs), _runs.to_rows(other._runs)
        return bool((mine == theirs).all()) and self._same_extra(other)

    def _same_extra(self, other: Any) -> bool:
        return True

    def print(self) -> None:
        print(repr(self))

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {len(self)} in {self._type.name}, "
            f"{len(self._runs)} runs>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self).__name__, self._bytes())

    def _bytes(self) -> bytes:
        """As NIXL serializes such a list."""
        raise NotImplementedError


class nixlXferDList(_List):
    """(address, length, device) descriptors of a transfer."""

    _word = "nixlBDList"
    width = 3

    def _fill(self, descs: Any) -> None:
        if isinstance(descs, np.ndarray):
            rows = rows_of_array(descs)
        else:
            rows = _runs.rows_of(descs)
        self._runs = _runs.from_rows(rows)

    def _bytes(self) -> bytes:
        rows = _runs.to_rows(self._runs)
        return _serial.list_bytes(self._word, self._type, rows)


class nixlRegDList(_List):
    """(address, length, device, meta) descriptors of a registration."""

    _word = "nixlSDList"
    _metas: list[bytes]

    def _split(self, desc: Any) -> tuple[tuple[Any, ...], Any]:
        if len(desc) != 4:
            raise ValueError(
                "Each descriptor tuple must have exactly 4 elements"
            )
        return desc[:3], _as_bytes(desc[3])

    def _join(self, row: tuple[int, ...], i: int) -> tuple[Any, ...]:
        return (*row, self._metas[i])

    def _clear_extra(self) -> None:
        self._metas = []

    def _blank_extra(self, count: int) -> None:
        self._metas = [b""] * count

    def _set_extra(self, extra: list[Any]) -> None:
        self._metas = extra

    def _splice_extra(self, i: int, end: int, extra: list[Any]) -> None:
        self._metas[i:end] = extra

    def _same_extra(self, other: Any) -> bool:
        return bool(self._metas == other._metas)

    def trim(self) -> nixlXferDList:
        """The same without the metas."""
        made = nixlXferDList(self._type)
        made._runs = self._runs
        return made

    def _bytes(self) -> bytes:
        rows = _runs.to_rows(self._runs)
        return _serial.list_bytes(self._word, self._type, rows, self._metas)


class nixlRemoteDList(_List):
    """(address, length, device, agent) descriptors of a memory view."""

    _word = "nixlRDList"
    _agents: list[str]

    def _split(self, desc: Any) -> tuple[tuple[Any, ...], Any]:
        if len(desc) != 4:
            raise ValueError(
                "Each descriptor tuple must have exactly 4 elements"
            )
        return desc[:3], _as_bytes(desc[3]).decode()

    def _join(self, row: tuple[int, ...], i: int) -> tuple[Any, ...]:
        return (*row, self._agents[i])

    def _clear_extra(self) -> None:
        self._agents = []

    def _set_extra(self, extra: list[Any]) -> None:
        self._agents = extra

    def _splice_extra(self, i: int, end: int, extra: list[Any]) -> None:
        self._agents[i:end] = extra

    def _same_extra(self, other: Any) -> bool:
        return bool(self._agents == other._agents)

    def _bytes(self) -> bytes:
        raise nixlInvalidParamError("a remote list cannot be serialized")


_CLASSES: dict[str, type[nixlXferDList] | type[nixlRegDList]] = {
    "nixlXferDList": nixlXferDList,
    "nixlRegDList": nixlRegDList,
}


def _restore(name: str, data: bytes) -> nixlXferDList | nixlRegDList:
    """The list that NIXL's class of this name made `data` of."""
    made = _CLASSES[name](nixl_mem_t.DRAM_SEG)
    kind, rows, metas = _serial.read_list(made._word, data)
    made._type = nixl_mem_t(kind)
    made._runs = _runs.from_rows(rows)
    if metas is not None:
        made._set_extra(metas)
    return made


def dumps(descs: nixlXferDList | nixlRegDList) -> bytes:
    """What pickle makes of the list under NIXL, so that NIXL can load it."""
    return _serial.pickled(type(descs).__name__, descs._bytes())


def loads(data: bytes) -> Any:
    """A list that was serialized here or under NIXL. Nothing else can be in
    it, unlike in other pickles."""
    return _serial.unpickled(data, _restore, _CLASSES)


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
