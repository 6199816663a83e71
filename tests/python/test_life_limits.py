# SPDX-License-Identifier: Apache-2.0
"""kvt in a process that may not do everything: each limit that a host program
may live under, with a writer and a target that are processes of their own.

Either everything works, or a call raises an error whose words name what is in
the way and what to do. In no case does the process end. What needs root (to
mount, to become another user) is skipped where that is not there.
"""

from __future__ import annotations

import json
import os
import platform
from typing import Any

import pytest

import kvt
from conftest import Engine, nixl_library, run_python

SKIP = 77

COMMON = """
import ctypes, json, os, resource, struct, sys
import kvt
libc = ctypes.CDLL(None, use_errno=True)

def skip(why):
    print(why, flush=True)
    os._exit(77)

def must(result):
    if result != 0:
        skip(os.strerror(ctypes.get_errno()))

def namespace(kinds):
    must(libc.unshare(kinds))

def mount(kind, place, flags=0, options=None):
    must(libc.mount(kind, place, kind, ctypes.c_ulong(flags), options))

def own_mounts():
    namespace(0x00020000)
    mount(b"none", b"/", 0x4000 | 0x40000)  # private, below it too

def own_processes():
    # The program goes on as the first process of a namespace.
    own_mounts()
    namespace(0x20000000)
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    mount(b"proc", b"/proc")

def become(user):
    if os.geteuid() != 0:
        skip("not root")
    os.setgid(user)
    os.setuid(user)
    # The change took that away.
    must(libc.prctl(4, 1, 0, 0, 0))

def forbid(*calls):
    # A seccomp filter: EPERM for these, by their numbers.
    ops = [(0x20, 0, 0, 0)]
    for at, number in enumerate(calls):
        ops.append((0x15, len(calls) - at, 0, number))
    ops += [(0x06, 0, 0, 0x7fff0000), (0x06, 0, 0, 0x00050001)]
    code = b"".join(struct.pack("HBBI", *op) for op in ops)
    held = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(ops), ctypes.addressof(held))
    must(libc.prctl(38, 1, 0, 0, 0))
    must(libc.prctl(22, 2, program, 0, 0))

def fill(place):
    with open(place, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

def files(more):
    last = max(int(name) for name in os.listdir("/proc/self/fd"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + more, hard))

options = json.loads(sys.argv[1])
"""

SCRIPT = (
    COMMON
    + """
told, tell = os.pipe()
wait, end = os.pipe()
if os.fork() == 0:
    os.close(end)
    TARGET
    memory = bytearray(4096)
    target = kvt.Transport(**options)
    target.register(memory)
    addr = kvt.region_of(memory).addr
    os.write(tell, struct.pack("Q", addr) + target.metadata())
    os.read(wait, 1)
    os._exit(0)
os.close(wait)
os.close(tell)
got = os.read(told, 1 << 20)
if not got:
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
addr, = struct.unpack("Q", got[:8])
try:
    WRITER
    memory = bytearray(4096)
    writer = kvt.Transport(**options)
    writer.register(memory)
    peer = writer.add_peer("target", got[8:])
    xfer = writer.write(peer, [(kvt.region_of(memory).addr, addr, 4096)])
    state = writer.wait(xfer, 60).state.name
    answer = {"state": state, "path": writer.peer_info(peer).path}
except kvt.Error as error:
    answer = {"error": type(error).__name__, "text": str(error)}
print(json.dumps(answer), flush=True)
os._exit(0)
"""
)

