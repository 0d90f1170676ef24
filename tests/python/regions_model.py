"""Which token of a sequence is in which region, as a model too plain to be wrong."""

from __future__ import annotations

from collections.abc import Sequence


class RegionsModel:
    """Which token is where, as four plain lists of token ids."""

    def __init__(self, sink: int, local: int, update: int, grain: int = 1, opening: int = 0):
        self.sizes = (sink, local, update)
        self.grain, self.opening = grain, opening  # a zone ends at multiples, and not before
        self.sink: list[int] = []
        self.retrieval: list[int] = []
        self.local: list[int] = []
        self.buffer: list[int] = []

    def counts(self) -> tuple[int, int, int, int]:
        return len(self.sink), len(self.retrieval), len(self.local), len(self.buffer)

    def tokens(self) -> list[int]:
        return self.sink + self.retrieval + self.local + self.buffer

    def _append(self, token: int) -> None:
        (self.sink if len(self.sink) < self.sizes[0] else self.buffer).append(token)

    def decode(self, token: int) -> None:
        self._append(token)
        if len(self.buffer) >= self.sizes[2]:
            self.flush()

    def prefill(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)
        if tokens:
            self.flush()

    def flush(self) -> None:
        window = self.local + self.buffer
        before = len(self.sink) + len(self.retrieval)
        end = self._end(before + len(window) - self.sizes[1])
        leave = max(0, end - before)
        self.retrieval += window[:leave]
        self.local, self.buffer = window[leave:], []

    def _end(self, position: int) -> int:
        return 0 if position < self.opening else position // self.grain * self.grain

    def truncate(self, count: int) -> None:
        for _ in range(count):
            next(r for r in (self.buffer, self.local, self.retrieval, self.sink) if r).pop()
        end = self._end(len(self.tokens()) - self.sizes[1])
        while self.retrieval and len(self.sink) + len(self.retrieval) > end:
            self.local.insert(0, self.retrieval.pop())
