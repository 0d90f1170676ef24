"""A scheduler with the rules of vLLM's that the plugin's books depend on, in a few lines.

Blocks are found by their tokens and all tokens before them, as soon as they are scheduled. Those
of ended requests stay until they are handed out again, the longest unused ones first. A request
that lacks blocks puts the last one off, which comes back as a new one. A request that ends may have
had one token more in flight.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

from pariskv_core.vllm.books import Arrival, Growth, Step


@dataclass
class Request:
    name: str
    tokens: list[int]
    answer: int  # tokens to generate
    prompt: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    whole: int = 0  # blocks that can be found, or could before they were forgotten
    over: bool = False


class Scheduler:
    def __init__(
        self, blocks: int, size: int, *, at_once: int, budget: int, seed: int, late: bool
    ) -> None:
        self.size = size
        self.blocks = blocks
        self._at_once = at_once
        self._budget = budget
        self._late = late
        self._chance = random.Random(seed)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._users = [0] * blocks
        self._tokens_of: dict[int, tuple[int, ...]] = {}
        self._found: dict[tuple[int, ...], list[int]] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ended: list[str] = []
        self.preempted = 0
        self.hit_tokens = 0
        self._reset = False

    @property
    def used_blocks(self) -> int:
        return self.blocks - len(self._free)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.ended or self._reset)

    def add(self, name: str, tokens: list[int], answer: int) -> None:
        self.waiting.append(Request(name, list(tokens), answer))

    def abort(self, name: str) -> None:
        for queue in (self.waiting, self.running):
            for request in list(queue):
                if request.name == name:
                    queue.remove(request)
                    self._end(request)

    def reset(self) -> bool:
        if self.used_blocks:
            return False
        self._tokens_of.clear()
        self._found.clear()
        self._reset = True
        return True

    def forget(self, blocks: set[int]) -> None:
        for block in blocks:
            self._evict(block)

    def _end(self, request: Request) -> None:
        self._release(request)
        self.ended.append(request.name)

    def _release(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None
        request.blocks = []

    def _evict(self, block: int) -> None:
        tokens = self._tokens_of.pop(block, None)
        if tokens is not None:
            same = self._found[tokens]
            same.remove(block)
            if not same:
                del self._found[tokens]

    def _take(self, request: Request, upto: int) -> list[int] | None:
        missing = -(-upto // self.size) - len(request.blocks)
        if missing > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(max(missing, 0))]
        for block in taken:
            self._evict(block)
            self._users[block] += 1
        request.blocks += taken
        whole = min(upto, len(request.tokens)) // self.size
        for place in range(request.whole, whole):
            tokens = tuple(request.tokens[: (place + 1) * self.size])
            self._tokens_of[request.blocks[place]] = tokens
            self._found.setdefault(tokens, []).append(request.blocks[place])
        request.whole = max(whole, request.whole)
        return taken

    def _hits(self, request: Request) -> list[int]:
        found = []
        for end in range(self.size, len(request.tokens), self.size):  # a token is left to compute
            same = self._found.get(tuple(request.tokens[:end]))
            if not same:
                break
            found.append(self._chance.choice(same))
        return found

    def schedule(self) -> Step:
        budget, tokens = self._budget, {}
        ended, self.ended = self.ended, []
        put_off: list[Request] = []
        grown: list[Growth] = []
        for request in list(self.running):
            if request not in self.running or budget == 0:
                continue
            count = min(len(request.tokens) - request.computed, budget)
            while (taken := self._take(request, request.computed + count)) is None:
                last = self.running.pop()
                self._release(last)
                put_off.append(last)
                if last is request:
                    break
            if taken is None:
                continue
            tokens[request.name] = count
            budget -= count
            grown.append(Growth(request.name, request.computed, taken))
        arrived = [] if put_off else self._arrivals(budget, tokens)
        for request in put_off:
            request.computed = 0
            self.preempted += 1
            self.waiting.insert(0, request)
            ended.append(request.name)
        reset, self._reset = self._reset, False
        return Step(sorted(ended), grown, arrived, tokens, reset)

    def _arrivals(self, budget: int, tokens: dict[str, int]) -> list[Arrival]:
        arrived = []
        while self.waiting and budget and len(self.running) < self._at_once:
            request = self.waiting[0]
            hits = self._hits(request)
            for block in hits:
                self._users[block] += 1
                self._free.pop(block, None)
            request.blocks, request.whole = hits, len(hits)
            request.computed = len(hits) * self.size
            count = min(len(request.tokens) - request.computed, budget)
            if self._take(request, request.computed + count) is None:
                self._release(request)
                break
            self.hit_tokens += request.computed
            self.waiting.pop(0)
            self.running.append(request)
            request.prompt = len(request.tokens)
            tokens[request.name] = count
            budget -= count
            most = len(request.tokens) + request.answer
            arrived.append(
                Arrival(request.name, request.prompt, request.computed, list(request.blocks), most)
            )
        return arrived

    def done(self, step: Step) -> None:
        """The step has run: requests that have computed all of their tokens get another one."""
        for request in list(self.running):
            request.computed += step.tokens.get(request.name, 0)
            if request.computed < len(request.tokens) or request.name not in step.tokens:
                continue
            if request.over or (request.answer == 0 and not self._late):
                self.running.remove(request)
                self._end(request)
                continue
            request.over = request.answer == 0  # what comes now is thrown away
            request.answer = max(request.answer - 1, 0)
            request.tokens.append(self._chance.randrange(2))
