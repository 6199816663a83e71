# SPDX-License-Identifier: Apache-2.0
"""Counts what NIXL does with damaged metadata that kvt's structure check takes:
the figures of docs/nixl.md. Not a test; it takes minutes.

    survey.py PLACE MUTATIONS [FILE]

PLACE is a virtual environment with nixl. What kills it goes to FILE, as hex,
one a line.
"""

import collections
import sys

import mutations
from loader import Loader
from peers import Memory, Plain


def main(place, count, path=None):
    agent = Plain(place, "surveyed")
    Memory(agent, [4096] * 4, seed=2)
    blob = agent.metadata()
    loader = Loader(place, "surveyed")
    for kind in mutations.KINDS:
        taken = mutations.taken(list(mutations.make(kind, blob, int(count), seed=3)))
        results = collections.Counter(loader.load(damaged) for damaged in taken)
        print(
            f"{kind.__name__}: {count} made, {len(taken)} taken ({len(set(taken))} "
            f"different), {dict(results)}",
            flush=True,
        )
    killers = sorted(b.hex() for b, r in loader.known.items() if r.startswith("crash"))
    if path is not None:
        with open(path, "w") as file:
            file.writelines(killer + "\n" for killer in [blob.hex()] + killers)
    print(f"{len(killers)} different ones kill it")
    loader.end()
    agent.kill()


main(*sys.argv[1:])
