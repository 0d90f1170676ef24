"""All of vLLM's names: where its types are, and what their fields are called.

No other file of the plugin imports vLLM or reads a field of its objects. vLLM's version is checked
before anything but the version is imported: another one has other names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from . import versions
from .books import Arrival, Growth, Step

_PLACES = {
    "AttentionBackend": "vllm.v1.attention.backend",
    "AttentionBackendEnum": "vllm.v1.attention.backends.registry",
    "AttentionCGSupport": "vllm.v1.attention.backend",
    "AttentionImpl": "vllm.v1.attention.backend",
    "AttentionMetadata": "vllm.v1.attention.backend",
    "AttentionMetadataBuilder": "vllm.v1.attention.backend",
    "AttentionType": "vllm.v1.attention.backend",
    "CPUAttentionBackend": "vllm.v1.attention.backends.cpu_attn",
    "KVConnectorBase_V1": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVConnectorFactory": "vllm.distributed.kv_transfer.kv_connector.factory",
    "KVConnectorMetadata": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVConnectorPromMetrics": "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "KVConnectorRole": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVConnectorStats": "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "KVQuantMode": "vllm.v1.kv_cache_interface",
    "MultipleOf": "vllm.v1.attention.backend",
    "RequestStatus": "vllm.v1.request",
    "SupportsHMA": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "current_platform": "vllm.platforms",
    "get_current_vllm_config_or_none": "vllm.config",
    "get_dtype_size": "vllm.utils.torch_utils",
    "init_logger": "vllm.logger",
    "register_backend": "vllm.v1.attention.backends.registry",
}


def __getattr__(name: str) -> Any:
    """A type or a function of vLLM's, imported when it is first asked for."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    versions.check()
    return getattr(importlib.import_module(_PLACES[name]), name)


def engine_of(config: Any) -> str:
    """The name of one engine of vLLM, in all of its processes.

    `instance_id` is none: vLLM sets it anew when its engine core is there.
    """
    return str(config.kv_transfer_config.engine_id)


# What vLLM's scheduler decides.


def step_of(
    output: Any,
    request_of: Callable[[str], Any],
    *,
    longest: int = 1 << 62,
    knows: Callable[[str], bool] = lambda request: True,
    blocks_of: Callable[[str], list[int]] = lambda request: [],
    reset: bool = False,
) -> Step:
    """One decision of the V2 scheduler, out of its SchedulerOutput.

    A request that was preempted arrives as a new one, with the tokens that it had generated in
    `prefill_token_ids`.

    request_of  vLLM's object of a request, None where it is not at hand
    longest     tokens that any request may grow to
    knows       whether the books have a request; else it arrives, with all of `blocks_of`
    """
    cached = output.scheduled_cached_reqs
    grown: list[Growth] = []
    arrived: list[Arrival] = []

    def arrive(name: str, prompt: int, computed: int, blocks: list[int]) -> None:
        request = request_of(name)
        most = longest if request is None else most_tokens(request, longest)
        hashes = () if request is None else request.block_hashes
        arrived.append(Arrival(name, prompt, computed, blocks, most, hashes))

    for name, computed, blocks in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        if knows(name):
            grown.append(Growth(name, computed, blocks[0] if blocks else []))
        else:
            prompt = computed + output.num_scheduled_tokens[name]
            arrive(name, prompt, computed, blocks_of(name))
    for new in output.scheduled_new_reqs:
        prompt = len(new.prefill_token_ids) if new.prefill_token_ids else new.prompt_len
        arrive(new.req_id, prompt, new.num_computed_tokens, new.block_ids[0])
    ended = sorted({*output.finished_req_ids, *(output.preempted_req_ids or ())})
    return Step(ended, grown, arrived, dict(output.num_scheduled_tokens), reset)


def load_before_pass(output: Any) -> None:
    """Workers then call start_load_kv before the forward pass or its replay, with the requests in
    the order of the batch."""
    output.has_sync_kv_loads = True


# A request.


def most_tokens(request: Any, longest: int) -> int:
    """That it may grow to. A streaming session gets more input than it has said."""
    if request.resumable:
        return longest
    return min(int(request.num_prompt_tokens) + int(request.max_tokens or 0), longest)


def is_running(request: Any) -> bool:
    """Whether it is among those that vLLM's scheduler may schedule, and none that waits."""
    return bool(request.status.name == "RUNNING")


def reads_prefixes(request: Any) -> bool:
    """Whether vLLM looks for a prefix. If it does not, because every token of the prompt has to
    be computed, it does not heed that a connector asks it to wait either."""
    return not request.skip_reading_prefix_cache


def let_read_prefixes(request: Any, allowed: bool) -> None:
    request.skip_reading_prefix_cache = not allowed


# The scheduler's pool of blocks, and its manager.


class Pool:
    """The blocks that may be found. `manager` is vLLM's KVCacheManager, or has its block_pool."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._pool = manager.block_pool
        self._table = self._pool.cached_block_hash_to_block
        self._watermark = getattr(manager, "watermark_blocks", None)

    def was_reset(self) -> bool:
        """Whether all prefixes were forgotten since `seen`: the pool then has a new table."""
        return self._pool.cached_block_hash_to_block is not self._table

    def seen(self) -> None:
        self._table = self._pool.cached_block_hash_to_block

    def forget(self, blocks: set[int]) -> None:
        if blocks:
            self._pool.evict_blocks(blocks)

    def all_blocks(self) -> set[int]:
        return {block.block_id for block in self._pool.blocks}

    def blocks_of(self, request: str) -> list[int]:
        return list(self._manager.get_block_ids(request)[0])

    def found(self, request: Any, position: int) -> tuple[int, bool, Any] | None:
        """Of a prefix that was just found for a request: the block at a position, whether a
        request uses it, and its hash."""
        content = request.block_hashes[position]
        found = self._pool.get_cached_block(content, [0])
        return None if found is None else (found[0].block_id, found[0].ref_cnt > 0, content)

    def close(self) -> bool:
        """Lets no further request come in until `open`: the scheduler finds that blocks do not
        suffice, and does not even look up prefixes of others that wait.

        It keeps a number of blocks free for requests that run already. That number is an option of
        vLLM's, and holds only while a request runs.
        """
        if self._watermark is None:
            return False
        self._manager.watermark_blocks = len(self._pool.blocks)
        return True

    def open(self) -> None:
        if self._watermark is not None:
            self._manager.watermark_blocks = self._watermark
