# SPDX-License-Identifier: Apache-2.0
"""What the jobs share: starting transfers, and waiting for their end."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any

from bench.pools import picks

PEER = "peer"
LISTS = 4
"""Different lists of blocks that repetitions go through."""


class TransferFailed(Exception):
    pass


def waiter(transport: Any, how: str) -> Callable[[int], None]:
    """Waits for one transfer: "spin" polls, "sleep" polls with short sleeps
    between, "fd" sleeps on the descriptor that kvt has for it."""

    def ended(number: int) -> bool:
        done, failed = transport.poll(PEER)
        if failed:
            raise TransferFailed(f"{failed} of peer {PEER}")
        return number in done

    def spin(number: int) -> None:
        while not ended(number):
            pass

    def sleep(number: int) -> None:
        while not ended(number):
            time.sleep(20e-6)

    if how != "fd":
        return {"spin": spin, "sleep": sleep}[how]
    ready = select.poll()
    ready.register(transport.transport.fileno(), select.POLLIN)

    def doze(number: int) -> None:
        while not ended(number):
            ready.poll(1000)

    return doze


def taken(number: int | None) -> int:
    if number is None:
        raise TransferFailed("write_blocks gave None")
    return number


class Started:
    """Transfers that are under way, by our own count: the classes have no call
    that tells."""

    def __init__(self, side: Any) -> None:
        self.transport = side.transport
        self.numbers: set[int] = set()

    def start(self, ours: Any, theirs: Any) -> int:
        number = taken(self.transport.write_blocks(PEER, ours, theirs))
        self.numbers.add(number)
        return number

    def collect(self) -> int:
        """How many have ended since."""
        done, failed = self.transport.poll(PEER)
        if failed:
            raise TransferFailed(f"{failed} of peer {PEER}")
        self.numbers.difference_update(done)
        return len(done)

    def wait_for_all(self) -> None:
        while self.numbers:
            self.collect()
            time.sleep(100e-6)


def lists(side: Any, count: int, run: int) -> list[Any]:
    return [picks(side.pool.blocks, count, run, n) for n in range(LISTS)]
