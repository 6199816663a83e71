# SPDX-License-Identifier: Apache-2.0
"""One writer: python -m soak.writer MOVER WRITER-OPTIONS TARGET-OPTIONS SECONDS

MOVER is kvt or raw; both options are JSON. Each line that it prints is JSON: a
stage that it has reached, and what it then knows. It goes on when it is given a
line, so that whoever samples it can do so in between.

    started    nothing of kvt or NIXL yet
    opened     no peers yet
    connected  to all peers; the run begins after this
    stopped    the run is over and every transfer ended; what went how
    reloaded   every peer, which all live, was reloaded
    removed    all peers
    closed     kvt or NIXL
"""

from __future__ import annotations

import json
import os
import queue
import select
import sys
import time
from typing import Any

from .peers import Born, Peers, Slot
from .shape import (
    BLIND_EACH,
    BLOCK,
    BLOCKS,
    CANCEL_EACH,
    INFLIGHT_MAX,
    KILL_EACH,
    NOTE_EACH,
    PEERS,
    RATE,
    RELOADS,
)
from .zygote import die_with_parent

SLEEP_MS = 2
BURST = RATE // 10
"""Writes that are made up for; if there are more, none is."""


def mover_class(name: str) -> Any:
    """Its modules are loaded now."""
    if name == "raw":
        from .raw_mover import RawMover

        return RawMover
    from .kvt_mover import KvtMover

    return KvtMover


class Writer:
    def __init__(self, mover: Any, peers: Peers) -> None:
        self.mover = mover
        self.peers = peers
        self.slots: list[Slot] = []
        self.number = 0  # of the last write
        self.missed = 0  # writes that came too late to be made
        self.kills = 0
        self.kills_due = 0
        self.replaced: queue.SimpleQueue[tuple[Slot, Born, Any]]
        self.replaced = queue.SimpleQueue()
        self.poller = select.poll()
        if mover.fileno() is not None:
            self.poller.register(mover.fileno(), select.POLLIN)

    def connect(self) -> None:
        for index in range(PEERS):
            born = self.peers.start()
            link = self.mover.add(index, born)
            self.slots.append(Slot(index, born, link))
            self.mover.write(link, 0, False, None)
        self.rest()

    # --------------------------------------------------------------- the run

    def run(self, seconds: float) -> float:
        """Returns how long it took to make them."""
        began = time.monotonic()
        due = 0
        while (now := time.monotonic()) < began + seconds:
            reached = int((now - began) * RATE)
            while due < reached and self.keeps_up(reached - due):
                self.step()
                due += 1
            self.missed += reached - due
            due = reached
            self.turn()
            self.poller.poll(SLEEP_MS)
        return time.monotonic() - began

    def keeps_up(self, late: int) -> bool:
        """A machine that is too slow gets fewer writes: a backlog that grows
        would be all that there is to see."""
        return late <= BURST and len(self.mover.live) < INFLIGHT_MAX

    def turn(self) -> None:
        self.mover.poll()
        while not self.replaced.empty():
            slot, born, link = self.replaced.get()
            slot.born, slot.link, slot.replaced = born, link, False

    def step(self) -> None:
        """One write, and what befalls it."""
        self.number += 1
        number = self.number
        slot = self.turn_of(number)
        kill = number % KILL_EACH == 0
        cancel = number % CANCEL_EACH == CANCEL_EACH // 2
        if kill:
            self.kills_due += 1
            slot = self.victim(slot)
            kill = slot.index > 0 and not slot.replaced
        note = b"%d" % number if number % NOTE_EACH == 0 else None
        xfer = self.mover.write(slot.link, number, kill or cancel, note)
        if kill:
            self.kills += 1
            self.kill(slot)
        elif cancel and xfer is not None:
            self.mover.cancel(xfer, number // CANCEL_EACH % 2 == 0)

    def turn_of(self, number: int) -> Slot:
        """The next slot whose process lives as far as we know; sometimes the
        next one, whether or not it does."""
        slot = self.slots[number % PEERS]
        if number % BLIND_EACH == 0:
            return slot
        while slot.replaced:
            slot = self.slots[(slot.index + 1) % PEERS]
        return slot

    def victim(self, slot: Slot) -> Slot:
        """One that may be killed; the first that can, by turns."""
        for offset in range(PEERS - 1):
            index = 1 + (self.kills_due + offset) % (PEERS - 1)
            if not self.slots[index].replaced:
                return self.slots[index]
        return slot

    def kill(self, slot: Slot) -> None:
        def ready(born: Born) -> None:
            link = self.mover.follow(slot.index, slot.link, born, slot.deaths)
            self.replaced.put((slot, born, link))

        self.peers.replace(slot, ready)

    def rest(self) -> None:
        """Until nothing is under way."""
        while not self.mover.at_rest() or any(s.replaced for s in self.slots):
            self.turn()
            self.poller.poll(SLEEP_MS)

    # ----------------------------------------------------------- and its end

    def reload(self) -> int:
        """Reloads peers that live, and writes once to each."""
        for turn in range(RELOADS):
            slot = self.slots[turn % PEERS]
            slot.link = self.mover.reload(slot.link, slot.born)
            self.mover.write(slot.link, turn, False, None)
            self.rest()
        return RELOADS

    def remove(self) -> None:
        for slot in self.slots:
            self.mover.remove(slot.link)

    def close(self) -> None:
        self.poller = select.poll()
        self.mover.close()


class Answers:
    """Tells the stages. What a library prints must not get between them."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, stage: str, **more: Any) -> None:
        print(json.dumps({"stage": stage, **more}), file=self._out)
        self._out.flush()
        if not sys.stdin.readline():
            os._exit(1)


def main() -> None:
    die_with_parent()
    answers = Answers()
    name, options, target_options, seconds = sys.argv[1:5]
    peers = Peers(BLOCKS, BLOCK, json.loads(target_options))
    made = mover_class(name)
    answers.say("started")
    writer = Writer(made(json.loads(options)), peers)
    answers.say("opened")
    writer.connect()
    answers.say("connected", target=writer.slots[0].born.pid)
    took = writer.run(float(seconds))
    writer.rest()
    answers.say(
        "stopped",
        seconds=took,
        writes=writer.number,
        missed=writer.missed,
        kills=writer.kills,
        kills_due=writer.kills_due,
        counts=writer.mover.check(),
        wrong=writer.mover.wrong,
    )
    answers.say("reloaded", reloads=writer.reload())
    writer.remove()
    answers.say("removed")
    writer.close()
    answers.say("closed")
    peers.end()


if __name__ == "__main__":
    main()
