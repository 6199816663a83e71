# SPDX-License-Identifier: Apache-2.0
"""What NIXL's own Python examples do, half of each in a process of its own.

Run as example_node DESCRIPTOR FLAVOUR. The calls, their forms and their order
are those of the examples, for two agents "target" and "initiator"; only the
metadata goes over the test's connection, where the examples use NIXL's
listener. A tensor is numpy with torch's names.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import time
from types import ModuleType
from typing import Any

import numpy as np

from nixl_agent_support.node import api_of
from stage import LIMIT, serve

ROWS, COLUMNS = 16, 32
PIECE, PIECES = 256, 10


class Tensor:
    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape = array.shape
        self.device = "cpu"

    def __getitem__(self, index: int) -> Tensor:
        return Tensor(self.array[index])

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def numel(self) -> int:
        return int(self.array.size)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def get_device(self) -> int:
        return -1

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)


def until(ready: Any) -> Any:
    limit = time.monotonic() + LIMIT / 2
    while time.monotonic() < limit:
        if answer := ready():
            return answer
        time.sleep(0.0002)
    raise AssertionError("it does not end")


class Node:
    """Methods named after an example are its half of a role."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.agent: Any = None

    def open(self, name: str, sign: int, **config: Any) -> bytes:
        """An agent whose tensor has rows of 1, 2, …, or of -1, -2, …; its
        metadata."""
        self.agent = None
        made = self.api.nixl_agent_config(True, False, 0, **config)
        self.agent = self.api.nixl_agent(name, made)
        self.other = "target" if name == "initiator" else "initiator"
        rows = np.arange(1, ROWS + 1, dtype=np.float32) * sign
        self.tensor = Tensor(np.repeat(rows[:, None], COLUMNS, axis=1))
        self.registered = self.agent.register_memory(self.tensor)
        assert self.registered
        return bytes(self.agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> None:
        added = self.agent.add_remote_agent(metadata)
        assert added == self.other.encode()
        until(lambda: self.agent.check_remote_metadata(self.other))

    def halves(self) -> list[list[float]]:
        """The one value of each half of each row."""
        found = []
        for row in self.tensor.array:
            pair = [np.unique(half) for half in np.split(row, 2)]
            assert [len(half) for half in pair] == [1, 1]
            found.append([float(half[0]) for half in pair])
        return found

    def leave(self) -> None:
        self.agent.deregister_memory(self.registered)

    # Parts of examples.

    def _rows(self) -> Any:
        tensor = self.tensor
        return self.agent.get_xfer_descs([tensor[i] for i in range(ROWS)])

    def _note(self) -> bytes:
        """The next message; the examples have one at a time."""
        notes = until(self.agent.get_new_notifs)
        ((sender, (note,)),) = notes.items()
        assert sender == self.other
        return bytes(note)

    def _finish(self, *handles: Any) -> None:
        waiting = list(handles)

        def done() -> bool:
            for handle in list(waiting):
                state = self.agent.check_xfer_state(handle)
                assert state in ("DONE", "PROC")
                if state == "DONE":
                    waiting.remove(handle)
            return not waiting

        until(done)

    def _run(self, handle: Any, note: bytes = b"") -> None:
        assert self.agent.transfer(handle, note) in ("DONE", "PROC")
        self._finish(handle)

    # basic_two_peers: the target says where its rows are, and is read.

    def basic_target(self) -> None:
        agent = self.agent
        agent.send_notif("initiator", agent.get_serialized_descs(self._rows()))
        assert self._note() == b"Done_reading"
        self.leave()

    def basic_initiator(self) -> None:
        agent = self.agent
        theirs = agent.deserialize_descs(self._note())
        handle = agent.initialize_xfer(
            "READ", self._rows(), theirs, "target", "Done_reading"
        )
        self._run(handle)
        agent.remove_remote_agent("target")
        agent.release_xfer_handle(handle)
        self.leave()

    # expanded_two_peers: reads by index side by side, then writes of tuples
    # and of an array, then the same reads again with other messages.

    def expanded_target(self) -> list[bytes]:
        agent, tensor = self.agent, self.tensor
        text = agent.get_serialized_descs(self._rows())
        about = (tensor.data_ptr(), COLUMNS * tensor.element_size())
        agent.send_notif("initiator", pickle.dumps((text, about)))
        heard: list[bytes] = []
        while len(heard) < 10:
            notes = until(agent.get_new_notifs)
            heard += notes["initiator"]
        self.leave()
        return sorted(heard)

    def expanded_initiator(self) -> None:
        agent = self.agent
        text, (base, size) = pickle.loads(self._note())
        theirs = agent.prep_xfer_dlist("target", agent.deserialize_descs(text))
        ours = agent.prep_xfer_dlist("", self._rows())
        reads = []
        for i in range(4):
            rows = [i, i + 4, i + 8]
            reads.append(
                agent.make_prepped_xfer(
                    "READ", ours, rows, theirs, rows[::-1], f"read {i}".encode()
                )
            )
        writes = [
            self._halves(base, size, rows, form)
            for rows, form in (([12, 13], list), ([14, 15], self._array))
        ]
        for handles in (reads, writes):
            for handle in handles:
                assert agent.transfer(handle) in ("DONE", "PROC")
            self._finish(*handles)
        for i, handle in enumerate(reads):
            agent.transfer(handle, f"read {i} again".encode())
        self._finish(*reads)
        agent.remove_remote_agent("target")
        for handle in reads + writes:
            agent.release_xfer_handle(handle)
        agent.release_dlist_handle(ours)
        agent.release_dlist_handle(theirs)
        self.leave()

    def _array(self, rows: Any) -> Any:
        return np.array(rows, dtype=np.uint64)

    def _halves(self, base: int, size: int, rows: list[int], form: Any) -> Any:
        """Writes the second half of an even row, the first of an odd one."""
        lists = []
        for start in (self.tensor.data_ptr(), base):
            places = [
                (start + row * size + (row % 2 == 0) * size // 2, size // 2, 0)
                for row in rows
            ]
            lists.append(self.agent.get_xfer_descs(form(places), "cpu"))
        note = f"write {rows}".encode()
        return self.agent.initialize_xfer("WRITE", *lists, "target", note)

    # Blocking send and receive: the receiver says where, and waits for the
    # sender's word; the sender for the transfer.

    def blocking_target(self) -> None:
        agent = self.agent
        agent.send_notif("initiator", agent.get_serialized_descs(self._rows()))
        until(lambda: agent.check_remote_xfer_done("initiator", b"sent"))

    def blocking_initiator(self) -> None:
        agent = self.agent
        theirs = agent.deserialize_descs(self._note())
        self._run(
            agent.initialize_xfer(
                "WRITE", self._rows(), theirs, "target", b"sent and gone"
            )
        )

    # The storage example's way, without the storage: the target moves its rows
    # to or from what an initiator names, and says that it has.

    def asked_target(self, operation: str) -> None:
        agent = self.agent
        note = self._note()
        assert note[:8].strip() == operation.encode()
        theirs = agent.deserialize_descs(note[8:])
        handle = agent.initialize_xfer(
            operation, self._rows(), theirs, "initiator"
        )
        self._run(handle)
        agent.release_xfer_handle(handle)
        agent.send_notif("initiator", b"COMPLETE")

    def asked_initiator(self, operation: str) -> None:
        agent = self.agent
        text = agent.get_serialized_descs(self._rows())
        agent.send_notif("target", operation.ljust(8).encode() + text)
        until(lambda: agent.check_remote_xfer_done("target", b"COMPLETE"))

    # Telemetry of a transfer.

    def figures_target(self) -> None:
        agent = self.agent
        agent.send_notif("initiator", agent.get_serialized_descs(self._rows()))

    def figures_initiator(self) -> tuple[int, int, str]:
        agent = self.agent
        theirs = agent.deserialize_descs(self._note())
        handle = agent.initialize_xfer("READ", self._rows(), theirs, "target")
        self._run(handle)
        found = agent.get_xfer_telemetry(handle)
        assert found.startTime > 0
        assert found.postDuration >= 0
        assert found.xferDuration >= 0
        backend = agent.query_xfer_backend(handle)
        return found.totalBytes, found.descCount, backend

    # partial_md_example: both agents in this process. What the metadata does
    # not have is not found, until it comes.

    def partial(self) -> list[str]:
        config = self.api.nixl_agent_config(True, False, 0)
        target = self.api.nixl_agent("target", config)
        agent = self.agent = self.api.nixl_agent("initiator", config)
        self.other = "target"
        pools = [
            [np.full(PIECE, i + 1, np.uint8) for _ in range(PIECES)]
            for i in range(3)
        ]
        lists = [
            owner.get_reg_descs(
                [(int(p.ctypes.data), PIECE, 0, "test") for p in pool], "DRAM"
            )
            for pool, owner in zip(pools, (target, target, agent), strict=True)
        ]
        for made, owner in zip(lists, (target, target, agent), strict=True):
            assert owner.register_memory(made) is not None
        first, second, ours = (made.trim() for made in lists)
        said = []
        for i, theirs in enumerate((first, second)):
            try:
                agent.initialize_xfer("READ", ours, theirs, "target", b"UUID")
            except Exception as error:
                said.append(type(error).__name__)
            agent.add_remote_agent(
                target.get_partial_agent_metadata(lists[i], True, ["UCX"])
            )
            until(lambda t=theirs: agent.check_remote_metadata("target", t))
            handle = agent.initialize_xfer(
                "READ", ours, theirs, "target", b"UUID"
            )
            self._run(handle)
            until(lambda: target.check_remote_xfer_done("initiator", b"UUID"))
            said.append(str(sorted({int(p[0]) for p in pools[2]})))
            agent.release_xfer_handle(handle)
        agent.remove_remote_agent("target")
        for made, owner in zip(lists, (target, target, agent), strict=True):
            owner.deregister_memory(made)
        return said


def _be_torch() -> None:
    """NIXL 1.3 imports torch, and has a stand-in of its own for it here."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        torch = sys.modules["torch"] = ModuleType("torch")
    torch.Tensor = Tensor


def main() -> None:
    descriptor, flavour = sys.argv[1:]
    _be_torch()
    serve(Node(api_of(flavour)), descriptor)


if __name__ == "__main__":
    main()
