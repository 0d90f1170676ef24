"""What is asked for: fields of vLLM's configuration, in all of its processes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from . import names


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
        found = getattr(names.envs(), "VLLM_KV_CACHE_LAYOUT", None)
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

    @property
    def multimodal(self) -> bool:
        """Whether prompts may have more than text."""
        return bool(getattr(self._model, "is_multimodal_model", False))

    def model_kinds(self) -> list[str]:
        """What vLLM says of a model that is not plain attention over text and images."""
        kinds = [words for field, words in _KINDS.items() if getattr(self._model, field, False)]
        return [words for words in kinds if not (self.beside and words == _KINDS["is_hybrid"])]

    def _layer_types(self) -> list[str]:
        """Of layers that have a cache: the last ones may share those of earlier ones."""
        named = (getattr(self.text, field, None) for field in ("layer_types", "layers_block_type"))
        found: list[str] = next((kinds for kinds in named if kinds), [])
        kinds = [_SAME.get(kind, kind) for kind in found if kind not in _WITHOUT_CACHE]
        if not self.on_gpu and not getattr(self.text, "linear_num_value_heads", None):
            kinds = [_OF_GPUS if kind == _STATES else kind for kind in kinds]
        return kinds[: len(kinds) - self.sharing]

    @property
    def sharing(self) -> int:
        """Layers, the last ones, that have the keys and values of earlier ones."""
        return int(getattr(self.text, "num_kv_shared_layers", None) or 0)

    @property
    def layer_counts(self) -> dict[str, int]:
        """Layers of each kind; none where a configuration does not tell them apart."""
        return dict(Counter(self._layer_types()))

    @property
    def other_kinds(self) -> list[str]:
        """Of layers that are not of full attention."""
        return sorted(set(self._layer_types()) - {_FULL})

    @property
    def window(self) -> int:
        """Tokens that a layer with a sliding window looks back to."""
        return int(getattr(self.text, "sliding_window", None) or 0)

    @property
    def beside(self) -> bool:
        """Whether some layers are of full attention and some are not, which remain vLLM's."""
        return _FULL in self._layer_types() and self.other_kinds != []

    @property
    def routes(self) -> dict[str, str]:
        """Backends of attention by kinds of layers, where they are asked for."""
        chosen = getattr(self._config.attention_config, "backend_per_kind", None) or {}
        return {kind: str(getattr(one, "name", one)) for kind, one in chosen.items()}

    # Shapes and sizes.

    @property
    def layers(self) -> int:
        """That the engine serves."""
        if self.beside:
            return self._layer_types().count(_FULL)
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
    def token_bytes(self) -> int:
        """Of a token's K and V in one layer of a rank."""
        return 2 * self.kv_heads * self.head_dim * int(names.get_dtype_size(self.dtype))

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
    def states(self) -> int:
        """That each such layer keeps of a request: where prefixes are found one more, at the last
        end of a block."""
        return 2 if str(getattr(self._cache, "mamba_cache_mode", "none")) == "align" else 1

    @property
    def block(self) -> int | None:
        """Where nobody has set it, workers learn it from the backend, and the core later."""
        return int(self._cache.block_size) if self._cache.user_specified_block_size else None

    @property
    def match_unit(self) -> int | None:
        """Tokens, where prefixes may end inside a block."""
        found = getattr(self._cache, "prefix_match_unit", None)
        return None if found is None else int(found)

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
        platform = names.current_platform
        return [int(platform.device_id_to_physical_device_id(place)) for place in places]

    def shared_layers(self) -> dict[str, str]:
        """Names of layers that have no cache: of the one whose keys and values they share."""
        layers = self._config.compilation_config.static_forward_context
        found = {
            name: getattr(one, "kv_sharing_target_layer_name", None) for name, one in layers.items()
        }
        return {name: target for name, target in found.items() if target is not None}

    def layer_kinds(self, names: Iterable[str]) -> list[str]:
        """Classes of the model's layers by these names."""
        layers = self._config.compilation_config.static_forward_context
        return sorted({type(layers[name]).__name__ for name in names})


_FULL = "full_attention"  # of layer_types, and of vLLM's kinds of caches
_STATES = "linear_attention"
# Other names of these, of configurations of some models and ages.
_SAME = {"attention": _FULL, "mamba": _STATES, "conv": _STATES}
_OF_GPUS = f"{_STATES} without a gated delta rule"  # Mamba, convolutions: vLLM has no kernels else
_WITHOUT_CACHE = ("mlp", "moe")  # where these are layers of their own
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
