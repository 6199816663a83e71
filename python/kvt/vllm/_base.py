# SPDX-License-Identifier: Apache-2.0
"""vLLM's DataTransport and PollResult, or our own where vLLM is not there."""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import kvt

CancelMode = Literal["immediate", "wait"]


class OurPollResult(NamedTuple):
    """The transfers that ended since the last poll."""

    done: Sequence[int]
    failed: Sequence[int]


class OurDataTransport(ABC):
    """What vLLM's session code asks of a data plane."""

    def __init__(
        self, view: memoryview, config_fields: dict[str, Any] | None = None
    ) -> None:
        assert view.shape is not None
        self._view: memoryview | None = view
        self._base_addr = kvt.region_of(view).addr
        self._num_blocks, self._block_len = view.shape
        self._config_fingerprint = fingerprint(config_fields)

    @property
    def base_addr(self) -> int:
        """Where block 0 begins."""
        return self._base_addr

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_len(self) -> int:
        """Bytes of a block."""
        return self._block_len

    @property
    def config_fingerprint(self) -> str:
        """Peers exchange blocks if these are equal or one is empty."""
        return self._config_fingerprint

    @abstractmethod
    def get_agent_metadata(self) -> bytes: ...

    @abstractmethod
    def add_remote_peer(
        self,
        peer_id: str,
        agent_metadata: bytes,
        base_addr: int,
        num_blocks: int,
        block_len: int,
    ) -> None: ...

    @abstractmethod
    def remove_remote_peer(self, peer_id: str) -> None: ...

    @abstractmethod
    def write_blocks(
        self, peer_id: str, local_idxs: list[int], remote_idxs: list[int]
    ) -> int | None: ...

    @abstractmethod
    def poll(self, peer_id: str | None = None) -> OurPollResult: ...

    @abstractmethod
    def cancel(
        self, transfer_ids: Iterable[int], mode: CancelMode = "immediate"
    ) -> list[int]: ...

    @abstractmethod
    def close(self) -> None: ...


def fingerprint(config_fields: dict[str, Any] | None) -> str:
    """As vLLM computes it: peers of both kinds compare them."""
    if not config_fields:
        return ""
    text = json.dumps(config_fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if TYPE_CHECKING:
    DataTransport = OurDataTransport
    PollResult = OurPollResult
else:
    try:
        from vllm.v1.kv_offload.tiering.p2p.data.base import (
            DataTransport,
            PollResult,
        )
    except ImportError as why:
        logging.getLogger("kvt").debug("not on vLLM's own classes: %s", why)
        DataTransport = OurDataTransport
        PollResult = OurPollResult
