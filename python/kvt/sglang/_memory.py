# SPDX-License-Identifier: Apache-2.0
"""This side's registered memory, by key."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import kvt

from ._errors import translate
from ._types import address, device_of, kind_of, whole


class Memory:
    """Which key names which region.

    A region is registered once however many keys share it, and goes with its
    last key. A key of a region of no length is known and has no memory (None).
    The lock is held while kvt registers, which may take its time; looking a
    key up takes no lock.
    """

    def __init__(self, core: kvt.Transport) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._regions: dict[Hashable, kvt.Region | None] = {}

    def find(self, key: Hashable, offset: int, length: int) -> kvt.Region:
        """The region of a key, which must have these bytes."""
        region = self._regions.get(key)
        if region is None:
            raise kvt.NotFound(f"no memory is registered under {key!r}")
        if offset < 0 or offset + length > region.length:
            raise kvt.OutOfRange(
                f"{length} bytes at {offset} of {key!r} are outside its "
                f"{region.length} bytes"
            )
        return region

    def register(
        self, regions: Mapping[Any, tuple[int, int, str | int, int]]
    ) -> None:
        wanted = {
            key: kvt.Region(
                address(base), length, kind_of(kind), device_of(device)
            )
            if whole(length, "a length") != 0
            else None
            for key, (base, length, kind, device) in regions.items()
        }
        with self._lock:
            for key, region in wanted.items():
                if self._regions.get(key, region) != region:
                    raise ValueError(
                        f"key {key!r} names another region: deregister it first"
                    )
            for kind in (kvt.VRAM, kvt.DRAM):
                self._register_kind(
                    kind,
                    {k: r for k, r in wanted.items() if r and r.kind == kind},
                )
            for key, region in wanted.items():
                self._regions.setdefault(key, region)

    def _register_kind(
        self, kind: kvt.Kind, wanted: dict[Hashable, kvt.Region]
    ) -> None:
        known = set(self._regions.values())
        new = [r for r in dict.fromkeys(wanted.values()) if r not in known]
        if new:
            try:
                self._core.register(new)
            except kvt.Error as error:
                raise RuntimeError(
                    f"registering {len(new)} regions of {kind.name} failed: "
                    f"{error}"
                ) from translate(error)
        self._regions.update(wanted)

    def deregister(self, keys: Iterable[Hashable]) -> None:
        keys = list(dict.fromkeys(keys))
        with self._lock:
            for key in keys:
                if key not in self._regions:
                    raise KeyError(f"no region is registered under {key!r}")
            left = {k: r for k, r in self._regions.items() if k not in keys}
            gone = {self._regions[key] for key in keys} - set(left.values())
            gone.discard(None)
            if gone:
                self._core.deregister([r for r in gone if r is not None])
            self._regions = left

    def clear(self) -> None:
        self._regions = {}
