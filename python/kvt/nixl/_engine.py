# SPDX-License-Identifier: Apache-2.0
"""How an agent's transport is opened, and which plugins NIXL has.

NIXL starts backends one by one; kvt starts them all when it opens. So the
first backend opens the transport, and another one opens it anew as long as
nothing depends on it.
"""

from __future__ import annotations

import importlib.machinery
import os
from collections.abc import Mapping
from pathlib import Path

import kvt

from ._errors import nixlBackendError, translate
from ._log import logger

GRACE_S = 2.0
"""How long a stopped transfer may stay unproven before it counts as lost."""

_LIMITS = {
    "inflight_max": 1 << 16,
    "layouts_max": 1 << 20,
    "runs_max": 1 << 32,
    "notify_max": 1 << 17,
    "notify_bytes_max": 131072,
}
"""NIXL has no limits; these are far from where its callers are."""

_THREAD_KEYS = {
    "UCX": "num_threads",
    "OBJ": "num_threads",
    "LIBFABRIC": "num_threads",
    "GDS_MT": "thread_count",
    "UCCL": "num_cpus",
}

_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl_rocm")


def name() -> str:
    """The engine: KVT_ENGINE, or nixl."""
    return os.environ.get("KVT_ENGINE") or "nixl"


def is_nixl(engine: str) -> bool:
    inner = engine.removeprefix("fault:").split("?")[0].split(":")[0]
    return inner in ("nixl", "auto")


def threads_for(backend: str, count: int) -> dict[str, str]:
    """The parameter by which a backend gets threads."""
    if count <= 0 or backend not in _THREAD_KEYS:
        return {}
    return {_THREAD_KEYS[backend]: str(count)}


def start(
    agent: str, backends: Mapping[str, Mapping[str, str]]
) -> kvt.Transport:
    """Opens a transport with these backends and their parameters."""
    engine = name()
    workers = 0
    params: dict[str, dict[str, str]] = {}
    for backend, given in backends.items():
        params[backend] = dict(given)
        threads = params[backend].get("num_threads", "0")
        if backend == "UCX" and threads != "0":
            # They would wait for requests larger than kvt's ever are, and
            # keep connections open when a peer dies (docs/nixl.md).
            del params[backend]["num_threads"]
            if threads.isdigit():
                workers = min(int(threads), 64)
            logger.info("UCX's num_threads %s becomes kvt's workers", threads)
    try:
        return kvt.Transport(
            engine,
            agent_name=agent,
            backends=list(backends) if is_nixl(engine) else None,
            params={k: v for k, v in params.items() if v} or None,
            workers=workers,
            grace=GRACE_S,
            **_LIMITS,  # type: ignore[arg-type]
        )
    except kvt.Unsupported as error:
        raise nixlBackendError(str(error)) from error
    except kvt.Error as error:
        raise translate(error) from error


def kinds() -> list[str]:
    """The memory that the engine moves, in NIXL's words."""
    engine = name()
    inner = engine.removeprefix("fault:").split("?")[0].split(":")[0]
    for info in kvt.engines():
        if info.name == ("nixl" if inner == "auto" else inner):
            return [f"{kind.name}_SEG" for kind in info.kinds]
    return []


def plugins() -> list[str]:
    """The plugins for which NIXL has a file, as NIXL lists them."""
    if not is_nixl(name()):
        return ["UCX"]  # stands for the engine, whichever it is
    for place in _plugin_places():
        found = sorted(
            path.name.removeprefix("libplugin_").removesuffix(".so")
            for path in place.glob("libplugin_*.so")
        )
        if found:
            return found
    return ["UCX"]


def _plugin_places() -> list[Path]:
    places = []
    if given := os.environ.get("NIXL_PLUGIN_DIR"):
        places.append(Path(given))
    for line in _maps():
        path = line.split(maxsplit=5)[-1].strip()
        if path.endswith("/libnixl_capi.so"):
            places.append(Path(path).parent / "plugins")
            break
    if given := os.environ.get("KVT_NIXL_LIBRARY"):
        places.append(Path(given).parent / "plugins")
    for package in _PACKAGES:
        # Not importlib.util.find_spec(): kvt may be in this package's place.
        spec = importlib.machinery.PathFinder.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or []:
            beside = Path(folder).parent / f".{package}.mesonpy.libs"
            places.append(beside / "plugins")
    return places


def _maps() -> list[str]:
    try:
        return Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
