# SPDX-License-Identifier: Apache-2.0
"""What the figures were taken on, and of which programs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.candidates import transports
from bench.candidates.pair import ROOT, Places


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _thp() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text().strip() if path.exists() else "unknown"


def about(places: Places) -> dict[str, Any]:
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "huge pages": _thp(),
        "python": platform.python_version(),
        "load at start": os.getloadavg()[0],
        "kvt": _commit() if places.python == sys.executable else "another",
        "vLLM": (places.vllm / "kvt-stamp").read_text().split()[0],
        "vLLM's nixl.py, SHA-256": transports.text_hash(places.vllm),
        "nixl": _version("nixl-cu12"),
        "mooncake": _version("mooncake-transfer-engine-non-cuda"),
    }
