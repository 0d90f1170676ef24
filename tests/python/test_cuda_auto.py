"""placement="auto": rows stay on the GPU while there is room, and leave for host memory then."""

from __future__ import annotations

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    assert_same_bits,
    assert_same_explanation,
    assert_same_summaries,
    make_config,
    randn_kv,
    randn_q,
    regions_of,
    rows_of,
    with_changes,
)
from test_cuda_graph import Graph, eager, make_steps

pytestmark = pytest.mark.cuda


def config_of(**changes) -> pk.Config:
    return make_config(
        **{
            "layers": 2,
            "head_dim": 128,
            "dtype": "bfloat16",
            "placement": "auto",
            "top_k": 16,
            **changes,
        }
    )


class Twins:
    """The same sequences under "auto" with a budget, and all on the GPU."""

    def __init__(self, budget: int, **changes):
        config = config_of(**changes)
        self.caches = [
            pk.Cache(config.replace(memory_budget=budget)),
            pk.Cache(config.replace(placement="device")),
        ]
        self.rng = np.random.default_rng(1)
        self.sequences: list[list[int]] = []

    def add(self, tokens: int) -> int:
        own = [cache.add() for cache in self.caches]
        self.sequences.append(own)
        self.grow(len(self.sequences) - 1, tokens)
        return len(self.sequences) - 1

    def grow(self, i: int, tokens: int) -> None:
        config = self.caches[0].config
        for layer in range(config.layers):
            k, v = randn_kv(self.rng, tokens, config)
            for cache, s in zip(self.caches, self.sequences[i], strict=True):
                cache.prefill(layer, [s], k, v)

    def decode(self, which: list[int], step) -> None:
        results = []
        for place, cache in enumerate(self.caches):
            batch = [self.sequences[i][place] for i in which]
            results.append(eager(cache, batch, step))
        for mine, theirs in zip(*results, strict=True):
            assert_same_bits(mine, theirs)

    def check(self, i: int) -> None:
        """Rows, summaries and searches are the same; where rows lie cuts the sums of `attend`."""
        (a, b), (s, t) = self.caches, self.sequences[i]
        q = randn_q(np.random.default_rng(4), 1, a.config)[0]
        for layer in range(a.config.layers):
            assert regions_of(a, s, layer) == regions_of(b, t, layer)
            assert_same_summaries(a.summaries(layer, s), b.summaries(layer, t))
            assert_same_explanation(a.explain(layer, s, q), b.explain(layer, t, q))
            for mine, theirs in zip(rows_of(a, s, layer), rows_of(b, t, layer), strict=True):
                assert_same_bits(mine, theirs)
            mine, theirs = (c.attend(layer, [x], q[None]) for c, x in ((a, s), (b, t)))
            torch.testing.assert_close(mine, theirs, rtol=0.02, atol=1e-3)

    def away(self) -> int:
        return self.caches[0].stats().offloaded_bytes


