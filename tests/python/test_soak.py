# SPDX-License-Identifier: Apache-2.0
"""A short form of ./dev soak, over local and, where it is found, over NIXL:
peers die under a writer, transfers are cancelled, peers that live are reloaded.
Proved are that each transfer that was accepted ended once, and that when all
peers are gone, and again when the transport is closed, as many descriptors of
each kind and as many threads of each name are there as before. Sockets that
NIXL keeps are NIXL's, since kvt has no TCP of its own: they may stay until the
close.

Then that the figures of a soak say what they should. No time is asserted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import nixl_library

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from soak.figures import fit, grown, slope_of
from soak.proc import Sample, descriptors, kind_of, threads
from soak.run import ROOT
from soak.shape import PEERS

SECONDS = 20
PATIENCE = 600.0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("soak")
    env = dict(os.environ)
    only = ["local"]
    library = nixl_library()
    if library is not None:
        env["KVT_NIXL_LIBRARY"] = library
        only.append("nixl")
    done = subprocess.run(
        [sys.executable, "-m", "soak.run", "--seconds", str(SECONDS),
         "--out", str(out), "--only", *only],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    assert list(found) == only
    return found


@pytest.fixture(params=["local", "nixl"])
def soak(request: pytest.FixtureRequest, results: dict[str, Any]) -> Any:
    if request.param not in results:
        if os.environ.get("KVT_REQUIRE_NIXL") == "1":
            pytest.fail("KVT_TEST_NIXL_15 must name a venv with NIXL")
        pytest.skip("KVT_TEST_NIXL_15 names no venv with NIXL")
    return results[request.param]


def change(soak: Any, of: str, before: str, after: str) -> dict[str, int]:
    stages = soak["stages"]
    return grown(stages[before][of], stages[after][of])


def test_each_transfer_ends_once(soak: Any) -> None:
    run = soak["run"]
    counts = run["counts"]
    assert run["wrong"] == []
    assert run["kills"] > 0
    assert counts["cancels"] > 0
    # The first ones are made when the peers are connected.
    assert counts["accepted"] + counts.get("refused", 0) == (
        run["writes"] + PEERS
    )


def test_descriptors_go_with_the_peers(soak: Any) -> None:
    kept = change(soak, "kinds", "opened", "removed")
    if soak["title"] != "kvt, engine local":
        kept.pop("tcp socket", None)
    assert kept == {}


def test_a_close_leaves_nothing(soak: Any) -> None:
    assert change(soak, "kinds", "started", "closed") == {}
    assert change(soak, "threads by name", "started", "closed") == {}


def test_threads_do_not_come_with_peers(soak: Any) -> None:
    """Those of the engine's pool start when they are first needed."""
    come = change(soak, "threads by name", "opened", "removed")
    assert come.pop("kvt-copy-N", 0) <= 4
    assert come.pop("kvt-local", 0) <= 1
    # One that made a call for Python may not have ended when they were counted.
    assert {name for name in come if name.startswith("kvt")} <= {"kvt-call"}


# -------------------------------------------------------------------- figures


def test_a_line_has_its_slope_and_no_error() -> None:
    xs = [0.0, 1.0, 2.0, 3.0]
    assert fit(xs, [5 + 3 * x for x in xs]) == pytest.approx((3, 0))


def test_a_level_has_no_slope_but_its_noise_as_error() -> None:
    slope, error = fit([0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 2.0, 1.0])
    assert slope == pytest.approx(0)
    assert error == pytest.approx((1 / 2 / 5) ** 0.5)


def test_the_beginning_of_a_run_is_not_fitted() -> None:
    samples = [
        Sample(float(at), 0, 100 if at < 20 else 7 + at, 1, 1)
        for at in range(101)
    ]
    slope = slope_of(samples, "fds")
    assert slope.per_hour == pytest.approx(3600)
    assert (slope.first, slope.last) == (27, 107)


@pytest.mark.parametrize(
    ("link", "kind"),
    [
        ("socket:[12]", "tcp socket"),
        ("socket:[13]", "unbound socket"),
        ("anon_inode:[eventfd]", "eventfd"),
        ("/memfd:kvt-gate (deleted)", "memfd kvt-gate"),
        ("pipe:[5]", "pipe"),
        ("/proc/123/maps", "/proc/N/maps"),
        ("/srv/models/file", "file"),
    ],
)
def test_descriptors_have_kinds(link: str, kind: str) -> None:
    assert kind_of(link, {"12": "tcp"}) == kind


def test_a_process_is_looked_at() -> None:
    before = descriptors(os.getpid())
    ends = os.pipe()
    assert grown(before, descriptors(os.getpid())) == {"pipe": 2}
    for end in ends:
        os.close(end)
    assert grown(before, descriptors(os.getpid())) == {}
    assert sum(threads(os.getpid()).values()) >= 1
