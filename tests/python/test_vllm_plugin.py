# SPDX-License-Identifier: Apache-2.0
"""Proves that the plugin puts kvt's class in place, when asked, and only then.

Without vLLM: a package of that name is made from a few lines, with the modules
that the plugin cares about and the imports between them. (test_vllm_nodes.py
and test_vllm_tier.py load the plugin as the real vLLM does.)
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stage import LIMIT

TIER = "vllm/v1/kv_offload/tiering/p2p"
FILES = {
    f"{TIER}/data/base.py": """
from typing import NamedTuple

class PollResult(NamedTuple):
    done: tuple = ()
    failed: tuple = ()

class DataTransport:
    pass
""",
    f"{TIER}/data/nixl.py": """
from vllm.v1.kv_offload.tiering.p2p.data.base import DataTransport

class NixlTransport(DataTransport):
    pass
""",
    f"{TIER}/data/__init__.py": """
from vllm.v1.kv_offload.tiering.p2p.data.base import DataTransport
from vllm.v1.kv_offload.tiering.p2p.data.nixl import NixlTransport
""",
    f"{TIER}/manager.py": """
from vllm.v1.kv_offload.tiering.p2p.data import NixlTransport
""",
}

LOOK = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
from importlib.metadata import entry_points
(entry,) = entry_points(group="vllm.general_plugins", name="kvt")
register = entry.load()
assert not any(name.split(".")[0] == "vllm" for name in sys.modules)
tier = "vllm.v1.kv_offload.tiering.p2p"
{before}
register()
register()
{after}
for name in "manager", "data", "data.nixl":
    module = importlib.import_module(f"{{tier}}.{{name}}")
    print(module.NixlTransport.__module__)
base = importlib.import_module(f"{{tier}}.data.base")
print(issubclass(module.NixlTransport, base.DataTransport))
"""

OURS = ["kvt.vllm._transport"] * 3 + ["True"]
THEIRS = ["vllm.v1.kv_offload.tiering.p2p.data.nixl"] * 3 + ["True"]


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def classes(
    vllm: Path, before: str = "", after: str = "", **env: str
) -> list[str]:
    """From which modules the tier's names for the class come."""
    settings = {
        name: value
        for name, value in os.environ.items()
        if name not in ("KVT_VLLM", "VLLM_PLUGINS")
    }
    code = LOOK.format(before=before, after=after)
    ended = subprocess.run(
        [sys.executable, "-c", code, str(vllm)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={**settings, **env},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_there_is_an_entry_point() -> None:
    group = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert [entry.name for entry in group if entry.name == "kvt"] == ["kvt"]


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"KVT_VLLM": ""},
        {"KVT_VLLM": "0"},
        {"KVT_VLLM": "no"},
        {"VLLM_PLUGINS": "other"},
        {"VLLM_PLUGINS": "kvt", "KVT_VLLM": "0"},
    ],
)
def test_it_is_off_by_default(vllm: Path, env: dict[str, str]) -> None:
    assert classes(vllm, **env) == THEIRS


@pytest.mark.parametrize(
    "env",
    [
        {"KVT_VLLM": "1"},
        {"VLLM_PLUGINS": "kvt"},
        {"VLLM_PLUGINS": "other, kvt"},
        {"VLLM_PLUGINS": "kvt", "KVT_VLLM": "1"},
    ],
)
def test_it_is_on_when_asked_for(vllm: Path, env: dict[str, str]) -> None:
    assert classes(vllm, **env) == OURS


@pytest.mark.parametrize("module", ["manager", "data", "data.nixl"])
def test_it_comes_late_and_replaces_all_the_same(
    vllm: Path, module: str
) -> None:
    before = f'importlib.import_module(tier + ".{module}")'
    assert classes(vllm, before, KVT_VLLM="1") == OURS


@pytest.mark.parametrize("when", ["before", "after"])
def test_our_class_may_be_imported_first(vllm: Path, when: str) -> None:
    code = {when: "from kvt.vllm import NixlTransport"}
    assert classes(vllm, **code, KVT_VLLM="1") == OURS


def test_importing_our_class_replaces_nothing_by_itself(vllm: Path) -> None:
    assert classes(vllm, after="from kvt.vllm import NixlTransport") == THEIRS


def test_a_vllm_without_the_class_is_left_alone(vllm: Path) -> None:
    nixl = vllm / TIER / "data" / "nixl.py"
    nixl.write_text(nixl.read_text() + "\nOther = NixlTransport\n")
    nixl.write_text(nixl.read_text() + "del NixlTransport\n")
    init = vllm / TIER / "data" / "__init__.py"
    init.write_text("")
    (vllm / TIER / "manager.py").write_text("")
    code = "import vllm.v1.kv_offload.tiering.p2p.data.nixl; print(1); exit()"
    assert classes(vllm, after=code, KVT_VLLM="1") == ["1"]


def test_kvts_own_lines_go_where_vllms_do(vllm: Path) -> None:
    before = """
import logging
theirs = logging.getLogger("vllm")
theirs.addHandler(logging.StreamHandler(sys.stdout))
theirs.setLevel(logging.INFO)
"""
    after = """
importlib.import_module(tier + ".data.nixl")
logging.getLogger("kvt").info("own-line")
logging.getLogger("kvt").debug("no-line")
"""
    words = classes(vllm, before, after, KVT_VLLM="1")
    assert "own-line" in words
    assert "no-line" not in words
    assert words[-4:] == OURS
