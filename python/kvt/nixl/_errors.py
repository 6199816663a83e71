# SPDX-License-Identifier: Apache-2.0
"""NIXL's exceptions, and how kvt's errors become them.

The text begins with NIXL's name for the error and goes on with kvt's sentence;
kvt's exception is the cause. NIXL's C interface has one number for a lost link
and for any other error of a backend: where kvt has that number only, the text
names both, and the class is that of a lost link, which is what follows from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import kvt


class _NixlError(Exception):
    """Base of all of them, NIXL's `status` and whether memory can be reused.

    Attributes:
        quiescent: for an error of a transfer: whether it is proven that
            nothing touches its memory any more, on either side.
    """

    status = ""
    quiescent = False

    def __init__(self, text: str = "") -> None:
        super().__init__(f"{self.status}: {text}" if text else self.status)


class nixlNotPostedError(_NixlError):
    """The transfer was never started."""

    status = "NIXL_ERR_NOT_POSTED"


class nixlInvalidParamError(_NixlError):
    """An argument is wrong."""

    status = "NIXL_ERR_INVALID_PARAM"


class nixlBackendError(_NixlError):
    """The engine, or the system below it, failed."""

    status = "NIXL_ERR_BACKEND"


class nixlNotFoundError(_NixlError):
    """No such agent, memory, list or backend."""

    status = "NIXL_ERR_NOT_FOUND"


class nixlMismatchError(_NixlError):
    """The metadata is damaged or of something else."""

    status = "NIXL_ERR_MISMATCH"


class nixlNotAllowedError(_NixlError):
    """Not in this state."""

    status = "NIXL_ERR_NOT_ALLOWED"


class nixlRepostActiveError(_NixlError):
    """The transfer is still under way."""

    status = "NIXL_ERR_REPOST_ACTIVE"


class nixlUnknownError(_NixlError):
    """Nobody can tell what became of the transfer."""

    status = "NIXL_ERR_UNKNOWN"


class nixlNotSupportedError(_NixlError):
    """kvt does not offer this."""

    status = "NIXL_ERR_NOT_SUPPORTED"


class nixlRemoteDisconnectError(_NixlError):
    """The link to the peer, or its process, is gone."""

    status = "NIXL_ERR_REMOTE_DISCONNECT"


class nixlCancelledError(_NixlError):
    """The transfer was stopped by this side."""

    status = "NIXL_ERR_CANCELED"


class nixlNoTelemetryError(_NixlError):
    """There are no figures for this transfer."""

    status = "NIXL_ERR_NO_TELEMETRY"


_FOLDED = -2
"""NIXL's C interface for a lost link, and for other errors of a backend."""

_NOT_FOUND = -6

_BY_CLASS: tuple[tuple[type[kvt.Error], type[_NixlError]], ...] = (
    (kvt.PeerDisconnected, nixlRemoteDisconnectError),
    (kvt.Cancelled, nixlCancelledError),
    (kvt.NotFound, nixlNotFoundError),
    (kvt.OutOfRange, nixlInvalidParamError),
    (kvt.StaleMemory, nixlNotFoundError),
    (kvt.InvalidArgument, nixlInvalidParamError),
    (kvt.Mismatch, nixlInvalidParamError),
    (kvt.BadMetadata, nixlMismatchError),
    (kvt.Unsupported, nixlNotSupportedError),
    (kvt.Lost, nixlUnknownError),
    (kvt.Busy, nixlNotAllowedError),
)


def translate(error: kvt.Error) -> _NixlError:
    """The same error as a caller of NIXL knows it."""
    found: type[_NixlError] = nixlBackendError
    for ours, theirs in _BY_CLASS:
        if isinstance(error, ours):
            found = theirs
            break
    text = str(error)
    if error.engine_code == _FOLDED:
        found = nixlRemoteDisconnectError
        text = f"or NIXL_ERR_BACKEND: {text}"
    elif error.engine_code == _NOT_FOUND and found is nixlBackendError:
        found = nixlNotFoundError
    made = found(text)
    made.__cause__ = error
    made.quiescent = error.result is not None and error.result.quiescent
    return made


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """kvt's errors leave as NIXL's."""
    try:
        yield
    except kvt.Error as error:
        raise translate(error) from error


def not_offered(what: str, instead: str) -> nixlNotSupportedError:
    """What kvt cannot do is said, with what to do."""
    return nixlNotSupportedError(f"kvt does not offer {what}: {instead}")
