# SPDX-License-Identifier: Apache-2.0
"""What docs/security.md says, where no other test proves it: who can talk to a
transport's socket, what lies open to other users, what is inherited, and what
is left when a transport, or its process, is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import kvt
from conftest import BLOCK, Engine, Pair, run_python

NOBODY = 65534
NAME = re.compile(rb"kvt-[0-9a-f]{32}")
"""Of agents and of sockets alike."""
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can")


def listeners() -> set[bytes]:
    """The abstract names that kvt's sockets have in this network namespace."""
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines():
        if match := re.search(r" @(kvt-[0-9a-f]{32})$", line):
            found.add(match[1].encode())
    return found


def own_listener(transport: kvt.Transport) -> bytes:
    """Found by its name, which the metadata has."""
    metadata = transport.metadata()
    names = [name for name in listeners() if name in metadata]
    assert len(names) == 1
    return names[0]


def is_dropped(name: bytes, greeting: bytes) -> bool:
    """Whether a stranger's connection is ended without an answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(60)
        stranger.connect(b"\0" + name)
        try:
            stranger.send(greeting)
            return stranger.recv(1) == b""
        except (BrokenPipeError, ConnectionResetError):
            return True


@pytest.mark.parametrize("greeting", [b"", b"x", bytes(4096)])
def test_a_stranger_of_the_same_user_is_dropped(
    local_pair: Pair, greeting: bytes
) -> None:
    """It would have to know the target's incarnation: its metadata."""
    name = own_listener(local_pair.target)
    assert is_dropped(name, greeting)
    assert local_pair.target.notifications() == []
    local_pair.source.notify(local_pair.peer, b"still there")
    while not (notes := local_pair.target.notifications()):
        pass
    assert notes[0].data == b"still there"


