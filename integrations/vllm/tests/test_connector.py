"""The connector's two sides, without an engine of vLLM around them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pariskv_core.serving.orders import ADD, Command, Orders, Row
from pariskv_core.vllm import ranks
from pariskv_core.vllm.backend import Builder
from pariskv_core.vllm.connector import Metadata, PariskvConnector
from pariskv_core.vllm.metrics import EngineStats, PromMetrics, Reporter
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from test_startup import ChunkedLocalAttention, config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec

LAYERS = ["model.layers.0", "model.layers.1"]


def cache_of(blocks: int, groups: int = 1, block: int = 128) -> Any:
    spec = FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=64, dtype=torch.float32)
    group = SimpleNamespace(layer_names=LAYERS, kv_cache_spec=spec)
    return SimpleNamespace(num_blocks=blocks, kv_cache_groups=[group] * groups)


def scheduler(**changes: Any) -> tuple[PariskvConnector, Any]:
    """The scheduler's side, and a pool of blocks that notes what it has to forget."""
    made = config(cache_config__enable_prefix_caching=True, **changes)
    PariskvConnector.get_required_kvcache_layout(made)
    blocks = made.cache_config.num_gpu_blocks_override
    connector = PariskvConnector(made, KVConnectorRole.SCHEDULER, cache_of(blocks))
    pool = SimpleNamespace(cached_block_hash_to_block={}, forgotten=set(), used=set(), blocks=[0])
    pool.evict_blocks = pool.forgotten.update
    pool.get_cached_block = lambda found, groups: [
        SimpleNamespace(block_id=found, ref_cnt=int(found in pool.used))
    ]
    pool.manager = SimpleNamespace(block_pool=pool, watermark_blocks=0)
    connector.bind_kv_cache_manager(pool.manager)
    return connector, pool


def request(name: str, prompt: int, answer: int, blocks: tuple[int, ...] = ()) -> Any:
    """A block's hash is its number here."""
    return SimpleNamespace(
        request_id=name,
        status=SimpleNamespace(name="WAITING"),
        resumable=False,
        skip_reading_prefix_cache=False,
        num_prompt_tokens=prompt,
        num_tokens=prompt,
        max_tokens=answer,
        block_hashes=blocks,
    )


def output(
    new: dict[str, list[int]] | None = None, tokens: int = 4, ended: tuple[str, ...] = ()
) -> SchedulerOutput:
    made = SchedulerOutput.make_empty()
    made.scheduled_new_reqs = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=list(range(tokens)),
            prefill_token_ids=list(range(tokens)),
            mm_features=[],
            sampling_params=None,
            pooling_params=None,
            block_ids=(blocks,),
            num_computed_tokens=0,
            lora_request=None,
        )
        for name, blocks in (new or {}).items()
    ]
    made.scheduled_cached_reqs = CachedRequestData.make_empty()
    made.num_scheduled_tokens = dict.fromkeys(new or (), tokens)
    made.finished_req_ids = set(ended)
    return made


def orders(connector: PariskvConnector, of: SchedulerOutput) -> list[tuple[str, int]]:
    made = connector.build_connector_meta(of)
    assert isinstance(made, Metadata)
    assert of.has_sync_kv_loads, "workers would hear of it after the forward pass"
    return [(command.kind, command.name) for command in made.orders.commands]


def come_in(connector: PariskvConnector, some: list[Any]) -> None:
    """They are scheduled in a step."""
    for one in some:
        connector.update_state_after_alloc(one, None, 0)
        one.status.name = "RUNNING"
    orders(connector, output({one.request_id: [100 + i] for i, one in enumerate(some)}))


def test_long_requests_wait_for_room_in_their_order() -> None:
    settings = {"dense_below": 512, "memory_budget": "24MB"}
    connector, pool = scheduler(additional_config={"pariskv": settings})
    admitted: list[Any] = []
    while True:
        one = request(f"long{len(admitted)}", 100, 1000)
        found, later = connector.get_num_new_matched_tokens(one, 0)
        assert not later
        if found is None:
            break
        admitted.append(one)
    assert 0 < len(admitted) < 20
    come_in(connector, admitted)
    # vLLM's scheduler is told that blocks do not suffice, so it asks for no other request.
    late = request("late", 100, 1000)
    assert connector.get_num_new_matched_tokens(late, 0) == (0, False)
    assert pool.manager.watermark_blocks >= len(pool.blocks)
    orders(connector, output(ended=(admitted[0].request_id,)))
    assert pool.manager.watermark_blocks == 0, "until the step is decided"
    assert connector.get_num_new_matched_tokens(late, 0) == (0, False)
    assert pool.manager.watermark_blocks == 0, "there is room"


