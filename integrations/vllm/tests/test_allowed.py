"""What is served is on lists, all else is refused in a sentence, without an engine."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from pariskv_core.vllm import allowed, beside, names, register, versions
from pariskv_core.vllm.backend import Backend
from pariskv_core.vllm.options import Options
from test_startup import config
from vllm.config import VllmConfig

MIXED = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_v2_model_runner": False}, "expected V2, got V1; set VLLM_USE_V2_MODEL_RUNNER=1"),
        ({"speculative_config": object()}, "speculative decoding is not supported; leave it out"),
        ({"engram_config": object()}, "engram_config is not supported; leave it out"),
        (
            {"parallel_config__pipeline_parallel_size": 2},
            "--pipeline-parallel-size: expected 1, got 2; leave it out",
        ),
        ({"parallel_config__decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"parallel_config__enable_dbo": True}, "--ubatch-size: expected 1, got 2"),
        ({"parallel_config__ubatch_size": 2}, "--ubatch-size: expected 1, got 2"),
        ({"model_config__enable_sleep_mode": True}, "--enable-sleep-mode: expected False, got T"),
        ({"model_config__runner_type": "pooling"}, "--runner: expected generate, got pooling"),
        ({"model_config__use_mla": True}, "a model with multi-head latent attention is not"),
        ({"model_config__is_hybrid": True}, "a model with layers that are not attention is not"),
        ({"model_config__is_mm_prefix_lm": True}, "attention in both directions is not"),
        ({"scheduler_config__policy": "lottery"}, "expected fcfs or priority, got lottery"),
        (
            {"cache_config__cache_dtype": "nvfp4"},
            "--kv-cache-dtype: expected auto or .* or int8_per_token_head .*, got nvfp4",
        ),
        ({"cache_config__kv_cache_dtype_skip_layers": ["3"]}, r"expected none, got \['3'\]"),
        (
            {"kv_transfer_config__kv_connector": "MultiConnector"},
            "kv_connector: expected ParisKV, got MultiConnector; it works beside no other one",
        ),
        ({"kv_transfer_config__kv_role": "kv_producer"}, 'set "kv_role": "kv_both"'),
        ({"model_config__is_multimodal_model": True}, 'set "kv_role": "kv_producer"'),
        (
            {"kv_transfer_config__kv_load_failure_policy": "recompute"},
            "kv_load_failure_policy: expected fail, got recompute",
        ),
        (
            {"device_config__device_type": "cuda", "attention_config__backend": None},
            "--attention-backend: expected CUSTOM, got none; set --attention-backend CUSTOM",
        ),
        (
            {"model_config__hf_text_config__layer_types": ["sliding_attention"]},
            "llama is not supported: it has layers with a sliding window",
        ),
        (
            {
                "device_config__device_type": "cuda",
                "model_config__hf_text_config__layer_types": MIXED,
            },
            "backend_per_kind of full_attention: expected CUSTOM, got none; .* set "
            '--attention-config \'{"backend_per_kind": {"full_attention": "CUSTOM"}}\'',
        ),
        (
            {
                "device_config__device_type": "cuda",
                "attention_config__backend_per_kind": {"full_attention": "CUSTOM"},
                "model_config__hf_text_config__layer_types": MIXED,
            },
            "--attention-backend CUSTOM: its other layers are vLLM's own; .* --attention-config",
        ),
        (
            {"model_config__hf_text_config__layer_types": ["full_attention", "chunked_attention"]},
            "llama is not supported: it has layers with chunks",
        ),
        (
            {"cache_config__prefix_match_unit": 64},
            "--prefix-match-unit: expected none, got 64",
        ),
        (
            {"model_config__hf_text_config__layer_types": ["linear_attention", "full_attention"]},
            'llama is not supported: it has layers of type "linear_attention without a gated delta',
        ),
        (
            {"model_config__is_hybrid": True},
            "a model with layers that are not attention is not supported",
        ),
        (
            {
                "device_config__device_type": "cuda",
                "model_config__hf_text_config__num_kv_shared_layers": 3,
            },
            "llama is not supported on a GPU: it has layers that share rows",
        ),
        (
            {"model_config__hf_text_config__layers_block_type": ["mamba", "attention"]},
            'llama is not supported: it has layers of type "linear_attention without a gated delta',
        ),
        (
            {"model_config__hf_text_config__kv_lora_rank": 512},
            "llama is not supported: it has multi-head latent attention",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_configuration_is_refused_in_a_sentence(change: dict[str, Any], sentence: str) -> None:
    allowed.check(Options(config()))
    with pytest.raises((ValueError, NotImplementedError), match=sentence):
        allowed.check(Options(config(**change)))


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__hf_text_config__layer_types": MIXED},
        {
            "model_config__is_hybrid": True,
            "model_config__hf_text_config__linear_num_value_heads": 4,
            "model_config__hf_text_config__layer_types": ["linear_attention", "full_attention"],
        },
        {
            "device_config__device_type": "cuda",
            "attention_config__backend": None,
            "attention_config__backend_per_kind": {"full_attention": "CUSTOM"},
            "model_config__hf_text_config__layer_types": MIXED,
        },
        {
            "device_config__device_type": "cuda",
            "attention_config__backend": None,
            "attention_config__backend_per_kind": {"full_attention": "CUSTOM"},
        },
        {
            "device_config__device_type": "cuda",
            "attention_config__backend": None,
            "attention_config__backend_per_kind": {"full_attention": "CUSTOM"},
            "model_config__is_hybrid": True,
            "model_config__hf_text_config__layers_block_type": ["mamba", "moe", "attention"],
        },
    ],
    ids=["CPU", "CPU, linear layers", "GPU", "GPU, full layers alone", "GPU, Mamba"],
)
def test_layers_of_full_attention_are_served_by_their_kind(change: dict[str, Any]) -> None:
    allowed.check(Options(config(**change)))


def test_prefixes_that_end_inside_a_block_are_refused() -> None:
    allowed.check_prefixes(SimpleNamespace(enable_partial_hash_hits=False))
    with pytest.raises(NotImplementedError, match=r"inside a block .* --no-enable-prefix-caching"):
        allowed.check_prefixes(SimpleNamespace(enable_partial_hash_hits=True))


def test_a_layout_of_pages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks no connector then, which is when blocks are counted."""
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBNHC")
    with pytest.raises(NotImplementedError, match="VLLM_KV_CACHE_LAYOUT: expected none, got LBN"):
        allowed.check(Options(config()))


