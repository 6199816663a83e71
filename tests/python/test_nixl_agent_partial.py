# SPDX-License-Identifier: Apache-2.0
"""Metadata of a part of an agent's memory, between processes.

It has kvt's part too, so a peer of kvt's knows whose process it is: the death
of that process is seen although nothing is under way, which no peer sees of a
plain agent. And it opens the memory that it names, and no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import kvt.nixl as nixl
from kvt import _kvt
from kvt.nixl import _blob, _trailer
from nixl_agent_support.nodes import Stage, pattern
from stage import Raised, until

BLOCK = 1024
COUNT = 16
SIZE = BLOCK * COUNT

ENGINES = ["local", "nixl", "only", "tcp"]


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as made:
        yield made


class Two:
    """`one` knows nothing of `other`, which registers pieces beside all."""

    def __init__(self, stage: Stage, engine: str) -> None:
        self.one, self.other = (stage.start("kvt", engine) for _ in range(2))
        self.ours = self.one.open("one", SIZE)
        self.theirs = self.other.open("other", SIZE)
        self.one.fill(0, pattern(1, SIZE))
        for block in (0, 4, 9):
            self.other.register(block * BLOCK, BLOCK)

    def part(self, block: int, connect: bool = False) -> Any:
        return self.other.partial(block * BLOCK, BLOCK, connect)

    def sees(self, block: int) -> bool:
        addr = self.theirs + block * BLOCK
        return bool(self.one.check("other", addr, BLOCK))

    def write(self, key: str, *blocks: int) -> str:
        ours = [(self.ours + i * BLOCK, BLOCK, 0) for i in blocks]
        theirs = [(self.theirs + i * BLOCK, BLOCK, 0) for i in blocks]
        self.one.initialize(key, "WRITE", ours, theirs, "other")
        return str(self.one.run(key))


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_is_opened_piece_by_piece(stage: Stage, engine: str) -> None:
    two = Two(stage, engine)
    with pytest.raises(Raised, match="nixlNotFoundError"):
        two.one.add(two.part(0))
    assert two.one.add(two.other.partial(0, 0, True)) == b"other"
    assert two.one.check("other") and not two.sees(0)
    two.one.add(two.part(0))
    assert two.sees(0) and not two.sees(4)
    assert two.write("first", 0) == "DONE"
    with pytest.raises(Raised, match="nixlNotFoundError"):
        two.write("outside", 4)
    two.one.add(two.part(4))
    assert two.sees(0) and two.sees(4) and not two.sees(9)
    assert two.write("both", 0, 4) == "DONE"
    expected = pattern(1, SIZE)
    for block in range(COUNT):
        span = slice(block * BLOCK, (block + 1) * BLOCK)
        wanted = expected[span] if block in (0, 4) else bytes(BLOCK)
        assert two.other.look(block * BLOCK, BLOCK) == wanted
    two.one.add(two.other.metadata())
    assert two.sees(9) and two.sees(1)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_death_of_its_process_is_noticed(stage: Stage, engine: str) -> None:
    two = Two(stage, engine)
    assert two.one.add(two.part(0, connect=True)) == b"other"
    two.one.add(two.part(4))
    assert two.write("before", 0, 4) == "DONE"
    two.other.kill()
    until("the death is seen", lambda: not two.one.check("other"))


def test_plain_nixl_takes_the_parts_of_an_agent_of_kvt(stage: Stage) -> None:
    two = Two(stage, "nixl")
    plain = stage.start("plain")
    addr = plain.open("plain", SIZE)
    plain.fill(0, pattern(7, SIZE))
    plain.add(two.part(0, connect=True))
    plain.add(two.part(9))
    rows = [(addr, BLOCK, 0), (addr + BLOCK, BLOCK, 0)]
    theirs = [(two.theirs + i * BLOCK, BLOCK, 0) for i in (0, 9)]
    plain.initialize("write", "WRITE", rows, theirs, "other")
    assert plain.run("write") == "DONE"
    assert (
        two.other.look(9 * BLOCK, BLOCK) == pattern(7, SIZE)[BLOCK : 2 * BLOCK]
    )


# ------------------------------------------------------------------- the bytes


def trailer(*regions: tuple[int, int], place: bytes = b"there") -> Any:
    """Of an agent with these (address, length)."""
    made = []
    for addr, length in regions:
        record = _trailer._REGION.pack(addr, length, 0, 0, 0, 0, 7, addr)
        made.append(_trailer.Region(0, 0, addr, length, record))
    fields = {1: b"agent", 2: b"local", 3: b"i" * 16}
    if place:
        fields[4] = place
    return _trailer.Trailer(fields, made)


def addresses(metadata: bytes) -> list[int]:
    found = _trailer.read(metadata)
    assert found is not None
    return [region.addr for region in found.regions]


def test_what_is_written_is_read() -> None:
    made = trailer((64, 8), (128, 8))
    assert _trailer.read(made.behind(b"")) == made
    assert _trailer.read(made.behind(b"NIXL's")) == made
    assert _trailer.read(b"") is None
    assert _trailer.read(b"something else that is long enough" * 4) is None


def test_parts_add_up_to_the_whole() -> None:
    whole = trailer((64, 8), (128, 8), (256, 8)).behind(b"")
    last = _blob.part(whole, 0, [[256, 8, 0]], True)
    first = _blob.part(whole, 0, [[64, 8, 0]], False)
    assert addresses(last) == [256] and addresses(first) == [64]
    assert _blob.life_of(last).connections and _blob.life_of(last).is_part
    assert not _blob.life_of(first).connections
    assert not _blob.life_of(whole).is_part
    both = _blob.joined(last, first)
    assert addresses(both) == [64, 256]
    assert _blob.joined(both, first) == both
    assert addresses(_blob.joined(whole, first)) == [64, 128, 256]
    assert _blob.joined(whole, first) == whole
    assert _blob.life_of(_blob.joined(first, last)).connections


def test_of_memory_that_is_registered_anew_the_later_word_counts() -> None:
    old, new = trailer((64, 8)), trailer((64, 8))
    record = _trailer._REGION.pack(64, 8, 0, 0, 0, 0, 7, 99)
    new.regions[0] = new.regions[0]._replace(record=record)
    both = _trailer.read(_blob.joined(old.behind(b""), new.behind(b"")))
    assert both is not None and both.regions == new.regions


ROW = (4096, 64, 0)
ADDRESS = [(b"UCX", b"address")]


def blob(key: bytes, *others: bytes) -> Any:
    """NIXL's part, with one registration that others may know by this key."""
    descs = [_blob._ROW.pack(*ROW) + key, *others]
    return _blob.Blob(b"agent", ADDRESS, [_blob.Section(b"UCX", 0, descs)])


