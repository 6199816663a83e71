# SPDX-License-Identifier: Apache-2.0
"""Puts kvt.nixl in NIXL's place, and takes it out again.

Each case is a fresh interpreter, since what is imported stays imported. The
names that NIXL's callers import are imported as they do it. A real NIXL is not
needed: a package of that name in a folder of the test stands for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAKE = "import sys\nreal = True\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Holds a package `nixl` that is not ours."""
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text(FAKE)
    return tmp_path


def run(code: str, place: Path, **env: str) -> str:
    path = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "KVT_NIXL": "0", **env, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_installed_it_answers_to_nixls_names(place: Path) -> None:
    code = """
import importlib.util, kvt.nixl
kvt.nixl.install()
kvt.nixl.install()
from nixl._api import (
    nixl_agent, nixl_agent_config, nixl_thread_sync_t, nixlBind)
from nixl._bindings import (
    nixlBackendError, nixlCancelledError, nixlRemoteDisconnectError,
    nixlXferTelemetry, DRAM_SEG)
from nixl import nixl_agent as again, nixlXferDList
from nixl.logging import get_logger
import nixl, nixl._api as api, nixl_cu12._bindings, nixl_cu13._api
assert again is nixl_agent is kvt.nixl.nixl_agent is api.nixl_agent
assert nixl_cu12._bindings.nixlBackendError is nixlBackendError
assert nixlBind.nixlXferDList is nixlXferDList
assert importlib.util.find_spec("nixl") is not None
assert get_logger("_api").name == "nixl.api"
assert not hasattr(nixl, "real")
print("ok")
"""
    assert run(code, place) == "ok"


def test_what_is_not_offered_cannot_be_imported(place: Path) -> None:
    code = """
import kvt.nixl
kvt.nixl.install()
for line in ("from nixl._bindings import nixlAgent", "import nixl._agent",
             "import nixl._utils"):
    try:
        exec(line)
    except ImportError:
        continue
    raise SystemExit(line)
print("ok")
"""
    assert run(code, place) == "ok"


def test_uninstalled_nixl_is_found_again(place: Path) -> None:
    code = """
import kvt.nixl
kvt.nixl.install()
from nixl import nixl_agent
kvt.nixl.uninstall()
kvt.nixl.uninstall()
import nixl
assert nixl.real
assert nixl_agent is kvt.nixl.nixl_agent
print("ok")
"""
    assert run(code, place) == "ok"


def test_it_refuses_when_nixl_is_there_already(place: Path) -> None:
    code = """
import nixl, kvt.nixl
try:
    kvt.nixl.install()
except RuntimeError as error:
    print(error)
assert nixl.real
import sys
assert "nixl_cu12" not in sys.modules
"""
    assert "nixl is imported already" in run(code, place)


@pytest.mark.parametrize(
    ("value", "answer"), [("1", "False"), ("0", "True"), ("", "True")]
)
def test_the_variable_decides_when_the_module_is_imported(
    place: Path, value: str, answer: str
) -> None:
    code = "import kvt.nixl, nixl; print(hasattr(nixl, 'real'))"
    assert run(code, place, KVT_NIXL=value) == answer


def test_it_stays_out_of_the_way_without_being_asked(place: Path) -> None:
    code = """
import kvt.nixl as ours, nixl
assert nixl.real and ours.nixl_agent
print("ok")
"""
    assert run(code, place) == "ok"
