# SPDX-License-Identifier: Apache-2.0
"""Proves that kvt.vllm.NixlTransport finds the shared file that its view is a
mapping of, and only such a file.

Memory of each kind is looked up in this process; then pools in files exchange
blocks over every engine, with guard zones and images as in
test_vllm_transport.py, and peers say how they reach them.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvt import region_of
from kvt.vllm import NixlTransport
from kvt.vllm._shared import backing
from vllm_support.sides import BLOCK_LEN, ENGINES, Sides, choose

PAGE = mmap.PAGESIZE


@pytest.fixture
def file() -> Iterator[int]:
    """Eight pages in memory."""
    fd = os.memfd_create("pool")
    os.ftruncate(fd, 8 * PAGE)
    yield fd
    os.close(fd)


def descriptors() -> int:
    """How many there are of files that are called pool."""
    links = []
    for place in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the folder itself
            links.append(os.readlink(place))
    return sum("pool" in link for link in links)


def looked_up(memory: object) -> tuple[int, int] | None:
    """Inode and offset of what is found."""
    region = region_of(memory)  # type: ignore[arg-type]
    found = backing(region.addr, region.length)
    if found is None:
        return None
    fd, offset = found
    assert not os.get_inheritable(fd)
    inode = os.fstat(fd).st_ino
    os.close(fd)
    return inode, offset


def test_a_shared_file_is_found_with_the_offset(file: int) -> None:
    inode = os.fstat(file).st_ino
    before = descriptors()
    memory = mmap.mmap(file, 4 * PAGE, offset=2 * PAGE)
    assert looked_up(memory) == (inode, 2 * PAGE)
    view = memoryview(memory)
    assert looked_up(view[PAGE + 64 : 3 * PAGE]) == (inode, 3 * PAGE + 64)
    view.release()
    memory.close()
    assert descriptors() == before


def test_a_file_without_a_name_is_found() -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as made:
        made.truncate(4 * PAGE)
        memory = mmap.mmap(made.fileno(), 4 * PAGE)
        inode = os.fstat(made.fileno()).st_ino
    # The mapping's own descriptor is left.
    assert looked_up(memory) == (inode, 0)


def test_a_mapping_in_pieces_is_one(file: int) -> None:
    memory = mmap.mmap(file, 8 * PAGE)
    memory.madvise(mmap.MADV_DONTFORK, 2 * PAGE, PAGE)
    memory.madvise(mmap.MADV_DONTFORK, 5 * PAGE, 2 * PAGE)
    assert looked_up(memory) == (os.fstat(file).st_ino, 0)


def test_other_memory_has_no_file(file: int) -> None:
    assert looked_up(bytearray(4 * PAGE)) is None
    assert looked_up(mmap.mmap(-1, 4 * PAGE)) is None
    private = mmap.mmap(file, 4 * PAGE, flags=mmap.MAP_PRIVATE)
    assert looked_up(private) is None


def test_memory_that_is_only_partly_the_file_has_none(file: int) -> None:
    memory = mmap.mmap(file, 8 * PAGE)
    region = region_of(memory)
    assert backing(region.addr, 1 << 46) is None
    assert backing(PAGE, PAGE) is None


def test_a_descriptor_that_only_reads_is_none(tmp_path: Path) -> None:
    place = tmp_path / "pool"
    place.write_bytes(bytes(4 * PAGE))
    with place.open("rb") as made:
        memory = mmap.mmap(made.fileno(), 0, prot=mmap.PROT_READ)
    begin = np.frombuffer(memory, np.uint8).ctypes.data
    assert backing(begin, 4 * PAGE) is None


@pytest.mark.parametrize("closed", [True, False])
def test_a_transport_leaves_no_descriptor(
    closed: bool, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose("local", monkeypatch)
    memory = mmap.mmap(file, 4 * PAGE)
    gc.collect()
    before = descriptors()
    transport = NixlTransport("a", memoryview(memory).cast("B", (4, PAGE)))
    assert transport._file is not None
    if closed:
        transport.close()
        del transport
    else:
        with pytest.warns(ResourceWarning, match="unclosed"):
            del transport
            gc.collect()
    gc.collect()
    assert descriptors() == before


@pytest.mark.parametrize("engine", list(ENGINES))
def test_pools_in_files_exchange_blocks(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(engine, monkeypatch)
    with Sides() as sides:
        fds = [os.memfd_create("pool") for _ in range(2)]
        a, b = (sides.side(fd=fd) for fd in fds)
        for fd in fds:
            os.close(fd)
        a.add(b)
        assert BLOCK_LEN == PAGE
        number = a.write(b, [0, 3, 4, 5, 63], [5, 7, 8, 1, 0])
        assert a.results(1, "b") == ([number], [])
        assert a.pool.wrong() == b.pool.wrong() == []
        info = a.inner().peer_info(a.inner().find_peer("b"))
        if engine != "nixl_only":
            assert info.path == "local"
            assert "1 of 1 regions through shared files" in info.text
    if not engine.startswith("nixl"):
        for side in (a, b):
            side.pool.view.release()
            side.pool.map.close()
        assert descriptors() == 0
