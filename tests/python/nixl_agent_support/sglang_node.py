# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefill or decode side: sglang_node DESCRIPTOR FLAVOUR PLACE.

SGLang's conn.py from PLACE, unchanged, over kvt.nixl or plain NIXL. The node
carries the messages that SGLang sends by ZeroMQ. There is no GPU, so the agent
calls memory of the host what SGLang calls memory of a GPU, in both flavours.
"""

from __future__ import annotations

import importlib
import logging
import sys
import time
from typing import Any

import numpy as np

from nixl_agent_support import sglang_stand_ins
from nixl_agent_support.node import api_of
from stage import cut_links, serve

LIMIT = 60.0
FAILED, WAITING, SUCCESS = 0, 2, 4
SLOTS = 64
ITEM = 256
LAYERS = 4
STATES = {"swa": 512, "mamba": 1024, "request_row": 64}
"""Kinds of state, and the bytes of one item. SGLang prepares lists for the
first two and describes the third anew each time."""


class Node:
    def __init__(self, conn: Any) -> None:
        self.conn = conn
        self.manager: Any = None
        self.buffers: dict[str, list[Any]] = {}

    def open(self, role: str, mla: bool) -> str:
        """The agent's name. All K buffers come before the V buffers."""
        self.buffers = {
            "kv": [self._zeros(SLOTS * ITEM) for _ in range(2 * LAYERS)],
            "aux": [self._zeros(SLOTS * 96), self._zeros(SLOTS * 8)],
        }
        for name, item in STATES.items():
            self.buffers[name] = [self._zeros(SLOTS * item) for _ in range(2)]
        args = self._arguments()
        mode = importlib.import_module("sglang.srt.disaggregation.utils")
        made = type(
            "Manager",
            (self.conn.NixlKVManager,),
            {
                "_start_bootstrap_thread": lambda self: None,
                "_start_decode_listener_thread": lambda self: None,
            },
        )
        self.manager = made(args, mode.DisaggregationMode(role), None, mla)
        return str(self.manager.agent.name)

    def _zeros(self, size: int) -> Any:
        return np.zeros(size, dtype=np.uint8)

    def _arguments(self) -> Any:
        base = importlib.import_module("sglang.srt.disaggregation.base.conn")
        args = base.KVArgs()
        kv = self.buffers["kv"]
        args.engine_rank = args.gpu_id = 0
        args.ib_device = None
        args.page_size = 1
        args.mla_compression_ratios = None
        args.kv_data_ptrs = [int(made.ctypes.data) for made in kv]
        args.kv_data_lens = [len(made) for made in kv]
        args.kv_item_lens = [ITEM] * len(kv)
        args.kv_layer_ids = []
        aux = self.buffers["aux"]
        args.aux_data_ptrs = [int(made.ctypes.data) for made in aux]
        args.aux_data_lens = [len(made) for made in aux]
        args.aux_item_lens = [96, 8]
        args.state_types = [base.StateType(name) for name in STATES]
        states = [self.buffers[name] for name in STATES]
        args.state_data_ptrs = [
            [int(made.ctypes.data) for made in each] for each in states
        ]
        args.state_data_lens = [[len(made) for made in each] for each in states]
        args.state_item_lens = [[size] * 2 for size in STATES.values()]
        args.state_layer_ids = [[] for _ in STATES]
        args.state_dim_per_tensor = []
        return args

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for each in self.buffers.values():
            for made in each:
                made[:] = rng.integers(0, 256, len(made), dtype=np.uint8)

    def item(self, name: str, index: int) -> list[bytes]:
        """Item `index` of each buffer."""
        return [
            made.reshape(SLOTS, -1)[index].tobytes()
            for made in self.buffers[name]
        ]

    # Decode.

    def registration(self) -> list[bytes]:
        return [*self.manager.build_receiver_registration_message()]

    def want(
        self, room: int, kv: list[int], aux: int, states: list[list[int]]
    ) -> list[bytes]:
        return [
            *self.manager.build_receiver_metadata_message(
                bootstrap_room=room,
                required_dst_info_num=1,
                kv_indices=np.array(kv, dtype=np.int32),
                aux_index=aux,
                state_indices=states,
                decode_prefix_len=None,
                is_dummy=False,
            )
        ]

    # Prefill.

    def register(self, frames: list[bytes]) -> None:
        assert frames[0] == self.conn.GUARD
        info = self.conn.KVArgsRegisterInfo.from_zmq(frames[1:])
        self.manager._add_remote_peer(info)

    def prepared(self) -> dict[str, list[int]]:
        """By peer, the kinds of state that have a prepared list."""
        plans = self.manager._prepared_state_plans
        return {name: sorted(p.components) for name, p in plans.items()}

    def send(
        self,
        frames: list[bytes],
        kv: list[int],
        aux: int,
        states: list[list[int]],
    ) -> tuple[int, str]:
        """Runs a room through SGLang's transfer worker: its status, and why it
        failed."""
        info = self.conn.TransferInfo.from_zmq(frames[1:])
        manager, room = self.manager, info.room
        manager.request_status[room] = WAITING
        manager.transfer_infos[room] = {info.agent_name: info}
        manager.add_transfer_request(
            room,
            np.array(kv, dtype=np.int32),
            slice(0, len(kv)),
            True,
            aux_index=aux,
            state_indices=states,
        )
        until = time.monotonic() + LIMIT
        while manager.request_status[room] not in (FAILED, SUCCESS):
            if time.monotonic() > until:
                return -1, "the room does not end"
            time.sleep(0.001)
        return manager.request_status[room], manager.failures.get(room, "")

    def loaded(self, name: str) -> bool:
        return bool(self.manager.agent.check_remote_metadata(name))

    def settle(self) -> None:
        """Until the worker waits for work: its reload of peers comes last."""
        done = importlib.import_module("threading").Event()
        queue = self.manager.transfer_queues[0]

        class Last:
            @property
            def room(self) -> int:
                done.set()
                return -1

        queue.put(Last())
        assert done.wait(LIMIT)

    def cut(self) -> int:
        return cut_links()


def _on_the_host(api: Any) -> None:
    """Makes an agent's VRAM memory of the host."""
    original = api.nixl_agent

    class Agent(original):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]

    api.nixl_agent = Agent


def main() -> None:
    descriptor, flavour, place = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING)
    _on_the_host(api_of(flavour))
    serve(Node(sglang_stand_ins.load(place)), descriptor)


if __name__ == "__main__":
    main()
