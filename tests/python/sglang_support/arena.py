# SPDX-License-Identifier: Apache-2.0
"""Memory with guard zones, and an image of what each byte must be."""

from __future__ import annotations

import mmap
import random

import kvt

GUARD = 4096


class Arena:
    """Seeded random bytes; offsets count from behind the first guard zone."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.map = mmap.mmap(-1, GUARD + size + GUARD)
        self.map[:] = random.Random(seed).randbytes(len(self.map))
        self.image = bytearray(self.map)
        self.addr = kvt.region_of(self.map).addr + GUARD

    def read(self, offset: int, length: int) -> bytes:
        return self.map[GUARD + offset : GUARD + offset + length]

    def expect(self, offset: int, data: bytes) -> None:
        """A peer must have written this by the time that it says so."""
        self.image[GUARD + offset : GUARD + offset + len(data)] = data

    def wrong(self) -> int:
        """How many bytes, guard zones too, are not as they must be."""
        now = self.map[:]
        if now == self.image:
            return 0
        return sum(a != b for a, b in zip(now, self.image, strict=True))
