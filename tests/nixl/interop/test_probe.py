# SPDX-License-Identifier: Apache-2.0
"""Proves that with KVT_OPEN_PROBE_METADATA nothing that plain metadata does to
NIXL reaches the host: it is loaded by a process of its own first.

The blobs that kill NIXL are found anew, by giving a plain agent single-bit
flips that kvt's structure check takes; a host that does not probe dies of them
too. KVT_PROBE puts a script in the program's place, which counts or hangs. What
the process leaves behind is looked up in /proc: children, zombies, descriptors.
"""

import os
import random
import time

import pytest

import mutations
from loader import Loader
from peers import Memory, Refused

FLIPS_MAX = 3000
ROUNDS_MAX = 5
KILLERS = 3


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        main = file.read().split()
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            main += file.read().split()
    return sorted(set(main))


def wait_for(claim, seconds=30):
    limit = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < limit, "it does not come true"


def find_killers(blob, name, place):
    """Flips of one bit that a plain agent dies of. Which do depends on where its
    memory lies: there was a run in which none of the first thousand did."""
    loader = Loader(place, name)
    killers = []
    for seed in range(1, ROUNDS_MAX + 1):
        made = list(mutations.make(mutations.one_bit, blob, FLIPS_MAX, seed=seed))
        for flip in dict.fromkeys(mutations.taken(made)):
            if len(killers) < KILLERS and loader.load(flip) == "crash":
                killers.append(flip)
        if killers:
            break
    loader.end()
    assert killers, f"no flip kills NIXL any more, of {ROUNDS_MAX} x {FLIPS_MAX}"
    return killers


def script(tmp_path, text):
    path = tmp_path / "probe.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def count_script(tmp_path):
    log = tmp_path / "log"
    log.write_text("")
    real = os.environ["KVT_TEST_PROBE"]
    path = script(tmp_path, f"echo probed >>{log}\nexec {real}")
    return path, lambda: len(log.read_text().split())


def test_what_kills_nixl_does_not_kill_the_host(alike):
    plain = alike.plain("victim")
    theirs = Memory(plain, [4096] * 4, seed=2)
    blob = plain.metadata()
    killers = find_killers(blob, "victim", alike.place)
    kvt = alike.kvt(flags="probe")
    ours = Memory(kvt, [4096], seed=1)
    kvt.add("good", blob)
    for killer in killers:
        with pytest.raises(Refused, match="KVT_EMETADATA.*signal"):
            kvt.add("bad", killer)
        with pytest.raises(Refused, match="KVT_ENOENT"):
            kvt.peer("bad")
        piece = [(ours.regions[0][0], theirs.regions[0][0], 4096)]
        assert kvt.move("WRITE", "good", piece)["state"] == "done"
    theirs.expect(theirs.regions[0][0], ours.read(*ours.regions[0]))
    theirs.check("the writes between the killers")
    assert children(kvt.process.pid) == []
    # And they do kill one that does not probe.
    bare = alike.kvt()
    with pytest.raises(AssertionError, match="Kvt ended with -"):
        bare.add("bad", killers[0])
    bare.forget()


def test_mutations_that_pass_the_check_leave_the_host_alive(alike):
    plain = alike.plain("victim")
    Memory(plain, [4096] * 4, seed=2)
    blob = plain.metadata()
    kvt = alike.kvt(flags="probe")
    taken = []
    for kind in (mutations.one_bit, mutations.one_byte, mutations.moved):
        made = list(mutations.make(kind, blob, 500, seed=4))
        taken += random.Random(5).sample(mutations.taken(made), 4)
    for damaged in taken:
        try:
            kvt.add("mutant", damaged)
        except Refused as refused:
            assert refused.code in ("KVT_EMETADATA", "KVT_EENGINE", "KVT_EINVAL")
    assert children(kvt.process.pid) == []
    kvt.add("good", blob)


