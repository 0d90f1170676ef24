"""What the books take from vLLM's SchedulerOutput. Of its types only names of fields are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .books import Arrival, Growth, Step


def step_of(output: Any, most: Callable[[str], int], *, reset: bool = False) -> Step:
    """One decision of the V2 scheduler; `most`: tokens that a request may grow to.

    A request that was preempted arrives as a new one, with the tokens that it had generated in
    `prefill_token_ids`.
    """
    cached = output.scheduled_cached_reqs
    grown = [
        Growth(request, computed, blocks[0] if blocks else [])
        for request, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        )
    ]
    arrived = [
        Arrival(
            new.req_id,
            len(new.prefill_token_ids) if new.prefill_token_ids else new.prompt_len,
            new.num_computed_tokens,
            new.block_ids[0],
            most(new.req_id),
        )
        for new in output.scheduled_new_reqs
    ]
    ended = sorted({*output.finished_req_ids, *(output.preempted_req_ids or ())})
    return Step(ended, grown, arrived, dict(output.num_scheduled_tokens), reset)
