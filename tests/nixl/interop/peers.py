# SPDX-License-Identifier: Apache-2.0
"""The two sides of a test as objects: Kvt drives tests/nixl/kvt_peer.c, Plain
drives plain_agent.py. Both have memory with guard zones and an image of what
every byte of it must be."""

import glob
import json
import os
import random
import subprocess

GUARD = 4096
HERE = os.path.dirname(os.path.abspath(__file__))


class Refused(Exception):
    """The other process answered with an error."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class Process:
    def __init__(self, command, env):
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )

    def ask(self, line):
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self.process.wait(timeout=30)
            raise AssertionError(
                f"{type(self).__name__} ended with {code} at: {line[:100]}"
            )
        return answer.rstrip("\n")

    def kill(self):
        self.process.kill()
        self.forget()

    def forget(self):
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def end(self):
        """It closes by itself; its exit code."""
        self.process.stdin.close()
        code = self.process.wait(timeout=60)
        self.process.stdout.close()
        return code


class Memory:
    """Regions in one mapping, a guard zone around each, all of it seeded."""

    def __init__(self, side, sizes, seed):
        self.side = side
        total = GUARD + sum(size + GUARD for size in sizes)
        self.addr = side.map(total)
        self.regions = []
        at = self.addr + GUARD
        for size in sizes:
            self.regions.append((at, size))
            at += size + GUARD
        self.image = bytearray(random.Random(seed).randbytes(total))
        side.poke(self.addr, bytes(self.image))
        if sizes:
            side.register(self.regions)

    def read(self, addr, size):
        at = addr - self.addr
        assert 0 <= at and at + size <= len(self.image)
        return bytes(self.image[at : at + size])

    def expect(self, addr, data):
        """These bytes will be there."""
        at = addr - self.addr
        assert 0 <= at and at + len(data) <= len(self.image)
        self.image[at : at + len(data)] = data

    def check(self, what):
        real = self.side.peek(self.addr, len(self.image))
        if real == self.image:
            return
        at = next(i for i, pair in enumerate(zip(real, self.image)) if pair[0] != pair[1])
        bad = sum(a != b for a, b in zip(real, self.image))
        raise AssertionError(f"{what}: {bad} wrong bytes, the first at offset {at}")


def move_image(pieces, source, target, source_first):
    """What a transfer of (local, remote, size) pieces does to the images."""
    for local, remote, size in pieces:
        a, b = (local, remote) if source_first else (remote, local)
        target.expect(b, source.read(a, size))


class Kvt(Process):
    def __init__(self, place, name, tls=None, flags="", engine="nixl", env=None):
        more = {
            "KVT_NIXL_LIBRARY": library(place),
            "KVT_SAME_HOST": "0",
            **tls_env(tls),
            **(env or {}),
        }
        super().__init__([os.environ["KVT_TEST_PEER"], engine], more)
        self.name = name
        self.call("open", name, flags)

    def call(self, *words):
        answer = self.ask(" ".join(str(word) for word in words)).split(" ", 2)
        if answer[0] == "err":
            raise Refused(answer[1], answer[2] if len(answer) > 2 else "")
        assert answer[0] == "ok", answer
        return " ".join(answer[1:])

    def map(self, size):
        return int(self.call("map", size), 16)

    def poke(self, addr, data):
        self.call("poke", addr, data.hex())

    def peek(self, addr, size):
        return bytes.fromhex(self.call("peek", addr, size))

    def register(self, regions):
        self.call("register", *(n for region in regions for n in region))

    def metadata(self):
        return bytes.fromhex(self.call("metadata"))

    def add(self, peer, metadata):
        self.call("add", peer, metadata.hex() or "-")

    def start_add(self, peer, metadata):
        self.call("start", peer, metadata.hex())

    def reload(self, peer, metadata=b""):
        self.call("reload", peer, metadata.hex() or "-")

    def peer(self, peer):
        state, path, regions, code, *text = self.call("peer", peer).split(" ", 4)
        return {
            "state": state,
            "path": path,
            "regions": int(regions),
            "code": code,
            "text": text[0] if text else "",
        }

    @staticmethod
    def _result(answer):
        state, flags, code, done, *text = answer.split(" ", 4)
        return {
            "state": state,
            "quiescent": bool(int(flags) & 4),
            "code": code,
            "bytes_done": int(done),
            "text": text[0] if text else "",
        }

    def move(self, op, peer, pieces, note=b""):
        numbers = (n for piece in pieces for n in piece)
        answer = self.call(op.lower(), peer, note.hex() or "-", *numbers)
        return self._result(answer)

    def confirm_dead(self, peer):
        self.call("dead", peer)

    def prepare(self, peer, layout, runs):
        self.call("prepare", peer or "-", layout, *(n for run in runs for n in run))

    def blocks(self, op, peer, ours, theirs, pairs, note=b""):
        numbers = (n for pair in pairs for n in pair)
        answer = self.call(op, peer, note.hex() or "-", ours, theirs, *numbers)
        return self._result(answer)

    def notify(self, peer, note):
        self.call("notify", peer, note.hex())

    def note(self, seconds=30):
        sender, note = self.call("note", seconds).rsplit(" ", 1)
        return sender, b"" if note == "-" else bytes.fromhex(note)

    def bytes_by_path(self):
        nixl, local, _ = self.call("stats").split()
        return {"nixl": int(nixl), "local": int(local)}

    def quarantined(self):
        return int(self.call("stats").split()[2])


class Plain(Process):
    def __init__(self, place, name, tls=None, backends=("UCX",)):
        super().__init__(
            [f"{place}/bin/python", f"{HERE}/plain_agent.py"],
            # As kvt sets it: the wheel's EFA module and the system's
            # libibverbs do not bear each other.
            {"UCX_MODULES": "^efa", **tls_env(tls)},
        )
        self.name = name
        self.call("open", name, list(backends))

    def call(self, name, *arguments):
        answer = json.loads(self.ask(json.dumps([name, *arguments])))
        if "error" in answer:
            raise Refused("nixl", answer["error"])
        return answer["ok"]

    def map(self, size):
        return self.call("map", size)

    def poke(self, addr, data):
        self.call("poke", addr, data.hex())

    def peek(self, addr, size):
        return bytes.fromhex(self.call("peek", addr, size))

    def register(self, regions):
        self.call("register", regions)

    def metadata(self):
        return bytes.fromhex(self.call("metadata"))

    def partial(self, regions, conn, backends=()):
        return bytes.fromhex(self.call("partial", regions, conn, list(backends)))

    def add(self, metadata):
        return self.call("add", metadata.hex())

    def remove(self, name):
        self.call("remove", name)

    def move(self, op, peer, pieces, note=b""):
        return self.call("move", op, peer, pieces, note.hex())

    def notify(self, peer, note):
        self.call("notify", peer, note.hex())

    def notes(self, seconds=30):
        return [(name, bytes.fromhex(note)) for name, note in self.call("notes", seconds)]


def library(place):
    """The C library of a virtual environment's wheel."""
    found = glob.glob(
        f"{place}/lib/python3*/site-packages/.nixl_cu1[23].mesonpy.libs/libnixl_capi.so"
    )
    assert found, f"no NIXL in {place}"
    return found[0]


def tls_env(tls):
    return {"UCX_TLS": tls} if tls else {}
