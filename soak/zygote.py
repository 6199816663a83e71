# SPDX-License-Identifier: Apache-2.0
"""Forks the targets: python -m soak.zygote DESCRIPTOR BLOCKS BLOCK_LEN OPTIONS

Each line on the connection DESCRIPTOR asks for one more target, which is a
process that opens a transport with OPTIONS (JSON), registers memory, and reads
notifications until it is killed. The memory was mapped before the fork, so that
each target has it at the same address: a peer that is reloaded with the
metadata of a new process keeps its layouts.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import kvt

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def target(
    connection: Connection, memory: mmap.mmap, options: dict[str, Any]
) -> None:
    """Does not return."""
    die_with_parent()
    transport = kvt.Transport(**options)
    transport.register(memory)
    addr = kvt.region_of(memory).addr
    connection.send((os.getpid(), addr, transport.metadata()))
    connection.close()
    poller = select.poll()
    poller.register(transport.fileno(), select.POLLIN)
    while True:
        poller.poll()
        transport.notifications()


def main() -> None:
    die_with_parent()
    # The kernel reaps those that are killed.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    memory = mmap.mmap(-1, int(sys.argv[2]) * int(sys.argv[3]))
    options = json.loads(sys.argv[4])
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        if os.fork() == 0:
            try:
                target(connection, memory, options)
            finally:
                os._exit(1)


if __name__ == "__main__":
    main()
