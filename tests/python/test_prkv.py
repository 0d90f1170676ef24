"""PRKV: what a step attends to, against the oracle, whatever was done to the sequence."""

import numpy as np
import oracle_prkv
import pariskv_core as pk
import pytest
import torch
from hardkv_life import f32, kept_of, random_life
from oracle_hardkv import Query
from prkv_life import Life, make_config
from support import f64, randn_kv, randn_q, randn_step

POLICIES = {
    "quarter": pk.PRKV(budget=64, static_share=0.25, page=16),
    "half": pk.PRKV(budget=32, static_share=0.5, page=8),
    "odd budget": pk.PRKV(budget=45, static_share=0.5, page=8, digest="max"),
    "pages alone": pk.PRKV(budget=48, static_share=0.0, page=16),
    "kept alone": pk.PRKV(budget=30, static_share=1.0, page=8),
    "auto": pk.PRKV(budget=40, static_share="auto", page=8),
    "large pages": pk.PRKV(budget=128, static_share=0.5, page=64),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("seed", range(2))
def test_a_random_life_attends_to_what_the_oracle_does(policy, seed):
    config = make_config(policy, dense_below=[0, 90][seed % 2])
    lives = random_life(Life(config, seed), seed, steps=30, prompt=200, turn=90)
    if policy.static_share != 0:
        assert sum(life.model.keeps for life in lives) > 1
    assert lives[0].cache.stats().keeps >= lives[0].model.keeps


SHAPES = {
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "head_dim 80": {"head_dim": 80, "value_dim": 80},
    "head_dim 192 of 128": {"head_dim": 192, "value_dim": 128, "dtype": "bfloat16"},
    "head_dim 512": {"head_dim": 512, "value_dim": 64},
    "one query head each": {"query_heads": 2},
    "group of 16": {"query_heads": 32},
    "one kv head": {"query_heads": 33, "kv_heads": 1},
    "many kv heads": {"query_heads": 24, "kv_heads": 24},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("digest", ["mean", "max"])
def test_every_shape_attends_to_what_the_oracle_does(changes, digest):
    policy = pk.PRKV(budget=48, static_share=0.4, page=8, digest=digest)
    life = Life(make_config(policy, **changes), 7)
    life.prefill(150)
    life.check()
    for _ in range(60):
        life.decode()
    life.check()
    life.check_digests()
    assert life.model.keeps == 3


def test_a_groups_heads_are_averaged_after_the_softmax():
    """B5: logits (2, 0, -2, 0) and (-2, 0, 2, 0). Tokens 0 and 2 have most of both; the mean of
    the two queries knows none of them."""
    config = make_config(
        pk.PRKV(budget=8, static_share=1.0, page=8), query_heads=2, kv_heads=1, sink=0, local=1
    )
    k = torch.zeros(17, 1, 64)
    k[:16, 0, 0] = torch.tensor([2.0, 0, -2, 0] * 4)
    q = torch.full((17, 2, 64), torch.nan)
    q[16] = 0
    q[16, :, 0] = torch.tensor([8.0, -8.0])
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, k, q=q)
    assert kept_of(cache.explain(0, s, q[16]).kept) == [[0, 2, 4, 6, 8, 10, 12, 14]]


def test_kept_rows_alone_find_no_pages():
    life = Life(make_config(pk.PRKV(budget=20, static_share=1.0, page=8)))
    life.prefill(200)
    for _ in range(30):
        life.decode()
    life.check()
    stats = life.cache.stats()
    assert [len(head) for head in life.kept()] == [20, 20]
    assert (stats.fetched_rows, stats.searched_tokens, stats.summary_bytes) == (0, 0, 0)
    assert stats.kept_rows == 40


def test_a_budget_of_the_whole_zone_is_dense():
    life = Life(make_config(pk.PRKV(budget=512, page=8)))
    life.prefill(300)
    for _ in range(30):
        life.decode()
    assert life.kept() == [[], []]
    assert life.cache.stats().fetched_rows == 0


def test_a_prompt_without_queries_spends_the_budget_on_pages(rng):
    life = Life(make_config(pk.PRKV(budget=32, static_share=0.5, page=8)))
    life.prefill(200, queries=False)
    life.check()
    assert [len(head) for head in life.decode()] == [32, 32]
    for _ in range(24):
        life.decode()
    life.check()
    assert [len(head) for head in life.kept()] == [16, 16]
    assert life.cache.explain(0, life.s, randn_q(rng, 1, life.config)[0]).details.static_rows == 16


def test_a_short_prompt_chooses_by_the_queries_it_has():
    life = Life(make_config(pk.PRKV(budget=8, static_share=0.5, page=8), local=1, sink=0))
    life.prefill(20)
    life.check()
    life = Life(make_config(pk.PRKV(budget=16, static_share=0.5, page=8), local=1, sink=0))
    life.prefill(30)
    life.check()
    assert [len(head) for head in life.kept()] == [8, 8]


def test_unchanged_queries_keep_the_same_rows():
    life = Life(make_config(pk.PRKV(budget=32, static_share=0.5, page=8), local=80), 4)
    q = randn_q(life.rng, 1, life.config)
    life.prefill(250)
    for _ in range(72):  # so that all of the last 64 queries are the same, and then some flushes
        life.decode(q)
    kept = life.kept()
    end = life.model.zone[1]
    for _ in range(24):
        life.decode(q)
    life.check()
    assert life.model.zone[1] > end
    # Only rows that were not there before may come in, for as many.
    for before, after in zip(kept, life.kept(), strict=True):
        assert all(p in before for p in after if p < end)


def test_an_automatic_share_is_what_the_first_and_the_last_query_agree_on(rng):
    """App. G: pages' worth of the rows that are among the best k of both, mean over heads."""
    policy = pk.PRKV(budget=40, static_share="auto", page=8)
    config = make_config(policy, local=64)

    def static_rows(same: bool) -> int:
        k, v = randn_kv(rng, 600, config)
        q = randn_q(rng, 600, config)
        if same:
            q[-64:] = q[-1]
        cache = pk.Cache(config)
        s = cache.add()
        cache.prefill(0, [s], k, v, q=q)
        rows = cache.explain(0, s, q[0]).details.static_rows
        begin, end = 4, 4 + cache.regions(s).retrieval
        found = []
        for head in range(4):
            top = [
                set(np.argsort(-(f64(k)[begin:end, head // 2] @ f64(q[at, head])))[:40])
                for at in (-64, -1)
            ]
            found.append(len(top[0] & top[1]))
        pages = int(np.mean(found)) // 8
        assert rows == oracle_prkv.split(policy, pages)[0]
        return rows

    assert static_rows(same=True) == 40
    assert static_rows(same=False) == 0


def test_an_automatic_share_holds_while_decoding():
    life = Life(make_config(pk.PRKV(budget=40, static_share="auto", page=8)), 11)
    k, v = life.keys(300)
    q = randn_q(life.rng, 300, life.config)
    q[:] = q[0] + 0.4 * q
    life.cache.prefill(0, [life.s], k, v, q=q)
    life.model.prefill(f32(k), [Query(row) for row in f32(q)])
    before = life.model.static
    assert 0 < before < 5
    for _ in range(50):
        life.decode()
    life.truncate(30)
    twin = life.fork()
    twin.decode()
    twin.check()
    assert life.model.static == before
    details = life.cache.explain(0, life.s, q[0]).details
    assert details.static_rows == oracle_prkv.split(life.config.policy, before)[0]


def test_a_prompt_in_chunks_is_the_prompt_in_one_piece():
    config = make_config(pk.PRKV(budget=48, static_share="auto", page=8))
    rng = np.random.default_rng(3)
    k, v = randn_kv(rng, 400, config)
    q = randn_q(rng, 400, config)
    found = []
    for cuts in ([], [100], [17, 200, 336]):
        cache = pk.Cache(config)
        s = cache.add()
        for part in torch.arange(400).tensor_split(cuts):
            cache.prefill(0, [s], k[part], v[part], q=q[part])
        why, summaries = cache.explain(0, s, q[0]), cache.summaries(0, s)
        arrays = (why.kept, why.positions, why.worth, summaries.middles, summaries.distances)
        found.append([array.copy() for array in arrays])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert np.array_equal(one, two)


def test_a_batch_attends_as_each_alone(rng):
    config = make_config(pk.PRKV(budget=48, static_share=0.4, page=8))
    lengths = [1, 30, 200, 77, 0, 140]
    k, v = randn_kv(rng, sum(lengths), config)
    q = randn_q(rng, sum(lengths), config)
    together = pk.Cache(config)
    batch = [together.add() for _ in lengths]
    together.prefill(0, batch, k, v, lengths, q=q)
    alone, at = [], 0
    for length in lengths:
        cache = pk.Cache(config)
        part = slice(at, at + length)
        alone.append((cache, cache.add()))
        cache.prefill(0, [alone[-1][1]], k[part], v[part], q=q[part])
        at += length
    for _ in range(50):
        step = randn_step(rng, len(lengths), config)
        out = together.decode(0, batch, *step)
        for i, (cache, s) in enumerate(alone):
            assert torch.equal(out[i : i + 1], cache.decode(0, [s], *(x[i : i + 1] for x in step)))
    for mine, (cache, s) in zip(batch, alone, strict=True):
        a, b = together.explain(0, mine, step[0][0]), cache.explain(0, s, step[0][0])
        assert np.array_equal(a.kept, b.kept)
        assert np.array_equal(a.positions, b.positions)


def test_a_beam_takes_what_is_kept_along():
    life = Life(make_config(), 2)
    life.prefill(150)
    other = Life(life.config, 3, life.cache)
    other.prefill(90)
    life.cache.reorder([life.s, other.s], [1, 1])
    other.check()
    life.model, life.values = other.model.copy(), other.values
    life.check()
    for each in (life, other):
        for _ in range(30):
            each.decode()
        each.check()


def test_forks_share_pages_and_what_is_kept_until_one_goes_on():
    life = Life(make_config(pk.PRKV(budget=48, static_share=0.5, page=8)))
    life.prefill(200)
    stats = life.cache.stats()
    assert (stats.kept_rows, stats.keeps) == (48, 1)
    assert stats.encoded_keys == 2 * life.cache.regions(life.s).retrieval
    ring = 64 * (8 + 4 * (64 + 8))
    twin = life.fork()
    shared = life.cache.stats()
    assert shared.kept_rows == 96
    assert shared.kept_bytes <= stats.kept_bytes + 2 * ring
    assert shared.summary_bytes == stats.summary_bytes
    for _ in range(24):
        twin.decode()
    twin.check()
    twin.check_digests()
    life.check()
    life.check_digests()
    assert life.cache.stats().kept_bytes > shared.kept_bytes
    life.cache.remove(life.s)
    life.cache.remove(twin.s)
    empty = life.cache.stats()
    assert (empty.kept_rows, empty.kept_bytes, empty.summary_bytes) == (0, 0, 0)
