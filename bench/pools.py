# SPDX-License-Identifier: Apache-2.0
"""The memory of one side, and lists of blocks in it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
import zlib
from typing import Any

import numpy as np

MIB = 1 << 20
MEMORIES = ("private", "file", "memfd")
"""Anonymous memory; an unsealed file in /dev/shm, as vLLM's CPU tier has it; a
sealed memfd, as kvt.SharedMemory makes it."""


class Pool:
    """`blocks` blocks of `block_len` bytes.

    `view` is what a transport gets. A pool that is the source has seeded random
    bytes, one that is the target has them once something was written.
    """

    def __init__(
        self, blocks: int, block_len: int, memory: str = "private"
    ) -> None:
        self.blocks = blocks
        self.block_len = block_len
        self.memory = memory
        self._held: Any = None
        whole = self._map(blocks * block_len)
        # Huge pages only where the memory itself decides so: no advice.
        self.view = whole.cast("B", shape=[blocks, block_len])
        self.array = np.frombuffer(whole, np.uint8).reshape(blocks, block_len)

    def _map(self, size: int) -> memoryview:
        if self.memory == "private":
            self._held = mmap.mmap(-1, size, mmap.MAP_PRIVATE)
        elif self.memory == "file":
            number, path = tempfile.mkstemp(prefix="kvt-bench-", dir="/dev/shm")
            # Peers open it through /proc, so that the name is not needed.
            os.unlink(path)
            os.ftruncate(number, size)
            self._held = mmap.mmap(number, size, mmap.MAP_SHARED)
            os.close(number)
        elif self.memory == "memfd":
            self._held = sealed(size)
        else:
            raise ValueError(f"no such memory: {self.memory}")
        return memoryview(self._held)

    def fill(self, seed: int) -> None:
        """Seeded random bytes; every page is touched."""
        flat = self.array.reshape(-1)
        words = flat[: flat.size // 8 * 8].view(np.uint64)
        rng = np.random.default_rng(seed)
        step = 4 * MIB
        for at in range(0, words.size, step):
            part = words[at : at + step]
            part[:] = rng.integers(0, 1 << 64, part.size, np.uint64)

    def scrub(self) -> None:
        self.array.fill(0xA5)

    def digest(self, blocks: np.ndarray) -> int:
        """Of these blocks' bytes, in this order."""
        found = 0
        step = max(1, 16 * MIB // self.block_len)
        for at in range(0, len(blocks), step):
            found = zlib.crc32(self.array[blocks[at : at + step]], found)
        return found


def sealed(size: int) -> mmap.mmap:
    """A memfd that can neither shrink nor grow, and has no hole."""
    number = os.memfd_create("kvt-bench", os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(number, 0, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(number, fcntl.F_ADD_SEALS, seals)
        return mmap.mmap(number, size, mmap.MAP_SHARED)
    finally:
        with contextlib.suppress(OSError):
            os.close(number)


def pick(
    pool_blocks: int, count: int, run: int, seed: int, sparse: bool = False
) -> np.ndarray:
    """`count` blocks, in runs of `run` blocks that lie side by side and are
    scattered over the whole pool; run == count is one stretch. Out of more
    blocks than can be permuted a `sparse` choice may take some twice."""
    run = min(run, count)
    rng = np.random.default_rng(seed)
    needed = -(-count // run)
    if needed > pool_blocks // run and not sparse:
        raise ValueError(f"{count} blocks out of {pool_blocks}")
    if sparse:
        starts = rng.integers(0, pool_blocks // run, needed)
    else:
        starts = rng.permutation(pool_blocks // run)[:needed]
    blocks = starts[:, None] * run + np.arange(run)
    return blocks.reshape(-1)[:count].astype(np.int32)


def picks(
    pool_blocks: int, count: int, run: int, seed: int, sparse: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """One list for each side."""
    return (
        pick(pool_blocks, count, run, 2 * seed, sparse),
        pick(pool_blocks, count, run, 2 * seed + 1, sparse),
    )
