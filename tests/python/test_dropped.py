"""HardKV(placement="dropped"): rows are given back once others were chosen to be kept.

Which calls need them is test_dropped_calls.py's.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import kept_digest
import numpy as np
import pariskv_core as pk
import pytest
import torch
from dropped_life import DROPPED, Pair
from hardkv_life import make_config
from support import (
    assert_same_bits,
    randn_kv,
    randn_q,
    randn_step,
    rows_of,
)

POLICIES = {
    "fixed": pk.HardKV(most=16, p=1.0, metric="attention", patience=0),
    "top p": pk.HardKV(most=20, p=0.6),
    "patient": pk.HardKV(most=12, p=0.5, pool=3, patience=3),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("seed", range(2))
def test_a_random_life_gives_the_bits_of_one_that_stores_all_rows(policy, seed):
    life = Pair(policy, seed, dense_below=[0, 90][seed])
    life.add(200, chunks=3)
    life.add(70)
    for _ in range(30):
        for _ in range(int(life.rng.integers(1, 30))):
            life.decode()
        deed, s = life.rng.integers(6), life.sequences[life.rng.integers(len(life.sequences))]
        if deed == 0 and len(life.sequences) < 5:
            life.sequences.append(life.both(lambda cache: cache.fork(s)))  # noqa: B023
        elif deed == 1:
            life.truncate(s, int(life.rng.integers(1, 60)))
        elif deed == 2:
            life.both(lambda cache: cache.flush(life.sequences))
        elif deed == 3:
            life.both(lambda cache: cache.reorder(life.sequences[:2], [1, 1]))
        elif deed == 4 and len(life.sequences) > 2:
            life.both(lambda cache: cache.remove(s))  # noqa: B023
            life.sequences.remove(s)
        elif deed == 5 and len(life.sequences) < 5:
            life.add(int(life.rng.integers(1, 200)))
        life.check()
    stats = life.dropped.stats()
    assert stats.dropped_rows > 200
    assert stats.row_bytes < life.host.stats().row_bytes / 2


@pytest.mark.cpu("a GPU has neither instruction sets nor threads; test_cuda_kept.py is its")
def test_every_shape_gives_the_bits_of_one_that_stores_all_rows():
    found = kept_digest.all_kept(threads=3)
    host = {name: kept for name, kept in found.items() if name.startswith("hardkv ")}
    assert len(host) == 12
    for name, kept in host.items():
        assert found[name.replace("hardkv", "dropped")] == kept


def test_memory_stays_as_it_is_over_20_000_tokens(rng):
    config = make_config(DROPPED, query_heads=2, kv_heads=1, local=32, update=128)
    cache = pk.Cache(config)
    s = cache.add()
    k, v = randn_kv(rng, 500, config)
    cache.prefill(0, [s], k, v, q=randn_q(rng, 500, config))
    assert cache.stats().dropped_rows == 0  # the prompt may go on
    step = randn_step(rng, 1, config)
    early, late = [], []
    for token in range(20_000):
        cache.decode(0, [s], *step)
        if token > 200 and (token < 2000 or token % 61 == 0):
            stats = cache.stats()
            (early if token < 2000 else late).append(
                (stats.row_bytes, stats.kept_bytes, stats.memory.live + stats.host_memory.live)
            )
    tables = 16 * 20_000 // config.segment_tokens  # of a GPU, in powers of two
    allowed = 0 if config.device == "cpu" else 4 * tables
    for most, later in zip(np.max(early, axis=0), np.max(late, axis=0), strict=True):
        assert later <= most + allowed
    # The sink's segment, and those of the window and the buffer.
    row = config.kv_heads * 2 * 64 * 4
    assert np.max(late, axis=0)[0] <= row * config.segment_tokens * (1 + 5)
    regions = cache.regions(s)
    assert cache.stats().tokens == 20_500
    assert cache.stats().dropped_rows == regions.dropped * config.kv_heads
    assert regions.dropped > 20_000
    assert f"dropped={regions.dropped}" in repr(regions)


def test_a_fork_holds_rows_until_it_drops_them_too(rng):
    config = make_config(DROPPED)
    cache = pk.Cache(config)
    s = cache.add()
    k, v = randn_kv(rng, 640, config)
    cache.prefill(0, [s], k, v, q=randn_q(rng, 640, config))
    twin, third = cache.fork(s), cache.fork(s)
    whole = cache.stats().row_bytes
    cache.decode(0, [s], *randn_step(rng, 1, config))
    cache.decode(0, [third], *randn_step(rng, 1, config))
    assert cache.regions(s).dropped == 512
    assert cache.regions(twin).dropped == 0
    assert cache.stats().row_bytes >= whole
    again, _ = rows_of(cache, twin)  # the fork that has all of them
    assert torch.equal(again.cpu(), k.cpu())
    cache.decode(0, [twin], *randn_step(rng, 1, config))
    assert cache.stats().row_bytes < whole


def test_a_prompt_in_chunks_is_a_prompt_in_one_piece():
    config = make_config(pk.HardKV(most=20, p=0.8, placement="dropped"))
    rng = np.random.default_rng(3)
    (k, v), q = randn_kv(rng, 400, config), randn_q(rng, 400, config)
    steps = [randn_step(rng, 1, config) for _ in range(60)]
    found = []
    for cuts in ([], [100], [17, 200, 368]):
        cache = pk.Cache(config)
        s = cache.add()
        for part in torch.arange(400).tensor_split(cuts):
            cache.prefill(0, [s], k[part], v[part], q=q[part])
        found.append([cache.decode(0, [s], *step) for step in steps])
        assert cache.regions(s).dropped > 0
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert_same_bits(a, b)


def test_a_batch_drops_what_each_drops_alone(rng):
    config = make_config(DROPPED, layers=2)
    lengths = [30, 200, 77, 140]
    together, alone = pk.Cache(config), [pk.Cache(config) for _ in lengths]
    batch = [together.add() for _ in lengths]
    for layer in range(2):
        for mine, cache, length in zip(batch, alone, lengths, strict=True):
            (k, v), q = randn_kv(rng, length, config), randn_q(rng, length, config)
            together.prefill(layer, [mine], k, v, q=q)
            cache.prefill(layer, cache.sequences() or [cache.add()], k, v, q=q)
    for _ in range(60):
        for layer in range(2):
            step = randn_step(rng, len(lengths), config)
            out = together.decode(layer, batch, *step)
            for i, cache in enumerate(alone):
                single = cache.decode(layer, cache.sequences(), *(x[i : i + 1] for x in step))
                assert_same_bits(out[i : i + 1], single)
    found = [[together.regions(s, layer).dropped for s in batch] for layer in range(2)]
    assert found[0] == found[1] == [cache.regions(cache.sequences()[0]).dropped for cache in alone]
    assert max(found[0]) > 0


@pytest.mark.cpu("calls take turns the same way on a GPU")
def test_threads_that_share_a_cache_drop_rows_of_their_own_sequences(rng):
    config = make_config(DROPPED)
    inputs = [
        [(randn_kv(rng, 200, config), randn_q(rng, 200, config))]
        + [randn_step(rng, 1, config) for _ in range(80)]
        for _ in range(4)
    ]

    def live(cache: pk.Cache, mine: list, start: threading.Barrier) -> list:
        s = cache.add()
        (k, v), q = mine[0]
        cache.prefill(0, [s], k, v, q=q)
        start.wait()
        out = [cache.decode(0, [s], *step) for step in mine[1:]]
        assert cache.regions(s).dropped == 192
        return out

    alone = [live(pk.Cache(config), mine, threading.Barrier(1)) for mine in inputs]
    shared, start = pk.Cache(config), threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda mine: live(shared, mine, start), inputs))
    for a, b in zip(alone, together, strict=True):
        for one, other in zip(a, b, strict=True):
            assert_same_bits(one, other)
