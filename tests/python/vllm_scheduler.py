"""A scheduler with the rules of vLLM's that the plugin depends on, in a few lines.

Blocks are found by their tokens and all tokens before them, as soon as they are scheduled. Those
of ended requests stay until they are handed out again, the longest unused ones first. A request
that lacks blocks puts another one off, which comes back as a new one: the last one, or the longest,
whose tokens may be scheduled in this step already, and whose blocks are then found all the same. A
request that ends may have had one token more in flight.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, overload

from pariskv_core.vllm.scheduling import Scheduling

Content = tuple[int, ...]  # of a block: its tokens, and all before them


class Hashes(Sequence[Content]):
    """Of the whole blocks of a request, which gets more tokens."""

    def __init__(self, tokens: list[int], size: int) -> None:
        self._tokens, self._size = tokens, size

    def __len__(self) -> int:
        return len(self._tokens) // self._size

    @overload
    def __getitem__(self, place: int) -> Content: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Content]: ...
    def __getitem__(self, place: Any) -> Any:
        return tuple(self._tokens[: (place + 1) * self._size])


@dataclass(eq=False)
class Request:
    """Names are those of vLLM's, as far as the plugin reads them."""

    request_id: str
    tokens: list[int]
    answer: int  # tokens to generate
    block_hashes: Hashes
    num_prompt_tokens: int
    max_tokens: int
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    status: Any = field(default_factory=lambda: SimpleNamespace(name="WAITING"))
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    whole: int = 0  # blocks that can be found, or could before they were forgotten
    over: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class Scheduler:
    """As vLLM's KVCacheManager and its block pool, too."""

    def __init__(
        self,
        blocks: int,
        size: int,
        *,
        at_once: int,
        budget: int,
        seed: int,
        late: bool,
        longest_goes: bool = False,
        chunk: int = 1 << 30,
    ) -> None:
        self.size = size
        self.blocks = [SimpleNamespace(block_id=block, ref_cnt=0) for block in range(blocks)]
        self._at_once = at_once
        self._budget = budget
        self._late = late
        self._longest_goes = longest_goes
        self._chunk = chunk  # tokens of a request in one step
        self._chance = random.Random(seed)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._tokens_of: dict[int, Content] = {}
        self.cached_block_hash_to_block: dict[Content, list[int]] = {}
        self.block_pool = self
        self.watermark_blocks = 0
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ended: list[str] = []
        self.preempted = 0
        self.in_vain = 0  # requests whose tokens were scheduled, and taken back in the same step
        self.waited = 0  # for a prefix that is computed in the same step
        self.lookups = 0
        self.hit_tokens = 0

    @property
    def used_blocks(self) -> int:
        return len(self.blocks) - len(self._free)

    def busy(self, scheduling: Scheduling) -> bool:
        return bool(self.waiting or self.running or self.ended or scheduling.pending)

    def add(self, name: str, tokens: list[int], answer: int, **others: Any) -> None:
        own = list(tokens)
        request = Request(name, own, answer, Hashes(own, self.size), len(own), answer, **others)
        self.waiting.append(request)

    def abort(self, name: str) -> None:
        for queue in (self.waiting, self.running):
            for request in list(queue):
                if request.request_id == name:
                    queue.remove(request)
                    self._end(request)

    def reset(self) -> bool:
        if self.used_blocks:
            return False
        self._tokens_of.clear()
        self.cached_block_hash_to_block = {}
        return True

    # What the plugin asks of the pool and of the manager.

    def evict_blocks(self, blocks: set[int]) -> None:
        for block in blocks:
            self._evict(block)

    def get_cached_block(self, content: Content, groups: list[int]) -> list[Any] | None:
        same = self.cached_block_hash_to_block.get(content)
        return [self.blocks[same[0]]] if same else None

    def get_block_ids(self, name: str) -> tuple[list[int]]:
        return (next(one for one in self.running if one.request_id == name).blocks,)

    def _end(self, request: Request) -> None:
        self._release(request)
        request.status.name = "FINISHED"
        self.ended.append(request.request_id)

    def _release(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.blocks[block].ref_cnt -= 1
            if self.blocks[block].ref_cnt == 0:
                self._free[block] = None
        request.blocks = []

    def _evict(self, block: int) -> None:
        tokens = self._tokens_of.pop(block, None)
        if tokens is not None:
            same = self.cached_block_hash_to_block[tokens]
            same.remove(block)
            if not same:
                del self.cached_block_hash_to_block[tokens]

    def _take(self, request: Request, upto: int, spare: int = 0) -> list[int] | None:
        missing = -(-upto // self.size) - len(request.blocks)
        if missing + spare > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(max(missing, 0))]
        for block in taken:
            self._evict(block)
            self.blocks[block].ref_cnt += 1
        request.blocks += taken
        whole = min(upto, len(request.tokens)) // self.size
        for place in range(request.whole, whole):
            content = request.block_hashes[place]
            self._tokens_of[request.blocks[place]] = content
            # The first one of several is found, until it is handed out again.
            self.cached_block_hash_to_block.setdefault(content, []).append(request.blocks[place])
        request.whole = max(whole, request.whole)
        return taken

    def _hits(self, request: Request) -> list[int]:
        found: list[int] = []
        if request.skip_reading_prefix_cache:
            return found
        self.lookups += 1
        for place in range((len(request.tokens) - 1) // self.size):  # a token is left to compute
            same = self.get_cached_block(request.block_hashes[place], [0])
            if not same:
                break
            found.append(same[0].block_id)
        return found

    def schedule(self, scheduling: Scheduling) -> SimpleNamespace:
        """As much of a SchedulerOutput as the plugin reads."""
        budget, tokens = self._budget, dict[str, int]()
        ended, self.ended = self.ended, []
        put_off: list[Request] = []
        grown: dict[str, tuple[int, list[int]]] = {}
        for request in list(self.running):
            if request not in self.running or budget == 0:
                continue
            count = min(len(request.tokens) - request.computed, budget, self._chunk)
            while (taken := self._take(request, request.computed + count)) is None:
                victim = self.running[-1]
                if self._longest_goes:
                    victim = max(self.running, key=lambda one: one.num_tokens)
                self.running.remove(victim)
                self._release(victim)
                put_off.append(victim)
                if victim.request_id in tokens:  # its blocks stay where they may be found
                    budget += tokens.pop(victim.request_id)
                    del grown[victim.request_id]
                    self.in_vain += 1
                if victim is request:
                    break
            if taken is None:
                break
            tokens[request.request_id] = count
            budget -= count
            grown[request.request_id] = (request.computed, taken)
        new = [] if put_off else self._arrivals(budget, tokens, scheduling)
        for request in put_off:
            request.computed = 0
            request.status.name = "PREEMPTED"
            self.preempted += 1
            self.waiting.insert(0, request)
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(grown),
                num_computed_tokens=[computed for computed, _ in grown.values()],
                new_block_ids=[(taken,) for _, taken in grown.values()],
            ),
            num_scheduled_tokens=tokens,
            finished_req_ids=set(ended),
            preempted_req_ids={request.request_id for request in put_off},
        )

    def _arrivals(
        self, budget: int, tokens: dict[str, int], scheduling: Scheduling
    ) -> list[SimpleNamespace]:
        arrived = []
        for request in list(self.waiting):
            if budget == 0 or len(self.running) >= self._at_once:
                break
            hits = self._hits(request)
            admitted = scheduling.admits(request, len(hits) * self.size)
            if admitted is None and not request.skip_reading_prefix_cache:
                self.waited += 1
                continue
            spare = self.watermark_blocks if self.running else 0
            for block in hits:
                self.blocks[block].ref_cnt += 1
                self._free.pop(block, None)
            request.blocks, request.whole = hits, len(hits)
            request.computed = len(hits) * self.size
            count = min(len(request.tokens) - request.computed, budget, self._chunk)
            if self._take(request, request.computed + count, spare) is None:
                self._release(request)
                break
            scheduling.entered(request)
            self.hit_tokens += request.computed
            self.waiting.remove(request)
            self.running.append(request)
            request.status.name = "RUNNING"
            tokens[request.request_id] = count
            budget -= count
            arrived.append(
                SimpleNamespace(
                    req_id=request.request_id,
                    prefill_token_ids=list(request.tokens),
                    num_computed_tokens=request.computed,
                    block_ids=(list(request.blocks),),
                )
            )
        return arrived

    def done(self, tokens: dict[str, int]) -> None:
        """The step has run: requests that have computed all of their tokens get another one."""
        for request in list(self.running):
            request.computed += tokens.get(request.request_id, 0)
            if request.computed < len(request.tokens) or request.request_id not in tokens:
                continue
            if request.over or (request.answer == 0 and not self._late):
                self.running.remove(request)
                self._end(request)
                continue
            request.over = request.answer == 0  # what comes now is thrown away
            request.answer = max(request.answer - 1, 0)
            request.tokens.append(self._chance.randrange(2))
