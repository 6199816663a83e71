# SPDX-License-Identifier: Apache-2.0
"""Several processes, fork and spawn, and every way for an interpreter to end.

Blocks go between processes of their own (agent.py). The endings run in fresh
interpreters, which must leave with the status of their own choice, in time and
without a word: no crash, no deadlock, no warning.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import kvt
from conftest import BLOCK, PATIENCE, Engine, Pair, run_python

AGENT = Path(__file__).with_name("agent.py")


class Remote:
    """A process that runs agent.py."""

    def __init__(self, engine: Engine) -> None:
        options = {"engine": engine.name, **engine.options}
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(AGENT),
             json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.name = f"agent{self.process.pid}"
        description = self.ask("describe")
        self.metadata, self.addr = description.values()

    def say(self, *words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def ask(self, *words: Any) -> Any:
        self.say(*words)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def meet(self, other: Remote) -> None:
        self.ask("add", other.name, other.metadata, other.addr)

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors


@pytest.fixture
def remotes(engine: Engine) -> Iterator[list[Remote]]:
    made = [Remote(engine) for _ in range(3)]
    yield made
    for remote in made:
        if remote.process.poll() is None:
            remote.process.kill()
        remote.process.communicate()


def test_three_processes_write_round(remotes: list[Remote]) -> None:
    for i, remote in enumerate(remotes):
        remote.ask("fill", 7, i + 1)
        for other in remotes:
            if other is not remote:
                remote.meet(other)
    for i, remote in enumerate(remotes):
        following = remotes[(i + 1) % 3]
        assert remote.ask("write", following.name, [7], [3]) == "DONE"
        assert following.ask("note") == following.name
        assert following.ask("block", 3) == [i + 1]
        assert following.ask("block", 4) == [0]
    for remote in remotes:
        remote.say("end")
        remote.say("leave")
        assert remote.end() == (0, "")


def test_a_peer_that_is_killed_is_disconnected(
    remotes: list[Remote], request: pytest.FixtureRequest
) -> None:
    one, two, three = remotes
    one.meet(two)
    one.meet(three)
    assert one.ask("write", two.name, [1], [1]) == "DONE"
    two.process.send_signal(signal.SIGKILL)
    two.process.wait()
    answer = one.ask("write", two.name, [1], [1])
    assert answer in ("PeerDisconnected", "Lost", "EngineError")
    if "[local]" in request.node.name:
        assert answer == "PeerDisconnected"
    assert one.ask("write", three.name, [1], [1]) == "DONE"


def test_agents_that_never_close_leave_quietly(remotes: list[Remote]) -> None:
    one, two, three = remotes
    one.meet(two)
    two.meet(one)
    assert one.ask("write", two.name, [1], [2]) == "DONE"
    for remote in (two, one, three):
        remote.say("leave")
        assert remote.end() == (0, "")


# ------------------------------------------------------------- fork and spawn


def in_child(connection: Connection) -> None:
    with Pair(Engine("local", {})).source as source:
        connection.send(source.stats().peers)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_spawned_process_has_transports_of_its_own(method: str) -> None:
    with kvt.Transport("local"):
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        child = context.Process(target=in_child, args=(theirs,))
        child.start()
        assert ours.poll(PATIENCE)
        assert ours.recv() == 1
        child.join(PATIENCE)
        assert child.exitcode == 0


FORK = """
import gc, logging, os, sys
import kvt
logging.basicConfig(level=logging.DEBUG, stream=open(os.devnull, "w"))
memory = bytearray(4096)
t = kvt.Transport(ENGINE)
u = kvt.Transport("local")
t.register(memory)
u.register(bytearray(64))
peer = t.add_peer("u", u.metadata())
fd = t.fileno()
pid = os.fork()
if pid == 0:
    for call in (t.poll, t.metadata, t.stats, t.metrics, t.notifications,
                 t.fileno, lambda: t.agent_name, lambda: t.peer_loaded(peer),
                 lambda: t.register(bytearray(1)), lambda: t.wait(1),
                 lambda: t.write(peer, [(1, 2, 3)]), lambda: t.cancel([1])):
        try:
            call()
        except kvt.Forked:
            pass
        else:
            os._exit(3)
    mine = kvt.Transport("local")
    mine.register(memory)
    other = kvt.Transport("local")
    mine.add_peer("other", other.metadata())
    HOW
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert t.peer_loaded(peer)
xfer = t.warm_up(peer)
assert t.wait(xfer, 60).ok
t.close()
u.close()
"""


# B36
@pytest.mark.parametrize(
    "how",
    [
        "os._exit(0)",
        "sys.exit(0)",
        "t.close(); u.close(); mine.close(); sys.exit(0)",
        "del t, u, mine, other; gc.collect(); sys.exit(0)",
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_told_and_ends(how: str) -> None:
    code = FORK.replace("HOW", how).replace("ENGINE", '"local"')
    done = run_python("import warnings; warnings.simplefilter('ignore')" + code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_fork_of_a_real_nixl_is_told(engine: Engine) -> None:
    if engine.name != "nixl":
        pytest.skip("about NIXL")
    library = engine.options["nixl_library"]
    opening = f'"nixl", nixl_library={library!r}'
    code = """
