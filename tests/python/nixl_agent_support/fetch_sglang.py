# SPDX-License-Identifier: Apache-2.0
"""Puts the files of SGLang that its tests here run into a folder.

    python fetch_sglang.py PLACE

They are pure Python and come unchanged out of the wheel `sglang` (some 10 MB);
nothing of SGLang or of what it needs is installed. A folder that is complete
is left as it is.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "sglang==0.5.23"
KEPT = [
    "sglang/srt/disaggregation/base/conn.py",
    "sglang/srt/disaggregation/common/utils.py",
    "sglang/srt/disaggregation/nixl/conn.py",
]
STAMP = "kvt-stamp"


def fetch(place: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "--disable-pip-version-check",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                "--python-version=3.11",
                "--implementation=cp",
                "--abi=cp311",
                "--platform=manylinux_2_34_x86_64",
                f"--dest={folder}",
                WHEEL,
            ],
            check=True,
            stdout=sys.stderr,
        )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place, KEPT)
    (place / STAMP).write_text(WHEEL)


def main() -> None:
    place = Path(sys.argv[1])
    stamp = place / STAMP
    if not stamp.exists() or stamp.read_text() != WHEEL:
        fetch(place)


if __name__ == "__main__":
    main()
