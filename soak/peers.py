# SPDX-License-Identifier: Apache-2.0
"""The targets of one writer: their processes, killed and started anew."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIMIT = 600.0
"""Seconds after which a target that does not start has failed."""


@dataclass(frozen=True)
class Born:
    """A target that has started."""

    pid: int
    addr: int
    metadata: bytes


@dataclass
class Slot:
    """A place for a target. The writer's own thread changes it."""

    index: int
    born: Born
    link: Any = None  # what the mover knows it by
    replaced: bool = False  # it was killed, and the next is not there yet
    deaths: int = 0


class Peers:
    """Starts targets, one at a time."""

    def __init__(
        self, blocks: int, block_len: int, options: dict[str, Any]
    ) -> None:
        here, there = multiprocessing.Pipe()
        self._connection = here
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "soak.zygote", str(there.fileno()),
             str(blocks), str(block_len), json.dumps(options)],
            pass_fds=[there.fileno()],
        )  # fmt: skip
        there.close()
        self._wanted: queue.SimpleQueue[Callable[[Born], None] | None]
        self._wanted = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._start_them, daemon=True)
        self._thread.start()

    def start(self) -> Born:
        """Only while nothing is being replaced."""
        self._connection.send("one")
        if not self._connection.poll(LIMIT):
            raise RuntimeError(f"a target does not start in {LIMIT:.0f} s")
        return Born(*self._connection.recv())

    def replace(self, slot: Slot, ready: Callable[[Born], None]) -> None:
        """Kills a target; `ready` is called with the next one, in a thread
        that is always the same."""
        slot.replaced = True
        slot.deaths += 1
        os.kill(slot.born.pid, signal.SIGKILL)
        self._wanted.put(ready)

    def _start_them(self) -> None:
        try:
            while (ready := self._wanted.get()) is not None:
                ready(self.start())
        except BaseException:
            # Without this thread the writer would wait for ever.
            traceback.print_exc()
            os._exit(1)

    def end(self) -> None:
        """They die with the zygote. Only while nothing is being replaced."""
        self._wanted.put(None)
        self._thread.join()
        self._zygote.kill()
        self._zygote.wait()
        self._connection.close()
