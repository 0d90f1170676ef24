"""All of vLLM's names: where its types are, and what their fields are called.

No other file of the plugin imports vLLM or reads a field of its objects, but for the scheduler's
blocks (pool.py). vLLM's version is checked before anything but the version is imported: another one
has other names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pariskv_core.serving import Arrival, Growth, Step

from . import versions

_PLACES = {
    "AttentionBackend": "vllm.v1.attention.backend",
    "AttentionBackendEnum": "vllm.v1.attention.backends.registry",
    "AttentionCGSupport": "vllm.v1.attention.backend",
    "AttentionImpl": "vllm.v1.attention.backend",
    "AttentionMetadata": "vllm.v1.attention.backend",
    "AttentionMetadataBuilder": "vllm.v1.attention.backend",
    "AttentionType": "vllm.v1.attention.backend",
    "BlockPool": "vllm.v1.core.block_pool",
    "CPUAttentionBackend": "vllm.v1.attention.backends.cpu_attn",
    "CPUAttentionBackendImpl": "vllm.v1.attention.backends.cpu_attn",
    "CPUAttentionMetadataBuilder": "vllm.v1.attention.backends.cpu_attn",
    "FullAttentionManager": "vllm.v1.core.single_type_kv_cache_manager",
    "FullAttentionSpec": "vllm.v1.kv_cache_interface",
    "KVCacheSpecRegistry": "vllm.v1.kv_cache_spec_registry",
    "KVConnectorBase_V1": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVConnectorFactory": "vllm.distributed.kv_transfer.kv_connector.factory",
    "KVConnectorMetadata": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVConnectorPromMetrics": "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "KVConnectorRole": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVConnectorStats": "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "KVConnectorWorkerMetadata": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVQuantMode": "vllm.v1.kv_cache_interface",
    "MultipleOf": "vllm.v1.attention.backend",
    "RequestStatus": "vllm.v1.request",
    "SupportsHMA": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "current_platform": "vllm.platforms",
    "flash_attn_varlen_func": "vllm.v1.attention.backends.fa_utils",
    "get_current_vllm_config_or_none": "vllm.config",
    "get_dtype_size": "vllm.utils.torch_utils",
    "get_flash_attn_version": "vllm.v1.attention.backends.fa_utils",
    "get_scheduler_metadata": "vllm.v1.attention.backends.fa_utils",
    "init_logger": "vllm.logger",
    "is_fa_version_supported": "vllm.v1.attention.backends.fa_utils",
    "register_backend": "vllm.v1.attention.backends.registry",
    "resolve_block_hashes": "vllm.v1.core.kv_cache_utils",
}
# Of these vLLM for a CPU has the text alone.
ON_GPUS = frozenset({"flash_attn_varlen_func", "get_scheduler_metadata", "is_fa_version_supported"})


def __getattr__(name: str) -> Any:
    """A type or a function of vLLM's, imported when it is first asked for."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    versions.check()
    return getattr(importlib.import_module(_PLACES[name]), name)


def envs() -> Any:
    """Variables of the environment, as vLLM reads them."""
    return importlib.import_module("vllm.envs")


class CacheGroups:
    """A KVCacheConfig: groups of layers with one kind of cache, and blocks that they share.

    own  the engine's group among them; None: it has all layers, in the only one
    """

    def __init__(self, config: Any) -> None:
        self.specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        own = [number for number, spec in enumerate(self.specs) if of_engine(spec)]
        self.own = own[0] if own else None
        self.group = self.own or 0
        spec = self.specs[self.group]
        self.block = int(spec.block_size)
        self.layers = list(config.kv_cache_groups[self.group].layer_names)
        self.kv_heads, self.head_dim = int(spec.num_kv_heads), int(spec.head_size)
        self.blocks = int(config.num_blocks)


def of_engine(spec: Any) -> bool:
    """Whether a cache beside others is that of layers that the engine serves (beside.py)."""
    return bool(getattr(spec, "of_engine", False))


