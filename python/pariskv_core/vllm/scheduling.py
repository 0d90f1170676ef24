"""The scheduler's side: lets requests in, and turns each decision of vLLM's scheduler into orders.

A request comes in once sequences have room for the length that it may reach, and once all rows of
the prefix that vLLM has found for it are stored. Others pass one that waits for room, until they
have taken twice what it needs.
"""

from __future__ import annotations

import logging
from typing import Any

from pariskv_core.serving import Books, Orders, RequestErrors, Step

from . import names
from .pool import Pool

logger = logging.getLogger("vllm.pariskv")

_LOOKUPS = 8  # requests that may wait while others pass, each of them a lookup of vLLM's
_SHUT = 16  # passes until those behind are looked at again, unless a request ends before


class Scheduling:
    """
    block    tokens of one of vLLM's blocks
    longest  tokens of a request: max_model_len
    """

    def __init__(self, books: Books, block: int, longest: int) -> None:
        self.books = books
        self._block = block
        self._longest = longest
        self._pool: Pool | None = None
        self.errors_of = RequestErrors()
        self._requests: dict[str, Any] = {}  # that have blocks, as vLLM's objects
        self._held: list[Any] = []  # that would not heed a wait, see `_wait`
        self._taken: dict[int, tuple[int, Any]] = {}  # blocks that were handed out in this pass
        self._waits = 0  # of this pass
        self._passed = False  # in this pass a request came in beside one that waits
        self._shut = 0  # passes in which the first one without room keeps out all others
        self._reset = False  # in this pass
        self._reported: dict[str, int] = {}
        self._said = self._broken = False
        self.forgotten = 0  # blocks that were found, and whose rows nobody has

    def bind(self, pool: Pool) -> None:
        self._pool = pool

    # Which requests come in.

    def admits(self, request: Any, computed: int) -> bool | None:
        """In a pass of vLLM's scheduler, of a request and the tokens that it has found for it.

        True: it may come in. False: it waits, and so do all that follow, since `Pool.close` keeps
        them out. None: it waits, and the scheduler goes on to the next one.
        """
        try:
            return self._admits(request, computed)
        except Exception:
            self._failed("A request waits for it.")
            return None

    def _admits(self, request: Any, computed: int) -> bool | None:
        self._look_for_reset()
        name, pool = request.request_id, self._pool
        most = names.most_tokens(request, self._longest)
        if not self.books.admits(name, request.num_tokens, most):
            self._waits += 1
            shut = self._shut > 0 or self.books.closed or self._waits > _LOOKUPS
            return self._close(request) if shut else self._wait(request)
        if pool is None or computed == 0 or self._stored(pool, request, computed):
            self._passed = self._passed or self._waits > 0
            return True
        self.books.withdraw(name)
        self._waits += 1
        return self._close(request) if self._waits > _LOOKUPS else self._wait(request)

    def _look_for_reset(self) -> None:
        """vLLM does not say that its pool has forgotten all prefixes."""
        if self._pool is not None and self._pool.was_reset():
            self._pool.seen()
            self._reset = True  # sequences that end in this step go, too
            self.books.reset()

    def _close(self, request: Any) -> bool | None:
        runs = any(names.is_running(other) for other in self._requests.values())
        if runs and self._pool is not None and self._pool.close():
            return False
        return self._wait(request)

    def _wait(self, request: Any) -> bool | None:
        """The scheduler goes on to the next one."""
        if not names.reads_prefixes(request):  # it would come in: vLLM takes None for 0
            names.let_read_prefixes(request, True)
            self._held.append(request)
        return None

    def _stored(self, pool: Pool, request: Any, tokens: int) -> bool:
        """Whether rows of a prefix that was just found are all there.

        Blocks whose rows nobody has or computes are forgotten, so that the next pass finds others.
        vLLM leaves such ones where it schedules a request and then preempts it in the same step.
        """
        strange: set[int] = set()
        for position in range(tokens // self._block - 1, -1, -1):
            found = pool.found(request, position)
            if found is None:
                break
            block, used, content = found
            stored = self.books.stores(block, position, content)
            if stored is None and not used:
                strange.add(block)
                continue
            if stored is None:  # of a request that is scheduled in this pass
                self._taken[block] = (position, content)
            if stored and not strange:
                return self._of_one_sequence(pool, request, block, position)
            break
        self._forget(strange)
        return False

    def _of_one_sequence(self, pool: Pool, request: Any, block: int, position: int) -> bool:
        """Whether a found prefix has the blocks of one sequence. Else the next pass finds them."""

        def found(place: int) -> int | None:
            there = pool.found(request, place)
            return None if there is None else there[0]

        others = self.books.others(block, position, found)
        pool.forget(others)
        return not others

    def _forget(self, blocks: set[int]) -> None:
        if blocks and self._pool is not None:
            self.forgotten += len(blocks)
            self._pool.forget(blocks)

    def entered(self, request: Any) -> None:
        """It has its blocks, and is scheduled in this pass."""
        self._requests[request.request_id] = request

    # What the workers are told.

    @property
    def pending(self) -> bool:
        """Whether a step without requests has something to tell the workers."""
        return self.books.pending or (self._pool is not None and self._pool.was_reset())

    def reset(self) -> None:
        """Nothing that was computed before may be found again."""
        try:
            self._evict(self.books.reset())
        except Exception:
            self._failed("Prefixes are dropped in the next step.")

    def decide(self, output: Any) -> Orders:
        """At the end of a pass, of its SchedulerOutput."""
        try:
            self._look_for_reset()
        except Exception:
            self._failed("Prefixes are dropped now.")
        reset, self._reset = self._reset, False
        if self._pool is not None:
            self._pool.open()
        for request in self._held:
            names.let_read_prefixes(request, False)
        self._held.clear()
        if self._shut > 0:
            self._shut -= 1
        elif self._waits > 0 and not self._passed:
            self._shut = _SHUT  # of those that were looked at nobody had room
        self._waits, self._passed = 0, False
        orders = self._orders(output, reset)
        taken, self._taken = self._taken, {}
        # Whatever was scheduled is in the books by now: else nobody computes these.
        self._forget(
            {block for block, of in taken.items() if self.books.stores(block, *of) is None}
        )
        return orders

    def _orders(self, output: Any, reset: bool) -> Orders:
        step = self._step(output, reset)
        if step.ended:
            self._shut = 0
        for request in step.ended:
            if request not in step.tokens:  # else it was preempted, and comes in again
                self._requests.pop(request, None)
        broken, self._broken = self._broken, False
        try:
            if broken:
                raise RuntimeError("[vllm] books: an error came up while requests were let in")
            orders, forgotten = self.books.step(step)
        except Exception:
            self._failed("Nothing that was stored is used.")
            self._broken = False
            self.books.restart()
            orders, forgotten = self.books.step(self._step(output, reset))
            if self._pool is not None:
                forgotten = self._pool.all_blocks()
        if orders.lost:
            self._say(
                "Rows of %d blocks are not there: the requests that need them fail.",
                len(orders.lost),
            )
        self._evict(forgotten)
        return orders

    def _step(self, output: Any, reset: bool) -> Step:
        return names.step_of(
            output,
            self._requests.get,
            longest=self._longest,
            knows=self.books.knows,
            pool=self._pool,
            reset=reset,
        )

    def _evict(self, blocks: set[int]) -> None:
        if self._pool is not None:
            self._pool.forget(blocks)

    def _failed(self, text: str) -> None:
        self._broken = True
        self._say("An error in the books. " + text, exc_info=True)

    def _say(self, text: str, *values: object, exc_info: bool = False) -> None:
        """Once: what happens often is in the metrics."""
        if not self._said:
            self._said = True
            rest = " vllm:pariskv_… counts it; please report this."
            logger.error(text + rest, *values, exc_info=exc_info)

    def errors(self) -> dict[str, int]:
        """What was counted since the last call."""
        now = {
            "lost_requests": self.books.counts.lost,
            "forgotten_blocks": self.forgotten,
            "restarts": self.books.counts.restarts,
        }
        new = {name: now[name] - self._reported.get(name, 0) for name in now}
        self._reported = now
        return new if any(new.values()) else {}
