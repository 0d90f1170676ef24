"""What a configuration of vLLM asks for: refused in a sentence, or settings, shape and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pariskv_core as pk
from pariskv_core._served import refusal

from . import versions
from .memory import available, most_host_memory, ranks_here
from .names import engine_of, get_dtype_size, init_logger
from .settings import SECTION, Settings, parse
from .sizes import BLOCK, Budgets, Load, Planned, Shape, engine_config, need, plan

logger = init_logger("vllm.pariskv")

_KV_DTYPES = {"auto": None, "float16": None, "bfloat16": None, "int8_per_token_head": "int8"}


@dataclass(frozen=True)
class Asked:
    """All that follows from a configuration: the same in every process."""

    settings: Settings
    shape: Shape
    block: int
    config: pk.Config  # of a rank's engine, without budgets


def refuse(config: Any) -> None:
    """Raises for what is not served."""
    versions.check()
    if not config.use_v2_model_runner:
        raise ValueError(
            "[vllm] model runner: expected V2, got V1; set VLLM_USE_V2_MODEL_RUNNER=1, and on a "
            "CPU TRITON_INTERPRET=1 (docs/vllm.md)"
        )
    parallel, model, cache = config.parallel_config, config.model_config, config.cache_config
    refused = {
        "speculative decoding": config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "dual batch overlap": bool(getattr(parallel, "enable_dbo", False)),
        "sleep mode": bool(model.enable_sleep_mode),
        "pooling": model.runner_type == "pooling",
        "multi-head latent attention": bool(model.use_mla),
        "layers that are not attention": bool(model.is_hybrid),
        f"--kv-cache-dtype {cache.cache_dtype}": cache.cache_dtype not in _KV_DTYPES,
    }
    for what, asked in refused.items():
        if asked:
            raise NotImplementedError(
                f"[vllm] {what} is not supported together with the connector {versions.NAME}; "
                "leave one of them out (docs/vllm.md#what-is-refused)"
            )
    text = model.hf_text_config
    unserved = refusal(lambda field: getattr(text, field, None))
    if unserved is None and "sliding_attention" in (getattr(text, "layer_types", None) or []):
        unserved = f"{text.model_type} is not supported: it has layers with a sliding window"
    if unserved:
        raise NotImplementedError(f"[vllm] model: {unserved}")


def asked(config: Any) -> Asked:
    refuse(config)
    settings = parse(
        (config.additional_config or {}).get(SECTION, {}),
        config.kv_transfer_config.kv_connector_extra_config or {},
    )
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    shape = Shape(
        layers=model.get_num_layers(parallel),
        query_heads=model.get_num_attention_heads(parallel),
        kv_heads=model.get_num_kv_heads(parallel),
        head_dim=model.get_head_size(),
        item=get_dtype_size(model.dtype),
    )
    fields = settings.of_config()
    narrow = _KV_DTYPES[cache.cache_dtype]
    if narrow is not None:
        fields["kv_dtype"] = narrow
    device = "cpu" if config.device_config.device_type == "cpu" else "cuda"
    # Where nobody has set it, workers learn it from the backend, and the engine core later.
    block = int(cache.block_size) if cache.user_specified_block_size else BLOCK
    made = engine_config(shape, model.dtype, device, block, fields)
    return Asked(settings, shape, block, made)


def planned(config: Any, wish: Asked) -> Planned:
    """How many blocks vLLM may have."""
    scheduler = config.scheduler_config
    chunk, part = scheduler.max_num_batched_tokens, scheduler.long_prefill_token_threshold
    load = Load(
        longest=config.model_config.max_model_len,
        sequences=scheduler.max_num_seqs,
        chunk=chunk,
        # One prompt takes all of a step that it can, unless its share is bounded.
        prompts=1 + (chunk // part if part else 0),
    )
    one = need(wish.shape, wish.config, wish.block, load.longest)
    gpu = wish.config.device != "cpu"
    return plan(one, budgets_of(config, wish), load, block=wish.block, gpu=gpu)


def budgets_of(config: Any, wish: Asked) -> Budgets:
    settings, ranks = wish.settings, ranks_here(config)
    device = settings.memory_budget or config.cache_config.kv_cache_memory_bytes
    host = settings.host_budget
    if not (device and host):
        found = available(config, gpu=wish.config.device != "cpu")
        device, host = device or found.device, host or found.host
    return Budgets(int(device), int(host) // ranks)


_plans: dict[str, Planned] = {}  # of this process, by engine: memory changes meanwhile


def rank_budgets(config: Any, wish: Asked, blocks: int) -> Budgets:
    """Of a rank's engine on a GPU, now that the model is there.

    Refused where the GPU has less left than the engine core expected when it counted blocks.
    """
    settings = wish.settings
    host = settings.host_budget // ranks_here(config)
    device = settings.memory_budget or available(config, gpu=True).device
    longest = config.model_config.max_model_len
    one = need(wish.shape, wish.config, wish.block, longest)
    tokens = (blocks - 1) * wish.block
    rows = one.on_device(tokens, host) if host else tokens * one.device
    wanted = rows + one.costs.of(longest, prompt=longest)
    if device < wanted:
        raise ValueError(
            f"[vllm] memory: {blocks} blocks need {wanted / 1e9:.1f} GB of each GPU, and one has "
            f"{device / 1e9:.1f} GB left; set memory_budget in --additional-config, or lower "
            "--max-num-batched-tokens"
        )
    return Budgets(device, host or most_host_memory() // ranks_here(config))


def override_blocks(config: Any) -> None:
    """Sets how many blocks vLLM has. In the engine core, before it makes its plan of the cache."""
    wish = asked(config)
    most = _plans[engine_of(config)] = planned(config, wish)
    cache = config.cache_config
    if cache.num_gpu_blocks_override is None:
        cache.num_gpu_blocks_override = most.blocks
        logger.info(
            "%d blocks of %d tokens, which memory_budget and host_budget pay for.",
            most.blocks,
            wish.block,
        )
    check_blocks(cache.num_gpu_blocks_override, most)


def plan_of(config: Any, wish: Asked) -> Planned:
    """The plan that `override_blocks` went by."""
    name = engine_of(config)
    if name not in _plans:
        _plans[name] = planned(config, wish)
    return _plans[name]


def check_blocks(blocks: int, most: Planned) -> None:
    if blocks > most.blocks:
        raise ValueError(
            f"[vllm] --num-gpu-blocks-override: expected at most {most.blocks}, which the budgets "
            f"pay for, got {blocks}; leave it out, or raise memory_budget or host_budget"
        )