def cache_kind(spec: Any) -> str:
    """What vLLM says of the cache of some layers, in a word: "FullAttentionSpec" if each token
    attends to all before it."""
    for field in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, field, None) is not None:
            return f"{field} {getattr(spec, field)}"
    if getattr(spec, "non_causal", False):
        return "non-causal"
    if getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
        return f"values of {spec.head_size_v} numbers beside keys of {spec.head_size}"
    return "FullAttentionSpec" if of_engine(spec) else type(spec).__name__


def told_by_workers(output: Any) -> Any:
    """What connectors of all ranks have sent, of a KVConnectorOutput; None: nothing."""
    return getattr(output, "kv_connector_worker_meta", None)


# What vLLM's scheduler decides.


class PoolNames(Protocol):
    """What a step is read by of the blocks that its requests have (pool.py)."""

    group: int

    def blocks_of(self, request: str) -> list[int]: ...
    def hashes_of(self, request: Any) -> Sequence[Any]: ...


def step_of(
    output: Any,
    request_of: Callable[[str], Any],
    *,
    longest: int = 1 << 62,
    knows: Callable[[str], bool] = lambda request: True,
    pool: PoolNames | None = None,
    reset: bool = False,
) -> Step:
    """One decision of the V2 scheduler, out of its SchedulerOutput.

    A request that was preempted arrives as a new one, with the tokens that it had generated in
    `prefill_token_ids`.

    request_of  vLLM's object of a request, None where it is not at hand
    longest     tokens that any request may grow to
    knows       whether the books have a request; else it arrives, with all of its blocks
    pool        whose blocks these are; None: of the only group, and hashes are theirs
    """
    cached, group = output.scheduled_cached_reqs, 0 if pool is None else pool.group
    grown: list[Growth] = []
    arrived: list[Arrival] = []

    def arrive(name: str, prompt: int, computed: int, blocks: list[int]) -> None:
        request = request_of(name)
        most = longest if request is None else most_tokens(request, longest)
        hashes: Sequence[Any] = ()
        if request is not None:
            hashes = request.block_hashes if pool is None else pool.hashes_of(request)
        arrived.append(Arrival(name, prompt, computed, blocks, most, hashes))

    for name, computed, blocks in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        if knows(name):
            grown.append(Growth(name, computed, blocks[group] if blocks else []))
        else:
            prompt = computed + output.num_scheduled_tokens[name]
            arrive(name, prompt, computed, [] if pool is None else pool.blocks_of(name))
    for new in output.scheduled_new_reqs:
        prompt = len(new.prefill_token_ids) if new.prefill_token_ids else new.prompt_len
        arrive(new.req_id, prompt, new.num_computed_tokens, new.block_ids[group])
    ended = sorted({*output.finished_req_ids, *(output.preempted_req_ids or ())})
    return Step(ended, grown, arrived, dict(output.num_scheduled_tokens), reset)


def load_before_pass(output: Any) -> None:
    """Workers then call start_load_kv before the forward pass or its replay, with the requests in
    the order of the batch."""
    output.has_sync_kv_loads = True


def num_requests(common: Any) -> int:
    """Of a CommonAttentionMetadata: of a graph all that it was captured for."""
    return int(common.num_reqs)


def queries_of(common: Any) -> dict[str, Any]:
    """What a CommonAttentionMetadata says of a step's queries, and of the longest request."""
    return {
        "begins": common.query_start_loc,
        "tokens": int(common.num_actual_tokens),
        "longest_query": int(common.max_query_len),
        "longest": int(common.max_seq_len),
    }


def pass_of(loads: Mapping[str, Any]) -> tuple[Sequence[str], Mapping[str, Any] | None]:
    """Of what `start_load_kv` is told: the requests in the order of the batch, and the metadata of
    attention by layer, if a graph is replayed. Of any other pass that is in the context."""
    return loads.get("request_ids", ()), loads.get("attn_metadata")


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
