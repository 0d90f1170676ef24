"""HardKV with dropped rows on a GPU: beside the CPU, in a graph, and in constant memory."""

from __future__ import annotations

import numpy as np
import pariskv_core as pk
import pytest
from hardkv_life import make_config
from kept_both import Both
from replays import warmed
from support import assert_same_bits, randn_kv, randn_q, randn_step, settled
from test_cuda_graph import Graph, make_steps

pytestmark = pytest.mark.cuda

POLICIES = {
    "top p": pk.HardKV(most=120, p=0.8, placement="dropped"),
    "fixed": pk.HardKV(most=64, p=1.0, metric="attention", placement="dropped"),
    "patient": pk.HardKV(most=50, p=0.6, least=5, pool=3, patience=4, placement="dropped"),
}


@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_thousand_steps_drop_what_the_cpu_drops(policy, placement):
    life = Both(policy, dtype="bfloat16", head_dim=128, value_dim=128, placement=placement)
    life.add(700, chunks=3)
    life.add(90, queries=False)
    life.live(1000)
    assert life.caches[1].stats().dropped_rows > 1000


@pytest.mark.parametrize("placement", ["host", "device"])
def test_dropped_rows_do_not_change_replayed_steps(placement):
    """A graph across drops, beside eager steps, and beside a cache that stores all rows."""
    config = make_config(
        pk.HardKV(most=40, p=0.7, placement="dropped"),
        layers=2,
        dtype="bfloat16",
        device="cuda",
        placement=placement,
    )
    warmed(config)
    caches = [
        pk.Cache(config),
        pk.Cache(config),
        pk.Cache(config.replace(policy=pk.HardKV(most=40, p=0.7))),
    ]
    batches = []
    for each in caches:
        rng = np.random.default_rng(3)
        batch = [each.add() for _ in range(3)]
        for layer in range(2):
            for s, tokens in zip(batch, (700, 120, 64), strict=True):
                k, v = randn_kv(rng, tokens, config)
                each.prefill(layer, [s], k, v, q=randn_q(rng, tokens, config))
        batches.append(batch)
    graph = Graph(caches[0], batches[0])
    for number, step in enumerate(make_steps(config, 3, 300)):
        mine = graph.step(batches[0], step)
        for other in (1, 2):
            theirs = []
            for layer in range(2):
                inputs = (x[layer] for x in step)
                theirs += caches[other].decode(layer, batches[other], *inputs, return_lse=True)
            for a, b in zip(mine, theirs, strict=True):
                assert_same_bits(a, b, f"step {number}")
        if number in (60, 140):
            for index, each in enumerate(caches):
                batch = batches[index]
                batches[index] = [each.fork(batch[0]), *batch[1:]]
                each.remove(batch[0])
    stats = [each.stats() for each in caches]
    assert stats[0].dropped_rows == stats[1].dropped_rows > 1000
    assert stats[0].row_bytes < stats[2].row_bytes / 2


@pytest.mark.parametrize("placement", ["host", "device"])
def test_memory_of_the_device_and_the_host_stays_as_it_is(placement, rng):
    config = make_config(
        pk.HardKV(most=64, placement="dropped"), dtype="float16", device="cuda", placement=placement
    )
    cache = pk.Cache(config)
    s = cache.add()
    k, v = randn_kv(rng, 3000, config)
    cache.prefill(0, [s], k, v, q=randn_q(rng, 3000, config))
    step = randn_step(rng, 1, config)
    sizes = []
    for token in range(6000):
        cache.decode(0, [s], *step)
        if token >= 200:
            stats = cache.stats()
            sizes.append((stats.row_bytes, stats.memory.live, stats.host_memory.live))
    early, late = np.max(sizes[:800], axis=0), np.max(sizes[800:], axis=0)
    assert late[0] <= early[0]
    tables = 4 * 16 * 9000 // config.segment_tokens  # they grow in powers of two
    assert late[1] <= early[1] + tables
    settled(cache)
    assert cache.stats().host_memory.live <= early[2]
    assert cache.regions(s).dropped > 8500
