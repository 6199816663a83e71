# SPDX-License-Identifier: Apache-2.0
"""What vLLM's NixlConnector imports, as far as it is used without vLLM.

load(PLACE) imports the connector from there as it is, with the modules of vLLM
that it is made of: its two workers and schedulers, its view of the KV cache,
its network calls. All else is a stand-in: torch is numpy, the platform is a
CPU, and there is one rank.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import importlib
import json
import re
import sys
import urllib.parse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_support.stand_in import module, package

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"


class Tensor:
    """A numpy array with torch's names."""

    device = SimpleNamespace(type="cpu")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape = array.shape
        self.ndim = array.ndim
        self.nbytes = array.nbytes

    def __getitem__(self, index: int) -> Tensor:
        return Tensor(self.array[index])

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def stride(self, dim: int) -> int:
        return int(self.array.strides[dim] // self.array.itemsize)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def untyped_storage(self) -> Any:
        whole = self.array if self.array.base is None else self.array.base
        return SimpleNamespace(
            data_ptr=lambda: int(whole.ctypes.data),
            nbytes=lambda: int(whole.nbytes),
        )


class Platform:
    device_type = "cpu"

    def is_rocm(self) -> bool:
        return False

    def get_nixl_memory_type(self) -> None: ...

    def get_nixl_supported_devices(self) -> dict[str, Any]:
        return {}

    def discover_numa_topology(self) -> list[list[int]]:
        return []

    def set_device(self, device: int) -> None: ...


class Backend:
    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def full_cls_name() -> str:
        return "stand_in.Backend"


class States(enum.Enum):
    MAMBA2 = "mamba2"


def _hash(factors: dict[str, Any]) -> str:
    text = json.dumps(factors, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _layers(*args: Any) -> dict[str, Any]:
    return {"layer": SimpleNamespace(get_attn_backend=lambda: Backend)}


def _none(*args: Any, **options: Any) -> Any:
    raise AssertionError("this path needs more of vLLM than is here")


def _empty(*names: str) -> dict[str, Any]:
    """Classes that are named, and nothing else."""
    return {name: type(name, (), {}) for name in names}


def _others() -> None:
    """Packages that are not installed."""
    sys.modules["regex"] = re
    module(
        "torch",
        Tensor=Tensor,
        long=int,
        **_empty("device", "dtype", "Size"),
    )
    module("prometheus_client", **_empty("Counter", "Gauge", "Histogram"))
    memory = SimpleNamespace(total=0, available=0)
    module("psutil", virtual_memory=lambda: memory, **_empty("Process"))
    module("urllib3").__path__ = []
    module("urllib3.util", parse_url=urllib.parse.urlsplit)


def _of_vllm() -> None:
    module(
        "vllm.config",
        get_current_vllm_config_or_none=lambda: None,
        get_layers_from_vllm_config=_layers,
        set_current_vllm_config=contextlib.nullcontext,
        **_empty("KVTransferConfig", "VllmConfig"),
    ).__path__ = []
    module("vllm.config.utils", hash_factors=_hash)
    module("vllm.platforms", current_platform=Platform())
    module(
        "vllm.distributed.parallel_state",
        get_pcp_group=_none,
        get_tensor_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_world_size=lambda: 1,
        is_global_first_rank=lambda: True,
        is_local_first_rank=lambda: True,
    )
    module("vllm.forward_context", **_empty("ForwardContext"))
    module(
        "vllm.model_executor.layers.attention_layer_base",
        **_empty("AttentionLayerBase"),
    )
    module("vllm.utils.gpu_sync_debug", gpu_sync_allowed=_none)
    module(
        "vllm.utils.torch_utils",
        async_tensor_h2d=_none,
        get_dtype_size=lambda dtype: np.dtype(dtype).itemsize,
    )
    module(
        "vllm.v1.attention.backend",
        **_empty("AttentionBackend", "AttentionMetadata"),
    )
    module(
        "vllm.v1.attention.backends.registry",
        MambaAttentionBackendEnum=States,
    )
    module("vllm.v1.core.sched.output", **_empty("SchedulerOutput"))
    module("vllm.v1.metrics.utils", create_metric_per_engine=_none)
    module(
        "vllm.v1.outputs", **_empty("KVConnectorOutput", "ModelRunnerOutput")
    )
    module(
        "vllm.v1.worker.utils",
        select_common_block_size=lambda size, backends, specs: size,
    )
    module(f"{_CONNECTOR}.factory", **_empty("KVConnectorFactory"))
    module(
        f"{_CONNECTOR}.v1.ssm_conv_transfer_utils",
        derive_mamba_conv_split=_none,
        **_empty("MambaConvSplitInfo"),
    )


def load(place: str) -> Any:
    """The module with the connectors."""
    folder = Path(place)
    for name in (
        "vllm",
        "vllm.distributed",
        "vllm.distributed.kv_transfer",
        _CONNECTOR,
        f"{_CONNECTOR}.v1",
        "vllm.utils",
    ):
        package(name, folder)
    vars(sys.modules["vllm"])["__version__"] = "0"
    _others()
    _of_vllm()
    return importlib.import_module(f"{_CONNECTOR}.v1.nixl.connector")
