"""What searches report of their own error, for each request, on the scheduler's side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_ANSWERED = 8192  # requests at most that end within a step or two


@dataclass
class ErrorSum:
    """Of the steps of one request that estimated something: means over layers and kv heads."""

    total: float = 0.0
    worst: float = 0.0  # of one kv head
    steps: int = 0

    def __iadd__(self, other: ErrorSum) -> ErrorSum:
        self.total += other.total
        self.worst = max(self.worst, other.worst)
        self.steps += other.steps
        return self

    @property
    def mean(self) -> float:
        return self.total / self.steps if self.steps else 0.0


def add_up(sums: dict[str, ErrorSum], told: Mapping[str, ErrorSum]) -> None:
    """By request."""
    for request, error in told.items():
        mine = sums.setdefault(request, ErrorSum())
        mine += error


class RequestErrors:
    """What ranks have told of requests that are not answered yet."""

    def __init__(self) -> None:
        self._of: dict[str, ErrorSum] = {}
        self._answered: dict[str, None] = {}  # the last ones: ranks tell of them for a step or two

    def add(self, told: Mapping[str, ErrorSum]) -> None:
        open_ones = {name: error for name, error in told.items() if name not in self._answered}
        add_up(self._of, open_ones)

    def answer(self, request: str) -> ErrorSum | None:
        """Of a request that ends; None: nothing was estimated for it."""
        self._answered[request] = None
        if len(self._answered) > _ANSWERED:
            del self._answered[next(iter(self._answered))]
        return self._of.pop(request, None)
