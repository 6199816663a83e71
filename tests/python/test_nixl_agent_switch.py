# SPDX-License-Identifier: Apache-2.0
"""Puts kvt.nixl in NIXL's place, and takes it out again.

Each case is a fresh interpreter, since what is imported stays imported. The
names that NIXL's callers import are imported as they do it. A real NIXL is not
needed: a package of that name in a folder of the test stands for it. What the
interpreter does at its start is what pip installed (kvt_nixl.pth).
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


# ------------------------------------------------ at the interpreter's start


@pytest.mark.parametrize(
    "line",
    [
        "import nixl",
        "import nixl_cu12 as nixl",
        "from nixl._api import nixl_agent",
        "import nixl._bindings",
        "import importlib, importlib.util\n"
        "assert importlib.util.find_spec('nixl').name == 'nixl'\n"
        "importlib.reload(importlib.import_module('nixl'))",
        "import kvt.nixl, nixl",
        "import threading\n"
        "many = [threading.Thread(target=__import__, args=[name])\n"
        "        for name in ('nixl', 'nixl_cu13', 'kvt.nixl', 'nixl._api')]\n"
        "[one.start() for one in many]\n"
        "[one.join() for one in many]",
    ],
)
def test_the_variable_alone_is_enough(place: Path, line: str) -> None:
    code = f"""
{line}
import kvt.nixl
import nixl, nixl._api, nixl_cu12._bindings
assert not hasattr(nixl, "real")
assert nixl.nixl_agent is nixl._api.nixl_agent is kvt.nixl.nixl_agent
assert nixl_cu12._bindings.nixlXferDList is kvt.nixl.nixlXferDList
print("ok")
"""
    assert run(code, place, KVT_NIXL="1") == "ok"


@pytest.mark.parametrize("when", ["import nixl", "import kvt.nixl", ""])
def test_it_can_be_undone(place: Path, when: str) -> None:
    code = f"""
{when}
import kvt.nixl
kvt.nixl.uninstall()
import nixl
assert nixl.real
print("ok")
"""
    assert run(code, place, KVT_NIXL="1") == "ok"


def test_a_spawned_process_is_on_kvt_too(place: Path) -> None:
    script = place / "spawn.py"
    script.write_text("""
import multiprocessing

def child():
    import nixl
    raise SystemExit(hasattr(nixl, "real"))

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    print(process.exitcode)
""")
    code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    assert run(code, place, KVT_NIXL="1") == "0"


@pytest.mark.parametrize("value", ["", "0", "yes"])
def test_another_value_starts_nothing(place: Path, value: str) -> None:
    code = """
import sys
assert "_kvt_nixl" not in sys.modules and "kvt" not in sys.modules
import nixl
assert nixl.real
print("ok")
"""
    assert run(code, place, KVT_NIXL=value) == "ok"


def test_nothing_is_imported_before_nixl_is(place: Path) -> None:
    code = """
import json, sys
assert "kvt" not in sys.modules and "numpy" not in sys.modules
print("ok")
"""
    assert run(code, place, KVT_NIXL="1") == "ok"


def failing(place: Path, name: str, code: str) -> tuple[int, str, str]:
    """An interpreter that finds a broken module `name` first."""
    (place / f"{name}.py").write_text("raise RuntimeError('broken\\nlines')")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "KVT_NIXL": "1", "PYTHONPATH": str(place)},
    )
    return done.returncode, done.stdout.strip(), done.stderr


def test_a_broken_start_is_one_line_and_no_more(place: Path) -> None:
    code = "import nixl; print(nixl.real)"
    ended, said, complained = failing(place, "_kvt_nixl", code)
    assert (ended, said) == (0, "True")
    assert complained.count("\n") == 1
    assert "KVT_NIXL=1" in complained and "broken" in complained


def test_what_kvt_needs_is_missed_by_name_and_nixl_not_taken(
    place: Path,
) -> None:
    code = """
import sys
sys.modules["numpy"] = None
try:
    from nixl._api import nixl_agent
except ImportError as error:
    print(error)
"""
    said = run(code, place, KVT_NIXL="1")
    assert "KVT_NIXL=1" in said and "numpy" in said
