"""Fetched rows that stay on the GPU: the same bits as without, whatever becomes of a sequence."""

from __future__ import annotations

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    SCORERS,
    assert_same_bits,
    make_config,
    randn_kv,
    randn_q,
    settled,
    unchanged,
    with_changes,
)
from test_cuda_graph import Graph, assert_same_results

pytestmark = pytest.mark.cuda

# None, the default, and so few slots that rows are pushed out all the time.
ROW_CACHES = (0, -1, 16)
NONE, WHOLE, TINY = range(3)


class Caches:
    """Caches that differ in their row caches alone, and are given the same of everything."""

    def __init__(self, config: pk.Config, seed: int = 0) -> None:
        self.config = config
        self.all = [pk.Cache(with_changes(config, row_cache=rows)) for rows in ROW_CACHES]
        self._rng = np.random.default_rng(seed)
        self._queries: dict[int, torch.Tensor] = {}  # by sequence: they change slowly

    def add(self) -> int:
        return self.each(lambda cache: cache.add())

    def each(self, call):
        """The same call of every cache, which says the same."""
        results = [call(cache) for cache in self.all]
        assert results[1:] == results[:-1]
        return results[0]

    def prefill(self, s: int, tokens: int) -> None:
        for layer in range(self.config.layers):
            k, v = randn_kv(self._rng, tokens, self.config)
            for cache in self.all:
                cache.prefill(layer, [s], k, v)

    def _query(self, s: int) -> torch.Tensor:
        fresh = randn_q(self._rng, self.config.layers, self.config)
        before = self._queries.get(s, fresh)
        self._queries[s] = (0.97 * before + 0.25 * fresh).to(fresh.dtype)
        return self._queries[s]

    def step(self, batch: list[int], what: str = "") -> None:
        q = torch.stack([self._query(s) for s in batch], dim=1)
        for layer in range(self.config.layers):
            k, v = randn_kv(self._rng, len(batch), self.config)
            first, *others = (
                cache.decode(layer, batch, q[layer], k, v, return_lse=True) for cache in self.all
            )
            for rows, other in zip(ROW_CACHES[1:], others, strict=True):
                for a, b in zip(first, other, strict=True):
                    assert_same_bits(a, b, f"{what}, layer {layer}, row_cache {rows}")

    def steps(self, batch: list[int], count: int, what: str = "") -> None:
        for i in range(count):
            self.step(batch, f"{what} {i}")

    def found(self) -> list[int]:
        """Rows that the row caches had, so far."""
        return [cache.stats().cached_rows for cache in self.all]


def config_of(**changes) -> pk.Config:
    return make_config(**{"layers": 2, "head_dim": 128, "top_k": 64, "dense_below": 200, **changes})


SHAPES = {
    "64": {"head_dim": 64, "dtype": "bfloat16"},
    "80": {"head_dim": 80, "dtype": "float16"},
    "96": {"head_dim": 96, "dtype": "bfloat16"},
    "128": {"dtype": "bfloat16"},
    "128, float32": {},
    "256, float32": {"head_dim": 256},
    "256": {"head_dim": 256, "dtype": "float16"},
    "20 heads for one": {"query_heads": 20, "kv_heads": 1, "dtype": "bfloat16"},
    "odd top_k": {"top_k": 37, "dtype": "bfloat16"},
    "8 bits": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "80, 8 bits": {"head_dim": 80, "dtype": "float16", "kv_dtype": "int8"},
    "256 and 64, 8 bits": {"head_dim": 256, "value_dim": 64, "kv_dtype": "int8"},
    "no local window": {"local": 0, "update": 1, "dtype": "bfloat16"},
    "mean query": {"group_rule": "mean_query"},
}


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_same_bits_with_and_without(shape, scorer):
    caches = Caches(config_of(scorer=scorer, **shape))
    batch = [caches.add() for _ in range(3)]
    for s, tokens in zip(batch, (900, 150, 450), strict=True):  # the second is short at first
        caches.prefill(s, tokens)
    caches.steps(batch, 80)
    found, fetched = caches.found(), caches.all[0].stats().fetched_rows
    assert found[NONE] == 0 < found[TINY] < found[WHOLE] <= fetched
    assert found[WHOLE] > fetched / 2  # else this tests little


def test_rows_that_stay_selected_are_all_found():
    config = config_of(layers=1, update=10_000)
    caches = Caches(config)
    s = caches.add()
    caches.prefill(s, 900)
    rng = np.random.default_rng(1)
    q = randn_q(rng, 1, config)
    found = [0]
    for _ in range(3):
        kv = randn_kv(rng, 1, config)
        caches.all[WHOLE].decode(0, [s], q, *kv)
        found.append(caches.all[WHOLE].stats().cached_rows)
    # A set of four slots may have been asked for five rows.
    assert found[1] == 0
    assert 0.85 < (found[3] - found[2]) / (2 * config.policy.top_k) <= 1


