# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of a process: memory, descriptors, threads, mappings."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KIB = 1024
PAGE = os.sysconf("SC_PAGE_SIZE")
_FAMILIES = ("tcp", "tcp6", "udp", "udp6", "unix", "netlink", "packet")


@dataclass(frozen=True)
class Sample:
    """`seconds` since the first sample of the run."""

    seconds: float
    rss_kib: int
    fds: int
    threads: int
    mappings: int
    kinds: dict[str, int] = field(default_factory=dict)  # of the descriptors

    def json(self) -> dict[str, Any]:
        return asdict(self)


def _sockets(proc: Path) -> dict[str, str]:
    """What each socket's inode is, in the process' network namespace."""
    found = {}
    for family in _FAMILIES:
        with suppress(OSError):
            lines = (proc / "net" / family).read_text().splitlines()
            columns = lines[0].split()
            if family.startswith(("tcp", "udp")):
                place = 9  # two columns of the heading share a field
            else:
                place = columns.index("Inode")
            for line in lines[1:]:
                found[line.split()[place]] = family
    return found


def kind_of(link: str, sockets: dict[str, str]) -> str:
    """What a link of /proc/PID/fd points to, in one or two words."""
    if link.startswith("socket:["):
        family = sockets.get(link[8:-1], "unbound")
        return f"{family} socket"
    if link.startswith("anon_inode:"):
        return link.removeprefix("anon_inode:").strip("[]")
    if link.startswith("/memfd:"):
        name = re.sub(r"\d+", "N", link.removeprefix("/memfd:").split()[0])
        return f"memfd {name}"
    if link.startswith("pipe:["):
        return "pipe"
    if link.startswith(("/dev/", "/sys/", "/proc/")):
        return re.sub(r"\d+", "N", link.removesuffix(" (deleted)"))
    return "file"


def descriptors(pid: int) -> dict[str, int]:
    """How many there are of each kind."""
    proc = Path(f"/proc/{pid}")
    links = []
    for name in os.listdir(proc / "fd"):
        # One that was closed meanwhile is not there.
        with suppress(FileNotFoundError):
            links.append(os.readlink(proc / "fd" / name))
    sockets = {}
    if any(link.startswith("socket:") for link in links):
        sockets = _sockets(proc)
    return dict(sorted(Counter(kind_of(x, sockets) for x in links).items()))


def threads(pid: int) -> dict[str, int]:
    """How many there are of each name, numbers left out."""
    names: Counter[str] = Counter()
    task = Path(f"/proc/{pid}/task")
    for entry in os.listdir(task):
        with suppress(FileNotFoundError, ProcessLookupError):
            name = (task / entry / "comm").read_text().strip()
            names[re.sub(r"\d+$", "N", name)] += 1
    return dict(sorted(names.items()))


def sample(pid: int, began: float = 0.0) -> Sample:
    proc = Path(f"/proc/{pid}")
    kinds = descriptors(pid)
    return Sample(
        seconds=time.monotonic() - began,
        rss_kib=int((proc / "statm").read_text().split()[1]) * PAGE // KIB,
        fds=sum(kinds.values()),
        threads=len(os.listdir(proc / "task")),
        mappings=(proc / "maps").read_text().count("\n"),
        kinds=kinds,
    )
