# SPDX-License-Identifier: Apache-2.0
"""One agent as a process: -m nixl_agent_support.node DESCRIPTOR FLAVOUR.

The flavour "kvt" puts kvt.nixl in NIXL's place first; "plain" leaves NIXL
there. The rest is the same for both, and knows only NIXL's names.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import time
from typing import Any

import numpy as np

from stage import serve

LIMIT = 60.0


def choose(flavour: str) -> None:
    """What is to be found under NIXL's name from now on."""
    if flavour == "kvt":
        import kvt.nixl

        kvt.nixl.install()


def api_of(flavour: str) -> Any:
    choose(flavour)
    return importlib.import_module("nixl._api")


class Node:
    """An agent with one buffer of bytes. Methods are what a test says."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.agent: Any = None
        self.memory = np.zeros(0, dtype=np.uint8)
        self.kept: dict[str, Any] = {}

    def names(self) -> dict[str, Any]:
        """NIXL's public names, and what their calls take."""
        bindings = importlib.import_module("nixl._bindings")
        found: dict[str, Any] = {
            "api": [n for n in dir(self.api) if n.startswith("nixl_")],
            "bindings": [n for n in dir(bindings) if not n.startswith("_")],
        }
        for name in ("nixl_agent", "nixl_agent_config"):
            made = getattr(self.api, name)
            for call in ["__init__", *dir(made)]:
                if not call.startswith("_") or call == "__init__":
                    taken = inspect.signature(getattr(made, call)).parameters
                    found[f"{name}.{call}"] = list(taken)
        for name in ("nixlXferDList", "nixlRegDList", "nixlRemoteDList"):
            made = getattr(bindings, name)
            found[name] = [n for n in dir(made) if not n.startswith("_")]
        telemetry = bindings.nixlXferTelemetry()
        found["telemetry"] = [
            n for n in dir(telemetry) if not n.startswith("_")
        ]
        return found

    def open(self, name: str, size: int, **config: Any) -> int:
        """The buffer's address."""
        self.agent = self.api.nixl_agent(
            name, self.api.nixl_agent_config(**config)
        )
        self.memory = np.zeros(size, dtype=np.uint8)
        self.kept["registered"] = self.agent.register_memory(
            [(self.addr, size, 0, "")], "DRAM"
        )
        return self.addr

    @property
    def addr(self) -> int:
        return int(self.memory.ctypes.data)

    def fill(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        self.memory[offset:end] = np.frombuffer(data, dtype=np.uint8)

    def look(self, offset: int, length: int) -> bytes:
        return self.memory[offset : offset + length].tobytes()

    def metadata(self) -> bytes:
        return bytes(self.agent.get_agent_metadata())

    def partial(self, offset: int, length: int, connect: bool) -> bytes:
        """Of one piece of the buffer, registered for itself; or of none."""
        descs = self.agent.get_reg_descs(
            [(self.addr + offset, length, 0, "")], "DRAM"
        )
        if length == 0:
            descs.clear()
        return bytes(self.agent.get_partial_agent_metadata(descs, connect))

    def register(self, offset: int, length: int) -> None:
        self.agent.register_memory(
            [(self.addr + offset, length, 0, "")], "DRAM"
        )

    def add(self, metadata: bytes) -> bytes:
        return bytes(self.agent.add_remote_agent(metadata))

    def remove(self, name: str) -> None:
        self.agent.remove_remote_agent(name)

    def check(self, name: str, addr: int = 0, length: int = 0) -> bool:
        descs = None
        if length:
            descs = self.agent.get_xfer_descs([(addr, length, 0)], "DRAM")
        return bool(self.agent.check_remote_metadata(name, descs))

    def prepare(self, key: str, side: str, rows: list[tuple[int, ...]]) -> None:
        """Rows of 3 or 5."""
        made = np.array(rows, dtype=np.uint64)
        self.kept[key] = self.agent.prep_xfer_dlist(side, made, "DRAM")

    def make(
        self,
        key: str,
        op: str,
        local: str,
        ours: Any,
        remote: str,
        theirs: Any,
        note: bytes = b"",
    ) -> None:
        self.kept[key] = self.agent.make_prepped_xfer(
            op, self.kept[local], ours, self.kept[remote], theirs, note
        )

    def initialize(
        self,
        key: str,
        op: str,
        ours: list[tuple[int, int, int]],
        theirs: list[tuple[int, int, int]],
        name: str,
        note: bytes = b"",
    ) -> None:
        self.kept[key] = self.agent.initialize_xfer(
            op,
            self.agent.get_xfer_descs(ours, "DRAM"),
            self.agent.get_xfer_descs(theirs, "DRAM"),
            name,
            note,
        )

    def run(self, key: str) -> str:
        """Posts it and waits for its end."""
        state = self.agent.transfer(self.kept[key])
        return self._wait(key, state)

    def wait(self, key: str) -> str:
        return self._wait(key, "PROC")

    def _wait(self, key: str, state: str) -> str:
        until = time.monotonic() + LIMIT
        while state == "PROC":
            if time.monotonic() > until:
                return "PROC for ever"
            time.sleep(0.0005)
            state = self.agent.check_xfer_state(self.kept[key])
        return state

    def post(self, key: str) -> str:
        return str(self.agent.transfer(self.kept[key]))

    def state(self, key: str) -> str:
        return str(self.agent.check_xfer_state(self.kept[key]))

    def forget(self, key: str) -> None:
        self.kept.pop(key).release()

    def send(self, name: str, note: bytes) -> None:
        self.agent.send_notif(name, note)

    def notes(self, count: int) -> dict[str, list[bytes]]:
        """So many, or what there is at the limit."""
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            found = self.agent.update_notifs()
            if sum(map(len, found.values())) >= count:
                break
            time.sleep(0.001)
        taken, self.agent.notifs = dict(self.agent.notifs), {}
        return taken

    def serialize(self, rows: list[tuple[int, int, int]]) -> bytes:
        descs = self.agent.get_xfer_descs(rows, "DRAM")
        return bytes(self.agent.get_serialized_descs(descs))

    def serialize_reg(self, rows: list[tuple[int, int, int, str]]) -> bytes:
        descs = self.agent.get_reg_descs(rows, "DRAM")
        return bytes(self.agent.get_serialized_descs(descs))

    def deserialize(self, data: bytes) -> list[tuple[Any, ...]]:
        descs = self.agent.deserialize_descs(data)
        return [descs[i] for i in range(descs.descCount())]


def main() -> None:
    descriptor, flavour = sys.argv[1:]
    serve(Node(api_of(flavour)), descriptor)


if __name__ == "__main__":
    main()