ENGINES = ["local", "nixl-only"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Not the fault engine, and NIXL without the shortcut."""
    if request.param == "local":
        return Engine("local", {})
    library = nixl_library()
    if library is None:
        if os.environ.get("KVT_REQUIRE_NIXL") == "1":
            pytest.fail("KVT_TEST_NIXL_15 must name a venv with NIXL")
        pytest.skip("KVT_TEST_NIXL_15 names no venv with NIXL")
    return Engine("nixl", {"nixl_library": library, "same_host": False})


@pytest.fixture
def local() -> Engine:
    return Engine("local", {})


def answer(
    engine: Engine, writer: str = "pass", target: str = "pass"
) -> dict[str, Any]:
    code = SCRIPT.replace("TARGET", target).replace("WRITER", writer)
    options = json.dumps({"engine": engine.name, **engine.options})
    done = run_python(code, options)
    if done.returncode == SKIP:
        pytest.skip(f"not possible here: {done.stdout.strip()}")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def refused(engine: Engine, **setup: str) -> str:
    found = answer(engine, **setup)
    assert "error" in found, found
    return f"{found['error']}: {found['text']}"


def works(engine: Engine, **setup: str) -> None:
    found = answer(engine, **setup)
    assert found == {"state": "DONE", "path": engine.name}


def test_without_a_limit(engine: Engine) -> None:
    works(engine)


def test_no_locked_memory(engine: Engine) -> None:
    """kvt locks none; NIXL does for RDMA alone."""
    none = "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))"
    works(engine, writer=none, target=none)


FULL = """
    own_mounts()
    mount(b"tmpfs", b"/dev/shm", 0, b"size=64k")
    fill("/dev/shm/full")
""".strip()


def test_a_full_dev_shm(engine: Engine) -> None:
    """kvt has nothing there, NIXL does without."""
    works(engine, writer=FULL, target=FULL)


def test_more_shared_memory_than_there_is() -> None:
    with pytest.raises(kvt.SystemCallFailed, match="ask for less"):
        kvt.SharedMemory(1 << 60)


READ_ONLY = """
    own_mounts()
    mount(b"/proc", b"/proc", 0x1000)
    mount(b"/proc", b"/proc", 0x1000 | 0x20 | 0x1)
    try:
        open("/proc/self/comm", "w")
        skip("/proc can be written")
    except OSError:
        pass
""".strip()


def test_a_read_only_proc(engine: Engine) -> None:
    works(engine, writer=READ_ONLY, target=READ_ONLY)


NONE = 'own_mounts(); mount(b"tmpfs", b"/proc")'


def test_no_proc(local: Engine) -> None:
    assert "cannot read /proc/" in refused(local, writer=NONE)


@pytest.mark.parametrize("more", [0, 2, 4, 6, 8, 10, 14])
def test_few_descriptors(local: Engine, more: int) -> None:
    """Enough for none, for some, at last for all."""
    found = answer(local, writer=f"files({more})")
    if "error" in found:
        assert "Too many open files" in found["text"]
        assert "ulimit -n" in found["text"]


@pytest.mark.parametrize("more", [4, 12, 30, 45])
def test_few_descriptors_do_not_end_a_process_with_nixl(
    engine: Engine, more: int
) -> None:
    """UCX would, at some of these numbers."""
    if engine.name == "local":
        pytest.skip("about NIXL")
    why = refused(engine, writer=f"files({more})")
    assert "open files" in why
    assert "ulimit -n" in why


def test_descriptors_that_run_out_later(engine: Engine) -> None:
    """A peer more than there are descriptors for."""
    late = """
    class Late(kvt.Transport):
        def add_peer(self, *args, **more):
            self.fileno()
            files(1)
            return super().add_peer(*args, **more)
    kvt.Transport = Late
    """.strip()
    found = answer(engine, writer=late)
    if engine.name == "local":
        assert "ulimit -n" in found["text"]


needs_numbers = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="numbers of system calls"
)


@needs_numbers
def test_a_filter_that_forbids_ptrace_access(local: Engine) -> None:
    why = refused(local, writer="forbid(310, 311)")
    assert why.startswith("AccessDenied")
    assert "seccomp" in why


@needs_numbers
def test_a_filter_is_no_limit_for_nixl(engine: Engine) -> None:
    """kvt's shortcut gives way to NIXL, and that to TCP."""
    if engine.name == "local":
        pytest.skip("about NIXL")
    both = {**engine.options, "same_host": True}
    works(Engine("nixl", both), writer="forbid(310, 311)")


def test_another_user(local: Engine) -> None:
    why = refused(local, target="become(65534)", writer="become(65533)")
    assert why.startswith("AccessDenied")
    assert "user 65534" in why
    assert "user 65533" in why
    assert "run both as one user" in why


def test_a_process_that_hides_its_memory(local: Engine) -> None:
    hide = "become(65534); libc.prctl(4, 0, 0, 0, 0)"
    why = refused(local, target=hide, writer="become(65534)")
    assert why.startswith("AccessDenied")
    assert "not dumpable" in why
    assert "PR_SET_DUMPABLE" in why


def test_another_pid_namespace(local: Engine) -> None:
    why = refused(local, target="own_processes()")
    assert why.startswith("Unsupported")
    assert "another pid namespace" in why


def test_another_pid_namespace_is_none_for_nixl(engine: Engine) -> None:
    if engine.name == "local":
        pytest.skip("about NIXL")
    both = {**engine.options, "same_host": True}
    works(Engine("nixl", both), target="own_processes()")


def test_a_thread_that_cannot_start() -> None:
    """As another user, who has no processes yet."""
    code = (
        COMMON
        + """
become(65532)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    kvt.Transport("local")
except kvt.Error as error:
    print(error)
"""
    )
    done = run_python(code, "{}")
    if done.returncode == SKIP:
        pytest.skip("only root can become another user")
    assert done.returncode == 0, done.stderr
    assert "thread" in done.stdout