def test_nixls_own_key_of_memory_is_the_later_one_too() -> None:
    """Else NIXL keeps a key that the peer's NIC knows no more."""
    other = _blob._ROW.pack(64, 64, 0) + b"other"
    last = _blob._ROW.pack(128, 64, 0) + b"last"
    old, new = blob(b"old", other), blob(b"new", last)
    both = _blob.parse(_blob.joined(old.to_bytes(), new.to_bytes()))
    assert both == blob(b"new", other, last)
    ours = trailer(ROW[:2])
    known, more = (ours.behind(each.to_bytes()) for each in (old, new))
    assert _blob.parse(_blob.joined(known, more)) == both
    assert _blob.joined(known, ours.behind(old.to_bytes())) == known
    assert _blob.joined(old.to_bytes(), old.to_bytes()) == old.to_bytes()


def test_kvts_part_is_not_lost_by_a_part_without() -> None:
    known = trailer(ROW[:2]).behind(blob(b"key").to_bytes())
    bare = blob(b"key")._replace(connections=[]).to_bytes()
    with pytest.raises(nixl.nixlMismatchError, match="get it from the agent"):
        _blob.joined(known, bare)


def test_a_part_of_another_engine_is_refused() -> None:
    ours = trailer((64, 8))
    other = ours._replace(fields={**ours.fields, 2: b"another"})
    with pytest.raises(nixl.nixlMismatchError, match="another engine"):
        _blob.joined(ours.behind(b""), other.behind(b""))


@pytest.mark.parametrize("what", [None, [], [(4096, 64, 0, "")]])
def test_a_part_is_asked_for_with_a_list_for_registration(
    what: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVT_ENGINE", "local")
    agent = nixl.nixl_agent("agent")
    with pytest.raises(TypeError, match="nixlRegDList"):
        agent.get_partial_agent_metadata(what)
    descs = agent.get_xfer_descs([(4096, 64, 0)], "DRAM")
    with pytest.raises(TypeError, match="nixlRegDList"):
        agent.get_partial_agent_metadata(descs)


def test_every_flipped_bit_is_seen() -> None:
    good = trailer((64, 8), (128, 8)).behind(b"")
    for at in range(8 * len(good)):
        bad = bytearray(good)
        bad[at // 8] ^= 1 << at % 8
        with pytest.raises(nixl.nixlMismatchError):
            _blob.life_of(bytes(bad))


def test_what_has_a_right_checksum_and_no_sense_is_refused() -> None:
    good = trailer((64, 8))
    cut = [good.regions[0]._replace(record=good.regions[0].record[:-1])]
    wrong = [good._replace(regions=cut)]
    for tag in (1, 2, 3):
        left = {key: text for key, text in good.fields.items() if key != tag}
        wrong.append(good._replace(fields=left))
    for incarnation in (b"", b"i" * 15, b"i" * 17):
        fields = {**good.fields, 3: incarnation}
        wrong.append(good._replace(fields=fields))
    for bad in wrong:
        with pytest.raises(nixl.nixlMismatchError):
            _blob.life_of(bad.behind(b""))


def test_a_section_without_regions_or_with_a_tag_twice_is_refused() -> None:
    good = trailer((64, 8)).behind(b"")
    foot = len(good) - _trailer._HEAD.size - _trailer._TAIL.size
    fields = _trailer._fields(good[:foot])

    def made(*tags: int) -> bytes:
        section = b"".join(
            _trailer._FIELD.pack(tag, len(fields[tag])) + fields[tag]
            for tag in tags
        )
        data = section + _trailer._HEAD.pack(len(section), _trailer._VERSION)
        data += _trailer._TAIL.pack(_kvt._checksum(data), _trailer._MAGIC)
        return data

    assert made(1, 2, 3, 4, 5) == good
    for tags in ((1, 2, 3, 4), (1, 1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 5)):
        with pytest.raises(nixl.nixlMismatchError):
            _blob.life_of(made(*tags))
