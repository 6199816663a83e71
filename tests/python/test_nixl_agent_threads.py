# SPDX-License-Identifier: Apache-2.0
"""kvt.nixl's agent in several threads at once, as SGLang's workers use it.

Each thread has blocks of its own and goes through the life of a transfer again
and again, over one agent, while another adds the peer again, asks for metadata
and takes notifications. Every block and every note must be there at the end,
and nothing may be left in the transport.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from nixl_agent_support.agents import BLOCK, COUNT, Two, run
from nixl_agent_support.nodes import environment

THREADS = 4
ROUNDS = 40


def worker(two: Two, mine: list[int], errors: list[BaseException]) -> None:
    try:
        for i in range(ROUNDS):
            seed = mine[0] * ROUNDS + i
            data = [two.fill("one", j, seed + j) for j in mine]
            ours, theirs = two.lists()
            handle = two.one.make_prepped_xfer(
                "WRITE", ours, mine, theirs, np.array(mine[::-1])
            )
            assert run(two.one, handle, f"{mine[0]}-{i}") == "DONE"
            for j, found in zip(mine[::-1], data, strict=True):
                assert two.block("other", j) == found
            if i % 2:
                handle.release()
            again = two.one.initialize_xfer(
                "READ",
                two.descs("one", *mine),
                two.descs("other", *mine),
                "other",
            )
            assert run(two.one, again) == "DONE"
            assert [two.block("one", j) for j in mine[::-1]] == data
    except BaseException as error:
        errors.append(error)


def bystander(two: Two, stop: threading.Event, errors: list[Any]) -> None:
    metadata = two.other.get_agent_metadata()
    try:
        while not stop.is_set():
            assert two.one.add_remote_agent(metadata) == b"other"
            assert two.one.check_remote_metadata("other")
            two.other.update_notifs()
    except BaseException as error:
        errors.append(error)


@pytest.mark.parametrize("engine", ["local", "nixl"])
def test_threads_share_an_agent(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    for name, value in environment(engine).items():
        monkeypatch.setenv(name, value)
    two = Two()
    errors: list[BaseException] = []
    stop = threading.Event()
    size = COUNT // THREADS
    workers = [
        threading.Thread(
            target=worker,
            args=(two, list(range(i * size, (i + 1) * size)), errors),
        )
        for i in range(THREADS)
    ]
    other = threading.Thread(target=bystander, args=(two, stop, errors))
    other.start()
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    while not errors and len(two.other.notifs.get("one", [])) < (
        THREADS * ROUNDS
    ):
        pass
    stop.set()
    other.join()
    assert not errors
    expected = {
        f"{i * size}-{j}" for i in range(THREADS) for j in range(ROUNDS)
    }
    assert {n.decode() for n in two.other.notifs["one"]} == expected
    gc.collect()
    stats = two.core.stats()
    assert (stats.layouts, stats.inflight, stats.undrained) == (0, 0, 0)
    assert stats.bytes_written == stats.bytes_read
    assert stats.bytes_written == THREADS * ROUNDS * size * BLOCK
