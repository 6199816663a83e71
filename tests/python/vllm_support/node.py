# SPDX-License-Identifier: Apache-2.0

"""One vLLM node in a process of its own: a transport, or the whole P2P tier.

    python -m vllm_support.node DESCRIPTOR PLACE

PLACE is the folder with the unpacked vLLM. The plugins are loaded as in any
process of vLLM: whether the transport is kvt's or vLLM's own is decided by
KVT_VLLM alone.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from stage import serve
from vllm_support import stand_in
from vllm_support.memory import Pool


class Lines(logging.Handler):
    """Keeps (level, text) of what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


class Node:
    def __init__(self) -> None:
        self.pool: Any = None
        self.transport: Any = None
        self.tier: Any = None
        self.contexts: dict[str, Any] = {}
        self.log = Lines()
        logger = logging.getLogger("vllm.v1.kv_offload")
        logger.addHandler(self.log)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False

    # ------------------------------------------------------------- transport

    def open(
        self, name: str, blocks: int, block_len: int, seed: int, **more: Any
    ) -> str:
        """The name of the transport's class, with its module."""
        from vllm.v1.kv_offload.tiering.p2p import manager

        self.pool = Pool(blocks, block_len, seed)
        self.transport = manager.NixlTransport(name, self.pool.view, **more)
        return self._class()

    def _class(self) -> str:
        made = type(self.transport)
        return f"{made.__module__}.{made.__qualname__}"

    def bases(self) -> list[str]:
        return [
            f"{c.__module__}.{c.__qualname__}"
            for c in type(self.transport).__mro__
        ]

    def call(self, name: str, *args: Any) -> Any:
        """A method of the transport, or one of its properties."""
        found = getattr(self.transport, name)
        answer = found(*args) if callable(found) else found
        if type(answer).__name__ == "PollResult":
            return list(answer.done), list(answer.failed)
        return answer

    def poll_type(self) -> str:
        return type(self.transport.poll()).__module__

    def fault(self, rules: str) -> None:
        self.transport.transport.set_fault(rules)

    def stats(self, name: str) -> int:
        return getattr(self.transport.transport.stats(), name)

    def path(self, peer_id: str) -> str:
        inner = self.transport.transport
        return inner.peer_info(inner.find_peer(peer_id)).path

    def forget(self) -> bool:
        """Whether the pool's memory can be unmapped; if so, it is."""
        self.pool.view.release()
        try:
            self.pool.map.close()
        except BufferError:
            return False
        return True

    # ------------------------------------------------------------------ pool

    def blocks(self, blocks: list[int]) -> list[bytes]:
        return self.pool.blocks(blocks)

    def fill(self, blocks: list[int], data: list[bytes]) -> None:
        for block, content in zip(blocks, data, strict=True):
            self.pool.fill(block, content)

    def expect(self, blocks: list[int], data: list[bytes]) -> None:
        for block, content in zip(blocks, data, strict=True):
            self.pool.expect(block, content)

    def wrong(self) -> list[int]:
        return self.pool.wrong()

    def lines(self) -> list[tuple[str, str]]:
        lines, self.log.lines = self.log.lines, []
        return lines

    # ------------------------------------------------------------------ tier

    def open_tier(
        self, port: int, blocks: int, block_len: int, seed: int
    ) -> str:
        from vllm.v1.kv_offload import config
        from vllm.v1.kv_offload.tiering.p2p.manager import (
            P2PSecondaryTierManager,
        )

        class Spec:
            blocks_per_chunk = 1

        group = config.OffloadingGroupConfig(16, ("layer",), 0)
        parallel = config.OffloadingParallelConfig(
            0, 1, 1, 1, 1, 1, 0, 1, None, True
        )
        spec = Spec()
        spec.config = config.OffloadingConfig(
            groups=(group,),
            worker_kv_bytes_per_block=block_len,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="engine",
            model=config.OffloadingModelConfig("model", "float16"),
            cache=config.OffloadingCacheConfig(16, 1),
            parallel=parallel,
        )
        self.pool = Pool(blocks, block_len, seed)
        self.tier = P2PSecondaryTierManager(
            spec, self.pool.view, host="127.0.0.1", port=port
        )
        self.transport = self.tier._data
        return self._class()

    def _context(self, request: str, **params: Any) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        if request not in self.contexts:
            context = ReqContext(request, params)
            self.contexts[request] = context
            self.tier.on_new_request(context)
        return self.contexts[request]

    @staticmethod
    def _job(
        number: int,
        keys: list[bytes],
        blocks: list[int],
        load: bool,
        context: Any,
    ) -> Any:
        import numpy as np
        from vllm.v1.kv_offload.tiering.base import TransferJob

        return TransferJob(number, keys, np.array(blocks), load, context)

    def store(
        self, job: int, request: str, keys: list[bytes], blocks: list[int]
    ) -> None:
        """Prefill has put these blocks into the pool for the other node."""
        context = self._context(
            request, remote_decoder={"kv_request_id": request}
        )
        self.tier.submit_store(self._job(job, keys, blocks, False, context))

    def load(
        self,
        job: int,
        request: str,
        keys: list[bytes],
        blocks: list[int],
        port: int,
    ) -> None:
        """Decode wants these blocks of the node at this port."""
        source = {
            "kv_request_id": request,
            "remote_host": "127.0.0.1",
            "remote_port": port,
        }
        context = self._context(request, remote_prefiller=source)
        self.tier.submit_load(self._job(job, keys, blocks, True, context))

    def finish(self, request: str) -> None:
        self.tier.on_request_finished(self.contexts.pop(request))

    def step(self) -> list[tuple[int, bool]]:
        """One step of the scheduler; the jobs that ended."""
        from vllm.v1.kv_offload.base import ScheduleEndContext

        ended = [
            (job.job_id, job.success) for job in self.tier.get_finished_jobs()
        ]
        self.tier.on_schedule_end(ScheduleEndContext((), ()))
        return ended

    def drain(self) -> None:
        self.tier.drain_jobs()

    def shutdown(self) -> None:
        # vLLM's control plane waits for ever for its last message to go out,
        # over its own class as over kvt's, unless it does not linger.
        for connection in self.tier._control._connections.values():
            connection._sockets.dealer.linger = 0
        self.tier.shutdown()


def main() -> None:
    descriptor, place = sys.argv[1:]
    stand_in.install(Path(place))
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    serve(Node(), descriptor)


if __name__ == "__main__":
    main()
