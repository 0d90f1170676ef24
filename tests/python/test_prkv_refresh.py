"""PRKV: a refresh of the kept rows looks at the best pages, its last kept rows and the latest."""

import numpy as np
import oracle_prkv
import pariskv_core as pk
import pytest
import torch
from hardkv_life import f32, kept_of
from oracle_hardkv import Query
from prkv_life import Life, make_config
from support import randn_kv, randn_q

CASES = {
    "quarter": (pk.PRKV(budget=64, static_share=0.25, page=16), {}),
    "auto": (pk.PRKV(budget=64, static_share="auto", page=32), {"dtype": "bfloat16"}),
    "max, a sink within a page": (
        pk.PRKV(budget=100, static_share=0.5, page=8, digest="max"),
        {"sink": 13, "dtype": "float16"},
    ),
    "large pages, one kv head": (
        pk.PRKV(budget=512, static_share=0.5, page=64),
        {"kv_heads": 1, "query_heads": 7, "head_dim": 80, "value_dim": 64},
    ),
    "queries that do not see the latest": (
        pk.PRKV(budget=64, static_share=0.5, page=16),
        {"local": 1, "sink": 0},
    ),
}


def turn(life: Life, q: torch.Tensor | int, **options) -> None:
    """As Life.attend, but what it returns is not looked at."""
    q = randn_q(life.rng, q, life.config) if isinstance(q, int) else q
    k, v = life.keys(len(q))
    life.cache.attend(0, [life.s], q, k=k, v=v, **options)
    life.model.attend(f32(k), [Query(one, **options) for one in f32(q)])


def check(life: Life) -> None:
    life.selected(randn_q(life.rng, 1, life.config)[0])


@pytest.mark.parametrize(("policy", "changes"), CASES.values(), ids=CASES.keys())
def test_a_refresh_keeps_what_the_oracle_keeps(policy, changes):
    life = Life(make_config(policy, **changes), 3)
    life.prefill(11_000)
    assert life.model.looked_at() * policy.page == oracle_prkv.LEAST_ROWS
    for count in (63, 50):
        turn(life, count)
        check(life)
    life.truncate(300)
    twin = life.fork()
    turn(life, 63, softcap=8.0)
    check(life)
    turn(twin, 63, scale=0.3)
    check(twin)
    assert (life.model.keeps > 2, twin.model.keeps) == (True, 1)


def test_a_long_zone_is_refreshed_from_a_quarter_of_its_pages():
    policy = pk.PRKV(budget=64, static_share=0.5, page=32)
    life = Life(make_config(policy, kv_heads=1, query_heads=2), 5)
    life.prefill(40_000)
    pages = life.model.zone[1] // policy.page
    assert life.model.looked_at() == -(-pages // oracle_prkv.PART) > 8192 // policy.page
    turn(life, 50)
    check(life)


def test_a_refresh_passes_over_pages_without_usable_keys():
    policy = pk.PRKV(budget=64, static_share=0.5, page=16)
    life = Life(make_config(policy), 1)
    k, v = life.keys(11_000)
    k[2000:4000] = torch.nan
    k[4000:6000:3, 0, 5] = torch.inf
    k[7000:7016, 1] = 3e38  # its digest is no finite number once it is in full
    k[7000:7016:2, 1] *= -1
    q = randn_q(life.rng, 11_000, life.config)
    life.cache.prefill(0, [life.s], k, v, q=q)
    life.model.prefill(f32(k), [Query(one) for one in f32(q)])
    for count in (30, 50):
        turn(life, count)
        check(life)
    assert life.model.keeps == 3


def test_a_refresh_without_a_query_that_has_a_say_keeps_the_latest_rows():
    config = make_config(pk.PRKV(budget=64, static_share=0.5, page=16))
    life = Life(config, 2)
    life.prefill(9_000)
    for _ in range(2):
        turn(life, torch.full((50, config.query_heads, config.head_dim), torch.nan))
    end = life.model.zone[1]
    assert life.kept() == [list(range(end - 32, end))] * 2


def test_a_prompt_in_chunks_is_looked_at_in_full(rng):
    config = make_config(pk.PRKV(budget=64, static_share=0.5, page=16))
    k, v = randn_kv(rng, 10_000, config)
    q = randn_q(rng, 10_000, config)
    cache = pk.Cache(config)
    kept = []
    for chunks in ([10_000], [9_000, 900, 100]):
        s, begin = cache.add(), 0
        for count in chunks:
            of = slice(begin, begin + count)
            cache.prefill(0, [s], k[of], v[of], q=q[of])
            begin += count
        kept.append(kept_of(cache.explain(0, s, q[-1]).kept))
    assert kept[0] == kept[1]


def test_sequences_that_are_refreshed_together_keep_what_they_keep_alone(rng):
    config = make_config(pk.PRKV(budget=64, static_share=0.5, page=16))
    alone, together = pk.Cache(config), pk.Cache(config)
    for cache in (alone, together):
        for _ in range(3):
            cache.add()
    for s, tokens in enumerate((9_000, 10_500, 9_000)):
        k, v = randn_kv(rng, tokens, config)
        q = randn_q(rng, tokens, config)
        for cache in (alone, together):
            cache.prefill(0, [s], k, v, q=q)
    lengths = [40, 30, 50]
    k, v = randn_kv(rng, sum(lengths), config)
    q = randn_q(rng, sum(lengths), config)
    together.attend(0, [0, 1, 2], q, lengths, k=k, v=v)
    for s, (count, end) in enumerate(zip(lengths, np.cumsum(lengths), strict=True)):
        of = slice(end - count, end)
        alone.attend(0, [s], q[of], k=k[of], v=v[of])
        kept = [kept_of(cache.explain(0, s, q[0]).kept) for cache in (alone, together)]
        assert kept[0] == kept[1]