def test_many_rows():
    """More than a block's threads, and tiles whose slots are used again."""
    caches = Caches(config_of(dtype="bfloat16", top_k=2048, layers=1, segment_tokens=1024))
    s = caches.add()
    caches.prefill(s, 9000)
    caches.steps([s], 12)
    assert caches.found()[WHOLE] > caches.all[0].stats().fetched_rows / 3


def test_a_batch_that_goes_in_branches():
    caches = Caches(config_of(layers=1, dtype="bfloat16", query_heads=16, kv_heads=8))
    batch = [caches.add() for _ in range(9)]
    for i, s in enumerate(batch):
        caches.prefill(s, 200 + 77 * i)
    caches.steps(batch, 40)
    for _ in range(6):  # others of them, in another order
        caches.step(batch[::2])
        caches.step(batch[:0:-3])
    assert caches.found()[WHOLE] > 0


@pytest.mark.parametrize("removed", [1, 20, 33, 60, 300, 800])
def test_other_rows_where_fetched_ones_were(removed):
    """Truncated, and other tokens in their place: with and without steps between."""
    caches = Caches(config_of(dtype="bfloat16"))
    s = caches.add()
    caches.prefill(s, 900)
    caches.steps([s], 20, "before")
    for turn in range(3):
        caches.each(lambda cache: cache.truncate([s], drop=removed))
        if turn != 1:
            caches.steps([s], 3, "shortened")
        caches.prefill(s, removed)
        caches.steps([s], 10, f"after {turn}")


def test_tokens_that_are_taken_back_from_the_window_leave_the_row_cache_alone():
    config = config_of(layers=1, dtype="bfloat16")
    caches = Caches(config)
    s = caches.add()
    caches.prefill(s, 900)
    caches.steps([s], 10)
    before = caches.found()[WHOLE]
    for _ in range(5):  # as speculative decoding does
        caches.steps([s], 4)
        caches.each(lambda cache: cache.truncate([s], drop=3))
    steps = 20 * config.kv_heads * config.policy.top_k
    assert caches.found()[WHOLE] - before > steps / 2


def test_forks_go_their_own_ways():
    caches = Caches(config_of(dtype="bfloat16"))
    one = caches.add()
    caches.prefill(one, 700)
    caches.steps([one], 10)
    two = caches.each(lambda cache: cache.fork(one))
    caches.steps([one, two], 60)  # past a flush: the shared last segment is written by both
    caches.each(lambda cache: cache.truncate([two], drop=500))
    caches.prefill(two, 400)
    caches.steps([two, one], 30)
    caches.each(lambda cache: cache.reorder([one, two], [1, 1]))
    caches.steps([one, two], 60)
    caches.each(lambda cache: cache.remove(one))
    caches.steps([two], 20)


def test_a_prompt_in_pieces_with_steps_between():
    caches = Caches(config_of(dtype="bfloat16"))
    s = caches.add()
    for tokens in (250, 1, 63, 64, 65, 400, 17):
        caches.prefill(s, tokens)
        caches.steps([s], 8, f"after {tokens}")


def test_a_sequence_in_the_memory_of_another():
    caches = Caches(config_of(dtype="bfloat16"))
    for turn in range(4):
        s = caches.add()
        caches.prefill(s, 600)
        caches.steps([s], 10, f"turn {turn}")
        for cache in caches.all:
            cache.remove(s)
            settled(cache)


def test_explaining_leaves_no_trace():
    config = config_of(dtype="bfloat16", layers=1)
    caches = Caches(config)
    s = caches.add()
    caches.prefill(s, 600)
    rng = np.random.default_rng(1)
    for i in range(30):
        caches.step([s], f"step {i}")
        found = caches.found()
        for q in randn_q(rng, 3, config):
            first, *others = (cache.explain(0, s, q) for cache in caches.all)
            for other in others:
                assert np.array_equal(first.positions, other.positions)
                assert np.array_equal(first.exact, other.exact, equal_nan=True)
        assert caches.found() == found


