"""Memory and shapes of models of which only layers of full attention are the engine's."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from pariskv_core.serving.memory import Available, Others
from pariskv_core.vllm import beside, memory, startup
from pariskv_core.vllm.options import Options
from test_startup import asked, config
from vllm.v1.kv_cache_interface import FullAttentionSpec


def test_layers_that_remain_with_vllm_get_what_their_windows_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two groups of two layers beside two of full attention: of 96 tokens three blocks of 64, and
    of a prompt that takes a step 8 more."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    served = config(
        device_config__device_type="cuda",
        attention_config__backend=None,
        attention_config__backend_per_kind={"full_attention": "CUSTOM"},
        cache_config__kv_cache_memory_bytes=None,
        cache_config__block_size=64,
        model_config__hf_text_config__layer_types=kinds,
        model_config__hf_text_config__sliding_window=96,
    )
    options = Options(served)
    assert options.layers == 2
    each = 2 * 64 * 2 * 2 * 64 * 4  # layers, tokens, K and V, heads, numbers, bytes
    first = 1 + 2 * (4 + 8)
    all_of_them = first + 2 * 4 * 8
    assert memory.of_others(options, 64, 10**12) == Others(all_of_them, all_of_them * each)
    assert memory.of_others(options, 64, 80 * each).blocks == 40, "half of what there is"
    assert memory.of_others(options, 64, 0).blocks == first, "a request has to run"
    free = Available(30 * 10**9, 10**10)
    monkeypatch.setattr(startup, "available", lambda options: free)
    wish = startup.asked(options)
    taken = memory.of_others(options, 64, free.device).bytes
    assert startup.budgets_of(options, wish).device == free.device - taken
    assert startup.budgets_of(options, wish, laid_out=True).device == free.device
    startup.override_blocks(options)
    assert served.cache_config.num_gpu_blocks_override == taken // each
    assert startup.plan_of(options, wish) == startup.planned(
        options, wish, startup.budgets_of(options, wish)
    )
    # vLLM's own option is for these layers, wherever a budget is asked for.
    served.cache_config.kv_cache_memory_bytes = 10**9
    assert startup.budgets_of(options, wish, laid_out=True).device == free.device
    assert startup.rank_budgets(options, wish, 100).device == free.device


@pytest.mark.parametrize("prefixes", [False, True])
def test_linear_layers_get_what_their_states_take(prefixes: bool) -> None:
    """Three groups of one layer beside one of full attention: a block for each state."""
    options = Options(
        config(
            cache_config__mamba_cache_mode="align" if prefixes else "none",
            model_config__is_hybrid=True,
            model_config__hf_text_config__layer_types=["linear_attention"] * 3 + ["full_attention"],
            model_config__hf_text_config__linear_num_value_heads=4,
        )
    )
    each = 192 * 2 * 2 * 64 * 4  # tokens, K and V, heads, numbers, bytes
    states = 3 * (2 if prefixes else 1)
    kept = 3 if prefixes else 0  # of each request that has ended, for its prefix
    blocks = 1 + states + 8 * (states + kept)
    assert memory.of_others(options, 192, 10**12) == Others(blocks, blocks * each)
    assert memory.of_others(options, 192, 0).blocks == 1 + states, "a request has to run"


def test_layers_beside_others_are_as_workers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes blocks as large as a state, whatever was asked for, and full layers may have heads
    of their own. The core learns it from a Spec that has come from another process."""
    mixed = {
        "model_config__is_hybrid": True,
        "model_config__hf_text_config__linear_num_value_heads": 4,
        "model_config__hf_text_config__layer_types": ["linear_attention", "full_attention"],
    }
    monkeypatch.setattr(beside.Spec, "told", None)
    spec = FullAttentionSpec(block_size=576, num_kv_heads=1, head_size=128, dtype=torch.float32)
    sent = pickle.dumps(beside.Spec.of(spec))
    beside.Spec.told = None
    assert asked(**mixed).block == 128
    assert pickle.loads(sent) == beside.Spec.told
    found = asked(**mixed)
    assert (found.block, found.config.kv_heads, found.config.head_dim) == (576, 1, 128)
    alone = asked()
    assert (alone.block, alone.config.kv_heads, alone.config.head_dim) == (128, 2, 64)


def test_a_plan_is_made_anew_where_blocks_became_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(config())
    monkeypatch.setattr(startup, "_plans", {})
    startup.override_blocks(options)
    wish = startup.asked(options)
    plan = startup.plan_of(options, wish)
    assert startup.plan_of(options, wish) is plan
    larger = dataclasses.replace(wish, block=256, config=wish.config.replace(segment_tokens=256))
    assert startup.plan_of(options, larger).blocks < plan.blocks
