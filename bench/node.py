# SPDX-License-Identifier: Apache-2.0
"""One side of a candidate, in a process of its own.

    python -m bench.node DESCRIPTOR CLASS VLLM

It does what it is told over the connection DESCRIPTOR and ends with the process
at the other end. CLASS is a name that transports.load() knows; VLLM the folder
with vLLM's modules, "" where they are not needed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.candidates import transports
from bench.jobs import JOBS
from bench.jobs.common import PEER
from bench.pools import Pool


class Side:
    """What the jobs work on."""

    def __init__(self, made: Any) -> None:
        self.made = made  # the transport's class
        self.pool: Any = None
        self.transport: Any = None
        self.started: Any = None  # of fly()
        self.flooded = 0

    def open(
        self, name: str, blocks: int, block_len: int, memory: str, fill: bool
    ) -> None:
        self.pool = Pool(blocks, block_len, memory)
        if fill:
            self.pool.fill(1)
        self.transport = self.made(name, self.pool.view)

    def numbers(self) -> tuple[bytes, int, int, int]:
        """What a peer's add_remote_peer() takes after the peer's name."""
        ours = self.transport
        return (
            ours.get_agent_metadata(),
            ours.base_addr,
            ours.num_blocks,
            ours.block_len,
        )

    def add(self, *numbers: Any, name: str = PEER) -> None:
        self.transport.add_remote_peer(name, *numbers)

    def job(
        self, name: str, args: tuple[Any, ...], more: dict[str, Any]
    ) -> Any:
        return JOBS[name](self, *args, **more)


def main() -> None:
    # Ends with the process that started it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    # vLLM's own default is INFO, and a line a call is not what is timed.
    logging.disable(logging.INFO)
    connection = Connection(int(sys.argv[1]))
    vllm = Path(sys.argv[3]) if sys.argv[3] else None
    side = Side(transports.load(sys.argv[2], vllm))
    while True:
        try:
            name, args, more = connection.recv()
        except EOFError:
            break
        try:
            answer = ("ok", getattr(side, name)(*args, **more))
        except Exception:
            answer = ("raised", traceback.format_exc())
        connection.send(answer)
    # Some rivals cannot be closed while a peer is gone or stopped.
    os._exit(0)


if __name__ == "__main__":
    main()
