# SPDX-License-Identifier: Apache-2.0
"""Errors under the names of NIXL's Python bindings.

Each is a subclass of the class of that name in the `nixl` package, where that
can be imported, so that an ``except`` clause written for NIXL catches it; else
of RuntimeError, which is what SGLang falls back to.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

import kvt


def _base(name: str) -> type[Exception]:
    for package in ("nixl", "nixl_cu13", "nixl_cu12"):
        try:
            bindings = importlib.import_module(f"{package}._bindings")
        except Exception:  # whatever a broken installation raises
            continue
        found = getattr(bindings, name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            return found
    return RuntimeError


class nixlBackendError(_base("nixlBackendError")):  # type: ignore[misc]
    """NIXL_ERR_BACKEND."""


class nixlRemoteDisconnectError(
    _base("nixlRemoteDisconnectError"),  # type: ignore[misc]
):
    """NIXL_ERR_REMOTE_DISCONNECT."""


class nixlCancelledError(_base("nixlCancelledError")):  # type: ignore[misc]
    """NIXL_ERR_CANCELED."""


class nixlNotFoundError(_base("nixlNotFoundError")):  # type: ignore[misc]
    """NIXL_ERR_NOT_FOUND."""


class nixlInvalidParamError(
    _base("nixlInvalidParamError"),  # type: ignore[misc]
    ValueError,
):
    """NIXL_ERR_INVALID_PARAM."""


class nixlMismatchError(
    _base("nixlMismatchError"),  # type: ignore[misc]
    ValueError,
):
    """NIXL_ERR_MISMATCH."""


class nixlNotSupportedError(
    _base("nixlNotSupportedError"),  # type: ignore[misc]
):
    """NIXL_ERR_NOT_SUPPORTED."""


class nixlUnknownError(_base("nixlUnknownError")):  # type: ignore[misc]
    """NIXL_ERR_UNKNOWN: the request's state cannot be told."""


class _NixlPostError(RuntimeError):
    """A post was refused: some of the write may be under way.

    Its text is ``<what>: <cause>``, or ``<what>`` where there is no cause.
    """

    def __init__(self, what: str, cause: BaseException | None = None) -> None:
        super().__init__(what if cause is None else f"{what}: {cause}")
        self.__cause__ = cause


# The numbers of NIXL's C interface that say more than kvt's class does. It has
# one number for a lost link and for any other error of a backend; kvt treats
# both as a lost link.
_FOLDED = -2
_NOT_FOUND = -6

_BY_CLASS: tuple[tuple[type[kvt.Error], type[Exception], str], ...] = (
    (
        kvt.PeerDisconnected,
        nixlRemoteDisconnectError,
        "NIXL_ERR_REMOTE_DISCONNECT",
    ),
    (kvt.Cancelled, nixlCancelledError, "NIXL_ERR_CANCELED"),
    (kvt.NotFound, nixlNotFoundError, "NIXL_ERR_NOT_FOUND"),
    (kvt.OutOfRange, nixlInvalidParamError, "NIXL_ERR_INVALID_PARAM"),
    (kvt.InvalidArgument, nixlInvalidParamError, "NIXL_ERR_INVALID_PARAM"),
    (kvt.Mismatch, nixlInvalidParamError, "NIXL_ERR_INVALID_PARAM"),
    (kvt.BadMetadata, nixlMismatchError, "NIXL_ERR_MISMATCH"),
    (kvt.Unsupported, nixlNotSupportedError, "NIXL_ERR_NOT_SUPPORTED"),
    (kvt.Lost, nixlUnknownError, "NIXL_ERR_UNKNOWN"),
)


def translate(error: Exception) -> Exception:
    """The same error as NIXL's Python caller knows it; kvt's is the cause."""
    if not isinstance(error, kvt.Error):
        return error
    found: type[Exception] = nixlBackendError
    name = "NIXL_ERR_BACKEND"
    for ours, theirs, status in _BY_CLASS:
        if isinstance(error, ours):
            found, name = theirs, status
            break
    if error.engine_code == _FOLDED:
        found = nixlRemoteDisconnectError
        name = "NIXL_ERR_REMOTE_DISCONNECT or NIXL_ERR_BACKEND"
    elif error.engine_code == _NOT_FOUND and found is nixlBackendError:
        found, name = nixlNotFoundError, "NIXL_ERR_NOT_FOUND"
    made = found(f"{name}: {error}")
    made.__cause__ = error
    return made


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """kvt's errors leave as NIXL's."""
    try:
        yield
    except kvt.Error as error:
        raise translate(error) from error
