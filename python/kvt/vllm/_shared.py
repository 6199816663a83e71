# SPDX-License-Identifier: Apache-2.0
"""Finds the shared file that memory is a mapping of.

vLLM's pool is one, in /dev/shm, but what the transport gets of it is a view.
Peers on the same host write into such a file faster than into memory that is
only ours, so the descriptor is worth a look into /proc.
"""

from __future__ import annotations

import fcntl
import os


def backing(addr: int, length: int) -> tuple[int, int] | None:
    """A new descriptor of the file and where in it `addr` is, or None if the
    memory is not one piece of a shared file that is open for writing."""
    try:
        found = _mapped(addr, length)
        if found is None:
            return None
        fd = _open_one(*found[:2])
    except OSError:  # no /proc, no descriptor left
        return None
    return None if fd is None else (fd, found[2])


def _mapped(addr: int, length: int) -> tuple[int, int, int] | None:
    """Device, inode and offset. The kernel may have split the mapping."""
    found = None
    reached = addr
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, mode, offset, device, inode = line.split()[:5]
            begin, end = (int(part, 16) for part in span.split("-"))
            if end <= reached:
                continue
            major, minor = (int(part, 16) for part in device.split(":"))
            piece = (
                os.makedev(major, minor),
                int(inode),
                int(offset, 16) + addr - begin,
            )
            if begin > reached or mode[3] != "s" or found not in (None, piece):
                return None
            found, reached = piece, end
            if reached >= addr + length:
                return found
    return None


def _open_one(device: int, inode: int) -> int | None:
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            status = os.stat(fd)
            access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        except OSError:  # it is closed by now
            continue
        same = (status.st_dev, status.st_ino) == (device, inode)
        if same and access == os.O_RDWR:
            return os.dup(fd)
    return None