@pytest.mark.parametrize("tail", ["none", "sample"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_nothing_leaves_while_there_is_room(tail, kv_dtype):
    twins = Twins(0, tail=tail, kv_dtype=kv_dtype, block=64 if tail == "sample" else 0)
    twins.add(3000)
    for step in make_steps(twins.caches[0].config, 1, 20):
        twins.decode([0], step)
    stats = twins.caches[0].stats()
    assert (stats.offloaded_bytes, stats.host_memory.live) == (0, 0)
    assert stats.searched_tokens > 0
    twins.check(0)


@pytest.mark.parametrize("tail", ["none", "sample"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("row_cache", [-1, 0])
def test_what_does_not_fit_runs(tail, kv_dtype, row_cache):
    twins = Twins(
        40 << 20,
        tail=tail,
        kv_dtype=kv_dtype,
        row_cache=row_cache,
        block=64 if tail == "sample" else 0,
        tail_rows=256,  # the tails of all of these fit
    )
    names = [twins.add(2000) for _ in range(12)]
    steps = iter(make_steps(twins.caches[0].config, 3, 60))
    for _ in range(5):
        for first in (0, 3, 6, 9):
            twins.decode(names[first : first + 3], next(steps))
    while twins.away() == 0 and len(names) < 40:
        names.append(twins.add(2000))
    assert twins.away() > 0
    for i in (0, 5, len(names) - 1):
        twins.decode([i, names[1], names[2]] if i > 2 else [0, 1, 2], next(steps))
        twins.check(i)
    assert twins.caches[0].stats().memory.reserved <= 40 << 20


def test_the_longest_unused_sequences_leave_first():
    twins = Twins(0)
    config = twins.caches[0].config
    cache = pk.Cache(config.replace(memory_budget=40 << 20))
    rng = np.random.default_rng(0)
    rows = [randn_kv(rng, 2000, config) for _ in range(config.layers)]

    def add() -> int:
        s = cache.add()
        for layer, (k, v) in enumerate(rows):
            cache.prefill(layer, [s], k, v)
        return s

    first, second = add(), add()
    step = make_steps(config, 1, 1)[0]
    eager(cache, [second], step)
    eager(cache, [first], step)  # `second` is the one that was not named for longest
    while cache.stats().offloaded_bytes == 0:
        add()
    before = cache.stats().offloaded_bytes
    cache.remove(second)
    assert cache.stats().offloaded_bytes < before


def test_a_prompt_longer_than_the_budget():
    twins = Twins(16 << 20)
    twins.add(1000)
    for _ in range(24):
        twins.grow(0, 1000)
    assert twins.away() > 0
    for step in make_steps(twins.caches[0].config, 1, 30):
        twins.decode([0], step)
    twins.check(0)


def test_recorded_steps_go_on_while_rows_leave():
    twins = Twins(32 << 20, dense_below=600)
    names = [twins.add(500), twins.add(900)]
    config = twins.caches[0].config
    batches = [[twins.sequences[i][place] for i in names] for place in (0, 1)]
    graph = Graph(twins.caches[0], batches[0])
    for i, step in enumerate(make_steps(config, 2, 400)):
        mine = graph.step(batches[0], step)
        theirs = eager(twins.caches[1], batches[1], step)
        if i % 20 == 0 or 60 < i < 200:
            for a, b in zip(mine, theirs, strict=True):
                assert_same_bits(a, b)
        if i % 20 == 10:
            twins.add(1500)  # the others are the ones in use, and leave last
    assert twins.away() > 0
    for i in names:
        twins.check(i)


def test_cuts_and_forks_of_rows_that_left():
    twins = Twins(24 << 20)
    names = [twins.add(4000) for _ in range(8)]
    assert twins.away() > 0
    for i in (0, 7):
        for cache, s in zip(twins.caches, twins.sequences[i], strict=True):
            cache.truncate([s], drop=1500)
        twins.check(i)
        forks = [cache.fork(s) for cache, s in zip(twins.caches, twins.sequences[i], strict=True)]
        twins.sequences.append(forks)
        twins.grow(len(twins.sequences) - 1, 700)
        twins.check(len(twins.sequences) - 1)
        twins.check(i)
    for step in make_steps(twins.caches[0].config, 2, 10):
        twins.decode([names[0], len(twins.sequences) - 1], step)


def test_sequences_come_and_go_and_leave_nothing():
    config = config_of(memory_budget=32 << 20)
    cache = pk.Cache(config)
    rng = np.random.default_rng(3)
    live: list[int] = []
    step = make_steps(config, 1, 1)[0]
    for _ in range(150):
        s = cache.add()
        tokens = int(10 ** rng.uniform(2, 4))
        for layer in range(config.layers):
            cache.prefill(layer, [s], *randn_kv(rng, tokens, config))
        live.append(s)
        eager(cache, [live[int(rng.integers(len(live)))]], step)
        if len(live) > 12:
            cache.remove(live.pop(int(rng.integers(len(live)))))
    assert cache.stats().offloaded_bytes > 0
    for s in live:
        cache.remove(s)
    torch.cuda.synchronize()
    cache.flush([])
    stats = cache.stats()
    assert (stats.row_bytes, stats.offloaded_bytes, stats.host_memory.live) == (0, 0, 0)


@pytest.mark.parametrize("mixed", [[100], [700], [100, 700], [30, 2500, 590, 610, 1]])
def test_a_step_of_dense_and_searched_sequences_is_that_of_each_alone(mixed):
    config = with_changes(config_of(layers=1), dense_below=600)
    cache, twin = pk.Cache(config), pk.Cache(config)
    rng = np.random.default_rng(2)
    together, alone = [], []
    for tokens in mixed:
        k, v = randn_kv(rng, tokens, config)
        for place, names in ((cache, together), (twin, alone)):
            names.append(place.add())
            place.prefill(0, [names[-1]], k, v)
    for step in make_steps(config, len(mixed), 20):
        out, lse = eager(cache, together, step)
        for i, s in enumerate(alone):
            one = [x[:, i : i + 1].contiguous() for x in step]
            mine, own = eager(twin, [s], one)
            assert_same_bits(out[i : i + 1], mine)
            assert_same_bits(lse[i : i + 1], own)


def crossing_caches(
    tokens: int, batch: int, below: int | str = "batch"
) -> tuple[list[pk.Cache], list[list[int]]]:
    """A cache that searches as asked, and one in which all sequences are attended to in full."""
    own = pk.Config(
        layers=1,
        query_heads=8,
        kv_heads=8,
        head_dim=128,
        dtype="float16",
        device="cuda",
        dense_below=below,
    )
    caches = [pk.Cache(own), pk.Cache(own.replace(dense_below=1 << 20))]
    rng = np.random.default_rng(4)
    k, v = randn_kv(rng, tokens, own)
    sequences = []
    for cache in caches:
        sequences.append([cache.add() for _ in range(batch)])
        for s in sequences[-1]:
            cache.prefill(0, [s], k, v)
    return caches, sequences


def searched(cache: pk.Cache, call) -> int:
    before = cache.stats().searched_tokens
    call()
    return cache.stats().searched_tokens - before


@pytest.mark.parametrize(
    ("tokens", "batch", "searches"),
    [(6000, 9, 0), (22_014, 1, 0), (22_015, 1, 1), (9726, 4, 0), (9727, 4, 4), (7679, 8, 8)],
)
def test_where_a_search_begins_follows_from_the_batch(tokens, batch, searches):
    caches, sequences = crossing_caches(tokens, batch)
    step = make_steps(caches[0].config, batch, 1)[0]
    found = []
    count = searched(caches[0], lambda: found.append(eager(caches[0], sequences[0], step)))
    assert count == searches
    full = eager(caches[1], sequences[1], step)
    if searches:
        assert (found[0][0] != full[0]).any()
    else:
        for mine, theirs in zip(found[0], full, strict=True):
            assert_same_bits(mine, theirs)


@pytest.mark.parametrize(("tokens", "searches"), [(14_334, 0), (14_335, 8)])
def test_where_pages_are_read_a_search_begins_later(tokens, searches):
    caches, sequences = crossing_caches(tokens, 8)
    caches[0].page_table(8, tokens + 128)
    step = make_steps(caches[0].config, 8, 1)[0]
    assert searched(caches[0], lambda: eager(caches[0], sequences[0], step)) == searches


def test_sequences_beside_a_long_one_are_searched_if_long_enough_themselves():
    caches, sequences = crossing_caches(22_016, 1)
    cache, batch = caches[0], sequences[0]
    rng = np.random.default_rng(5)
    for tokens in (5000, 6000):
        batch.append(cache.add())
        cache.prefill(0, [batch[-1]], *randn_kv(rng, tokens, cache.config))
    step = make_steps(cache.config, len(batch), 1)[0]
    assert searched(cache, lambda: eager(cache, batch, step)) == 2


@pytest.mark.parametrize(("tokens", "searches"), [(8190, False), (8191, True)])
@pytest.mark.parametrize("batch", [1, 4, 9])
def test_by_default_the_length_alone_decides(tokens, batch, searches):
    caches, sequences = crossing_caches(tokens, batch, below=-1)
    step = make_steps(caches[0].config, batch, 1)[0]
    found = []
    count = searched(caches[0], lambda: found.append(eager(caches[0], sequences[0], step)))
    assert count == (batch if searches else 0)
    alone = caches[0].fork(sequences[0][0])
    caches[0].truncate([alone], drop=1)
    for mine, theirs in zip(
        eager(caches[0], [alone], [part[:, :1] for part in step]), found[0], strict=True
    ):
        assert_same_bits(mine, theirs[:1])


def test_a_graph_begins_to_search_at_its_batchs_crossing():
    caches, sequences = crossing_caches(9720, 4)
    config = caches[0].config
    graph = Graph(caches[0], sequences[0])
    for length, step in enumerate(make_steps(config, 4, 12), start=9721):
        found = []
        count = searched(caches[0], lambda s=step, f=found: f.append(graph.step(sequences[0], s)))
        assert count == (4 if length >= 9728 else 0)
        full = eager(caches[1], sequences[1], step)
        if length < 9728:
            for mine, theirs in zip(found[0], full, strict=True):
                assert_same_bits(mine, theirs)
        else:
            assert (found[0][0] != full[0]).any()


def test_rows_that_have_left_are_searched_at_any_length():
    caches, sequences = crossing_caches(6000, 1)
    cache, s = caches[0], sequences[0][0]
    step = make_steps(cache.config, 1, 1)[0]
    near = pk.Cache(cache.config.replace(memory_budget=48 << 20))
    rng = np.random.default_rng(4)
    k, v = randn_kv(rng, 6000, cache.config)
    first = near.add()
    near.prefill(0, [first], k, v)
    while near.stats().offloaded_bytes == 0:
        near.prefill(0, [near.add()], k, v)
    assert searched(near, lambda: eager(near, [first], step)) == 1
    assert searched(cache, lambda: eager(cache, [s], step)) == 0


def test_rows_come_back_when_others_have_gone():
    twins = Twins(32 << 20)
    names = [twins.add(3000) for _ in range(12)]
    mine = twins.caches[0]
    assert mine.stats().offloaded_bytes > 0
    step = make_steps(mine.config, 1, 1)[0]
    for name in names[1:]:
        for cache, s in zip(twins.caches, twins.sequences[name], strict=True):
            cache.remove(s)
    for _ in range(400):
        twins.decode([names[0]], step)
        torch.cuda.synchronize()
        if mine.stats().offloaded_bytes == 0:
            break
    assert mine.stats().offloaded_bytes == 0
    twins.decode([names[0]], step)
