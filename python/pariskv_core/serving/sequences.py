"""Carries orders out on an engine's cache: names of the scheduler's side become its sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pariskv_core as pk

from .orders import ADD, CLEAR, CUT, FORK, REMOVE, Command


class Sequences:
    def __init__(self, cache: pk.Cache) -> None:
        self._cache = cache
        self._of: dict[int, int] = {}
        self.forks = 0

    def __len__(self) -> int:
        return len(self._of)

    def of(self, names: Iterable[int]) -> list[int]:
        return [self._of[name] for name in names]

    def apply(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if command.kind == ADD:
                self._of[command.name] = self._cache.add()
            elif command.kind == FORK:
                source = self._of[command.source]
                self._of[command.name] = self._cache.fork(source, tokens=command.tokens)
                self.forks += 1
            elif command.kind == CUT:
                self._cache.truncate([self._of[command.name]], keep=command.tokens)
            elif command.kind == REMOVE:
                self._cache.remove(self._of.pop(command.name))
            elif command.kind == CLEAR:
                for sequence in self._of.values():
                    self._cache.remove(sequence)
                self._of.clear()
            else:
                raise ValueError(f"[begin] orders: expected a known command, got {command.kind}")