@pytest.mark.parametrize("row_cache", ROW_CACHES[1:])
def test_a_graph_that_is_replayed(row_cache):
    """While sequences grow, flush, are shortened, forked and exchanged."""
    config = config_of(dtype="bfloat16")
    caches = [pk.Cache(with_changes(config, row_cache=size)) for size in (row_cache, 0)]
    rng = np.random.default_rng(0)
    batches = [[cache.add() for _ in range(2)] for cache in caches]

    def prefill(i: int, tokens: int) -> None:
        for layer in range(config.layers):
            k, v = randn_kv(rng, tokens, config)
            for cache, batch in zip(caches, batches, strict=True):
                cache.prefill(layer, [batch[i]], k, v)

    for i, tokens in enumerate((700, 120)):
        prefill(i, tokens)
    graphs = [Graph(cache, batch) for cache, batch in zip(caches, batches, strict=True)]
    queries = torch.zeros(0)

    def go(count: int, what: str) -> None:
        nonlocal queries
        for i in range(count):
            fresh = torch.stack([randn_q(rng, 2, config) for _ in range(config.layers)])
            queries = fresh if len(queries) == 0 else (0.97 * queries + 0.25 * fresh).to(fresh)
            rows = [randn_kv(rng, 2, config) for _ in range(config.layers)]
            kv = [torch.stack(x) for x in zip(*rows, strict=True)]
            step = [queries, *kv]
            mine, theirs = (
                graph.step(batch, step) for graph, batch in zip(graphs, batches, strict=True)
            )
            assert_same_results(mine, theirs, f"{what} {i}")
            if i % 5 == 0:  # once more, with another query and other rows for the same token
                step = [x.flip(0) for x in step]
                assert_same_results(graphs[0].replay(step), graphs[1].replay(step), f"{what} again")

    go(120, "growing")
    for cache, batch in zip(caches, batches, strict=True):
        cache.truncate([batch[0]], drop=400)
    go(30, "shortened")
    prefill(0, 300)
    go(30, "filled up")
    for cache, batch in zip(caches, batches, strict=True):
        batch[1] = cache.fork(batch[0])
    go(60, "forked")
    assert caches[0].stats().cached_rows > 0


def test_short_sequences_have_none():
    config = config_of(layers=1, dense_below=300, update=10_000, segment_tokens=1024)
    caches = [pk.Cache(with_changes(config, row_cache=rows)) for rows in (1 << 16, 0)]
    rng = np.random.default_rng(0)
    rows_bytes = (1 << 16) * config.kv_heads * 2 * config.head_dim * 4
    k, v = randn_kv(rng, 299, config)

    def more() -> int:
        """What the row cache takes."""
        with_one, without = (settled(cache).memory.live for cache in caches)
        return with_one - without

    sequences = [cache.add() for cache in caches]
    for cache, s in zip(caches, sequences, strict=True):
        cache.prefill(0, [s], k, v)
    assert more() == 0
    step = (randn_q(rng, 1, config), *randn_kv(rng, 1, config))
    for cache, s in zip(caches, sequences, strict=True):
        cache.decode(0, [s], *step)
    one = more()
    assert rows_bytes < one < 1.1 * rows_bytes
    forks = [cache.fork(s) for cache, s in zip(caches, sequences, strict=True)]
    assert more() == one
    for cache, s in zip(caches, forks, strict=True):
        cache.decode(0, [s], *step)
    assert more() == 2 * one
    for cache, s in zip(caches, sequences, strict=True):
        cache.remove(s)
    assert more() == one
    for cache, s in zip(caches, forks, strict=True):
        cache.remove(s)
    assert more() == 0


@pytest.mark.parametrize("placement", ["host", "device"])
def test_where_nothing_is_fetched_nothing_is_kept(placement):
    config = config_of(layers=1, placement=placement, row_cache=1 << 16, segment_tokens=1024)
    without = with_changes(config, row_cache=0)
    lives = []
    for each in (config, without):
        cache = pk.Cache(each)
        s = cache.add()
        rng = np.random.default_rng(0)
        cache.prefill(0, [s], *randn_kv(rng, 600, each))
        cache.decode(0, [s], randn_q(rng, 1, each), *randn_kv(rng, 1, each))
        lives.append(settled(cache).memory.live)
    assert (lives[0] == lives[1]) == (placement == "device")


def test_a_refused_row_cache_changes_nothing():
    config = config_of(layers=1, dense_below=300, memory_budget=64 << 20, row_cache=1 << 20)
    cache, twin = pk.Cache(config), pk.Cache(with_changes(config, row_cache=0))
    rng = np.random.default_rng(0)
    k, v = randn_kv(rng, 298, config)
    s, t = cache.add(), twin.add()
    cache.prefill(0, [s], k, v)
    twin.prefill(0, [t], k, v)
    step = (randn_q(rng, 1, config), *randn_kv(rng, 1, config))
    assert_same_bits(cache.decode(0, [s], *step), twin.decode(0, [t], *step))
    for _ in range(3):
        with unchanged(cache), pytest.raises(pk.OutOfMemory, match="device memory"):
            cache.decode(0, [s], *step)
        with unchanged(cache), pytest.raises(pk.OutOfMemory, match="device memory"):
            cache.advance([s])
    q = randn_q(rng, 1, config)
    for each, sequence in ((cache, s), (twin, t)):  # what does not decode needs none
        each.prefill(0, [sequence], k, v)
    assert_same_bits(cache.attend(0, [s], q), twin.attend(0, [t], q))
    for each, sequence in ((cache, s), (twin, t)):
        each.truncate([sequence], drop=400)
    assert_same_bits(cache.decode(0, [s], *step), twin.decode(0, [t], *step))
