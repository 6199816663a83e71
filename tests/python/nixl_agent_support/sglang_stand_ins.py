# SPDX-License-Identifier: Apache-2.0
"""What SGLang's NIXL connection imports, as far as it is used without SGLang.

load(PLACE) imports sglang/srt/disaggregation/nixl/conn.py from there, as it is;
so are the two files beside it that are its own business. All else is a
stand-in: torch, the server's arguments, the bootstrap over HTTP and ZeroMQ.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import importlib
import sys
import types
from pathlib import Path
from typing import Any

_SRT = "sglang.srt"


class Mode(enum.Enum):
    NULL = "null"
    PREFILL = "prefill"
    DECODE = "decode"


_SETTINGS = {
    "SGLANG_DISAGGREGATION_NIXL_BACKEND": "UCX",
    "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS": "{}",
    "SGLANG_DISAGGREGATION_QUEUE_SIZE": 1,
    "SGLANG_DISAGGREGATION_ENGINE_INIT_TIMEOUT": 60.0,
}


class Settings:
    """SGLang's environment variables: those above, all others are false."""

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(get=lambda: _SETTINGS.get(name, False))


class Manager:
    """CommonKVManager: one rank, no network. Statuses are kept and nothing is
    sent when a room ends."""

    def __init__(self, args: Any, mode: Mode, server: Any, mla: bool) -> None:
        self.kv_args = args
        self.disaggregation_mode = mode
        self.is_mla_backend = mla
        self.is_hybrid_mla_backend = False
        self.attn_tp_size = self.state_tp_size = 1
        self.pp_size = self.attn_cp_size = self.dcp_size = 1
        self.dcp_rank = 0
        self.local_ip, self.rank_port = "127.0.0.1", 1
        self.enable_deferred_decode_kv_release = False
        self.request_status: dict[int, int] = {}
        self.transfer_infos: dict[int, Any] = {}
        self.decode_kv_args_table: dict[str, Any] = {}
        self.req_to_decode_prefix_len: dict[int, int] = {}
        self.failures: dict[int, str] = {}
        self._staging_outstanding: Any = collections.defaultdict(int)
        self._staging_ctx = None

    def update_status(self, room: int, status: int) -> None:
        self.request_status[room] = status

    def conclude_transfer(self, *, bootstrap_room: int, status: int) -> None:
        self.update_status(bootstrap_room, status)

    def conclude_failure(
        self, *, bootstrap_room: int, failure_reason: str
    ) -> None:
        self.record_failure(bootstrap_room, failure_reason)
        self.update_status(bootstrap_room, 0)

    def record_failure(self, room: int, reason: str) -> None:
        self.failures[room] = reason

    def poison_deferred_ack_room(self, room: int) -> None: ...

    def requires_dcp_relayout(self, size: int, rank: int) -> bool:
        return False

    def check_peer_aux_buffer_count(self, peer: str, count: int) -> None:
        assert count == len(self.kv_args.aux_data_ptrs)

    def get_mla_kv_ptrs_with_pp(
        self, ours: Any, theirs: Any, state_type: Any = None
    ) -> tuple[Any, Any, int]:
        return ours, theirs, len(ours)

    def get_mha_kv_ptrs_with_pp(self, ours: Any, theirs: Any) -> Any:
        half = len(ours) // 2
        return ours[:half], ours[half:], theirs[:half], theirs[half:], half

    # In conn.py these listen on ZeroMQ; the node brings the messages.
    def _start_heartbeat_checker_thread(self) -> None: ...


class Struct:
    """msgspec's, with fields by keyword."""

    def __init_subclass__(cls, **options: Any) -> None:
        dataclasses.dataclass(cls)


def _pairs(
    ours: Any, theirs: Any, n_ours: int, n_theirs: int, **options: Any
) -> list[tuple[int, int]]:
    return [(i, i) for i in range(n_ours)]


def _none(*args: Any, **options: Any) -> Any:
    raise AssertionError("this path needs more of SGLang than is here")


def _set_device(number: int) -> None: ...


def _module(name: str, **names: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(names)
    sys.modules[name] = made
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, made)
    return made


def load(place: str) -> Any:
    """The module conn."""
    own = Path(place) / "sglang" / "srt" / "disaggregation"
    for name in ("sglang", _SRT, f"{_SRT}.disaggregation", f"{_SRT}.utils"):
        _module(name).__path__ = []
    for part in ("base", "common", "nixl"):
        package = _module(f"{_SRT}.disaggregation.{part}")
        package.__path__ = [str(own / part)]
    empty = type("Nothing", (), {})
    device = types.SimpleNamespace(set_device=_set_device)
    _module("msgspec", Struct=Struct)
    _module(
        "torch",
        Tensor=type("Tensor", (), {}),
        get_device_module=lambda name: device,
    )
    _module(f"{_SRT}.server_args", ServerArgs=empty)
    _module(f"{_SRT}.environ", envs=Settings())
    _module(f"{_SRT}.observability").__path__ = []
    _module(
        f"{_SRT}.observability.trace",
        TraceNullContext=empty,
        TraceReqContext=empty,
    )
    _module(
        f"{_SRT}.runtime_context",
        get_device=lambda: types.SimpleNamespace(device="cuda"),
        get_schedule=_none,
    )
    _module(
        f"{_SRT}.utils.common",
        run_with_deadline=lambda call, **options: call(),
    )
    _module(
        f"{_SRT}.disaggregation.common.conn",
        ABORT_TAG=b"ABORT",
        AbortNotification=empty,
        CommonKVBootstrapServer=empty,
        CommonKVManager=Manager,
        CommonKVReceiver=empty,
        CommonKVSender=empty,
    )
    _module(
        f"{_SRT}.disaggregation.common.staging_handler",
        STAGING_WATERMARK_WAIT_S=1.0,
        StagingManagerMixin=empty,
        handle_staging_rsp=_none,
        handle_watermark_msg=_none,
    )
    _module(
        f"{_SRT}.disaggregation.utils",
        DisaggregationMode=Mode,
        build_dsa_tail_transfer_blocks=_none,
        build_transfer_entry_pairs=_pairs,
        compute_mamba_state_slice_byte_blocks=_none,
        is_elided_entry=lambda *args, **options: False,
        resolve_dcp_dst_entry_indices=_none,
        slice_dsa_tail_dst_ptrs_for_pp=_none,
    )
    return importlib.import_module(f"{_SRT}.disaggregation.nixl.conn")