def test_a_request_that_reads_no_prefix_is_made_to_wait_where_none_runs() -> None:
    """vLLM takes None for 0 where it does not look for a prefix."""
    settings = {"dense_below": 512, "memory_budget": "24MB"}
    connector, _ = scheduler(additional_config={"pariskv": settings})
    sessions = [request(f"session{number}", 100, 1000) for number in range(20)]
    sessions = [
        one for one in sessions if connector.get_num_new_matched_tokens(one, 0) == (0, False)
    ]
    come_in(connector, sessions)
    for one in sessions:  # they wait for more input, and keep what they have
        one.status.name = "WAITING_FOR_STREAMING_REQ"
    late = request("late", 100, 1000)
    late.skip_reading_prefix_cache = True
    assert connector.get_num_new_matched_tokens(late, 0) == (None, False)
    assert not late.skip_reading_prefix_cache, "now vLLM heeds the None"
    orders(connector, output())
    assert late.skip_reading_prefix_cache, "as it was"


def test_a_prefix_is_shared_once_all_of_it_is_stored() -> None:
    connector, pool = scheduler()
    late = request("late", 129, 10, (7,))
    pool.used = {7}
    assert connector.get_num_new_matched_tokens(late, 128) == (None, False), "scheduled just now"
    first = request("first", 127, 10)
    assert connector.get_num_new_matched_tokens(first, 0) == (0, False)
    orders(connector, output({"first": [7, 8]}, tokens=127))
    assert connector.get_num_new_matched_tokens(late, 128) == (None, False)
    step = output()
    step.scheduled_cached_reqs.req_ids = ["first"]
    step.scheduled_cached_reqs.num_computed_tokens = [127]
    step.scheduled_cached_reqs.new_block_ids = [None]
    step.num_scheduled_tokens = {"first": 1}
    orders(connector, step)
    assert connector.get_num_new_matched_tokens(late, 128) == (0, False)
    assert pool.forgotten == set()


def test_found_blocks_whose_rows_nobody_has_are_forgotten() -> None:
    connector, pool = scheduler()
    late = request("late", 300, 10, (7, 9))
    assert connector.get_num_new_matched_tokens(late, 256) == (None, False)
    assert pool.forgotten == {7, 9}
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.total("forgotten_blocks") == 2
    assert connector.get_kv_connector_stats() is None, "it is counted once"


def test_a_reset_of_the_prefix_cache_is_told_in_a_step_of_its_own() -> None:
    connector, pool = scheduler()
    assert orders(connector, output({"a": [1]}, tokens=128)) == [("add", 0)]
    assert orders(connector, output(ended=("a",))) == [], "its block may be found"
    assert not connector.has_pending_push_work()
    pool.cached_block_hash_to_block = {}  # as the pool does it
    assert connector.has_pending_push_work()
    assert orders(connector, output()) == [("remove", 0)]
    assert not connector.has_pending_push_work()
    assert orders(connector, output({"b": [2]}, tokens=128)) == [("add", 1)]
    orders(connector, output(ended=("b",)))
    assert connector.reset_cache() is True
    assert pool.forgotten == {2}, "at once: the next pass may not find it"
    assert connector.has_pending_push_work()
    assert orders(connector, output()) == [("remove", 1)]


def test_more_blocks_than_were_paid_for_are_refused() -> None:
    made = config(cache_config__enable_prefix_caching=True)
    with pytest.raises(ValueError, match="num-gpu-blocks-override: expected at most"):
        PariskvConnector(made, KVConnectorRole.SCHEDULER, cache_of(1 << 30))


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(RuntimeError, match="expected 128 tokens, got 16; set --block-size 128"):
        PariskvConnector(config(), KVConnectorRole.WORKER, cache_of(10, block=16))


def test_several_kinds_of_layers_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="got 2 of 2 groups"):
        PariskvConnector(config(), KVConnectorRole.WORKER, cache_of(10, groups=2))
    model = config(model_config__get_num_layers=lambda parallel: 3)
    with pytest.raises(NotImplementedError, match="expected 3 layers of attention, got 2"):
        PariskvConnector(model, KVConnectorRole.WORKER, cache_of(10))


def test_layers_of_another_class_are_refused() -> None:
    """With --disable-hybrid-kv-cache-manager vLLM gives them a cache of full attention."""
    model = config()
    model.compilation_config.static_forward_context[LAYERS[0]] = ChunkedLocalAttention()
    with pytest.raises(NotImplementedError, match="expected Attention layers, got ChunkedLocal"):
        PariskvConnector(model, KVConnectorRole.WORKER, cache_of(10))


def test_a_worker_makes_an_engine_of_its_own_threads_and_reports() -> None:
    made = config(additional_config={"pariskv": {"threads": 3}}, parallel_config__rank=1)
    connector = PariskvConnector(made, KVConnectorRole.WORKER, cache_of(10))
    connector.register_kv_caches({})
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    assert set(stats.data) == {"1"}
    assert stats.data["1"]["decode_tokens"] == 0
    assert "mass" not in stats.data["1"], "no search has estimated it"
    assert connector.get_kv_connector_stats() is None, "once a second"
    connector.shutdown()


