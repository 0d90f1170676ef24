"""Settings, refusals and the number of blocks, without an engine."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pariskv_core as pk
import pytest
import torch
from conftest import environment
from pariskv_core import _machine as machine
from pariskv_core.cli import main as command
from pariskv_core.serving import sizes
from pariskv_core.serving.memory import Limits
from pariskv_core.serving.sizes import Budgets
from pariskv_core.vllm import memory, register, startup
from pariskv_core.vllm.backend import Backend
from pariskv_core.vllm.defaults import UTILIZATION, captures, default_limits
from pariskv_core.vllm.options import Options
from pariskv_core.vllm.settings import parse
from vllm.config import CacheConfig, CompilationConfig, CUDAGraphMode, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine import arg_utils
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends.registry import AttentionBackendEnum


class Attention:
    """A layer of a model: the class of vLLM's that has this name is what is served."""


class ChunkedLocalAttention(Attention):
    """One that is not."""


def asked(**changes: Any) -> startup.Asked:
    return startup.asked(Options(config(**changes)))


def config(**changes: Any) -> Any:
    """As much of a VllmConfig as is looked at; `changes` by names like model_config__use_mla."""
    text = SimpleNamespace(model_type="llama", layer_types=None, kv_lora_rank=None)
    made = SimpleNamespace(
        use_v2_model_runner=True,
        speculative_config=None,
        additional_config={},
        instance_id="test",
        kv_transfer_config=SimpleNamespace(
            kv_connector="ParisKV",
            kv_connector_extra_config={},
            engine_id="engine",
            kv_role="kv_both",
        ),
        attention_config=SimpleNamespace(backend=AttentionBackendEnum.CUSTOM),
        compilation_config=SimpleNamespace(
            static_forward_context={"model.layers.0": Attention(), "model.layers.1": Attention()},
            cudagraph_capture_sizes=(),
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_dbo=False,
            ubatch_size=0,
            world_size=1,
            data_parallel_size_local=1,
            assigned_physical_gpu_ids=None,
            get_local_gpu_index=lambda rank: rank,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            block_size=128,
            user_specified_block_size=True,
            kv_cache_memory_bytes=1 << 28,
            num_gpu_blocks_override=None,
            gpu_memory_utilization=UTILIZATION,
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=8,
            max_num_batched_tokens=512,
            long_prefill_token_threshold=0,
            policy="fcfs",
        ),
        model_config=SimpleNamespace(
            dtype="float32",
            max_model_len=4096,
            use_mla=False,
            is_hybrid=False,
            enable_sleep_mode=False,
            runner_type="generate",
            hf_text_config=text,
            get_num_layers=lambda parallel: 2,
            get_num_attention_heads=lambda parallel: 4,
            get_num_kv_heads=lambda parallel: 2,
            get_head_size=lambda: 64,
            get_hidden_size=lambda: 256,
            get_vocab_size=lambda: 1920,
        ),
    )
    made.model_config.dtype = torch.float32
    for name, value in changes.items():
        owner: Any = made
        *folders, last = name.split("__")
        for folder in folders:
            owner = getattr(owner, folder)
        setattr(owner, last, value)
    return made


def test_settings_come_from_either_place() -> None:
    settings = {"pariskv": {"top_k": 64, "memory_budget": "2GiB"}}
    wish = asked(
        additional_config=settings,
        kv_transfer_config__kv_connector_extra_config={"dense_below": 512},
    )
    assert wish.config.policy == pk.ParisKV(top_k=64, seed=None)
    assert wish.config.dense_below == 512
    assert wish.settings.memory_budget == 2 << 30
    assert wish.config.segment_tokens == 128
    for name in ("int8_per_token_head", "fp8"):
        assert asked(cache_config__cache_dtype=name).config.kv_dtype == "int8"


def test_blocks_that_nobody_sets_are_the_backends() -> None:
    """An engine core whose ranks are other processes has vLLM's default until they say theirs."""
    wish = asked(cache_config__block_size=16, cache_config__user_specified_block_size=False)
    assert wish.block == wish.config.segment_tokens == 128 == Backend.get_preferred_block_size(16)
    assert asked(cache_config__block_size=256).block == 256


