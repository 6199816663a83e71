# SPDX-License-Identifier: Apache-2.0
"""The module's logger, and NIXL's name for getting one."""

from __future__ import annotations

import logging

logger = logging.getLogger("kvt.nixl")


def get_logger(name: str) -> logging.Logger:
    """A logger below "nixl". No handler is installed and no level is set: that
    is the program's."""
    return logging.getLogger(f"nixl.{name.lstrip('_')}")
