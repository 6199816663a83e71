# SPDX-License-Identifier: Apache-2.0
"""A pool of blocks with guard zones, and an image of what each byte must be."""

from __future__ import annotations

import mmap
import os
import random

GUARD = 4096


class Pool:
    """Seeded random bytes; `view` is what the transport gets. `fd` is the file
    that they are in, which gets its size here; -1 for none."""

    def __init__(
        self, num_blocks: int, block_len: int, seed: int, fd: int = -1
    ) -> None:
        self.num_blocks = num_blocks
        self.block_len = block_len
        size = num_blocks * block_len
        if fd >= 0:
            os.ftruncate(fd, GUARD + size + GUARD)
        self.map = mmap.mmap(fd, GUARD + size + GUARD)
        self.map[:] = random.Random(seed).randbytes(len(self.map))
        self.image = bytearray(self.map)
        inside = memoryview(self.map)[GUARD : GUARD + size]
        self.view = inside.cast("B", shape=[num_blocks, block_len])

    def _span(self, block: int) -> slice:
        at = GUARD + block * self.block_len
        return slice(at, at + self.block_len)

    def block(self, block: int) -> bytes:
        return self.map[self._span(block)]

    def blocks(self, blocks: list[int]) -> list[bytes]:
        return [self.block(block) for block in blocks]

    def fill(self, block: int, data: bytes) -> None:
        """Our own program writes the block."""
        self.map[self._span(block)] = data
        self.expect(block, data)

    def expect(self, block: int, data: bytes) -> None:
        """A peer may, or must, have written the block."""
        self.image[self._span(block)] = data

    def wrong(self) -> list[int]:
        """The blocks that are not as they must be; -1 for the guard zones."""
        if self.map[:] == self.image:
            return []
        blocks = [
            block
            for block in range(self.num_blocks)
            if self.block(block) != self.image[self._span(block)]
        ]
        return blocks or [-1]
