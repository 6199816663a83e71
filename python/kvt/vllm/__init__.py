# SPDX-License-Identifier: Apache-2.0
"""kvt in the place of NIXL's Python agent in vLLM's P2P KV-offload tier.

``NixlTransport`` has the interface of vLLM's class of that name. With
``KVT_VLLM=1`` in the environment it takes its place in every vLLM process;
docs/vllm.md says what changes.

Nothing of vLLM is imported before a name of this module is asked for: vLLM
loads its plugins, this one among them, early and in every process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._base import DataTransport, PollResult
    from ._transport import NixlTransport

__all__ = ["DataTransport", "NixlTransport", "PollResult"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import _transport

    return getattr(_transport, name)


def __dir__() -> list[str]:
    return __all__
