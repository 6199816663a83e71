# SPDX-License-Identifier: Apache-2.0
"""What users of such transports reported that can be seen in a whole
interpreter only. docs/reliability.md lists all of it.

Each case is an interpreter of its own: it looks at itself before anything of
kvt is there, and in the end.
"""

from __future__ import annotations

import json
import signal

from conftest import Engine, run_python

SIGNALS = """
import json, os, signal, sys, threading

signal.signal(signal.SIGHUP, signal.SIG_DFL)
# The first thread of a process makes the C library take a signal of its own.
thread = threading.Thread(target=int)
thread.start()
thread.join()

def look():
    with open("/proc/self/status") as file:
        return [line for line in file if line.startswith("Sig")]

seen = [look()]
import kvt
seen.append(look())
t = kvt.Transport(sys.argv[1], **json.loads(sys.argv[2]))
t.register(bytearray(4096))
seen.append(look())
t.close()
seen.append(look())
# Pending ones are nobody's doing.
words = [[line for line in part if "Pnd" not in line and "SigQ" not in line]
         for part in seen]
assert words == words[:1] * 4, words
assert len(words[0]) == 3
print("as before", flush=True)
os.kill(os.getpid(), signal.SIGHUP)
signal.pause()
"""


# B37
def test_signals_are_as_before_and_a_hangup_ends_the_program(
    engine: Engine,
) -> None:
    done = run_python(SIGNALS, engine.name, json.dumps(engine.options))
    assert done.returncode == -signal.SIGHUP, done.stderr
    assert done.stdout.splitlines()[-1] == "as before"


CYCLES = """
import gc, os, threading, time, warnings
import kvt

def count():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

def make():
    memory = bytearray(4096)
    t, u = kvt.Transport("local"), kvt.Transport("local")
    t.register(memory)
    u.register(memory)
    t.add_peer("u", u.metadata())
    t.other, u.other = u, t
    t.me = t

def wait_for(wanted):
    # Threads that have ended are counted a moment longer.
    until = time.monotonic() + 60
    while count() != wanted and time.monotonic() < until:
        time.sleep(0.001)
    assert count() == wanted, (wanted, count())

warnings.simplefilter("ignore")
tasks = count()[0]
kvt.Transport("local").close()
gc.collect()
gc.disable()
before = tasks, count()[1]
wait_for(before)
for _ in range(10):
    make()
assert count() > before
collector = threading.Thread(target=gc.collect)
collector.start()
collector.join()
wait_for(before)
"""


# B38
def test_a_cycle_that_another_thread_collects_leaves_nothing() -> None:
    done = run_python(CYCLES)
    assert (done.returncode, done.stderr) == (0, "")
