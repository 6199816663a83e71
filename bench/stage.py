# SPDX-License-Identifier: Apache-2.0
"""What a row works with: the candidates, and rounds in which they take turns.

A pair is started when it is first asked for and kept for later rows, as long as
the memory of all pairs together is below a limit; those longest unused go
first.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from bench.candidates.pair import KINDS, NodeProcess, Pair, Places
from bench.figures import Curve, Figures

MEMORY_LIMIT = 5 << 30


class Stage:
    def __init__(self, places: Places, quick: bool) -> None:
        self.places = places
        self.quick = quick
        self.curves: list[Curve] = []
        self._pairs: OrderedDict[tuple[Any, ...], Pair] = OrderedDict()

    @property
    def rounds(self) -> int:
        return 3 if self.quick else 7

    @property
    def pool(self) -> int:
        """Bytes of a side's blocks: far more than a cache holds."""
        return (128 if self.quick else 256) << 20

    def pair(
        self,
        kind: str,
        blocks: int,
        block_len: int,
        memory: str = "private",
        fill: bool = True,
    ) -> Pair:
        key = kind, blocks, block_len, memory
        if key not in self._pairs:
            self._make_room(2 * blocks * block_len)
            self._pairs[key] = Pair(
                KINDS[kind], self.places, blocks, block_len, memory, fill
            )
        self._pairs.move_to_end(key)
        return self._pairs[key]

    def node(self, kind: str) -> NodeProcess:
        """A node without a pair; the caller ends it."""
        return NodeProcess(KINDS[kind], self.places)

    def drop(self, pair: Pair) -> None:
        """Ends a pair that can't be used any more."""
        for key, found in list(self._pairs.items()):
            if found is pair:
                del self._pairs[key]
        pair.end()

    def _make_room(self, size: int) -> None:
        while self._pairs:
            used = sum(pair.size for pair in self._pairs.values())
            if used + size <= MEMORY_LIMIT:
                break
            _, oldest = self._pairs.popitem(last=False)
            oldest.end()

    def take_turns(
        self,
        candidates: Mapping[str, Callable[[], float]],
        rounds: int | None = None,
    ) -> dict[str, Figures]:
        """A B C A B C …: one figure a round from each."""
        found = {name: Figures(name, []) for name in candidates}
        for _ in range(rounds or self.rounds):
            for name, measure in candidates.items():
                found[name].values.append(measure())
        return found

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        self.clear()

    def clear(self) -> None:
        for pair in self._pairs.values():
            pair.end()
        self._pairs.clear()
