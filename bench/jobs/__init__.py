# SPDX-License-Identifier: Apache-2.0
"""What is timed, inside the process of the side that starts the transfers.

Each job takes the Side (node.py) first. Times are nanoseconds. The lists of
blocks are seeded, so that every candidate moves the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.jobs import idle, moves, tables

JOBS: dict[str, Callable[..., Any]] = {
    job.__name__: job
    for job in (
        idle.cpu,
        idle.flood,
        idle.flooded,
        idle.fly,
        idle.polls,
        moves.digest,
        moves.many,
        moves.mixed_calls,
        moves.queued_calls,
        moves.scrub,
        moves.singles,
        moves.writes,
        tables.adds,
        tables.async_adds,
        tables.prepares,
        tables.run_writes,
        tables.vllm_lists,
    )
}
