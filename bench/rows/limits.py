# SPDX-License-Identifier: Apache-2.0
"""kvt beside what the machine can do at all (the program `limits`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.candidates.pair import Pair
from bench.candidates.program import Program
from bench.figures import Figures, Line, best
from bench.rows.speed import speed
from bench.stage import Stage

MOVED = 64 << 20
ANY_THREADS = ("--threads", "1,2")
ANY_BATCH = ("--iov", "16,64,256")


class Rounds:
    """All variants of a program over the rounds."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.found: dict[str, list[float]] = {}

    def measure(self) -> float:
        lines = self.program.round()
        for line in lines:
            speed = line["bytes"] / line["seconds"] / 1e9
            self.found.setdefault(line["name"], []).append(speed)
        return max(each[-1] for each in self.found.values())

    def best(self) -> Figures:
        return best((Figures(*each) for each in self.found.items()), high=True)


def shape(stage: Stage, block_len: int) -> tuple[int, int]:
    """Blocks of a pool and of a transfer; small ones take long, so that fewer
    are moved."""
    moved = MOVED if block_len >= 4096 else MOVED // 4
    return stage.pool // block_len, moved // block_len


def compare(
    stage: Stage,
    block_len: int,
    memory: str,
    options: tuple[str, ...],
    order: str = "scattered",
) -> tuple[Figures, Figures]:
    """kvt, whose caller sleeps on the descriptor, and the limit."""
    blocks, count = shape(stage, block_len)
    run = {"scattered": 1, "half": 2, "contiguous": count}[order]
    pair = stage.pair("kvt", blocks, block_len, memory)
    pair.check(count, run)
    program = Program(
        stage.places.build,
        "limits",
        *options,
        "--order",
        order,
        "--block-bytes",
        str(block_len),
        "--blocks",
        str(count),
        "--pool",
        str(blocks),
    )
    try:
        limit = Rounds(program)
        found = stage.take_turns(
            {"kvt, fd": ours(pair, count, run), "limit": limit.measure}
        )
        return found["kvt, fd"], limit.best()
    finally:
        program.end()


def ours(pair: Pair, count: int, run: int) -> Callable[[], float]:
    return lambda: speed(pair, count, run, "fd", 3)


def sizes(stage: Stage) -> Iterator[Line]:
    some = (4096, 65536, 1 << 20)
    every = tuple(256 << n for n in range(0, 13, 2))
    for block_len in some if stage.quick else every:
        options = ("--method", "pvw", *ANY_THREADS, *ANY_BATCH)
        found = compare(stage, block_len, "private", options)
        yield line("private", block_len, found)


def few(stage: Stage) -> tuple[int, ...]:
    return (4096, 65536) if stage.quick else (4096, 65536, 1 << 20)


def memfd(stage: Stage) -> Iterator[Line]:
    for block_len in few(stage):
        options = ("--from", "memfd", "--to", "memfd", "--method", "memcpy")
        found = compare(stage, block_len, "memfd", (*options, *ANY_THREADS))
        yield line("sealed memfd", block_len, found)


def file(stage: Stage) -> Iterator[Line]:
    for block_len in few(stage):
        options = ("--from", "shm", "--to", "shm", "--method", "self")
        found = compare(
            stage, block_len, "file", (*options, *ANY_THREADS, *ANY_BATCH)
        )
        yield line("unsealed file", block_len, found)


def line(memory: str, block_len: int, found: tuple[Figures, Figures]) -> Line:
    size = f"{block_len >> 10} KiB" if block_len >= 1024 else f"{block_len} B"
    return Line(f"{memory}, {size}", "GB/s", *found, "times", 0.9)
