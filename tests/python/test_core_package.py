# SPDX-License-Identifier: Apache-2.0
"""What pip installed is whole: the module and the program that it starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from conftest import PATIENCE
from kvt import _kvt


def test_the_probe_program_lies_beside_the_module() -> None:
    program = Path(_kvt.__file__).parent / "kvt-probe"
    assert os.access(program, os.X_OK)
    ended = subprocess.run(
        [program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE,
    )
    assert ended.returncode > 0  # it speaks to the library only