import os, kvt
t = kvt.Transport(OPEN)
pid = os.fork()
if pid == 0:
    try:
        t.metadata()
    except kvt.Forked:
        t.close()
        os._exit(0)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
t.close()
""".replace("OPEN", opening)
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")


# -------------------------------------------------------------------- endings

BEGIN = f"""
import gc, logging, os, sys, threading, time
import kvt
memory = bytearray(64 * {BLOCK})
addr = kvt.region_of(memory).addr
t = kvt.Transport("fault:local")
u = kvt.Transport("local")
t.register(memory)
u.register(memory)
peer = t.add_peer("u", u.metadata())
runs = [(addr, {BLOCK}, 64)]
local, remote = t.prepare("l", runs), t.prepare("r", runs, peer)
def write(**options):
    return t.write_blocks(peer, local, range(32), remote, range(32, 64),
                          **options)
"""

ENDINGS = {
    "idle": "",
    "in flight": "[write() for _ in range(100)]",
    "held": "t.set_fault('hold=*'); [write() for _ in range(100)]",
    "hanging": "t.set_fault('hang=*'); [write() for _ in range(100)]",
    "lost for ever": "t.set_fault('never=*'); write()",
    "collected in flight": """
import warnings
warnings.simplefilter("ignore")
write()
del t, write
gc.collect()
""",
    "collected the other way round": """
import warnings
warnings.simplefilter("ignore")
write()
del memory, u
gc.collect()
""",
    "a cycle": "t.me = t; t.u = u; u.t = t; write()",
    "daemons": """
def poll():
    while True:
        write()
        t.poll()
        t.stats()
        try:
            t.wait(write(), 1)
        except kvt.Error:
            pass
def other():
    while True:
        v = kvt.Transport("local")
        v.register(bytearray(64))
        v.close()
def quietly(f):
    try:
        f()
    except kvt.Error:
        pass
for f in (poll, poll, other):
    threading.Thread(target=quietly, args=(f,), daemon=True).start()
while t.stats().done < 20:
    pass
""",
    "a daemon in wait": """
t.set_fault("hang=*")
xfer = write()
def wait():
    try:
        t.wait(xfer)
    except kvt.Error:
        pass
threading.Thread(target=wait, daemon=True).start()
""",
    "debug logs": """
logging.basicConfig(level=logging.DEBUG, stream=open(os.devnull, "w"))
t.set_fault("fail=*")
[write() for _ in range(10)]
""",
    "a handler that raises": """
class Handler(logging.Handler):
    def emit(self, record):
        raise RuntimeError
logging.getLogger("kvt").addHandler(Handler())
logging.getLogger("kvt").setLevel(1)
sys.unraisablehook = lambda *args: None
t.set_fault("disconnect=*")
write()
""",
    "atexit before and after": """
