# SPDX-License-Identifier: Apache-2.0
"""The harness of bench/: that the table says what the figures mean, that it
gets into the page, and that a pair of processes writes, compares and times. No
time is asserted; the rivals are not needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import report
from bench.candidates.pair import KINDS, NodeFailed, Pair, Places
from bench.figures import Figures, Line, best_of
from bench.pools import MEMORIES, Pool, pick, picks


def line(sense: str, goal: float, ours: float, rival: float | None) -> Line:
    theirs = None if rival is None else Figures("rival", [rival, rival, 0.0])
    return Line("what", "us", Figures("ours", [ours]), theirs, sense, goal)


@pytest.mark.parametrize(
    ("sense", "goal", "ours", "rival", "ratio", "met"),
    [
        ("times", 4, 8, 2, 4, True),
        ("times", 4, 7.9, 2, 3.95, False),
        ("shorter", 100, 1, 100, 100, True),
        ("shorter", 100, 2, 100, 50, False),
        ("part", 0.6, 5, 10, 0.5, True),
        ("part", 0.6, 7, 10, 0.7, False),
        ("under", 2, 2, None, None, True),
        ("under", 2, 2.1, 100, 0.021, False),
        ("seen", 0, 1, 2, 0.5, None),
    ],
)
def test_a_goal_is_met_as_its_words_say(
    sense: str,
    goal: float,
    ours: float,
    rival: float | None,
    ratio: float | None,
    met: bool | None,
) -> None:
    made = line(sense, goal, ours, rival)
    assert made.met is met
    assert made.ratio == pytest.approx(ratio)


def test_the_best_way_of_a_kind_counts() -> None:
    found = {
        "a, fd": Figures("a, fd", [1, 5, 1]),
        "a, spin": Figures("a, spin", [2, 2, 2]),
        "ab, fd": Figures("ab, fd", [9]),
    }
    assert best_of(found, "a", high=True).name == "a, spin"
    assert best_of(found, "a", high=False).name == "a, fd"


def test_the_table_gets_between_the_marks_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    lines = [line("times", 4, 8, 2), line("times", 4, 1, 2)]
    plot = tmp_path / "bench" / "goals.svg"
    report.publish(page, {"cpu": "some"}, lines, [plot])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "old" not in text and "1 of 2 met" in text
    assert "| cpu | some |" in text and "(bench/goals.svg)" in text
    report.publish(page, {}, lines, [])
    assert page.read_text().count(report.BEGIN) == 1


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="no place for the table"):
        report.publish(page, {}, [], [])


def test_blocks_come_in_runs_and_none_twice() -> None:
    for run in (1, 2, 16, 64):
        blocks = pick(256, 64, run, 1)
        assert len(set(blocks.tolist())) == 64
        for at in range(0, 64, run):
            first = blocks[at]
            assert blocks[at : at + run].tolist() == [
                *range(first, first + run)
            ]
    ours, theirs = picks(256, 64, 1, 1)
    assert ours.tolist() != theirs.tolist()


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_digest_tells_blocks_and_their_order(memory: str) -> None:
    pool = Pool(8, 512, memory)
    pool.fill(1)
    here = pool.digest(pick(8, 4, 1, 1))
    assert here != pool.digest(pick(8, 4, 1, 1)[::-1])
    pool.scrub()
    assert here != pool.digest(pick(8, 4, 1, 1))


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("KVT_ENGINE", "local")
    nowhere = Path("nowhere")
    places = Places(sys.executable, nowhere, nowhere, nowhere)
    made = Pair(KINDS["kvt"], places, 64, 4096)
    yield made
    made.end()


def test_a_pair_writes_compares_and_times(pair: Pair) -> None:
    for wait in pair.kind.waits:
        pair.check(32, 2, wait)
        found = pair.do("writes", 32, 1, 3, wait)
        assert len(found["call"]) == len(found["total"]) == 3
    assert len(pair.do("singles", 4, "spin")) == 4
    assert pair.do("many", 100, 8) > 0
    assert len(pair.do("queued_calls", 16, 3, 32, 2)) == 2
    assert len(pair.do("adds", pair.numbers, 2)["total"]) == 2
    assert len(pair.do("async_adds", pair.numbers, 2)) == 2
    assert len(pair.do("prepares", 4, 2)["total"]) == 2
    base = pair.numbers[1]
    assert len(pair.do("run_writes", 4, base, 100, 2)) == 2
    assert len(pair.do("mixed_calls", 3)["write_blocks"]) == 3


def test_other_bytes_at_the_target_are_noticed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = pair.target.do

    def other_bytes(job: str, *args: object, **more: object) -> object:
        answer = honest(job, *args, **more)
        return answer + 1 if job == "digest" else answer

    monkeypatch.setattr(pair.target, "do", other_bytes)
    with pytest.raises(NodeFailed, match="target's bytes"):
        pair.check(32, 1)


def test_what_a_node_raises_is_raised_here(pair: Pair) -> None:
    with pytest.raises(NodeFailed, match="no such wait"):
        pair.do("writes", 1, 1, 1, "no such wait")
