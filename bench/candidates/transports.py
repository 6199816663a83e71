# SPDX-License-Identifier: Apache-2.0
"""The classes with vLLM's interface: its own, kvt's, and a stronger rival."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

HOME = "vllm/v1/kv_offload/tiering/p2p/data/nixl.py"


def load(name: str, vllm: Path | None) -> Any:
    if name == "kvt":
        from kvt.vllm import NixlTransport as Ours

        return Ours
    if name.startswith("regions "):
        from bench.candidates import regions

        _, engine, count = name.split()
        return regions.made(engine, int(count))
    if name == "mooncake":
        from bench.candidates.mooncake import Mooncake

        return Mooncake
    assert vllm is not None
    theirs = _vllms(vllm)
    return {"vllm": theirs, "strided": _strided(theirs)}[name]


def _vllms(place: Path) -> Any:
    root = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(root / "tests/python"))
    from vllm_support import stand_in

    stand_in.install(place)
    from vllm.v1.kv_offload.tiering.p2p.data.nixl import NixlTransport

    return NixlTransport


def _strided(theirs: Any) -> Any:
    """vLLM's class, but a peer's blocks are given to NIXL as one strided row
    of five numbers, not as a tuple for each block."""
    import numpy as np

    class Strided(theirs):
        def add_remote_peer(
            self,
            peer_id: str,
            agent_metadata: bytes,
            base_addr: int,
            num_blocks: int,
            block_len: int,
        ) -> None:
            name = self._agent.add_remote_agent(agent_metadata)
            row = [base_addr, block_len, 0, block_len, num_blocks]
            blocks = np.array([row], dtype=np.uint64)
            made = self._agent.prep_xfer_dlist(name, blocks, "DRAM")
            self._peer_nixl_names[peer_id] = name
            self._remote_dlists[peer_id] = made

    return Strided


def text_hash(vllm: Path) -> str:
    """SHA-256 of the rival's file, which is used as it is."""
    return hashlib.sha256((vllm / HOME).read_bytes()).hexdigest()
