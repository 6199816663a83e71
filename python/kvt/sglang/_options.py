# SPDX-License-Identifier: Apache-2.0
"""From SGLang's settings to a transport's: backend, parameters, interface."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence

logger = logging.getLogger("kvt.sglang")

PREFILL_WORKERS = 8
INIT_TIMEOUT_S = 60.0
GRACE_S = 2.0
"""How long a broken write may stay unproven before kvt counts it as lost: also
how long a reload may wait for it. It is not called quiescent either way."""

# How each backend calls its threads; others have none. UCX's get none, unlike
# SGLang's own: kvt's requests are too small for them to help, and each keeps a
# connection of its own open when a peer dies (docs/nixl.md).
_WORKER_KEYS = {
    "OBJ": "num_threads",
    "GDS_MT": "thread_count",
    "UCCL": "num_cpus",
}


def _read_params(params: str | Mapping[str, str] | None) -> dict[str, str]:
    """A JSON object, or a mapping, of strings to strings."""
    if params is None:
        params = os.environ.get("SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS", "")
    if isinstance(params, str):
        try:
            params = json.loads(params) if params.strip() else {}
        except json.JSONDecodeError as error:
            raise ValueError(
                f"the backend's parameters are no JSON: {error}"
            ) from None
    if not isinstance(params, Mapping) or not all(
        isinstance(key, str) and isinstance(value, str)
        for key, value in params.items()
    ):
        raise ValueError(
            "the backend's parameters must be one object of strings to strings"
        )
    return dict(params)


def _interfaces(
    ib_device: str | Sequence[str] | Mapping[int | str, str], gpu_id: int
) -> list[str]:
    """The names for this GPU. A mapping, also as JSON, has them by GPU."""
    if isinstance(ib_device, str) and ib_device.lstrip().startswith("{"):
        try:
            ib_device = json.loads(ib_device)
        except json.JSONDecodeError as error:
            raise ValueError(f"ib_device is no JSON: {error}") from None
    if isinstance(ib_device, Mapping):
        by_gpu = {str(key): value for key, value in ib_device.items()}
        if str(gpu_id) not in by_gpu:
            raise ValueError(f"ib_device names no interface for GPU {gpu_id}")
        ib_device = by_gpu[str(gpu_id)]
    names = ib_device.split(",") if isinstance(ib_device, str) else ib_device
    names = [name.strip() for name in names]
    for name in names:
        if not name or ":" in name:
            raise ValueError(
                f"ib_device {name!r} is no interface: give names such as "
                "mlx5_0, without a port"
            )
    return names


def _choose_interface(
    params: dict[str, str],
    ib_device: str | Sequence[str] | Mapping[int | str, str],
    gpu_id: int,
) -> None:
    if os.environ.get("UCX_NET_DEVICES"):
        logger.warning(
            "UCX_NET_DEVICES is set, so ib_device %r is ignored", ib_device
        )
        return
    wanted = ", ".join(_interfaces(ib_device, gpu_id))
    if params.setdefault("device_list", wanted) != wanted:
        raise ValueError(
            f"device_list is {params['device_list']!r} in the backend's "
            f"parameters and {wanted!r} by ib_device: give one of them"
        )


def _role_of(role: str) -> str:
    """The role, also of an enumeration of SGLang's."""
    name = str(getattr(role, "value", role)).lower()
    if name not in ("prefill", "decode"):
        raise ValueError(f"role {name!r} is neither prefill nor decode")
    return name


def workers(role: str) -> int:
    """Decode only receives: one thread, which is the least there is."""
    return PREFILL_WORKERS if _role_of(role) == "prefill" else 1


def init_timeout() -> float:
    name = "SGLANG_DISAGGREGATION_ENGINE_INIT_TIMEOUT"
    try:
        return float(os.environ.get(name) or INIT_TIMEOUT_S)
    except ValueError:
        raise ValueError(
            f"{name}={os.environ[name]} is no number of seconds"
        ) from None


def backend_options(
    role: str,
    backend: str | None = None,
    params: str | Mapping[str, str] | None = None,
    ib_device: str | Sequence[str] | Mapping[int | str, str] | None = None,
    gpu_id: int = 0,
) -> tuple[str, dict[str, str]]:
    """The backend and its parameters for a role ("prefill" or "decode").

    Raises ValueError for settings that contradict each other.
    """
    role = _role_of(role)
    backend = backend or os.environ.get(
        "SGLANG_DISAGGREGATION_NIXL_BACKEND", "UCX"
    )
    made = _read_params(params)
    key = _WORKER_KEYS.get(backend)
    if key is not None and role == "prefill":
        made.setdefault(key, str(PREFILL_WORKERS))
    if ib_device and backend == "UCX":
        _choose_interface(made, ib_device, gpu_id)
    return backend, made
