# SPDX-License-Identifier: Apache-2.0
"""Proves what reaches NIXL: how many transfers of which kinds and addresses,
in which order memory is registered, with which parameters a backend is made,
and that one that hangs does not hang the caller.

NIXL is a stand-in that writes down what it is asked, since no GPU is needed to
see that; each case of sglang_support/vram.py has a process of its own. Numbers
are those of the table in docs/sglang.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import PATIENCE

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The library, of KVT_TEST_FAKE_NIXL or compiled here."""
    made = os.environ.get("KVT_TEST_FAKE_NIXL")
    if made:
        return made
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler, and KVT_TEST_FAKE_NIXL names no library")
    place = tmp_path_factory.mktemp("nixl") / "libfake_nixl_capi.so"
    subprocess.run(
        [
            compiler,
            "-std=c11",
            "-D_GNU_SOURCE",
            "-shared",
            "-fPIC",
            "-pthread",
            *(f"-I{ROOT / d}" for d in ("include", "src", "tests/support")),
            str(ROOT / "tests/support/fake_nixl_capi.c"),
            "-o",
            str(place),
        ],
        check=True,
    )
    return str(place)


def run(case: str, stand_in: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang_support.vram", case],
        env={
            **os.environ,
            "PYTHONPATH": str(HERE),
            "KVT_ENGINE": "fault:nixl",
            "KVT_NIXL_LIBRARY": stand_in,
            "KVT_SAME_HOST": "0",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["done"], done.stderr
    assert done.returncode == 0, done.stderr


def test_04_mixed_kinds(stand_in: str) -> None:
    run("mixed_kinds", stand_in)


# B26
def test_05_vram_is_registered_before_dram(stand_in: str) -> None:
    run("register_order", stand_in)


def test_09_a_post_that_nixl_fails(stand_in: str) -> None:
    run("post_fails", stand_in)


def test_14_partial_multi_post_of_three_kinds(stand_in: str) -> None:
    run("partial_post", stand_in)


def test_25_gpu_thread_that_hangs(stand_in: str) -> None:
    run("hang", stand_in)


def test_25_gpu_thread_is_not_the_callers(stand_in: str) -> None:
    run("threads", stand_in)


def test_26_params_reach_the_backend(stand_in: str) -> None:
    run("params", stand_in)


def test_lists_of_a_gpu(stand_in: str) -> None:
    pytest.importorskip("numpy", reason="numpy is not there")
    run("vram_lists", stand_in)