def test_the_same_bytes_are_probed_once(alike, tmp_path):
    path, probed = count_script(tmp_path)
    plain = alike.plain()
    Memory(plain, [4096], seed=2)
    before = plain.metadata()
    kvt = alike.kvt(flags="probe", env={"KVT_PROBE": path})
    kvt.add("peer", before)
    kvt.add("peer", before)
    kvt.add("other", before)
    kvt.reload("peer", before)
    kvt.reload("peer")
    assert probed() == 1
    Memory(plain, [4096], seed=3)
    kvt.reload("peer", plain.metadata())
    assert probed() == 2


def test_metadata_with_our_trailer_is_not_probed(alike, tmp_path):
    path, probed = count_script(tmp_path)
    other = alike.kvt()
    Memory(other, [4096], seed=2)
    kvt = alike.kvt(flags="probe", env={"KVT_PROBE": path})
    kvt.add("peer", other.metadata())
    assert probed() == 0


def test_a_probe_that_hangs_holds_up_nobody_else(alike, tmp_path):
    """One after another: it is waited for while others are written to; its time
    ends; the transport is closed with another one at work."""
    plain = alike.plain()
    theirs = Memory(plain, [4096], seed=2)
    path = script(tmp_path, f"[ -e {tmp_path}/hang ] || exec {os.environ['KVT_TEST_PROBE']}\nexec sleep 1000")
    kvt = alike.kvt(flags="probe", engine="nixl:probe_s=5", env={"KVT_PROBE": path})
    ours = Memory(kvt, [4096], seed=1)
    kvt.add("good", plain.metadata())
    (tmp_path / "hang").touch()
    Memory(plain, [4096], seed=3)
    kvt.start_add("slow", plain.metadata())
    wait_for(lambda: children(kvt.process.pid) != [])
    piece = [(ours.regions[0][0], theirs.regions[0][0], 4096)]
    for _ in range(50):
        assert kvt.move("WRITE", "good", piece)["state"] == "done"
    assert kvt.peer("slow")["state"] == "adding"
    Memory(plain, [4096], seed=4)
    with pytest.raises(Refused, match="KVT_ETIMEDOUT.*probe_s"):
        kvt.add("slower", plain.metadata())
    wait_for(lambda: children(kvt.process.pid) == [])
    Memory(plain, [4096], seed=5)
    kvt.start_add("slowest", plain.metadata())
    wait_for(lambda: children(kvt.process.pid) != [])
    (last,) = children(kvt.process.pid)
    assert kvt.end() == 0
    assert not os.path.exists(f"/proc/{last}")


def test_a_missing_program_is_said_when_the_transport_opens(alike):
    with pytest.raises(Refused, match="KVT_EUNSUPPORTED.*KVT_PROBE.*no program"):
        alike.kvt(flags="probe", env={"KVT_PROBE": "/nonexistent/kvt-probe"})


def test_a_program_that_is_another_is_said(alike, tmp_path):
    plain = alike.plain()
    kvt = alike.kvt(flags="probe", env={"KVT_PROBE": script(tmp_path, "exit 3")})
    with pytest.raises(Refused, match="KVT_EENGINE.*could not start NIXL.*3"):
        kvt.add("peer", plain.metadata())


@pytest.mark.parametrize("how", ["ignore", "reap"])
def test_hosts_that_take_away_our_children_are_served_too(alike, tmp_path, how):
    """What the program said decides, not its exit status."""
    plain = alike.plain()
    real = os.environ["KVT_TEST_PROBE"]
    path = script(tmp_path, f"[ -e {tmp_path}/die ] || exec {real}\nprintf R\nkill -SEGV $$")
    kvt = alike.kvt(flags=f"probe sigchld={how}", env={"KVT_PROBE": path})
    kvt.add("good", plain.metadata())
    (tmp_path / "die").touch()
    Memory(plain, [4096], seed=3)
    with pytest.raises(Refused, match="KVT_EMETADATA.*NIXL crashes"):
        kvt.add("bad", plain.metadata())
    assert children(kvt.process.pid) == []
