"""How much sequences may take beside what a host counts in blocks, and who may still come in.

A searched sequence has copies of its tail's rows and a row cache. A shorter one on a GPU has all of
its rows where the engine cannot move them to host memory. Neither grows with the host's blocks, so
requests are admitted only while the sums for the lengths that they may reach have room: of bytes
that stay on the device, and of those among them that no block pays for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Costs:
    """Bytes of one sequence beside its blocks.

    token     of a token, as long as no zone is searched
    opening   tokens from which on one is
    searched  of a sequence with so many tokens
    beside    of `searched`, what is no row of a block
    """

    token: int = 0
    opening: int = 0
    searched: int = 0
    beside: int = 0

    def of(self, tokens: int, *, prompt: int = 0) -> int:
        """The most that a sequence takes on its way to so many tokens.

        prompt  tokens that come in chunks: while these pass the opening, their rows lie in memory
                that is set aside for prompts
        """
        before = 0 if prompt >= self.opening else min(tokens, self.opening) * self.token
        return before if tokens < self.opening else max(before, self.searched)

    def most(self, tokens: int, *, prompt: int = 0) -> Cost:
        beside = self.beside if tokens >= self.opening else 0
        return Cost(self.of(tokens, prompt=prompt), beside)


class Cost(NamedTuple):
    """Bytes that stay on the device, and those among them that no block pays for."""

    stays: int = 0
    beside: int = 0


class _Sum:
    """Of the costs of what has a name."""

    def __init__(self) -> None:
        self._costs: dict[str | int, Cost] = {}
        self.stays = self.beside = 0

    def put(self, name: str | int, cost: Cost) -> None:
        self.take(name)
        self._costs[name] = cost
        self.stays, self.beside = self.stays + cost.stays, self.beside + cost.beside

    def take(self, name: str | int) -> None:
        cost = self._costs.pop(name, Cost())
        self.stays, self.beside = self.stays - cost.stays, self.beside - cost.beside

    def clear(self) -> None:
        self._costs.clear()
        self.stays = self.beside = 0


@dataclass
class _Wait:
    """Bytes that a request needs, and that others have taken since it began to wait: twice as many
    are enough."""

    needs: int
    passed: int = 0

    @property
    def starves(self) -> bool:
        return self.passed >= 2 * self.needs


class Room:
    """
    stays   bytes on the device for what does not leave it
    beside  for what no block pays for; None: as much as `stays`
    """

    def __init__(self, stays: int, costs: Costs, beside: int | None = None) -> None:
        self._most = Cost(stays, stays if beside is None else beside)
        self._costs = costs
        self._running, self._parked = _Sum(), _Sum()
        self._noted = _Sum()  # admitted in this pass of the scheduler
        self._waiting: dict[str, _Wait] = {}  # requests that had no room when they were asked for
        self._asked: set[str] = set()  # in this pass

    def admit(self, request: str, prompt: int, most: int) -> bool:
        """Whether there is room for a request of at most so many tokens, which is then noted.

        One that has to wait is passed by others, until they have taken twice what it needs: else it
        would wait forever while smaller ones take what becomes free.
        """
        self._noted.take(request)
        self._asked.add(request)
        cost = self._costs.most(most, prompt=prompt)
        if not self._fits(self._running, self._noted, cost):
            self._waiting.setdefault(request, _Wait(cost.stays))
            return False
        if any(wait.starves for name, wait in self._waiting.items() if name != request):
            return False
        self._noted.put(request, cost)
        return True

    @property
    def closed(self) -> bool:
        """Whether a request has waited for so long that none may pass it."""
        return any(wait.starves for wait in self._waiting.values())

    def withdraw(self, request: str) -> None:
        self._noted.take(request)

    def clear(self) -> None:
        for some in (self._running, self._parked, self._noted):
            some.clear()
        self._waiting.clear()

    def settle(self) -> None:
        """The scheduler's pass is over: what it did not take is asked for again."""
        self._noted.clear()
        if self._asked:  # who waits is asked for first of all: the others have gone
            self._waiting = {
                name: wait for name, wait in self._waiting.items() if name in self._asked
            }
        self._asked.clear()

    def enter(self, request: str, prompt: int, most: int) -> None:
        cost = self._costs.most(most, prompt=prompt)
        self._running.put(request, cost)
        self._waiting.pop(request, None)
        for wait in self._waiting.values():
            wait.passed += cost.stays

    def leave(self, request: str) -> None:
        self._running.take(request)
        self._waiting.pop(request, None)

    def park(self, name: int, tokens: int) -> None:
        """A sequence whose request ended, of so many tokens."""
        self._parked.put(name, self._costs.most(tokens, prompt=tokens))

    def unpark(self, name: int) -> None:
        self._parked.take(name)

    @property
    def suffices(self) -> bool:
        """Whether parked sequences have room beside the running requests."""
        return self._fits(self._running, self._parked)

    def _fits(self, *some: _Sum | Cost) -> bool:
        stays, beside = sum(s.stays for s in some), sum(s.beside for s in some)
        return stays <= self._most.stays and beside <= self._most.beside