def test_memory_is_that_of_the_ranks_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [machine.Gpu("GPU", 80 << 30, free << 30) for free in (70, 60, 50, 79)]
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)

    def free(**changes: Any) -> int:
        two = {"parallel_config__world_size": 2, **changes}
        return memory.gpu_memory(Options(config(**two)))[0] >> 30

    assert free() == 60
    assert free(parallel_config__get_local_gpu_index=lambda rank: 2 + rank) == 50
    assert free(parallel_config__assigned_physical_gpu_ids=[3, 0]) == 70
    assert free(parallel_config__world_size=1) == 70
    gpus.clear()
    with pytest.raises(RuntimeError, match=r"expected nvidia-smi to say .* set memory_budget"):
        free()
    # Nobody is asked where both are set.
    both = {"pariskv": {"memory_budget": "1GB", "host_budget": "2GB"}}
    made = Options(config(additional_config=both, device_config__device_type="cuda"))
    assert startup.budgets_of(made, startup.asked(made)) == Budgets(10**9, 2 * 10**9)


def test_host_memory_that_another_server_has_counted_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It takes it only as requests grow: until then the memory looks free."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(machine, "available_memory", lambda: 100 << 30)
    monkeypatch.setattr(memory, "gpu_memory", lambda options: (60 << 30, 80 << 30))
    blocks = {}
    for server in ("one_dp0", "one_dp1", "two"):
        options = Options(
            config(
                device_config__device_type="cuda",
                kv_transfer_config__engine_id=server,
                additional_config={"pariskv": {"memory_budget": "60GB", "placement": "host"}},
                parallel_config__data_parallel_size_local=2 if "dp" in server else 1,
            )
        )
        startup.override_blocks(options)
        blocks[server] = options.blocks
    assert blocks["one_dp0"] == blocks["one_dp1"], "of one server, which has shared it out"
    assert blocks["one_dp0"] is not None
    assert blocks["two"] is not None
    # .8 of what is free go to the first, .8 of the rest to the second.
    assert blocks["two"] < 0.6 * blocks["one_dp0"]


