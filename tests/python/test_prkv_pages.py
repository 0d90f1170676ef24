"""PRKV's digests and the pages that are found by them, with ordinary and hostile rows."""

import sys

import numpy as np
import pariskv_core as pk
import pytest
import torch
from hardkv_life import f32, kept_of
from oracle_hardkv import Query
from oracle_prkv import PRKVModel
from prkv_life import Life, make_config
from support import HERE, f64, randn_kv, randn_q, randn_step


@pytest.mark.parametrize("page", [8, 16, 32, 64])
def test_every_page_size_has_the_oracles_digests(page):
    life = Life(make_config(pk.PRKV(budget=2 * page, page=page), segment_tokens=128), page)
    life.prefill(400)
    life.check_digests()
    life.decode()
    life.check()
    summaries = life.cache.summaries(0, life.s)
    assert summaries.middles.shape[1] == life.cache.regions(life.s).retrieval // page + 1


def test_a_digest_is_the_briefs():
    """B5: K = (1, -2), (3, 0), (2, 4) have c = (2, 1), r = (.667, 2.333), the box (1, 3)."""
    found = {}
    for digest in ("mean", "max"):
        config = make_config(
            pk.PRKV(budget=8, static_share=0.0, page=8, digest=digest),
            query_heads=1,
            kv_heads=1,
            sink=5,
            local=1,
        )
        rows = torch.zeros(20, 1, 64)
        rows[5:8, 0, :2] = torch.tensor([[1.0, -2], [3, 0], [2, 4]])
        cache = pk.Cache(config)
        s = cache.add()
        cache.prefill(0, [s], rows, rows)
        summaries = cache.summaries(0, s)
        assert summaries.middles[0, 0, :2].tolist() == [2, 1]
        found[digest] = summaries.distances[0, 0, :2]
        q = torch.zeros(1, 64)
        q[0, :2] = torch.tensor([1.0, -1])
        scores = cache.explain(0, s, q).details.page_scores[0]
        assert scores[0] == pytest.approx({"mean": 4, "max": 5}[digest], abs=2e-3)
    assert found["mean"] == pytest.approx([2 / 3, 7 / 3], abs=1e-3)
    assert found["max"] == pytest.approx([1, 3], abs=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30])
def test_the_box_is_a_bound_of_every_keys_product(dtype, size, rng):
    config = make_config(
        pk.PRKV(budget=16, static_share=0.0, page=16, digest="max"), dtype=dtype, sink=0
    )
    k, v = randn_kv(rng, 400, config)
    k[..., 9] += 40.0
    k[70:90] *= 1e-3
    k *= size
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, v)
    summaries = cache.summaries(0, s)
    keys = f64(k)[: cache.regions(s).retrieval].reshape(-1, 16, 2, 64).transpose(2, 0, 1, 3)
    middles, distances = f64(summaries.middles), f64(summaries.distances)
    assert (keys <= (middles + distances)[:, :, None]).all()
    assert (keys >= (middles - distances)[:, :, None]).all()
    # And it is not much wider than the keys are.
    reach = keys.max(axis=2) - keys.min(axis=2)
    largest = np.abs(keys).max(axis=(2, 3))[..., None]
    assert (2 * distances <= reach * 1.002 + 1e-3 * largest).all()