@root
def test_another_user_is_dropped_before_it_speaks(local_pair: Pair) -> None:
    name = own_listener(local_pair.target)
    child = os.fork()
    if child == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(b"\0" + name)
            os._exit(0 if stranger.recv(1) == b"" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert local_pair.target.notifications() == []


@root
def test_another_user_cannot_open_what_peers_map() -> None:
    """The memfds have no name; the way to them is guarded by ptrace."""
    shared = kvt.SharedMemory(4096)
    transport = kvt.Transport("local")
    transport.register(shared)
    here = os.getpid()
    memfds = [
        name
        for name in os.listdir("/proc/self/fd")
        if "memfd:kvt" in _link(f"/proc/self/fd/{name}")
    ]
    assert len(memfds) == 2  # the memory and the gate
    child = os.fork()
    if child == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        for name in memfds:
            try:
                os.open(f"/proc/{here}/fd/{name}", os.O_RDONLY)
            except PermissionError:
                continue
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    transport.close()
    shared.close()


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def test_no_descriptor_is_inherited(local_pair: Pair) -> None:
    shared = kvt.SharedMemory(4096)
    local_pair.source.register(shared)
    local_pair.source.wait(local_pair.write([1], [2]), 60)
    local_pair.source.fileno()
    kinds = ("memfd:kvt", "anon_inode:", "socket:")
    checked = 0
    for name in os.listdir("/proc/self/fd"):
        link = _link(f"/proc/self/fd/{name}")
        if link.lstrip("/").startswith(kinds) and int(name) > 2:
            checked += 1
            assert fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert checked >= 4
    local_pair.source.deregister(shared)
    shared.close()


def test_local_listens_on_no_network(local_pair: Pair) -> None:
    local_pair.source.wait(local_pair.write([1], [2]), 60)
    ours = {
        _link(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
    }
    for family in ("tcp", "tcp6", "udp", "udp6"):
        table = Path(f"/proc/self/net/{family}")
        if table.exists():
            for line in table.read_text().splitlines()[1:]:
                assert f"socket:[{line.split()[9]}]" not in ours


LISTEN = """
import json, os, sys
import kvt
transport = kvt.Transport(**json.loads(sys.argv[1]))
mine = set()
for name in os.listdir("/proc/self/fd"):
    try:
        mine.add(os.readlink(f"/proc/self/fd/{name}"))
    except FileNotFoundError:
        pass
for line in open("/proc/self/net/tcp").readlines()[1:]:
    fields = line.split()
    if f"socket:[{fields[9]}]" in mine and fields[3] == "0A":
        print("LISTENS", fields[1].split(":")[0], flush=True)
os._exit(0)
"""


def test_nixl_listens_where_it_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    options = json.dumps({"engine": engine.name, **engine.options})
    done = run_python(LISTEN, options)
    assert done.returncode == 0, done.stderr
    lines = [x for x in done.stdout.splitlines() if x.startswith("LISTENS")]
    if engine.name == "nixl":
        assert lines == ["LISTENS 0100007F"]
    else:
        assert lines == []


def test_metadata_has_no_content_and_no_names(engine: Engine) -> None:
    """Addresses and numbers, but neither memory nor where this runs."""
    memory = bytearray(b"SECRETKV" * 512)
    with engine.open() as transport:
        transport.register(memory)
        metadata = transport.metadata()
        assert transport.agent_name.encode() in metadata
    assert b"SECRETKV" not in metadata
    assert os.getcwd().encode() not in metadata
    assert sys.executable.encode() not in metadata
    # A short host name may be anywhere by chance.
    if len(socket.gethostname()) >= 8:
        assert socket.gethostname().encode() not in metadata


def test_names_and_incarnations_are_never_the_same(engine: Engine) -> None:
    with engine.open() as one, engine.open() as two:
        assert one.agent_name != two.agent_name
        assert re.fullmatch("kvt-[0-9a-f]{32}", one.agent_name)
        assert own_listeners_differ(one, two)


def own_listeners_differ(one: kvt.Transport, two: kvt.Transport) -> bool:
    return not set(socket_names(one)) & set(socket_names(two))


def socket_names(transport: kvt.Transport) -> list[bytes]:
    names = NAME.findall(transport.metadata())
    return [name for name in names if name != transport.agent_name.encode()]


LEAVE = f"""
import json, os, sys
import kvt
options = json.loads(sys.argv[1])
memory = bytearray({BLOCK})
shared = kvt.SharedMemory(4096)
s, t = kvt.Transport(**options), kvt.Transport(**options)
for each in (s, t):
    each.register([memory, shared])
peer = s.add_peer("t", t.metadata())
addr = kvt.region_of(memory).addr
assert s.wait(s.write(peer, [(addr, addr + 64, 64)]), 60).ok
for each in (s, t):
    print(each.metadata().hex(), flush=True)
HOW
"""


@pytest.mark.parametrize(
    "how", ["s.close(); t.close()", "os.kill(os.getpid(), 9)"]
)
def test_nothing_is_left_behind(
    engine: Engine, how: str, tmp_path: Path
) -> None:
    """No file, in the directories of the process; no name of a socket."""
    options = json.dumps({"engine": engine.name, **engine.options})
    code = LEAVE.replace("HOW", how)
    done = subprocess.run(
        [sys.executable, "-c", code, options],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, -9), done.stderr
    assert os.listdir(tmp_path) == []
    blobs = done.stdout.split()
    names = {
        name for blob in blobs for name in NAME.findall(bytes.fromhex(blob))
    }
    assert names
    assert listeners() & names == set()
    assert [file for file in os.listdir("/dev/shm") if "kvt" in file] == []


def test_files_in_dev_shm_have_no_name(engine: Engine) -> None:
    """NIXL's UCX has some; no name of them is left to be opened, or to stay
    behind."""
    with engine.open() as transport:
        transport.register(bytearray(BLOCK))
        links = {
            _link(f"/proc/self/fd/{name}")
            for name in os.listdir("/proc/self/fd")
        }
        mine = {link for link in links if link.startswith("/dev/shm/")}
        assert {
            link for link in mine if not link.endswith("(deleted)")
        } == set()
