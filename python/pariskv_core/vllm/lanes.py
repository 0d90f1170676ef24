"""Rows of a captured step that have no request: sequences that nobody reads.

A graph of a step is captured over as many lanes as its batch has rows. A replay decodes one token
of the sequences that `Cache.advance` named last: real sequences take the first lanes, idle ones
fill the rest. An idle lane grows by a token with each replay and is cut now and then.
"""

from __future__ import annotations

from collections.abc import Sequence

import pariskv_core as pk

_LONGEST = 256  # tokens of an idle lane, before it is cut to nothing


class Lanes:
    def __init__(self, cache: pk.Cache) -> None:
        self._cache = cache
        self._idle: list[int] = []
        self._grown = 0  # tokens that the longest idle lane may have
        self._captured = False
        self.width = 0  # of the graph that is replayed next, or captured

    @property
    def idle(self) -> int:
        """Sequences that are here for padding alone."""
        return len(self._idle)

    def widen(self, width: int) -> None:
        """Before a step of so many rows: what `build` is told, padding among them."""
        self.width = width

    def capture(self, width: int) -> pk.Batch:
        """What a capture over so many rows decodes. Once graphs are there, a dummy run replays
        one: over idle lanes alone."""
        self.widen(width)
        lanes = self._lanes(width)
        if self._captured:
            self.advance([])
        return self._cache.batch(lanes)

    def captured(self) -> None:
        """All graphs are there."""
        self._captured = True
        self.empty()

    def advance(self, sequences: Sequence[int]) -> None:
        """Before a replay over these sequences and as many idle ones as the graph is wide."""
        missing = max(self.width - len(sequences), 0)
        self._cache.advance([*sequences, *self._lanes(missing)])
        self._grown += missing > 0

    def _lanes(self, count: int) -> list[int]:
        while len(self._idle) < count:
            self._idle.append(self._cache.add())
        return self._idle[:count]

    def rest(self) -> None:
        """Between two steps: idle lanes that grew long are emptied."""
        if self._grown >= _LONGEST:
            self.empty()

    def empty(self) -> None:
        if self._idle:
            self._cache.truncate(self._idle, keep=0)
        self._grown = 0