def test_servers_that_share_a_gpu_have_a_share_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM, where --gpu-memory-utilization is of one server, whatever others take."""
    own, total = 2 << 30, 80 << 30
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: own)

    def budget(others: int) -> int:
        monkeypatch.setattr(memory, "gpu_memory", lambda options: (total - own - others, total))
        made = Options(
            config(
                device_config__device_type="cuda",
                cache_config__kv_cache_memory_bytes=None,
                cache_config__gpu_memory_utilization=0.45,
                additional_config={"pariskv": {"host_budget": "2GB"}},
            )
        )
        return startup.budgets_of(made, startup.asked(made)).device

    alone = budget(0)
    assert alone > 0.4 * total
    # A context and workspaces cannot be told from what others take: they are counted beside these.
    assert budget(total // 2) == alone - (3 << 29)
    assert budget(total - own - (1 << 30)) < 1 << 30, "no more than what is free"


def test_bytes_of_vllms_own_cache_are_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """--kv-cache-memory-bytes counts blocks, and is what the engine may take."""
    monkeypatch.setattr(memory, "gpu_memory", lambda options: pytest.fail("no need to look"))
    settings = {"pariskv": {"host_budget": "2GB"}}
    made = Options(
        config(
            additional_config=settings,
            device_config__device_type="cuda",
            cache_config__kv_cache_memory_bytes=3 << 30,
        )
    )
    wish = startup.asked(made)
    blocks = startup.planned(made, wish, startup.budgets_of(made, wish)).blocks
    assert startup.rank_budgets(made, wish, blocks) == Budgets(3 << 30, 2 * 10**9)


@pytest.mark.parametrize("host_budget", [0, 50 * 10**9])
def test_host_memory_is_pinned_for_what_the_gpu_has_no_room_for(host_budget: int) -> None:
    extra = {"pariskv": {"host_budget": host_budget}} if host_budget else {}
    served = config(
        device_config__device_type="cuda",
        model_config__max_model_len=100_000,
        additional_config=extra,
    )
    options = Options(served)
    wish = startup.asked(options)
    one = sizes.need(wish.config, wish.block, options.longest)
    assert one.host > 0

    def ahead(blocks: int, device: int) -> int:
        return startup.pinned_ahead(options, wish, blocks, Budgets(device, 50 * 10**9))

    if host_budget:
        assert ahead(1, 10**12) == host_budget - (4 << 20)
        return
    assert ahead(1, 10**12) == 0, "all of it fits the GPU"
    most = options.sequences * options.longest  # tokens
    rows, beside = most * one.host, most * one.device
    device = (rows + beside - 7000) // 7 * 8  # of which a part is kept free
    assert ahead(10**9, device) == 7000 + (rows + beside - 7000) % 7
    assert ahead(10**9, 1) == min(rows, 50 * 10**9 // 4 * 3)


def test_plan_of_the_command_line_counts_as_the_plugin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336}
    fields |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    fields |= {"vocab_size": 128_256, "max_position_embeddings": 131_072}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    weights, host = 16 * 10**9, 200 * 10**9
    loaded = machine.Gpu("NVIDIA H100", 80 << 30, (79 << 30) - weights)
    monkeypatch.setattr(machine, "available_memory", lambda: host)
    monkeypatch.setattr(machine, "gpus", lambda: [loaded])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    served = config(
        device_config__device_type="cuda",
        cache_config__kv_cache_memory_bytes=None,
        cache_config__gpu_memory_utilization=0.8,
        scheduler_config__max_num_batched_tokens=8192,
        scheduler_config__max_num_seqs=64,
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=range(captures(64))),
        model_config__dtype=torch.float16,
        model_config__max_model_len=100_000,
        model_config__hf_text_config=SimpleNamespace(**fields),
        model_config__get_num_layers=lambda parallel: 32,
        model_config__get_num_attention_heads=lambda parallel: 32,
        model_config__get_num_kv_heads=lambda parallel: 8,
        model_config__get_head_size=lambda: 128,
        model_config__get_hidden_size=lambda: 4096,
        model_config__get_vocab_size=lambda: 128_256,
    )
    options = Options(served)
    wish = startup.asked(options)
    budgets = startup.budgets_of(options, wish)
    made = startup.planned(options, wish, budgets)

    empty = dataclasses.replace(loaded, free=79 << 30)
    monkeypatch.setattr(machine, "gpus", lambda: [empty])
    asked = ["--context", "100000", "--utilization", "0.8", "--max-num-seqs", "64"]
    asked += ["--weights", str(weights), "--vllm", "--json"]
    assert command(["plan", str(tmp_path), *asked]) == 0
    found = json.loads(capsys.readouterr().out)["vllm"]
    assert Budgets(found["engine_bytes"], found["engine_host_bytes"]) == budgets
    assert found["blocks"] == made.blocks
    assert 0 < found["sequences"] <= (made.blocks - 1) * 128 // 100_000


def test_defaults_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CacheConfig().gpu_memory_utilization == UTILIZATION
    platform = arg_utils.current_platform

    def theirs(memory: int, name: str, *, cpu: bool = False) -> Limits:
        monkeypatch.setattr(platform, "get_device_total_memory", lambda: memory, raising=False)
        monkeypatch.setattr(platform, "get_device_name", lambda: name, raising=False)
        monkeypatch.setattr(platform, "is_cpu", lambda: cpu, raising=False)
        chunks, sequences = arg_utils.EngineArgs.get_batch_defaults(1)
        server = UsageContext.OPENAI_API_SERVER
        return Limits(sequences[server], chunks[server])

    def ours(memory: int, name: str, *, gpu: bool = True) -> Limits:
        return default_limits(memory, name, gpu=gpu, longest=1 << 20)

    for size, name in ((24, "NVIDIA L4"), (80, "NVIDIA A100"), (80, "NVIDIA H100")):
        assert ours(size << 30, name) == theirs(size << 30, name)
    assert ours(180 << 30, "NVIDIA B200") == theirs(180 << 30, "NVIDIA B200")
    assert ours(64 << 30, "", gpu=False) == theirs(64 << 30, "", cpu=True)


def test_graphs_are_counted_as_vllm_captures_them(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = type(arg_utils.current_platform)
    monkeypatch.setattr(platform, "is_device_capability_family", lambda *number: False)
    for sequences in (1, 3, 6, 64, 100, 300, 1024):
        served = config(
            uniform_decode_query_len=1,
            performance_mode="balanced",
            model_config__enforce_eager=False,
            scheduler_config__max_num_seqs=sequences,
            scheduler_config__max_num_batched_tokens=8192,
            compilation_config=CompilationConfig(
                cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
                max_cudagraph_capture_size=None,
            ),
        )
        VllmConfig._set_cudagraph_sizes(served)
        assert len(served.compilation_config.cudagraph_capture_sizes) == captures(sequences)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"topk": 3}, "got topk; did you mean top_k"),
        ({"top_k": 0}, "top_k: expected"),
        ({"memory_budget": "much"}, 'memory_budget: expected bytes, or as "60GB", got much'),
        ({"host_budget": "1e30"}, 'host_budget: expected bytes, or as "60GB", got 1e30'),
        ({"threads": -3}, "threads: expected 0 to 1024, got -3"),
        ({"policy": "lru"}, 'policy: expected "pariskv" or "hardkv" or "prkv", got lru'),
        ({"policy": {"name": "hardkv", "depth": 3}}, "fields of HardKV, least, .* got depth"),
        ({"policy": {"name": "prkv", "budget": "abc"}}, "of their types, got budget 'abc'"),
        ({"policy": 3}, 'policy: expected "pariskv" or "hardkv" or "prkv", got 3'),
        ({"policy": "hardkv", "top_k": 3}, "top_k: expected it inside the policy"),
        ({"placement": "disk"}, "placement: expected"),
        ({"policy": {"name": "hardkv", "placement": "dropped"}}, "rows that are gone"),
        ({"dense_below": "often"}, "dense_below: expected a number of tokens"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_wrong_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse(settings)
    with pytest.raises(ValueError, match="expected it once"):
        parse({"top_k": 3}, {"top_k": 4})


def test_policies_by_name() -> None:
    assert parse({"policy": "pariskv", "top_k": 64}).of_config()["policy"] == pk.ParisKV(
        top_k=64, seed=None
    )
    made = parse({"policy": {"name": "hardkv", "most": 512}}).of_config()
    assert made["policy"] == pk.HardKV(most=512)


def test_blocks_follow_from_the_budget() -> None:
    small, large = (
        config(
            kv_transfer_config__engine_id=str(size),
            additional_config={"pariskv": {"memory_budget": size}},
        )
        for size in (1 << 27, 1 << 28)
    )
    for one in (small, large):
        startup.override_blocks(Options(one))
    blocks = [one.cache_config.num_gpu_blocks_override for one in (small, large)]
    assert blocks[1] > 1.5 * blocks[0]
    ample = copy.deepcopy(small)
    ample.cache_config.num_gpu_blocks_override = blocks[1]
    with pytest.raises(ValueError, match=f"expected at most {blocks[0]}"):
        startup.override_blocks(Options(ample))
    tiny = config(additional_config={"pariskv": {"memory_budget": "1MB"}})
    with pytest.raises(ValueError, match=r"a request of 4,096 tokens takes .* --max-model-len"):
        startup.override_blocks(Options(tiny))


def test_registering_again_changes_nothing() -> None:
    register()
    register()
    made = KVConnectorFactory.get_connector_class_by_name("ParisKV")
    assert made.__name__ == "PariskvConnector"
    assert AttentionBackendEnum.CUSTOM.get_path() == "pariskv_core.vllm.backend.Backend"
    assert not made.supports_sleep_mode(None)


def test_on_a_cpu_the_backend_is_vllms_own_unless_the_connector_is_configured() -> None:
    from pariskv_core.vllm import on_cpu
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert on_cpu.Backend is CPUAttentionBackend
    with pytest.raises(AttributeError, match="other"):
        on_cpu.other  # noqa: B018


def test_the_plugin_is_found_by_vllm_and_imports_no_engine() -> None:
    """Until it is asked for, a process has neither the library nor a part of it."""
    program = (
        "import sys; from vllm.plugins import load_general_plugins; load_general_plugins(); "
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as F; "
        "assert 'ParisKV' in F._registry; "
        "assert 'pariskv_core.serving.engine' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
