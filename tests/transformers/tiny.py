"""Random models of a few layers, and the ways to run them that the tests share."""

from __future__ import annotations

import functools
from typing import Any

import pariskv_core as pk
import pariskv_core.transformers as pkt
import pytest
import torch
import transformers
from pariskv_core.transformers import versions
from pariskv_core.transformers.versions import CACHE
from transformers import DynamicCache

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
VOCABULARY = 307

# Everything is attended to; and every step searches, with few rows left to choose from.
DENSE: dict[str, Any] = {"threads": 1}
SEARCHING: dict[str, Any] = {
    "policy": pk.ParisKV(top_k=36, schedule=[(0, 1.0, 1.0)], block=0, tail="none"),
    "sink": 2,
    "local": 4,
    "update": 5,
    "dense_below": 0,
    "segment_tokens": 64,
    "threads": 1,
}
SETTINGS = {"dense": DENSE, "searching": SEARCHING}

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
SLIDING: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}

MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
NEMOTRON: dict[str, Any] = {
    "num_hidden_layers": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 64,
    "ssm_state_size": 16,
    "n_groups": 1,
    "chunk_size": 16,
}
LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}

# model_type: the class, and what its config has besides.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "mistral": ("Mistral", {"sliding_window": None}),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"attention_multiplier": 0.1, "residual_multiplier": 0.5}),
    "smollm3": ("SmolLM3", {}),
    "cohere2": ("Cohere2", SLIDING),
    "gemma2": ("Gemma2", {**SLIDING, "attn_logit_softcapping": 30.0, "query_pre_attn_scalar": 64}),
    "gemma3_text": ("Gemma3", {**SLIDING, "query_pre_attn_scalar": 64}),
    "gpt_oss": ("GptOss", {**SLIDING, **EXPERTS}),
    "gemma3n_text": (
        "Gemma3n",
        {
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "gemma4_text": (
        "Gemma4",
        {
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "global_head_dim": 128,
        },
    ),
    "qwen3_next": ("Qwen3Next", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3_5_text": ("Qwen3_5", LINEAR),
    "olmo_hybrid": ("OlmoHybrid", LINEAR),
    "lfm2": ("Lfm2", {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}),
    "jamba": (
        "Jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": ("Bamba", {"num_hidden_layers": 4, "attn_layer_indices": [1, 3], **MAMBA}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {"layer_types": ["mamba", "attention"], "num_local_experts": 0, **MAMBA},
    ),
    "nemotron_h": (
        "NemotronH",
        {"layers_block_type": ["mamba", "attention", "mlp", "attention"], **NEMOTRON},
    ),
    "llama4_text": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "attention_chunk_size": 32,  # of three layers; the fourth attends to all
            "intermediate_size_mlp": 128,
            **EXPERTS,
        },
    ),
}


# Families whose other layers keep states: newer versions of the library have layers for them.
STATES = {"qwen3_next", "qwen3_5_text", "olmo_hybrid", "lfm2"}
STATES |= {"jamba", "bamba", "granitemoehybrid", "nemotron_h"}


@functools.cache
def model(family: str, sharpness: float = 4.0) -> Any:
    """A model with eager attention: large random weights, so that it does not repeat itself."""
    name, extra = FAMILIES[family]
    if family in STATES and not versions.WITHOUT_ROWS:
        pytest.skip(f"the caches of transformers {transformers.__version__} keep no states")
    config_class = getattr(transformers, f"{name}TextConfig", None)
    if config_class is None or not family.endswith("_text"):
        config_class = getattr(transformers, f"{name}Config", None)
    model_class = getattr(transformers, f"{name}ForCausalLM", None)
    if config_class is None or model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = config_class(**{**COMMON, **extra}, attn_implementation="eager")
    torch.manual_seed(11)
    made = model_class(config).eval()
    made.generation_config.eos_token_id = 10 * VOCABULARY  # never
    made.generation_config.pad_token_id = 0
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            # Where queries are normalised, their norm's weight counts: 1 + weight for Gemma.
            if "q_norm" in parameter_name or "q_layernorm" in parameter_name:
                parameter.fill_(3 * sharpness - (0.0 if parameter.any() else 1.0))
            elif "q_proj" in parameter_name or "qkv_proj" in parameter_name:
                parameter.mul_(sharpness)
    return made


class Counting(pk.Cache):
    """An engine that counts its calls."""

    def __init__(self, config: pk.Config) -> None:
        super().__init__(config)
        self.calls: dict[str, int] = dict.fromkeys(("prefill", "decode", "attend"), 0)

    def prefill(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["prefill"] += 1
        return super().prefill(*args, **kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["decode"] += 1
        return super().decode(*args, **kwargs)

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["attend"] += 1
        return super().attend(*args, **kwargs)


def prompt(rows: int = 1, tokens: int = 60, seed: int = 5) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=random)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def ragged(lengths: tuple[int, ...] = (60, 37, 48), seed: int = 6) -> dict[str, torch.Tensor]:
    """A batch that is padded on the left."""
    inputs = prompt(len(lengths), max(lengths), seed)
    for row, length in enumerate(lengths):
        inputs["input_ids"][row, : max(lengths) - length] = 0
        inputs["attention_mask"][row, : max(lengths) - length] = 0
    return inputs


def with_attention(made: Any, name: str) -> Any:
    made.set_attn_implementation(name)
    return made


def generated(made: Any, inputs: dict[str, torch.Tensor], cache: Any = None, **how: Any) -> Any:
    """Token ids, with the attention that the cache asks for."""
    ours = isinstance(cache, pkt.PariskvCache)
    with_attention(made, "pariskv" if ours else "eager")
    if cache is None:
        cache = DynamicCache(config=made.config)
    torch.manual_seed(17)
    how = {"max_new_tokens": 30, "do_sample": False, **how}
    try:
        return made.generate(**inputs, **{CACHE: cache}, **how)
    finally:
        with_attention(made, "eager")


def check_use(cache: pkt.PariskvCache, inputs: dict[str, torch.Tensor] | None = None) -> None:
    """The engine did the work: no layer of the library holds its rows, no padding is stored."""
    engine = cache.engine
    assert isinstance(engine, Counting)
    assert engine.calls["decode"] + engine.calls["attend"] > 0
    if inputs is not None and inputs["input_ids"].shape[1] > 1:
        assert engine.calls["prefill"] == engine.config.layers
    for i, layer in enumerate(cache.layers):
        if i in cache.engine_layers:
            assert layer.keys is None and layer.values is None
    if cache._store.settings is not DENSE and engine.config.dense_below == 0:
        assert engine.stats().searched_tokens > 0
    lengths = [engine.length(sequence) for sequence in cache.sequences]
    stored = cache._store.columns.stored.sum(dim=1).tolist()
    assert lengths == stored
    if inputs is not None:
        columns = cache.get_seq_length()
        padding = (inputs["attention_mask"] == 0).sum(dim=1).tolist()
        repeats = len(lengths) // len(padding)
        expected = [columns - pad for pad in padding for _ in range(repeats)]
        assert lengths == expected


def distinct(tokens: torch.Tensor, start: int) -> int:
    return len(set(tokens[:, start:].flatten().tolist()))