import atexit
atexit.register(lambda: t.closed)
atexit.register(t.close)
write()
""",
    "an object that polls when it dies": """
class Last:
    def __del__(self):
        self.t.poll()
        self.t.close()
        try:
            kvt.Transport("local")
        except Exception:
            pass
sys.modules["last"] = Last()
sys.modules["last"].t = t
""",
    "closed": "t.close(); u.close()",
    "exec": """
write()
os.execv(sys.executable, [sys.executable, "-c", ""])
""",
    "_exit": "write(); os._exit(0)",
}


LOST = "a transfer is lost: its memory is quarantined"


@pytest.mark.parametrize("name", ENDINGS)
def test_an_interpreter_ends_quietly(name: str) -> None:
    done = run_python(BEGIN + ENDINGS[name])
    # What is in flight for ever is said, once each, and is the only word.
    words = set(done.stderr.splitlines()) - {LOST}
    assert (done.returncode, done.stdout, words) == (0, "", set())


def test_an_exception_ends_with_its_own_status() -> None:
    done = run_python(BEGIN + "write(); raise SystemExit(7)")
    assert (done.returncode, done.stderr) == (7, "")
    done = run_python(BEGIN + "write(); raise KeyError('mine')")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 'mine'")


# B38
def test_a_signal_ends_a_wait() -> None:
    code = (
        BEGIN
        + """
import signal
t.set_fault("hang=*")
xfer = write()
signal.setitimer(signal.ITIMER_REAL, 0.05)
signal.signal(signal.SIGALRM, lambda *args: (_ for _ in ()).throw(KeyError))
try:
    t.wait(xfer)
except KeyError:
    t.set_fault("")
    assert t.wait(xfer, 60).ok
    os._exit(5)
"""
    )
    done = run_python(code)
    assert done.returncode == 5, done.stderr


# B40
def test_an_interpreter_ends_quietly_with_nixl(engine: Engine) -> None:
    if engine.name != "nixl":
        pytest.skip("about NIXL")
    options = {k: v for k, v in engine.options.items()}
    code = (
        BEGIN.replace('"fault:local"', f'"nixl", **{options!r}').replace(
            '"local"', f'"nixl", **{options!r}'
        )
        + "[write() for _ in range(100)]"
    )
    done = run_python(code)
    # UCX warns of requests that kvt leaves alone on purpose, NIXL says that
    # the other agent was closed first.
    said = (done.stdout + done.stderr).splitlines()
    theirs = ("UCX  WARN", "nixl_agent.cpp")
    words = {line for line in said if not any(t in line for t in theirs)}
    words -= {LOST}
    assert (done.returncode, words) == (0, set())


def test_another_interpreter_is_refused() -> None:
    code = """
import kvt
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
interpreter = interpreters.create()
interpreters.run_string(interpreter, '''
try:
    import kvt
except ImportError as error:
    print("refused")
''')
interpreters.destroy(interpreter)
kvt.Transport("local").close()
"""
    if sys.version_info[:2] not in ((3, 10), (3, 11), (3, 12), (3, 13)):
        pytest.skip("the private module of this Python is not known")
    done = run_python(code)
    assert (done.returncode, done.stdout.strip()) == (0, "refused"), done.stderr


def test_a_second_import_is_the_same_library() -> None:
    code = """
import sys, kvt
first = kvt
for name in [name for name in sys.modules if name.startswith("kvt")]:
    del sys.modules[name]
import kvt
assert kvt is not first
with kvt.Transport("local") as t:
    t.register(bytearray(64))
with first.Transport("local") as t:
    t.register(bytearray(64))
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_but_the_entry_is_exported() -> None:
    path = Path(sys.modules["kvt._kvt"].__file__ or "")
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("nm is not there")
    symbols = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert symbols == {"PyInit__kvt"}
    assert os.path.getsize(path) < 4_000_000
