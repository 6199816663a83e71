# SPDX-License-Identifier: Apache-2.0
"""vLLM's prefill or decode side: vllm_node DESCRIPTOR FLAVOUR PLACE.

vLLM's NixlConnector from PLACE, unchanged, over kvt.nixl or plain NIXL: one
worker, and the scheduler's half for what it serves to workers of the other
side. The node makes the metadata that a scheduler would give to its worker at
each step. The KV cache is memory of the host, as in a vLLM on CPUs.
"""

from __future__ import annotations

import importlib
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from nixl_agent_support import vllm_stand_ins
from nixl_agent_support.node import choose
from stage import LIMIT, cut_links, serve

LAYERS, BLOCKS = 3, 32
HEADS, TOKENS, HEAD = 2, 16, 16
LEASE = 3000
"""Seconds for which a producer keeps blocks: longer than any test. A heartbeat
makes it two thirds of that again."""


def config(engine: str, role: str) -> Any:
    """What a worker reads of VllmConfig."""
    layouts = importlib.import_module("vllm.v1.kv_cache_layout")
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id=engine,
            kv_role=role,
            kv_buffer_device="cpu",
            enable_permute_local_kv=False,
            get_from_extra_config=lambda name, default: {
                "kv_lease_duration": LEASE
            }.get(name, default),
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            decode_context_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=1,
        ),
        cache_config=SimpleNamespace(
            block_size=TOKENS,
            cache_dtype="auto",
            get_resolved_kv_cache_layout=lambda: layouts.KVCacheLayout.LBHNC,
        ),
        model_config=SimpleNamespace(
            model="model",
            dtype="float16",
            use_mla=False,
            get_head_size=lambda: HEAD,
            get_total_num_hidden_layers=lambda: LAYERS,
            get_total_num_kv_heads=lambda: HEADS,
        ),
        speculative_config=None,
    )


def caches() -> tuple[Any, dict[str, Any]]:
    """vLLM's description of the KV cache, and the cache: by layer."""
    specs = importlib.import_module("vllm.v1.kv_cache_interface")
    shape = (BLOCKS, HEADS, TOKENS, 2 * HEAD)
    made = {
        f"model.layers.{i}.attn": vllm_stand_ins.Tensor(
            np.zeros(shape, dtype=np.float16)
        )
        for i in range(LAYERS)
    }
    group = specs.KVCacheGroupSpec(
        list(made),
        specs.FullAttentionSpec(
            block_size=TOKENS,
            num_kv_heads=HEADS,
            head_size=HEAD,
            dtype=np.float16,
        ),
    )
    return specs.KVCacheConfig(BLOCKS, [], [group]), made


class Node:
    def __init__(self, connectors: Any) -> None:
        self.connectors = connectors
        self.caches: dict[str, Any] = {}
        self.received: set[str] = set()
        self.sent: set[str] = set()

    def open(self, engine: str, role: str, way: str, port: int) -> None:
        """`way` is "Pull" or "Push"; workers of the other side ask at `port`
        for this one's metadata."""
        self.engine, self.port = engine, port
        vars(importlib.import_module("vllm.envs")).update(
            VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
            VLLM_NIXL_SIDE_CHANNEL_PORT=port,
        )
        made = getattr(self.connectors, f"Nixl{way}Connector")
        kinds = self.connectors.KVConnectorRole
        about = config(engine, role)
        cache, self.caches = caches()
        self.connector = made(about, kinds.WORKER, cache)
        self.scheduler = made(about, kinds.SCHEDULER, cache)
        self.connector.register_kv_caches(self.caches)
        payload = self.connector.get_handshake_metadata()
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): payload})

    # The KV cache.

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for cache in self.caches.values():
            flat = cache.array.view(np.uint8)
            flat[:] = rng.integers(0, 256, flat.shape, dtype=np.uint8)

    def blocks(self) -> list[list[bytes]]:
        """By layer and number."""
        return [
            [cache.array[i].tobytes() for i in range(BLOCKS)]
            for cache in self.caches.values()
        ]

    # The scheduler's words to the worker.

    def _step(self, meta: Any) -> None:
        self.connector.bind_connector_metadata(meta)
        self.connector.start_load_kv(None)

    def _metadata(self) -> Any:
        return self.connectors.NixlConnectorMetadata()

    def offer(self, request: str, blocks: list[int]) -> dict[str, Any]:
        """Keeps these blocks of a finished prefill for a decode; what the
        decode is told."""
        meta = self._metadata()
        meta.reqs_in_batch.add(request)
        meta.reqs_to_send[request] = time.perf_counter() + LEASE / 3
        meta.push_finished_blocks[request] = (blocks,)
        self._step(meta)
        return {
            "remote_block_ids": (blocks,),
            "remote_engine_id": self.engine,
            "remote_request_id": request,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": 1,
        }

    def want(
        self, request: str, blocks: list[int], offer: dict[str, Any]
    ) -> None:
        """Gets a prefill's blocks into these."""
        meta = self._metadata()
        meta.add_new_req_to_recv(request, (blocks,), offer, awaiting_kvs=True)
        meta.push_registrations[request] = {
            "request_id": request,
            "decode_engine_id": self.engine,
            "decode_host": "127.0.0.1",
            "decode_port": self.port,
            "decode_tp_size": 1,
            "local_block_ids": (blocks,),
            "remote_engine_id": offer["remote_engine_id"],
            "remote_host": offer["remote_host"],
            "remote_port": offer["remote_port"],
            "remote_tp_size": 1,
        }
        self._step(meta)

    def step(self) -> tuple[set[str], set[str]]:
        """A step with nothing new: what has been sent and received so far."""
        self._step(self._metadata())
        sent, received = self.connector.get_finished(set())
        self.sent |= sent
        self.received |= received
        return self.sent, self.received

    def wait(self, request: str) -> set[int]:
        """Until it is received; the blocks of it that vLLM must compute anew,
        since their load failed."""
        until = time.monotonic() + LIMIT / 2
        while request not in self.step()[1]:
            assert time.monotonic() < until, f"{request} does not end"
            time.sleep(0.001)
        found: set[int] = self.connector.get_block_ids_with_load_errors()
        return found

    def heartbeat(self, offer: dict[str, Any]) -> None:
        """Tells the producer to keep the blocks for longer."""
        meta = self._metadata()
        parts = importlib.import_module(type(meta).__module__)
        meta.heartbeat_by_engine[offer["remote_engine_id"]] = (
            parts.HeartbeatInfo(
                {offer["remote_request_id"]},
                offer["remote_host"],
                offer["remote_port"],
                1,
            )
        )
        self._step(meta)

    def lease(self, request: str) -> float:
        found: float = self.connector.connector_worker._reqs_to_send[request]
        return found

    def peers(self) -> list[str]:
        """The engines that the worker has loaded."""
        return list(self.connector.connector_worker._remote_agents)

    def stats(self) -> dict[str, Any]:
        """vLLM's own figures of the transfers since the last call."""
        found = self.connector.get_kv_connector_stats()
        return {} if found is None else dict(found.data)

    def cut(self) -> int:
        return cut_links()

    def close(self) -> None:
        self.connector.shutdown()
        self.scheduler.shutdown()


def main() -> None:
    descriptor, flavour, place = sys.argv[1:]
    choose(flavour)
    serve(Node(vllm_stand_ins.load(place)), descriptor)


if __name__ == "__main__":
    main()