def test_a_replay_is_as_wide_as_its_graph() -> None:
    made = config(parallel_config__rank=0)
    connector = PariskvConnector(made, KVConnectorRole.WORKER, cache_of(10))
    connector.register_kv_caches({})
    found = ranks.of(made)
    assert found is not None
    named: list[int] = []
    found.rank.lanes.advance = lambda slots, width: named.append(width)  # type: ignore[method-assign]
    rows = [Row(name, number, 0, 0, 1, 0) for number, name in enumerate("ab")]
    commands = [Command(ADD, number) for number in range(2)]
    builder = Builder(None, LAYERS, made, torch.device("cpu"))
    of_layers = dict.fromkeys(LAYERS, builder.build(0, SimpleNamespace(num_reqs=4)))
    connector.bind_connector_metadata(Metadata(Orders(commands, rows)))
    connector.start_load_kv(None, request_ids=["b", "a"], attn_metadata=of_layers)
    assert named == [4]
    connector.bind_connector_metadata(Metadata(Orders([], rows)))
    connector.start_load_kv(None, request_ids=["b", "a"])
    assert named == [4], "no graph is replayed"
    connector.finish_forward()
    connector.shutdown()


def test_a_rank_is_found_once_vllm_has_named_its_configuration_anew() -> None:
    made = config(parallel_config__rank=0)
    connector = PariskvConnector(made, KVConnectorRole.WORKER, cache_of(10))
    assert ranks.of(made) is None
    connector.register_kv_caches({})
    found = ranks.of(made)
    assert found is not None
    # As `vllm serve` does when its engine core is there; prompts were then attended to by nobody.
    made.instance_id = "another"
    assert ranks.of(made) is found
    connector.shutdown()
    assert ranks.of(made) is None
    assert ranks.of(config(kv_transfer_config=None)) is None, "the connector is not asked for"


def test_reports_add_up_over_time_and_over_ranks() -> None:
    def stats(decoded: int, rows: int) -> Any:
        zero = dict.fromkeys(
            ("searched_tokens", "fetched_rows", "cached_rows", "offloaded_bytes", "summary_bytes"),
            0,
        )
        memory = SimpleNamespace(live=rows, reserved=rows, coming=0)
        fields = {"decode_tokens": decoded, "row_bytes": rows, "mean_mass": float("nan")}
        fields["mean_error"] = float("nan")
        return SimpleNamespace(**zero, **fields, memory=memory, host_memory=memory)

    first, second = Reporter(0), Reporter(1)
    one = first.report(stats(10, 500), 2)
    two = second.report(stats(10, 500), 2)
    both = one.aggregate(two)
    assert isinstance(both, EngineStats)
    assert (both.total("decode_tokens"), both.total("row_bytes")) == (20, 1000)
    later = both.aggregate(first.report(stats(25, 700), 3))
    assert isinstance(later, EngineStats)
    assert (later.total("decode_tokens"), later.total("row_bytes")) == (35, 1200)
    assert later.total("sequences") == 5
    assert later.reduce()["device GB"] == 0.0


def test_reports_are_exported_and_mass_once_a_search_has_estimated_it() -> None:
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Histogram)}
    modes = []

    def gauge(multiprocess_mode: str, **others: Any) -> Gauge:
        modes.append(multiprocess_mode)
        return Gauge(**others, multiprocess_mode=multiprocess_mode, registry=registry)

    kinds[Gauge] = gauge
    labels = {0: ["some/model", "0"], 1: ["some/model", "1"]}
    metrics = PromMetrics(config(), kinds, ["model_name", "engine"], labels)

    def exported(name: str, engine: int) -> float | None:
        named = dict(zip(["model_name", "engine"], labels[engine], strict=True))
        return registry.get_sample_value(f"vllm:pariskv_{name}", named)

    metrics.observe({"0": {"decode_tokens": 3, "sequences": 2}}, 0)
    for _ in range(2):
        metrics.observe({"scheduler": {"lost_requests": 2}}, 0)
    assert exported("lost_requests_total", 0) == 4
    assert exported("restarts_total", 0) == 0
    assert set(modes) == {"mostrecent"}, "of several API servers, as vLLM's own"
    assert exported("decode_tokens_total", 0) == 3
    assert exported("sequences", 0) == 2
    assert exported("mass", 0) is None
    metrics.observe({"0": {"mass": 0.97}, "1": {"mass": 0.95}}, 0)
    assert exported("mass", 0) == 0.95, "of the rank that reaches least"
    assert exported("mass", 1) is None
    metrics.observe({"0": {"error": 0.004}, "1": {"error": 0.006}}, 1)
    assert exported("error", 1) == 0.006, "of the rank that errs most"
