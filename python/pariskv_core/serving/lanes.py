"""Rows of a captured step: which sequence each of them decodes in the next replay.

A graph of a step is captured over as many lanes as its batch has rows, all of them idle. A replay
decodes one token of the sequences that `Cache.advance` named last, in the first lanes; rows that a
graph has for padding are named as idle ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import pariskv_core as pk


class Lanes:
    def __init__(self, cache: pk.Cache) -> None:
        self._cache = cache
        self._captured = False

    def capture(self, width: int) -> pk.Batch:
        """What a capture over so many rows decodes. Once graphs are there, a dummy run replays
        one: over idle lanes alone."""
        if self._captured:
            self.advance([], 0)
        return self._cache.batch([pk.IDLE] * width)

    def captured(self) -> None:
        """All graphs are there."""
        self._captured = True

    def advance(self, sequences: Sequence[int], width: int) -> None:
        """Before a replay over these sequences of a graph that has so many rows."""
        self._cache.advance([*sequences, *[pk.IDLE] * (width - len(sequences))])
