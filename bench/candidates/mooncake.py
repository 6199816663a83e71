# SPDX-License-Identifier: Apache-2.0
"""Mooncake's Python engine over TCP, with the part of vLLM's interface that the
jobs use."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CHUNK = 512
"""Slices a call: Mooncake 0.3.13 refuses longer lists when its queue is full,
and then everything that comes later on that connection."""


class Mooncake:
    """Every transfer is over when the call returns: its own queue of batches
    takes no longer lists and is not faster."""

    def __init__(self, name: str, view: memoryview) -> None:
        from mooncake.engine import TransferEngine

        assert view.shape is not None
        self.num_blocks, self.block_len = view.shape
        self.base_addr = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self._engine: Any = TransferEngine()
        _check(self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        _check(
            self._engine.register_memory(
                self.base_addr, self.num_blocks * self.block_len
            )
        )
        self._peers: dict[str, tuple[str, int]] = {}
        self._next = 0
        self._done: list[int] = []

    def get_agent_metadata(self) -> bytes:
        return f"127.0.0.1:{self._engine.get_rpc_port()}".encode()

    def add_remote_peer(
        self,
        peer_id: str,
        agent_metadata: bytes,
        base_addr: int,
        num_blocks: int,
        block_len: int,
    ) -> None:
        self._peers[peer_id] = agent_metadata.decode(), base_addr

    def write_blocks(
        self, peer_id: str, local_idxs: np.ndarray, remote_idxs: np.ndarray
    ) -> int:
        host, base = self._peers[peer_id]
        ours = self.base_addr + local_idxs.astype(np.int64) * self.block_len
        theirs = base + remote_idxs.astype(np.int64) * self.block_len
        for at in range(0, len(ours), CHUNK):
            part = slice(at, at + CHUNK)
            sources = ours[part].tolist()
            lengths = [self.block_len] * len(sources)
            _check(
                self._engine.batch_transfer_sync_write(
                    host, sources, theirs[part].tolist(), lengths
                )
            )
        self._next += 1
        self._done.append(self._next)
        return self._next

    def poll(self, peer_id: str | None = None) -> tuple[list[int], list[int]]:
        done, self._done = self._done, []
        return done, []


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"Mooncake answered {code}")
