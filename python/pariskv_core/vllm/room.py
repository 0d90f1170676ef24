"""How much sequences may take beside what vLLM counts in blocks, and who may still come in.

A searched sequence has copies of its tail's rows and a row cache. A shorter one on a GPU has all of
its rows where the engine cannot move them to host memory. Neither grows with vLLM's blocks, so
requests are admitted only while the sum for the lengths that they may reach has room.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Bytes of one sequence beside its blocks.

    torn      of a fork that begins inside a block: a segment that it does not share
    token     of a token, as long as no zone is searched
    opening   tokens from which on one is
    searched  of a sequence with so many tokens
    """

    torn: int = 0
    token: int = 0
    opening: int = 0
    searched: int = 0

    def of(self, tokens: int, *, prompt: int = 0, torn: bool = True) -> int:
        """The most that a sequence takes on its way to so many tokens.

        prompt  tokens that come in chunks: while these pass the opening, their rows lie in memory
                that is set aside for prompts
        """
        before = 0 if prompt >= self.opening else min(tokens, self.opening) * self.token
        whole = before if tokens < self.opening else max(before, self.searched)
        return whole + (self.torn if torn else 0)


class Room:
    def __init__(self, size: int, costs: Costs) -> None:
        self._size = size
        self._costs = costs
        self._running: dict[str, int] = {}
        self._noted: dict[str, int] = {}  # admitted in this pass of the scheduler
        self._parked: dict[int, int] = {}
        self._full = False  # a request has to wait
        self._taken = 0  # sums of these three
        self._promised = 0
        self._waiting = 0

    def admit(self, request: str, prompt: int, most: int) -> bool:
        """Whether there is room for a request of at most so many tokens, which is then noted.

        After one that has to wait, all others do, in this pass: it would wait forever while
        smaller ones take what becomes free.
        """
        self._promised -= self._noted.pop(request, 0)
        cost = self._costs.of(most, prompt=prompt)
        if self._full or self._taken + self._promised + cost > self._size:
            self._full = True
            return False
        self._noted[request] = cost
        self._promised += cost
        return True

    def settle(self) -> None:
        """The scheduler's pass is over: what it did not take is asked for again."""
        self._noted.clear()
        self._promised = 0
        self._full = False

    def enter(self, request: str, prompt: int, most: int) -> None:
        self._running[request] = self._costs.of(most, prompt=prompt)
        self._taken += self._running[request]

    def leave(self, request: str) -> None:
        self._taken -= self._running.pop(request, 0)

    def park(self, name: int, tokens: int, *, torn: bool) -> None:
        """A sequence whose request ended, of so many tokens."""
        self.unpark(name)
        self._parked[name] = self._costs.of(tokens, prompt=tokens, torn=torn)
        self._waiting += self._parked[name]

    def unpark(self, name: int) -> None:
        self._waiting -= self._parked.pop(name, 0)

    @property
    def suffices(self) -> bool:
        """Whether parked sequences have room beside the running requests."""
        return self._taken + self._waiting <= self._size
