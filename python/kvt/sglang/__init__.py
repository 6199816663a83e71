# SPDX-License-Identifier: Apache-2.0
"""SGLang's NixlTransport on kvt.

:class:`NixlTransport` owns an agent and moves KV, state and aux buffers from a
prefill to a decode process. docs/sglang.md says how to switch it on and what
differs from SGLang's own class.
"""

from ._errors import (
    _NixlPostError,
    nixlBackendError,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotFoundError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    nixlUnknownError,
)
from ._options import backend_options
from ._transport import NixlTransport
from ._types import (
    BufferKey,
    NixlHandle,
    NixlResult,
    NixlState,
    PeerBuffers,
    StridedRun,
)

__all__ = [
    "BufferKey",
    "NixlHandle",
    "NixlResult",
    "NixlState",
    "NixlTransport",
    "PeerBuffers",
    "StridedRun",
    "_NixlPostError",
    "backend_options",
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNotFoundError",
    "nixlNotSupportedError",
    "nixlRemoteDisconnectError",
    "nixlUnknownError",
]
