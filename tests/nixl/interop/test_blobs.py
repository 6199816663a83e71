# SPDX-License-Identifier: Apache-2.0
"""Proves that kvt takes whatever metadata a plain NIXL agent exports, and
nothing but an error comes of metadata that is damaged.

Clean: 0, 1, 61 and 1,000 regions, one backend and two, whole and partial; the
last region is written and compared. Damaged: 20,000 mutations of each kind go
through the structure check alone; what it takes of them is then given to NIXL
by a transport that probes first, which must survive whatever NIXL does.
"""

import pytest

import mutations
from peers import Memory, Refused

COUNTS = (0, 1, 61, 1000)
MUTATIONS = 20000


@pytest.mark.parametrize("backends", [["UCX"], ["UCX", "POSIX"], ["POSIX", "UCX"]], ids="+".join)
def test_clean_metadata_is_taken(alike, backends):
    kvt = alike.kvt()
    ours = Memory(kvt, [4096], seed=1)
    for count in COUNTS:
        plain = alike.plain(backends=backends)
        theirs = Memory(plain, [4096] * count, seed=2)
        blob = plain.metadata()
        assert mutations.taken([blob]) == [blob]
        kvt.add("peer", blob)
        assert kvt.peer("peer")["regions"] == count
        if count > 0:
            piece = [(ours.regions[0][0], theirs.regions[-1][0], 4096)]
            assert kvt.move("WRITE", "peer", piece)["state"] == "done"
            theirs.expect(piece[0][1], ours.read(*ours.regions[0]))
            theirs.check(f"a write to region {count}")


def test_partial_metadata_is_taken_when_it_says_where_to_connect(alike):
    kvt = alike.kvt()
    plain = alike.plain()
    ours = Memory(kvt, [4096], seed=1)
    theirs = Memory(plain, [4096] * 61, seed=2)
    for some in (theirs.regions[:3], theirs.regions[7:8], []):
        blob = plain.partial(some, True)
        assert mutations.taken([blob]) == [blob]
        kvt.add("peer", blob)
        assert kvt.peer("peer")["regions"] == len(some)
    kvt.add("peer", plain.partial(theirs.regions[5:7], True, ["UCX"]))
    piece = [(ours.regions[0][0], theirs.regions[6][0], 4096)]
    assert kvt.move("WRITE", "peer", piece)["state"] == "done"
    theirs.expect(piece[0][1], ours.read(*ours.regions[0]))
    theirs.check("a write to one of the two")
    with pytest.raises(Refused, match="KVT_ERANGE"):
        kvt.move("WRITE", "peer", [(piece[0][0], theirs.regions[7][0], 4096)])
    # Regions alone are of no use to somebody who does not know the agent.
    with pytest.raises(Refused, match="KVT_EENGINE.*cannot load"):
        kvt.add("stranger", plain.partial(theirs.regions[:3], False))


@pytest.mark.parametrize("kind", mutations.KINDS, ids=lambda kind: kind.__name__)
def test_damaged_metadata_is_refused_by_its_structure(alike, kind, record_property):
    """Not all of it: what lies inside UCX's own bytes cannot be seen."""
    plain = alike.plain()
    Memory(plain, [4096] * 4, seed=2)
    blob = plain.metadata()
    left = mutations.taken(list(mutations.make(kind, blob, MUTATIONS, seed=3)))
    print(f"{len(blob)} bytes, {MUTATIONS} {kind.__name__}: {len(left)} taken")
    if kind in (mutations.truncated, mutations.noise, mutations.noise_after_intro):
        assert not left
