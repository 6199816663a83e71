# SPDX-License-Identifier: Apache-2.0
"""One exception class for each error code of the C library.

A class also derives from the built-in exception that a Python caller would
expect, so that ``except ValueError`` or ``except TimeoutError`` works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._kvt import Result


class Error(Exception):
    """Base of every error of kvt.

    Attributes:
        code: the library's code, below 0 (a constant of the class).
        name: the code's name in C, for instance ``"KVT_EBUSY"``.
        text: one sentence that says what was wrong and what to do.
        os_errno: errno of the failed system call, or 0.
        scope: how much is damaged: a :class:`kvt.Scope`.
        engine_code: the engine's own number for the error, or 0.
        result: the :class:`kvt.Result` of the transfer that failed, or None
            when a call failed.
    """

    code: int = 0
    name: str = "KVT_E?"
    text: str = ""
    os_errno: int = 0
    scope: int = 0
    engine_code: int = 0
    result: Result | None = None


class InvalidArgument(Error, ValueError):
    """An argument is malformed."""

    code = -1
    name = "KVT_EINVAL"


class OutOfRange(Error, ValueError):
    """An index, address or size is out of range."""

    code = -2
    name = "KVT_ERANGE"


class NotFound(Error, LookupError):
    """No such name or id, or it is gone."""

    code = -3
    name = "KVT_ENOENT"


class Busy(Error):
    """Still in use."""

    code = -4
    name = "KVT_EBUSY"


class LimitReached(Error):
    """A limit is reached; drain or wait, then ask again."""

    code = -5
    name = "KVT_EAGAIN"


class OutOfMemory(Error, MemoryError):
    """The library found no memory."""

    code = -6
    name = "KVT_ENOMEM"


class TimedOut(Error, TimeoutError):
    """The time given is over."""

    code = -7
    name = "KVT_ETIMEDOUT"


class Closed(Error):
    """The transport is closed."""

    code = -8
    name = "KVT_ECLOSED"


class Forked(Error):
    """The transport belongs to the parent process."""

    code = -9
    name = "KVT_EFORKED"


class Unsupported(Error):
    """The engine cannot do this."""

    code = -10
    name = "KVT_EUNSUPPORTED"


class BadMetadata(Error, ValueError):
    """The metadata is damaged or not kvt's."""

    code = -11
    name = "KVT_EMETADATA"


class Mismatch(Error, ValueError):
    """The two sides do not fit each other."""

    code = -12
    name = "KVT_EMISMATCH"


class PeerDisconnected(Error, ConnectionError):
    """The peer is not connected."""

    code = -13
    name = "KVT_EDISCONNECTED"


class Superseded(Error):
    """A newer call for the same peer replaced this one."""

    code = -14
    name = "KVT_ESUPERSEDED"


class Cancelled(Error):
    """Cancelled by the caller."""

    code = -15
    name = "KVT_ECANCELED"


class EngineError(Error):
    """The engine reported an error."""

    code = -16
    name = "KVT_EENGINE"


class Rejected(Error):
    """The engine refused to start the request."""

    code = -17
    name = "KVT_EREJECTED"


class Lost(Error):
    """The engine cannot say whether the request is over."""

    code = -18
    name = "KVT_ELOST"


class NotificationFailed(Error):
    """The data is done, its notification failed."""

    code = -19
    name = "KVT_ENOTIFY"


class AccessDenied(Error, PermissionError):
    """The kernel forbids access to the peer."""

    code = -20
    name = "KVT_EPERM"


class SystemCallFailed(Error, OSError):
    """A system call failed; ``os_errno`` says how."""

    code = -21
    name = "KVT_ESYSTEM"


class StaleMemory(Error):
    """The peer took this memory back; import it again."""

    code = -22
    name = "KVT_ESTALE"


CLASSES: tuple[type[Error], ...] = (
    InvalidArgument,
    OutOfRange,
    NotFound,
    Busy,
    LimitReached,
    OutOfMemory,
    TimedOut,
    Closed,
    Forked,
    Unsupported,
    BadMetadata,
    Mismatch,
    PeerDisconnected,
    Superseded,
    Cancelled,
    EngineError,
    Rejected,
    Lost,
    NotificationFailed,
    AccessDenied,
    SystemCallFailed,
    StaleMemory,
)
"""The class of code -1, -2, and so on, in this order."""
