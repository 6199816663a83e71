# SPDX-License-Identifier: Apache-2.0
"""An agent of the real `nixl` package, in a process of its own.

It runs in whichever virtual environment its NIXL is installed in, does what it
is told by one line of JSON on standard input, and answers with one line. It
knows nothing of kvt. What it is told to do is what NIXL's users do: register
memory, exchange metadata, initialize_xfer, transfer, check_xfer_state,
get_new_notifs.
"""

import ctypes
import json
import mmap
import os
import signal
import sys
import time

# What NIXL prints must not get between our answers.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

# Ends with the process that started it.
ctypes.CDLL(None).prctl(1, signal.SIGKILL)

from nixl import nixl_agent, nixl_agent_config  # noqa: E402


class Agent:
    def __init__(self):
        self.agent = None
        self.maps = []
        self.handles = []

    def open(self, name, backends):
        self.agent = nixl_agent(name, nixl_agent_config(backends=backends))
        return sorted(self.agent.backends)

    def map(self, size):
        memory = mmap.mmap(-1, size)
        addr = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.maps.append(memory)
        return addr

    @staticmethod
    def poke(addr, data):
        data = bytes.fromhex(data)
        ctypes.memmove(addr, data, len(data))

    @staticmethod
    def peek(addr, size):
        return ctypes.string_at(addr, size).hex()

    def _reg_descs(self, regions):
        if not regions:
            # The package's own helper takes no empty list.
            bindings = sys.modules[nixl_agent.__module__].nixlBind
            return bindings.nixlRegDList(bindings.DRAM_SEG)
        rows = [(addr, size, 0, "") for addr, size in regions]
        return self.agent.get_reg_descs(rows, mem_type="DRAM")

    def register(self, regions):
        self.agent.register_memory(self._reg_descs(regions))

    def metadata(self):
        return self.agent.get_agent_metadata().hex()

    def partial(self, regions, conn, backends):
        descs = self._reg_descs(regions)
        return self.agent.get_partial_agent_metadata(descs, conn, backends).hex()

    def add(self, data):
        name = self.agent.add_remote_agent(bytes.fromhex(data))
        return name.decode() if isinstance(name, bytes) else name

    def remove(self, name):
        self.agent.remove_remote_agent(name)

    def move(self, op, peer, pieces, note):
        """One request; waits for its end and returns its last state."""
        local = [(here, size, 0) for here, there, size in pieces]
        remote = [(there, size, 0) for here, there, size in pieces]
        handle = self.agent.initialize_xfer(
            op,
            self.agent.get_xfer_descs(local, mem_type="DRAM"),
            self.agent.get_xfer_descs(remote, mem_type="DRAM"),
            peer,
            bytes.fromhex(note),
        )
        state = self.agent.transfer(handle)
        limit = time.monotonic() + 30
        while state == "PROC" and time.monotonic() < limit:
            state = self.agent.check_xfer_state(handle)
        if state == "DONE":
            self.agent.release_xfer_handle(handle)
        else:
            self.handles.append(handle)
        return state

    def notify(self, peer, note):
        self.agent.send_notif(peer, bytes.fromhex(note))

    def notes(self, seconds):
        """Waits for some: [[sender, hex], …] in order for each sender."""
        limit = time.monotonic() + seconds
        while True:
            found = self.agent.get_new_notifs()
            if found or time.monotonic() > limit:
                break
            time.sleep(0.001)
        return [[name, note.hex()] for name in found for note in found[name]]

    @staticmethod
    def ping():
        return os.getpid()


def serve():
    agent = Agent()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"ok": getattr(agent, name)(*arguments)}
        except Exception as error:  # NIXL's own exceptions have no base
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


serve()
# NIXL's teardown in a dying interpreter is not what is tested.
os._exit(0)