def test_caches_that_are_not_of_full_attention_are_refused() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    shape: dict[str, Any] = {"block_size": 64, "num_kv_heads": 2, "head_size": 64}
    shape["dtype"] = torch.float32
    Backend.customize_spec(FullAttentionSpec(**shape))
    chunked = FullAttentionSpec(**shape, attention_chunk_size=128)
    with pytest.raises(NotImplementedError, match="FullAttentionSpec, got attention_chunk_size"):
        Backend.customize_spec(chunked)
    with pytest.raises(NotImplementedError, match="expected FullAttentionSpec, got sliding_window"):
        allowed.check_caches([SlidingWindowSpec(**shape, sliding_window=128)])
    with pytest.raises(NotImplementedError, match="expected FullAttentionSpec, got non-causal"):
        allowed.check_caches([FullAttentionSpec(**shape, non_causal=True)])
    with pytest.raises(NotImplementedError, match="got values of 32 numbers beside keys of 64"):
        allowed.check_caches([FullAttentionSpec(**shape, head_size_v=32)])
    sliding, own = SlidingWindowSpec(**shape, sliding_window=128), FullAttentionSpec(**shape)
    allowed.check_caches([sliding, beside.Spec.of(own), sliding])
    with pytest.raises(NotImplementedError, match=r"one group of .* got 2 of 3 groups"):
        allowed.check_caches([sliding, *[beside.Spec.of(own)] * 2])
    with pytest.raises(NotImplementedError, match=r"one group of .* got 2 of 2 groups"):
        allowed.check_caches([sliding, own])


def test_parts_of_a_configuration_are_those_of_the_served_versions() -> None:
    """One that a later version adds is refused until it is on a list."""
    options = Options(VllmConfig())
    assert options.parts() == []
    fields = [name for name in VllmConfig.__dataclass_fields__ if name.endswith("_config")]
    assert set(allowed._PARTS) <= set(fields)


def test_all_names_of_vllm_are_in_one_file_and_exist() -> None:
    folder = Path(names.__file__).parent
    users = [path.name for path in folder.glob("*.py") if "vllm." in _imports(path)]
    assert users == ["versions.py"], "for the version alone"
    for name, place in names._PLACES.items():
        if name in names.ON_GPUS:  # vLLM for a CPU has them in its text alone
            found = importlib.util.find_spec(place)
            assert found is not None and found.origin is not None
            assert re.search(rf"\b{name}\b", Path(found.origin).read_text()), name
        else:
            assert getattr(names, name) is not None, name


def _imports(path: Path) -> str:
    tree = ast.walk(ast.parse(path.read_text()))
    found = [node for node in tree if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = [node.module for node in found if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in found for alias in node.names]
    return " ".join(f"{module}." for module in modules if str(module).split(".")[0] == "vllm")


@pytest.mark.parametrize("version", ["0.31.1", "0.34.0", "1.0", "dev"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = versions.refusal(version)
    assert sentence is not None
    assert f"expected vllm>=0.32,<0.34, got {version}" in sentence
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(RuntimeError, match=r"expected vllm>=0\.32"):
        allowed.check(Options(config()))
    assert versions.refusal("0.32.0") is versions.refusal("0.33.1.dev3+cu130") is None


def test_of_another_version_nothing_but_the_version_is_imported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    monkeypatch.setattr(names.importlib, "import_module", lambda place: pytest.fail(place))
    register()
    assert "expected vllm>=0.32,<0.34, got 0.31.0" in caplog.text
    with pytest.raises(RuntimeError, match=r"expected vllm>=0\.32"):
        names.KVConnectorFactory  # noqa: B018
