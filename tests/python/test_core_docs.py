# SPDX-License-Identifier: Apache-2.0
"""docs/python.md is true: its programs run as they stand, as two processes, and
its table of errors is the package's."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

from conftest import PATIENCE
from kvt import _errors

PAGE = (Path(__file__).parents[2] / "docs/python.md").read_text()


def programs() -> list[str]:
    blocks = re.findall(r"(?:^    .*\n|^\n)+", PAGE, re.M)
    return [
        textwrap.dedent(block)
        for block in blocks
        if block.lstrip().startswith("import kvt")
    ]


def test_the_two_programs_move_a_block(tmp_path: Path) -> None:
    target, source = programs()
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for code in (target, source)
    ]
    try:
        outputs = [p.communicate(timeout=PATIENCE)[0] for p in running]
    finally:
        for process in running:
            process.kill()
    assert outputs == ["block 3 begins with 42\n", ""]
    assert [process.returncode for process in running] == [0, 0]


def test_the_table_of_errors_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? *\|", PAGE, re.M)
    expected = [
        (cls.__name__, cls.__bases__[1].__name__ if cls.__bases__[1:] else "")
        for cls in _errors.CLASSES
    ]
    assert rows == expected
