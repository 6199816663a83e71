# SPDX-License-Identifier: Apache-2.0
"""kvt moves KV-cache blocks between LLM inference processes.

:class:`Transport` is the whole library: registered memory, peers, transfers.
docs/python.md has a tour.
"""

from ._errors import (
    AccessDenied,
    BadMetadata,
    Busy,
    Cancelled,
    Closed,
    EngineError,
    Error,
    Forked,
    InvalidArgument,
    LimitReached,
    Lost,
    Mismatch,
    NotFound,
    NotificationFailed,
    OutOfMemory,
    OutOfRange,
    PeerDisconnected,
    Rejected,
    StaleMemory,
    Superseded,
    SystemCallFailed,
    TimedOut,
    Unsupported,
)
from ._kvt import (
    EngineInfo,
    Histogram,
    PeerInfo,
    Result,
    SharedMemory,
    Stats,
    engines,
    region_of,
)
from ._kvt import version as _version
from ._transport import Transport
from ._types import (
    ANY,
    NAME_MAX,
    SELF,
    TAG_MAX,
    Copy,
    Kind,
    Notification,
    Op,
    PeerState,
    Region,
    Run,
    Scope,
    State,
)

DRAM = Kind.DRAM
VRAM = Kind.VRAM

__version__ = _version()

__all__ = [
    "ANY",
    "DRAM",
    "NAME_MAX",
    "SELF",
    "TAG_MAX",
    "VRAM",
    "AccessDenied",
    "BadMetadata",
    "Busy",
    "Cancelled",
    "Closed",
    "Copy",
    "EngineError",
    "EngineInfo",
    "Error",
    "Forked",
    "Histogram",
    "InvalidArgument",
    "Kind",
    "LimitReached",
    "Lost",
    "Mismatch",
    "NotFound",
    "Notification",
    "NotificationFailed",
    "Op",
    "OutOfMemory",
    "OutOfRange",
    "PeerDisconnected",
    "PeerInfo",
    "PeerState",
    "Region",
    "Rejected",
    "Result",
    "Run",
    "Scope",
    "SharedMemory",
    "StaleMemory",
    "State",
    "Stats",
    "Superseded",
    "SystemCallFailed",
    "TimedOut",
    "Transport",
    "Unsupported",
    "engines",
    "region_of",
]
