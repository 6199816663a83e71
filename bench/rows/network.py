# SPDX-License-Identifier: Apache-2.0
"""Between two network namespaces on this machine."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.candidates.pair import KINDS, ROOT, Pair
from bench.candidates.program import Program
from bench.figures import Figures, Line, best
from bench.rows.limits import Rounds
from bench.rows.speed import all_waits
from bench.stage import Stage

HOSTS = str(ROOT / "bench/hosts.sh")
POOL = 64 << 20

SETTINGS = {
    "target's thread spins": ("--no-progress",),
    "spinning threads on both sides": (),
    "threads sleep 1 ms": (
        "--pthr-delay",
        "1000",
        "--target-pthr-delay",
        "1000",
    ),
}
"""Raw NIXL's progress settings: that which does best is kvt's rival."""


@contextmanager
def hosts() -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """What stands before a command to run it on host a, and on host b."""
    name = f"bench-{os.getpid()}"
    subprocess.run(
        ["bash", HOSTS, "up", name], check=True, stdout=subprocess.DEVNULL
    )
    try:
        run = ("bash", HOSTS, "run", name)
        yield (*run, "a"), (*run, "b")
    finally:
        subprocess.run(["bash", HOSTS, "down", name], check=False)


class RawNixl:
    """A target and an initiator of raw_nixl, with one of the SETTINGS."""

    def __init__(
        self,
        stage: Stage,
        on: tuple[tuple[str, ...], tuple[str, ...]],
        options: tuple[str, ...],
        shape: tuple[str, ...],
        socket: Path,
    ) -> None:
        env = {
            "UCX_TLS": "tcp",
            "UCX_MODULES": "^efa",
            "KVT_NIXL_LIBRARY": stage.places.library(),
        }
        place = stage.places.build
        common = (*options, *shape, "--socket", str(socket))
        self.target = Program(
            place,
            "raw_nixl",
            *common,
            "--role",
            "target",
            env=env,
            prefix=on[1],
        )
        self.initiator = Program(
            place,
            "raw_nixl",
            *common,
            *("--role", "initiator", "--lists", "create,prepared"),
            *("--split", "0,256", "--inflight", "1,4"),
            env=env,
            prefix=on[0],
            beside=self.target,
        )
        self.rounds = Rounds(self.initiator)

    def end(self) -> None:
        self.initiator.end()
        self.target.end()


def tcp(stage: Stage) -> Iterator[Line]:
    with hosts() as on, tempfile.TemporaryDirectory() as folder:
        for block_len in 4096, 65536:
            found = compare(stage, on, block_len, Path(folder))
            what = (
                f"{POOL // 4 // block_len:,} x {block_len >> 10} KiB scattered"
            )
            yield Line(f"TCP, {what}", "GB/s", *found, "times", 0.95)


def compare(
    stage: Stage,
    on: tuple[tuple[str, ...], tuple[str, ...]],
    block_len: int,
    folder: Path,
) -> tuple[Figures, Figures]:
    blocks, count = POOL // block_len, POOL // 4 // block_len
    shape = (
        *("--block-bytes", str(block_len)),
        *("--blocks", str(count), "--pool", str(blocks)),
    )
    pair = Pair(
        KINDS["kvt over TCP"], stage.places, blocks, block_len, prefixes=on
    )
    raw: dict[str, RawNixl] = {}
    try:
        pair.check(count, 1)
        tried = list(SETTINGS.items())[: 1 if stage.quick else None]
        for number, (name, options) in enumerate(tried):
            socket = folder / f"{block_len}-{number}"
            raw[name] = RawNixl(stage, on, options, shape, socket)
        ours = all_waits(pair, count, 1, 3)
        theirs: dict[str, Callable[[], float]] = {
            name: each.rounds.measure for name, each in raw.items()
        }
        found = stage.take_turns({**ours, **theirs})
        rivals = []
        for name, each in raw.items():
            figures = each.rounds.best()
            figures.name += f", {name}"
            rivals.append(figures)
        return best((found[name] for name in ours), True), best(rivals, True)
    finally:
        pair.end()
        for each in raw.values():
            each.end()
