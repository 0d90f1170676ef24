"""Which columns of a model's batch are tokens of its sequences: padding is not stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Columns:
    """A matrix of booleans, (batch, columns seen): true where a token is stored."""

    def __init__(self, batch: int) -> None:
        self._room = torch.zeros((batch, 0), dtype=torch.bool)
        self._seen = 0

    @property
    def stored(self) -> torch.Tensor:
        return self._room[:, : self._seen]

    def append(self, kept: torch.Tensor | None, count: int) -> None:
        """`count` columns more; `kept` None: all of them are tokens."""
        batch, room = self._room.shape
        if self._seen + count > room:
            wider = torch.zeros((batch, 2 * room + count), dtype=torch.bool)
            wider[:, : self._seen] = self.stored
            self._room = wider
        self._room[:, self._seen : self._seen + count] = True if kept is None else kept
        self._seen += count

    def drop(self, count: int) -> list[int]:
        """Takes the last columns away; returns how many tokens each row had there."""
        gone = self.stored[:, self._seen - count :].sum(dim=1).tolist()
        self._seen -= count
        return [int(tokens) for tokens in gone]

    def keep_only(self, mask: torch.Tensor) -> None:
        """Columns where `mask` is false are no tokens any more."""
        self.stored.logical_and_(mask)

    def take(self, rows: Sequence[int]) -> None:
        self._room = self._room[list(rows)]

    def copy(self) -> Columns:
        twin = Columns(0)
        twin._room, twin._seen = self._room.clone(), self._seen
        return twin
