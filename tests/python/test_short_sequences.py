"""Rows on a CPU come in blocks of 64 tokens: what short sequences, forks and 8 bits then take."""

import pariskv_core as pk
import pytest
from support import randn_kv, randn_step

pytestmark = pytest.mark.cpu("on a GPU a block of rows is a segment")


def test_a_budget_has_room_for_many_short_prompts(rng):
    """Of 100 tokens each: rows in blocks of 64."""
    shape = {"query_heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "float16"}
    config = pk.Config(layers=4, **shape, threads=1, memory_budget=60_000_000)
    cache, count = pk.Cache(config), 0
    k, v = randn_kv(rng, 100, config)
    while True:
        s = cache.add()
        try:
            for layer in range(4):
                cache.prefill(layer, [s], k, v)
        except pk.OutOfMemory:
            break
        count += 1
    own = 4 * 100 * 2 * 2 * 64 * 2
    assert count >= 220
    assert cache.stats().memory.live <= 1.3 * own * (count + 1)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_fork_that_grows_by_a_token_copies_a_block_of_rows(kv_dtype, rng):
    shape = {"query_heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "float16"}
    config = pk.Config(layers=1, **shape, threads=1, kv_dtype=kv_dtype)
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], *randn_kv(rng, 3000, config))
    before = cache.stats()
    fork = cache.fork(s)
    assert cache.stats().row_bytes == before.row_bytes
    cache.decode(0, [fork], *randn_step(rng, 1, config))
    after = cache.stats()
    assert after.row_bytes - before.row_bytes == 64 * 2 * 2 * 64 * 2
    assert after.summary_bytes - before.summary_bytes < 10_000  # the statistics of a layer
    assert after.kept_bytes == before.kept_bytes


def test_rows_in_8_bits_take_less_than_16_from_the_first_zone_on(rng):
    shape = {"query_heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "float16"}
    taken = {}
    for kv_dtype in ("auto", "int8"):
        config = pk.Config(layers=1, **shape, threads=1, kv_dtype=kv_dtype)
        cache = pk.Cache(config)
        cache.prefill(0, [cache.add()], *randn_kv(rng, 5000, config))
        taken[kv_dtype] = cache.stats().row_bytes
    assert taken["auto"] == 79 * 64 * 2 * 256
    assert taken["int8"] < 0.7 * taken["auto"]
