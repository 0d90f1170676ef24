"""All of vLLM's names: where its types are, and what their fields are called.

No other file of the plugin imports vLLM or reads a field of its objects, but for the scheduler's
blocks (pool.py). vLLM's version is checked before anything but the version is imported: another one
has other names.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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
    "flash_attn_varlen_func": "vllm.v1.attention.backends.fa_utils",
    "get_current_vllm_config_or_none": "vllm.config",
    "get_dtype_size": "vllm.utils.torch_utils",
    "get_flash_attn_version": "vllm.v1.attention.backends.fa_utils",
    "get_scheduler_metadata": "vllm.v1.attention.backends.fa_utils",
    "init_logger": "vllm.logger",
    "is_fa_version_supported": "vllm.v1.attention.backends.fa_utils",
    "register_backend": "vllm.v1.attention.backends.registry",
}
# Of these vLLM for a CPU has the text alone.
ON_GPUS = frozenset({"flash_attn_varlen_func", "get_scheduler_metadata", "is_fa_version_supported"})


def __getattr__(name: str) -> Any:
    """A type or a function of vLLM's, imported when it is first asked for."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    versions.check()
    return getattr(importlib.import_module(_PLACES[name]), name)


# What is asked for: vLLM's configuration.


class Options:
    """A VllmConfig. A field that one of the versions lacks has the value of no such option."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._model, self._parallel = config.model_config, config.parallel_config
        self._cache, self._scheduler = config.cache_config, config.scheduler_config
        self._transfer = config.kv_transfer_config

    @property
    def connector(self) -> str | None:
        return None if self._transfer is None else self._transfer.kv_connector

    @property
    def transfer(self) -> dict[str, str]:
        """Of --kv-transfer-config, by field."""
        policy = getattr(self._transfer, "kv_load_failure_policy", "fail")
        return {"kv_role": str(self._transfer.kv_role), "kv_load_failure_policy": str(policy)}

    @property
    def engine(self) -> str:
        """The name of one engine of vLLM, in all of its processes.

        `instance_id` is none: vLLM sets it anew when its engine core is there.
        """
        return str(self._transfer.engine_id)

    @property
    def server(self) -> str:
        """The name that all engines of a server have in common, under data parallelism."""
        return re.sub(r"_dp\d+$", "", self.engine)

    def settings(self, section: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """A part of --additional-config, and what --kv-transfer-config has beside its own."""
        of_all = (self._config.additional_config or {}).get(section, {})
        return of_all, self._transfer.kv_connector_extra_config or {}

    def parts(self) -> list[str]:
        """Names of the optional parts that are there."""
        fields = getattr(self._config, "__dataclass_fields__", vars(self._config))
        parts = [name for name in fields if name.endswith("_config") and name not in _ALWAYS]
        there = [name for name in parts if getattr(self._config, name, None) is not None]
        if getattr(getattr(self._config, "aux_output_config", None), "enabled", False):
            there.append("aux_output_config")
        return there

    # What could be refused.

    @property
    def v2_runner(self) -> bool:
        return bool(self._config.use_v2_model_runner)

    @property
    def on_gpu(self) -> bool:
        return bool(self._config.device_config.device_type != "cpu")

    @property
    def backend(self) -> str | None:
        """Of attention, where one is asked for by its name."""
        backend = getattr(self._config.attention_config, "backend", None)
        return None if backend is None else str(getattr(backend, "name", backend))

    @property
    def layout(self) -> str | None:
        """Of pages in vLLM's own cache, where one is asked for."""
        found = getattr(importlib.import_module("vllm.envs"), "VLLM_KV_CACHE_LAYOUT", None)
        return None if found is None else str(found)

    @property
    def parallel(self) -> dict[str, int]:
        """Parts of a batch, of a prompt or of the model that run beside each other, by option."""
        both = 2 * bool(getattr(self._parallel, "enable_dbo", False))
        return {
            "--pipeline-parallel-size": int(self._parallel.pipeline_parallel_size),
            "--decode-context-parallel-size": int(self._parallel.decode_context_parallel_size),
            "--prefill-context-parallel-size": int(
                getattr(self._parallel, "prefill_context_parallel_size", 1)
            ),
            "--ubatch-size": max(both, int(getattr(self._parallel, "ubatch_size", 0)), 1),
        }

    @property
    def sleep_mode(self) -> bool:
        return bool(self._model.enable_sleep_mode)

    @property
    def runner(self) -> str:
        return str(self._model.runner_type)

    @property
    def policy(self) -> str:
        return str(getattr(self._scheduler, "policy", "fcfs"))

    @property
    def kv_dtype(self) -> str:
        return str(self._cache.cache_dtype)

    @property
    def other_dtypes(self) -> list[str]:
        """Layers whose rows have another type."""
        return list(getattr(self._cache, "kv_cache_dtype_skip_layers", None) or [])

    @property
    def text(self) -> Any:
        """The model's own configuration, of its decoder."""
        return self._model.hf_text_config

    def model_kinds(self) -> list[str]:
        """What vLLM says of a model that is not plain attention over text and images."""
        return [words for field, words in _KINDS.items() if getattr(self._model, field, False)]

    # Shapes and sizes.

    @property
    def layers(self) -> int:
        return int(self._model.get_num_layers(self._parallel))

    @property
    def query_heads(self) -> int:
        return int(self._model.get_num_attention_heads(self._parallel))

    @property
    def kv_heads(self) -> int:
        return int(self._model.get_num_kv_heads(self._parallel))

    @property
    def head_dim(self) -> int:
        return int(self._model.get_head_size())

    @property
    def dtype(self) -> Any:
        return self._model.dtype

    @property
    def width(self) -> tuple[int, int, int]:
        """hidden_size, intermediate_size, vocab_size."""
        intermediate = int(getattr(self.text, "intermediate_size", 0))
        return self._model.get_hidden_size(), intermediate, self._model.get_vocab_size()

    @property
    def longest(self) -> int:
        return int(self._model.max_model_len)

    @property
    def block(self) -> int | None:
        """Where nobody has set it, workers learn it from the backend, and the core later."""
        return int(self._cache.block_size) if self._cache.user_specified_block_size else None

    @property
    def prefixes(self) -> bool:
        return bool(self._cache.enable_prefix_caching)

    @property
    def cache_bytes(self) -> int:
        """Of a rank: --kv-cache-memory-bytes, or 0."""
        return int(self._cache.kv_cache_memory_bytes or 0)

    @property
    def utilization(self) -> float:
        return float(self._cache.gpu_memory_utilization)

    @property
    def blocks(self) -> int | None:
        found = self._cache.num_gpu_blocks_override
        return None if found is None else int(found)

    def set_blocks(self, blocks: int) -> None:
        self._cache.num_gpu_blocks_override = blocks

    @property
    def sequences(self) -> int:
        return int(self._scheduler.max_num_seqs)

    @property
    def chunk(self) -> int:
        """New tokens of a step."""
        return int(self._scheduler.max_num_batched_tokens)

    @property
    def part(self) -> int:
        """New tokens of one prompt in a step, 0: as many as there is room for."""
        return int(self._scheduler.long_prefill_token_threshold)

    @property
    def captured(self) -> int:
        """Sizes of a step that are captured as graphs."""
        return len(self._config.compilation_config.cudagraph_capture_sizes or ())

    @property
    def widest(self) -> int:
        """Requests of a step at most, with the padding of a graph."""
        sizes = self._config.compilation_config.cudagraph_capture_sizes or ()
        return max(self.sequences, *sizes, 1)

    @property
    def full_graphs(self) -> bool:
        return bool(self._config.compilation_config.cudagraph_mode.has_full_cudagraphs())

    @property
    def most_captured(self) -> int:
        """Tokens of the largest step that is captured."""
        return int(self._config.compilation_config.max_cudagraph_capture_size or 0)

    @property
    def most_splits(self) -> int:
        """Parts that FlashAttention cuts the tokens of a request into, in a graph."""
        found = getattr(self._config, "attention_config", None)
        return int(getattr(found, "flash_attn_max_num_splits_for_cuda_graph", 32))

    @property
    def rank(self) -> int:
        return int(self._parallel.rank)

    @property
    def ranks(self) -> int:
        return int(self._parallel.world_size)

    @property
    def ranks_here(self) -> int:
        """Ranks of this server that share this machine's memory."""
        return self.ranks * max(int(self._parallel.data_parallel_size_local), 1)

    def gpus(self) -> list[int]:
        """Of the ranks, as nvidia-smi counts them."""
        places = [self._parallel.get_local_gpu_index(rank) for rank in range(self.ranks)]
        assigned = self._parallel.assigned_physical_gpu_ids
        if assigned is not None:
            return [int(assigned[place]) for place in places if place < len(assigned)]
        platform = __getattr__("current_platform")
        return [int(platform.device_id_to_physical_device_id(place)) for place in places]

    def layer_kinds(self, names: Iterable[str]) -> list[str]:
        """Classes of the model's layers by these names."""
        layers = self._config.compilation_config.static_forward_context
        return sorted({type(layers[name]).__name__ for name in names})


_ALWAYS = {  # parts that every configuration has
    "model_config", "cache_config", "parallel_config", "scheduler_config", "device_config",
    "load_config", "offload_config", "attention_config", "aux_output_config", "mamba_config",
    "kernel_config", "structured_outputs_config", "observability_config", "logging_config",
    "compilation_config", "profiler_config", "ec_manager_config", "additional_config",
    "watchdog_config",
}  # fmt: skip
_KINDS = {
    "use_mla": "multi-head latent attention",
    "is_hybrid": "layers that are not attention",
    "is_attention_free": "no attention",
    "is_encoder_decoder": "an encoder and a decoder",
    "is_mm_prefix_lm": "attention in both directions",
    "is_diffusion": "a canvas in place of next tokens",
}


class CacheGroups:
    """A KVCacheConfig: blocks, and the layers whose rows they have."""

    def __init__(self, config: Any) -> None:
        self.specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self.block = int(self.specs[0].block_size)
        self.layers = list(config.kv_cache_groups[0].layer_names)
        self.blocks = int(config.num_blocks)


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
    return type(spec).__name__


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
