# SPDX-License-Identifier: Apache-2.0

"""Waiting for what must come, without saying when."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

LIMIT = 60.0
"""Seconds after which a wait has failed."""


def until(what: str, ready: Callable[[], Any]) -> Any:
    """Asks again and again until the answer is true, and returns it."""
    limit = monotonic() + LIMIT
    while monotonic() < limit:
        answer = ready()
        if answer:
            return answer
        sleep(0.001)
    raise AssertionError(f"not in {LIMIT} s: {what}")
