# SPDX-License-Identifier: Apache-2.0
"""kvt as a guest in a program, in ways that no other test has: exit() of C with
transfers in flight and without Python's own end, threads that die, signals that
come while kvt's threads are there, the variables of the environment, and
KVT_LOG. Each runs in a fresh interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from conftest import BLOCK, PATIENCE, Engine

BEGIN = f"""
import ctypes, json, os, signal, sys, threading
import kvt
libc = ctypes.CDLL(None)
options = json.loads(sys.argv[1])
memory = bytearray(128 * {BLOCK})
addr = kvt.region_of(memory).addr
runs = [(addr, {BLOCK}, 128)]
ONLY = range(0, 64, 2), range(64, 128, 2)
def begin():
    global t, u, peer, local, remote
    t, u = kvt.Transport(**options), kvt.Transport(**options)
    for each in (t, u):
        each.register(memory)
    peer = t.add_peer("u", u.metadata())
    local, remote = t.prepare("l", runs), t.prepare("r", runs, peer)
def write(**more):
    return t.write_blocks(peer, local, ONLY[0], remote, ONLY[1], **more)
"""


def run(
    engine: Engine, code: str, **env: str
) -> subprocess.CompletedProcess[str]:
    options = json.dumps({"engine": engine.name, **engine.options})
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", BEGIN + code, options],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """UCX writes to the standard output, too."""
    return (done.stdout.splitlines() or [""])[-1]


@pytest.mark.parametrize("call", ["exit", "quick_exit", "_exit"])
def test_exit_of_c_with_transfers_in_flight(engine: Engine, call: str) -> None:
    """Its status is the program's own: nothing of kvt, or of NIXL, crashes in
    the handlers that exit() runs."""
    code = f"""
begin()
for _ in range(200):
    write()
libc.{call}(7)
"""
    done = run(engine, code)
    assert done.returncode == 7, done.stderr


def test_threads_that_die_leave_their_transfers(engine: Engine) -> None:
    """What a thread began is everybody's: it goes on, and others poll it."""
    code = """
begin()
started = []
threads = [
    threading.Thread(target=lambda: started.append(write(user_data=1)))
    for _ in range(16)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
left = set(started)
assert len(left) == 16
while left:
    for result in t.poll():
        left.remove(result.id)
        assert result.ok, result
t.close()
u.close()
print("all")
"""
    done = run(engine, code)
    assert (done.returncode, last_line(done)) == (0, "all"), done.stderr


def test_signals_come_to_the_program_s_own_threads(engine: Engine) -> None:
    """kvt's threads block them all, so that a handler of the host, which may
    not expect it, never runs on one. Then a hundred signals change nothing."""
    code = """
came = []
signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
begin()
assert t.wait(write(), 60).ok
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
wanted = (1 << signal.SIGUSR1 - 1) | (1 << signal.SIGINT - 1)
wanted |= 1 << signal.SIGTERM - 1 | 1 << signal.SIGCHLD - 1
ours = 0
for task in os.listdir("/proc/self/task"):
    try:
        with open(f"/proc/self/task/{task}/status") as file:
            fields = dict(line.split(":", 1) for line in file)
    except (FileNotFoundError, ProcessLookupError):
        continue  # it has ended
    if fields["Name"].strip().startswith("kvt"):
        ours += 1
        blocked = int(fields["SigBlk"], 16)
        assert blocked & wanted == wanted, fields["Name"]
assert ours >= 2
for _ in range(100):
    xfer = write()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert t.wait(xfer, 60).ok
assert came
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
t.close()
u.close()
print("well")
"""
    done = run(engine, code)
    assert (done.returncode, last_line(done)) == (0, "well"), done.stderr


USERS = {
    "UCX_TLS": "tcp,self,cma",
    "UCX_MODULES": "^efa,^cuda",
    "UCX_DEBUG_SIGNO": "SIGUSR2",
    "UCX_LOG_LEVEL": "fatal",
    "NIXL_LOG_LEVEL": "FATAL",
}
ENVIRONMENT = """
libc.getenv.restype = ctypes.c_char_p
names = json.loads(sys.argv[1]).pop("names")
del options["names"]
begin()
found = {name: (libc.getenv(name.encode()) or b"").decode() for name in names}
t.close()
u.close()
print(json.dumps(found))
"""


def environment(engine: Engine, **env: str) -> dict[str, str]:
    named = Engine(engine.name, {**engine.options, "names": list(USERS)})
    done = run(named, ENVIRONMENT, **env)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(last_line(done))
    return found


def test_the_user_s_variables_are_left_alone(engine: Engine) -> None:
    assert environment(engine, **USERS) == USERS


def test_others_are_set_for_ucx_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in USERS:
        monkeypatch.delenv(name, raising=False)
    found = environment(engine)
    wanted = {name: "" for name in USERS}
    if engine.name == "nixl":
        wanted |= {"UCX_MODULES": "^efa", "UCX_DEBUG_SIGNO": "0"}
    assert found == wanted


# -------------------------------------------------------------------- KVT_LOG

LOST = """
options.update(engine="fault:local", grace=0.01, log=False)
begin()
t.set_fault("never=*")
try:
    t.wait(write(), 60)
except kvt.Lost:
    pass
os._exit(0)
"""


@pytest.fixture
def local() -> Engine:
    return Engine("local", {})


def test_kvt_log_shows_what_nobody_listens_to(local: Engine) -> None:
    done = run(local, LOST, KVT_LOG="warning")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert any(
        line.startswith("kvt[") and "] warning: " in line and "lost" in line
        for line in lines
    ), lines


@pytest.mark.parametrize("word", ["error", "off", ""])
def test_kvt_log_shows_no_more_than_it_says(local: Engine, word: str) -> None:
    done = run(local, LOST, KVT_LOG=word)
    assert (done.returncode, done.stderr) == (0, "")


def test_kvt_log_with_another_word_is_refused(local: Engine) -> None:
    code = """
try:
    begin()
except kvt.InvalidArgument as error:
    print(error)
"""
    done = run(local, code, KVT_LOG="verbose")
    assert "KVT_LOG" in done.stdout
    assert "verbose" in done.stdout