def test_pages_alone_equal_the_labs_arkvale_page_for_page(rng):
    sys.path.insert(0, str(HERE.parents[1] / "bench"))
    from quality.peers import ArkVale

    policy = pk.PRKV(budget=96, static_share=0.0, page=32)
    config = make_config(policy, head_dim=128, value_dim=128, sink=0)
    # Quarters, so that the middle and the mean distance are exact in 16 bits.
    k = torch.from_numpy(np.rint(rng.normal(0, 2, (700, 2, 128))).clip(-8, 8) / 4).float()
    q = randn_q(rng, 20, config)
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k.to(q.device), k.to(q.device))
    zone = cache.regions(s).retrieval
    for h in range(2):
        with torch.device("cpu"):
            peer = ArkVale(32)
            peer.prefill(k[:zone, h].cpu(), None)
            expected = peer.pick(q[:, 2 * h : 2 * h + 2].cpu(), 96, torch.zeros(20, 2))
        for step in range(20):
            explanation = cache.explain(0, s, q[step])
            assert explanation.kept.size == 0
            assert explanation.positions[h].tolist() == expected[step].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_hostile_rows_and_queries_attend_to_what_the_oracle_does(seed):
    """Zeros, giants, dwarfs, copies, and rows that are no numbers."""
    policy = [
        pk.PRKV(budget=40, static_share=0.4, page=8),
        pk.PRKV(budget=40, static_share="auto", page=8, digest="max"),
        pk.PRKV(budget=48, static_share=0.0, page=16),
    ][seed]
    config = make_config(policy)
    rng = np.random.default_rng(seed)
    cache = pk.Cache(config)
    model, life = PRKVModel(cache.config), Life(config, seed, cache)
    life.model = model
    life.s = s = cache.add()
    for count in (200, 60, 90):
        (k, v), q = randn_kv(rng, count, config), randn_q(rng, count, config)
        for rows in (k, q):
            for factor in (0.0, 1e30, 1e-30, 1e4, 1e-42, np.nan, np.inf):
                rows[torch.from_numpy(rng.random(rows.shape[:2]) < 0.03)] *= factor
        scale = [0.125, 1e20, 1e-20][int(rng.integers(3))]
        cache.prefill(0, [s], k, v, q=q, scale=scale)
        model.prefill(f32(k), [Query(row, scale=scale) for row in f32(q)])
        life.check_digests()
        for query in q[:20]:
            life.selected(query)
    begin, end = model.zone
    unusable = (~np.isfinite(model.k[begin:end]).all(axis=2)).sum()
    assert unusable > 10
    assert cache.stats().unusable_keys == unusable


def test_a_key_that_is_not_finite_is_attended_to_by_no_step(rng):
    """It is neither kept nor a live row of its page; the others of the page are."""
    config = make_config(pk.PRKV(budget=64, static_share=0.5, page=8))
    k, v = randn_kv(rng, 200, config)
    k[50, 0, 3] = np.inf
    k[96:104, 1] = np.nan
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, v, q=randn_q(rng, 200, config))
    assert cache.stats().unusable_keys == 9
    for _ in range(30):
        q, k1, v1 = randn_step(rng, 1, config)
        assert torch.isfinite(cache.decode(0, [s], q, k1, v1)).all()
        explanation = cache.explain(0, s, q[0])
        for rows in (explanation.kept, explanation.positions):
            assert 50 not in rows[0]
            assert not set(range(96, 104)) & set(rows[1].tolist())
    assert explanation.details.page_scores[1][96 // 8] == -np.inf


def test_a_query_that_is_not_finite_has_no_say(rng):
    life = Life(make_config(pk.PRKV(budget=32, static_share=0.5, page=8)), 3)
    life.prefill(200)
    q = randn_q(rng, 1, life.config)[0]
    q[0, 3] = np.nan
    life.selected(q)  # the other head of the group finds the pages
    q[1, 9] = np.inf
    positions = life.selected(q)
    assert [len(head) > 0 for head in positions] == [False, True]
    # Kept rows: the queries of all heads of one kv head, and then of all.
    for heads in (slice(0, 2), slice(0, 4)):
        k, v = randn_kv(rng, 200, life.config)
        q = randn_q(rng, 200, life.config)
        q[:, heads] = np.nan
        cache = pk.Cache(life.config)
        s = cache.add()
        cache.prefill(0, [s], k, v, q=q)
        zone_end = 4 + cache.regions(s).retrieval
        kept = kept_of(cache.explain(0, s, randn_q(rng, 1, life.config)[0]).kept)
        assert kept[0] == list(range(zone_end - 16, zone_end))
        assert (kept[1] == kept[0]) == (heads.stop == 4)


def test_a_page_all_of_whose_rows_are_kept_is_not_found(rng):
    config = make_config(pk.PRKV(budget=24, static_share=0.7, page=8), sink=0)
    (k, v), q = randn_kv(rng, 200, config), randn_q(rng, 200, config).abs()
    k[40:56] = 8.0  # two pages that every query looks at
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, v, q=q)
    explanation = cache.explain(0, s, q[0])
    assert kept_of(explanation.kept) == [list(range(40, 56))] * 2
    assert (explanation.details.page_scores[:, [5, 6]] == -np.inf).all()
    assert explanation.details.pages.shape == (2, 1)
    assert not np.isin(explanation.details.pages, [5, 6]).any()


def test_equal_pages_are_found_from_the_lowest_on(rng):
    config = make_config(pk.PRKV(budget=32, static_share=0.0, page=8))
    rows = torch.ones(200, 2, 64)
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], rows, rows)
    explanation = cache.explain(0, s, torch.ones(4, 64))
    assert explanation.details.pages.tolist() == [[0, 1, 2, 3]] * 2
    assert explanation.positions[0].tolist()[:28] == list(range(4, 32))
