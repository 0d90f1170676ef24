"""A GPU's memory and pinned host memory: what is promised, what is refused, and what comes back."""

from __future__ import annotations

import re
import time

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    SCORERS,
    assert_same_bits,
    assert_same_sequence,
    assert_same_summaries,
    filled,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    regions_of,
    rows_of,
    settled,
    state_of,
    with_changes,
)
from test_memory import Played, assert_same_results, scarce

pytestmark = pytest.mark.cuda

MESSAGE = re.compile(r"asked for (\d+) bytes of (.*), but only (\d+) of the budget of (\d+)")


def test_an_idle_cache_holds_next_to_nothing():
    cache = pk.Cache(make_config(layers=80))
    stats = cache.stats()
    assert stats.memory.live < 1 << 20
    assert stats.host_memory.reserved == 0
    assert stats.row_bytes == stats.summary_bytes == stats.tokens == stats.sequences == 0


@pytest.mark.parametrize("placement", ["host", "device"])
def test_everything_comes_back(placement):
    config = make_config(layers=2, placement=placement, head_dim=128)
    cache = pk.Cache(config)
    idle = settled(cache)
    rng = np.random.default_rng(1)
    for tokens in (1, 63, 64, 65, 200, 999, 3000):
        a = cache.add()
        k, v = randn_kv(rng, tokens, config)
        for layer in range(2):
            cache.prefill(layer, [a], k, v)
        b = cache.fork(a)
        cache.decode(0, [a, b], *randn_step(rng, 2, config))
        cache.explain(0, a, randn_q(rng, 1, config)[0])
        cache.reorder([a, b], [1, 1])
        cache.truncate([a], drop=tokens // 2)
        cache.prefill(0, [b], k, v)
        cache.flush([a, b])
        cache.remove(a)
        cache.remove(b)
    stats = settled(cache)
    assert stats.row_bytes == stats.summary_bytes == stats.tokens == stats.sequences == 0
    # What steps work in stays: a graph may be replayed.
    assert stats.memory.live - stats.workspace_bytes == idle.memory.live
    assert stats.host_memory.live == 0
    cache.trim()
    stats = cache.stats()
    # Two rows and an explanation have worked in memory of their own, a slab of 4 MB between them.
    workspace = 4 << 20 if stats.workspace_bytes > 0 else 0
    assert stats.memory.reserved <= idle.memory.reserved + workspace
    assert stats.host_memory.reserved == 0


def test_pinned_memory_is_allocated_ahead():
    f = filled(make_config(head_dim=128), 64 * 50)
    deadline = time.monotonic() + 20
    while True:
        f.cache.flush([])  # any call sees to it
        memory = f.cache.stats().host_memory
        if memory.reserved >= 2 * memory.live > 0:
            break
        assert time.monotonic() < deadline, memory
        time.sleep(0.01)
    f.cache.trim()
    memory = f.cache.stats().host_memory
    assert memory.reserved < 2 * memory.live


def test_memory_that_is_taken_ahead_keeps_to_the_budget():
    config = make_config(head_dim=128)
    live = settled(filled(config, 64 * 50).cache).host_memory.live
    f = filled(with_changes(config, host_budget=live + (3 << 20)), 64 * 50)
    for _ in range(20):
        f.cache.flush([])
        time.sleep(0.01)
    memory = f.cache.stats().host_memory
    assert memory.live == live
    assert memory.reserved <= memory.budget


def test_memory_that_is_taken_ahead_spoils_no_graph():
    config = make_config(head_dim=128, layers=2)
    f, twin = filled(config, 300), filled(config, 300)
    for turn in range(8):
        k, v = randn_kv(np.random.default_rng(turn), 2000, config)
        step = randn_step(f.rng, 1, config)
        for layer in range(2):
            f.cache.prefill(layer, [f.s], k, v)
            twin.cache.prefill(layer, [twin.s], k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [f.cache.decode(layer, [f.s], *step) for layer in range(2)]
        f.cache.advance([f.s])
        graph.replay()
        for layer in range(2):
            assert_same_bits(outs[layer], twin.cache.decode(layer, [twin.s], *step), f"turn {turn}")


def test_closing_gives_the_device_its_memory_back():
    def once() -> None:
        f = filled(make_config(head_dim=128), 4000)
        f.cache.decode(0, [f.s], *randn_step(f.rng, 1, f.cache.config))
        f.cache.close()

    def free() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    for _ in range(3):
        once()
    taken = []
    for _ in range(4):  # other processes take memory too, but not in each of these times
        before = free()
        for _ in range(20):
            once()
        taken.append(before - free())
    assert min(taken) < 32 << 20, taken


def test_a_freed_block_is_zeroed_before_reuse():
    # Rows of a removed sequence may not shine through gaps of the next one's.
    config = make_config(segment_tokens=256)
    f = filled(config, 1000)
    f.cache.remove(f.s)
    twin = pk.Cache(config)
    for cache in (f.cache, twin):
        s = cache.add()
        k, v = randn_kv(np.random.default_rng(2), 70, config)
        cache.prefill(0, [s], k, v)
        cache.flush([s])
        f.s = s if cache is f.cache else f.s
    q = randn_q(f.rng, 1, config)[0]
    assert_same_sequence(f.cache, f.s, twin, s, q)


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("budget_of", ["memory", "host"])
def test_every_allocation_may_be_refused(budget_of, scorer):
    """The budget grows by just what the last refusal lacked: each allocation fails once."""
    config = scarce({"scorer": scorer})
    whole = Played(config)
    # What a cache needs before anything is asked of it is not what this is about.
    empty = pk.Cache(config)
    for _ in range(2):
        empty.add()
    name = f"{budget_of}_budget"
    budget = empty.stats().memory.reserved if budget_of == "memory" else 1
    refused = []
    while (played := Played(with_changes(config, **{name: budget}))).refused:
        refused.append(played.refused)
        assert_left_as_it_was(played, config)
        asked, kind, free, said = MESSAGE.search(played.error).groups()
        assert kind == ("device memory" if budget_of == "memory" else "pinned host memory")
        assert int(said) == budget
        assert int(asked) > int(free) >= 0
        budget += int(asked) - int(free)
        assert len(refused) < 200
    assert_same_results(played.results, whole.results)
    # Of pinned memory a slab or two is all that this little cache asks for.
    assert len(refused) >= (8 if budget_of == "memory" else 1)
    assert "prefill" in refused or budget_of == "host"


def assert_left_as_it_was(played: Played, config: pk.Config) -> None:
    cache = played.cache
    assert state_of(cache) == played.before
    twin = Played(config, stop=played.refused)
    for s, t in zip(played.sequences, twin.sequences, strict=True):
        for layer in range(config.layers):
            assert regions_of(cache, s, layer) == regions_of(twin.cache, t, layer)
            assert_same_summaries(cache.summaries(layer, s), twin.cache.summaries(layer, t))
            mine, theirs = rows_of(cache, s, layer), rows_of(twin.cache, t, layer)
            assert_same_bits(mine[0], theirs[0])
            assert_same_bits(mine[1], theirs[1])
    for s in played.sequences:
        cache.remove(s)
    stats = settled(cache)
    assert stats.row_bytes == stats.summary_bytes == stats.tokens == 0
    assert stats.host_memory.live == 0


@pytest.mark.parametrize("budget_of", ["memory", "host"])
def test_the_next_call_works_after_a_refusal(budget_of):
    budget = {"memory": {"memory_budget": 24 << 20}, "host": {"host_budget": 2 << 20}}[budget_of]
    config = make_config(**budget)
    f = filled(config, 1000)
    twin = filled(with_changes(config, memory_budget=0, host_budget=0), 1000)
    k, v = randn_kv(f.rng, 30_000, config)
    other = f.cache.add()
    for _ in range(3):
        step = randn_step(f.rng, 1, config)
        assert_same_bits(f.cache.decode(0, [f.s], *step), twin.cache.decode(0, [twin.s], *step))
        for s in (f.s, other):
            with pytest.raises(pk.OutOfMemory, match="asked for"):
                f.cache.prefill(0, [s], k, v)
    assert f.cache.length(other) == 0
    assert_same_sequence(f.cache, f.s, twin.cache, twin.s, step[0][0])


def test_a_refusal_names_the_kind_of_memory():
    for budget, kind in (("memory_budget", "device memory"), ("host_budget", "pinned host memory")):
        cache = pk.Cache(make_config(**{budget: 6 << 20}))
        s = cache.add()
        k, v = randn_kv(np.random.default_rng(0), 60_000, cache.config)
        with pytest.raises(MemoryError, match=rf"asked for \d+ bytes of {kind}, but only \d+ of"):
            cache.prefill(0, [s], k, v)
        assert cache.length(s) == 0
        cache.prefill(0, [s], k[:500], v[:500])
        assert cache.length(s) == 500


def test_more_pinned_memory_than_the_machine_has_is_refused():
    # Not by the system's swapping everybody out: nothing is even asked for.
    with open("/proc/meminfo", encoding="ascii") as lines:
        kilobytes = next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    config = make_config(
        query_heads=16, kv_heads=16, head_dim=256, dtype="float32", segment_tokens=1 << 20
    )
    one = 16 * (1 << 20) * 2 * 256 * 4  # a segment of 34 GB
    if 2 * one > torch.cuda.mem_get_info()[0] or one < kilobytes * 1024 - (1 << 30):
        pytest.skip("this machine has memory for it, or the GPU has none for the rows")
    cache = pk.Cache(config)
    s = cache.add()
    k = torch.zeros((1 << 20) + 64, 1, 256).expand(-1, 16, -1)
    with pytest.raises(pk.OutOfMemory, match="pinned host memory"):
        cache.prefill(0, [s], k, k)
    assert cache.length(s) == 0


def test_removing_a_sequence_makes_room():
    config = make_config(memory_budget=16 << 20)
    cache, full = pk.Cache(config), []
    k, v = randn_kv(np.random.default_rng(0), 600, config)

    def fill() -> None:
        while len(full) < 1000:
            full.append(cache.add())
            cache.prefill(0, [full[-1]], k, v)

    with pytest.raises(pk.OutOfMemory):
        fill()
    cache.remove(full.pop())
    for _ in range(20):
        cache.remove(full.pop(0))
        full.append(cache.add())
        cache.prefill(0, [full[-1]], k, v)
    assert cache.stats().tokens == 600 * len(full)


@pytest.mark.slow
def test_offsets_beyond_32_bits():
    """Segments of 2^33 elements, and rows at both ends of the first and in the second."""
    config = make_config(
        query_heads=16,
        kv_heads=16,
        head_dim=256,
        dtype="bfloat16",
        segment_tokens=1 << 20,
        placement="device",
        top_k=64,
        schedule=[(0, 0.01, 0.2)],
    )
    tokens, chunk = (1 << 20) + 5000, 1 << 16
    assert 16 * (1 << 20) * 2 * 256 == 1 << 33
    if torch.cuda.mem_get_info()[0] < 64 << 30:
        pytest.skip("this takes 56 GB of the GPU's memory")
    random = torch.Generator("cuda").manual_seed(1)
    k, v = (
        torch.empty(tokens, 16, 256, dtype=torch.bfloat16).normal_(generator=random) for _ in "kv"
    )
    planted = torch.tensor([10, 1 << 19, (1 << 20) - 3, (1 << 20) + 7, tokens - 100])
    q = torch.empty(1, 16, 256, dtype=torch.bfloat16).normal_(generator=random)
    k[planted] = q * 4
    cache = pk.Cache(config)
    s = cache.add()
    for begin in range(0, tokens, chunk):
        cache.prefill(0, [s], k[begin : begin + chunk], v[begin : begin + chunk])
    for begin in (0, (1 << 19) - 50, (1 << 20) - 100, tokens - 100):
        got = cache.read(0, s, begin, begin + 100)
        assert torch.equal(got[0], k[begin : begin + 100])
        assert torch.equal(got[1], v[begin : begin + 100])
    explanation = cache.explain(0, s, q[0])
    for head in range(16):
        assert set(planted.tolist()) <= set(explanation.positions[head].tolist())
    # They have all of the attention.
    out = cache.decode(0, [s], q, k[:1], v[:1])
    expected = v[planted].float().mean(dim=0)
    assert (out[0].float() - expected).abs().max() < 0.02
    attended = cache.attend(0, [s], q)
    assert (attended[0].float() - expected).abs().max() < 0.02
