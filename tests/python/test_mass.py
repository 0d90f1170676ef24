"""A budget by mass: fewer rows where a few have nearly all of the attention, and its estimate."""

import math

import numpy as np
import oracle
import pariskv_core as pk
import pytest
import torch
from oracle_search import rows_within
from support import (
    SEARCHES,
    assert_output_close,
    assert_same_bits,
    decode_oracle,
    f64,
    filled,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    regions_of,
    rows_of,
    tensor,
    with_changes,
)

# What an estimate may be off, by its arithmetic: the budget may be reached one row later.
APART = 2e-3
# Of logits: a few keys have nearly all of the attention, or none has much of it.
PEAKED, FLAT = 6.0, 0.3


def counts_of(explanation) -> np.ndarray:
    return (explanation.positions >= 0).sum(axis=1)


def resident_share(explanation) -> np.ndarray:
    """What rows besides the selected ones have, by what explain says: (kv_heads)."""
    return explanation.details.mass - np.nansum(explanation.worth, axis=1, dtype=np.float64)


@pytest.mark.parametrize("mass", [0.05, 0.3, 0.6, 0.9, 0.98, 1.0])
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_rows_are_taken_until_they_have_the_mass(search, mass, device):
    config = make_config(**search, mass=mass, top_k=60, query_heads=6, device=device)
    f = filled(config, 1000)
    for size in (FLAT, 1.0, 2.0, PEAKED):
        q = randn_q(f.rng, 1, config)[0] * size
        why, expected = f.cache.explain(0, f.s, q), decode_oracle(f.cache, f.s, q)
        for head in range(config.kv_heads):
            mine, theirs = why.positions[head], expected.positions[head]
            mine = mine[mine >= 0]
            assert abs(len(mine) - len(theirs)) <= 1
            assert len(set(mine) ^ set(theirs)) <= 2
            worth = why.worth[head][: len(mine)]
            assert (np.diff(worth) <= 0).all()
            # By its own worths it is the shortest list that has the mass.
            rest = resident_share(why)[head]
            assert abs(rows_within(worth.astype(float), rest, mass) - len(mine)) <= (mass < 1)
            if len(mine) < 60:
                assert why.details.mass[head] >= min(mass, 1 - 1e-5) - 1e-6
        np.testing.assert_allclose(
            why.details.mass, expected.mass, atol=APART + 1 / 60 * (mass < 1)
        )


@pytest.mark.parametrize("mass", [0.2, 0.7])
@pytest.mark.parametrize("options", [{}, {"softcap": 8.0}, {"scale": 0.3}, {"sink_bias": 2.0}])
def test_outputs_are_of_the_rows_that_were_taken(options, mass, dtype, device):
    config = make_config(dtype=dtype, mass=mass, top_k=40, block=64, device=device)
    f = filled(config, 900)
    if "sink_bias" in options:
        options = {"sink_bias": torch.full((4,), 2.0, device=device)}
    for _ in range(3):
        q, k, v = randn_step(f.rng, 1, config)
        out, lse = f.cache.decode(0, [f.s], q * 3, k, v, return_lse=True, **options)
        why = f.cache.explain(0, f.s, q[0] * 3, **options)
        keys, values = (f64(x) for x in rows_of(f.cache, f.s))
        sink, zone, *_ = regions_of(f.cache, f.s)
        kept = np.r_[0:sink, sink + zone : len(keys)]
        rows = [np.r_[kept, row[row >= 0]] for row in why.positions]
        bias = f64(options["sink_bias"]) if "sink_bias" in options else None
        logits = oracle.Logits(options.get("scale"), options.get("softcap", 0.0), bias)
        expected, total = oracle.attention_over(f64(q[0] * 3), keys, values, rows, logits)
        assert_output_close(out[0], expected, dtype)
        np.testing.assert_allclose(f64(lse)[0], total, rtol=1e-4, atol=1e-4)


def test_a_flat_head_takes_all_rows_and_a_peaked_one_few(device):
    config = make_config(mass=0.95, top_k=50, block=64, tail="sample", tail_rows=64, device=device)
    f = filled(config, 3000)
    flat = f.cache.explain(0, f.s, randn_q(f.rng, 1, config)[0] * FLAT)
    assert (counts_of(flat) == 50).all()
    assert (flat.details.mass < 0.2).all()
    one = f64(f.k[1500])  # each head looks for one key of the zone
    q = tensor(np.repeat(one, 2, axis=0) * 4, config)
    peaked = f.cache.explain(0, f.s, q)
    assert (counts_of(peaked) == 1).all()
    assert (peaked.positions[:, 0] == 1500).all()
    assert (peaked.details.mass > 0.99).all()
    # Heads of one step have budgets of their own.
    both = torch.cat([q[:2], randn_q(f.rng, 1, config)[0, 2:] * FLAT])
    assert counts_of(f.cache.explain(0, f.s, both)).tolist() == [1, 50]


def test_no_row_is_taken_where_resident_rows_have_the_mass(device):
    config = make_config(mass=0.5, top_k=20, block=64, tail="sample", tail_rows=32, device=device)
    f = filled(config, 1000)
    q = tensor(np.repeat(f64(f.k[-1]), 2, axis=0) * 4, config)  # a key of the local window
    why = f.cache.explain(0, f.s, q)
    assert why.searched and why.positions.shape == (2, 0)
    assert (why.details.mass > 0.99).all()
    out = f.cache.decode(0, [f.s], q[None])
    assert_output_close(out[0], np.repeat(f64(f.v[-1]), 2, axis=0), "float32")
    assert f.cache.stats().fetched_rows == 0


@pytest.mark.parametrize("tail", ["none", "sample"])
def test_a_mass_of_one_changes_nothing_but_tells(tail, dtype, device):
    fields = {"dtype": dtype, "block": 64, "tail": tail, "tail_rows": 32, "device": device}
    off, on = (filled(make_config(**fields, mass=mass), 1200) for mass in (None, 1.0))
    for _ in range(4):
        step = randn_step(off.rng, 1, off.cache.config)
        a, b = (f.cache.decode(0, [f.s], *step, return_lse=True) for f in (off, on))
        assert_same_bits(a[0], b[0])
        assert_same_bits(a[1], b[1])
    q = randn_q(off.rng, 1, off.cache.config)[0]
    a, b = (f.cache.explain(0, f.s, q) for f in (off, on))
    assert_same_bits(a.positions, b.positions)
    assert_same_bits(a.worth, b.worth)
    assert a.details.mass.shape == (0,)
    assert b.details.mass.shape == (2,)
    mine, theirs = off.cache.stats(), on.cache.stats()
    assert mine.fetched_rows == theirs.fetched_rows == 4 * 2 * 8
    assert math.isnan(mine.mean_mass) and math.isnan(mine.least_mass)
    assert 0 < theirs.least_mass < theirs.mean_mass < 1


def test_stats_have_the_mean_and_the_least(device):
    config = make_config(mass=0.6, top_k=30, layers=2, device=device)
    f = filled(config, 900)
    assert math.isnan(f.cache.stats().mean_mass)
    known = []
    for size in (FLAT, 1.0, PEAKED, 2.0):
        q = randn_q(f.rng, 1, config) * size
        for layer in range(2):
            f.cache.decode(layer, [f.s], q)
            known.append(f.cache.explain(layer, f.s, q[0]).details.mass)
            assert np.isfinite(known[-1]).all()
            # explain is not counted.
            stats = f.cache.stats()
            np.testing.assert_allclose(stats.mean_mass, np.mean(known), atol=1e-5)
            np.testing.assert_allclose(stats.least_mass, np.min(known), atol=1e-5)
    assert "mean_mass=" in repr(stats) and "least_mass=" in repr(stats)
    assert stats.fetched_rows < 4 * 2 * 2 * 30


def test_the_estimate_is_near_the_truth(device):
    config = make_config(
        mass=1.0, top_k=60, block=64, query_heads=6, schedule=[(0, 0.1, 0.2)], device=device
    )
    f = filled(config, 6000, queries=True)
    keys = f64(f.k)
    sink, zone, *_ = regions_of(f.cache, f.s)
    for size in (FLAT, 1.0, 2.0, 3.0, PEAKED):
        q = randn_q(f.rng, 1, config)[0] * size
        why = f.cache.explain(0, f.s, q)
        for head in range(config.kv_heads):
            own = np.r_[0:sink, sink + zone : len(keys), why.positions[head]]
            logits = f64(q[3 * head : 3 * head + 3]) @ keys[:, head].T / 8
            shares = np.exp(logits - oracle.log_sum_exp(logits)[:, None])
            true = shares[:, own].sum(axis=1).mean()
            assert abs(why.details.mass[head] - true) < 0.08


def test_a_smaller_budget_takes_the_first_of_the_rows(device):
    config = make_config(top_k=60, block=64, device=device)
    f = filled(config, 1500)
    q = randn_q(f.rng, 1, config)[0] * 2
    before = [[-1]] * 2
    for mass in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
        g = filled(with_changes(config, mass=mass), 1500)
        rows = [row[row >= 0].tolist() for row in g.cache.explain(0, g.s, q).positions]
        for mine, fewer in zip(rows, before, strict=True):
            if fewer != [-1]:
                assert mine[: len(fewer)] == fewer
        before = rows
    assert all(len(row) == 60 for row in before)


HOSTILE = {
    "zero": lambda q: q * 0,
    "one nan": lambda q: torch.cat([q[:1] * float("nan"), q[1:]]),
    "all nan": lambda q: q * float("nan"),
    "infinite": lambda q: q * float("inf"),
    "huge": lambda q: q * 1e30,
    "tiny": lambda q: q * 1e-30,
}


@pytest.mark.parametrize("tail", ["none", "sample"])
@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_queries_that_mean_harm(make, tail, device):
    config = make_config(mass=0.5, top_k=20, block=64, tail=tail, tail_rows=32, device=device)
    f = filled(config, 900)
    plain = randn_q(f.rng, 1, config)[0]
    q = make(plain)
    out = f.cache.decode(0, [f.s], q[None])
    why = f.cache.explain(0, f.s, q)
    counts, mass = counts_of(why), why.details.mass
    assert (counts <= 20).all()
    usable = np.isfinite(f64(q)).all(axis=1)
    for head in range(2):
        heard = usable[2 * head : 2 * head + 2]
        if not heard.any():
            assert counts[head] == 20 and np.isnan(mass[head])
        elif heard.all() and np.abs(f64(q)).max() < 1e20:
            assert 0 < mass[head] <= 1
            assert np.isfinite(f64(out)[0, 2 * head : 2 * head + 2]).all()
    if HOSTILE["one nan"] is make:  # the other query decides alone
        alone = f.cache.explain(0, f.s, torch.cat([plain[1:2], plain[1:]]))
        assert counts[0] == counts_of(alone)[0]
        np.testing.assert_allclose(mass[0], alone.details.mass[0], atol=1e-5)


def test_keys_that_are_no_numbers_are_not_taken(device):
    config = make_config(mass=0.9, top_k=40, block=64, tail="sample", tail_rows=32, device=device)
    k, v = randn_kv(np.random.default_rng(0), 900, config)
    k[100:140] = float("nan")
    k[300, 1, 3] = float("inf")
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, v)
    for size in (FLAT, 2.0, PEAKED):
        q = randn_q(np.random.default_rng(1), 1, config) * size
        why = cache.explain(0, s, q[0])
        assert not np.isin(why.positions, np.arange(100, 140)).any()
        assert np.isfinite(why.details.mass).all()
        assert np.isfinite(f64(cache.decode(0, [s], q))).all()


@pytest.mark.parametrize("tokens", [20, 100, 340, 400, 700])
def test_zones_that_are_hardly_larger_than_top_k(tokens, device):
    config = make_config(
        mass=0.8, top_k=200, block=64, tail="sample", tail_rows=16, update=16, device=device
    )
    f = filled(config, tokens)
    for size in (FLAT, PEAKED):
        q, k, v = randn_step(f.rng, 1, config)
        out = f.cache.decode(0, [f.s], q * size, k, v)
        assert np.isfinite(f64(out)).all()
        why = f.cache.explain(0, f.s, q[0] * size)
        zone = regions_of(f.cache, f.s)[1]
        assert why.searched == (zone > 200)
        assert (counts_of(why) <= 200).all()


def test_batches_and_threads_take_the_same_rows(device):
    config = make_config(mass=0.6, top_k=40, block=64, tail="sample", tail_rows=32, device=device)
    together, alone = pk.Cache(config), pk.Cache(config.replace(threads=1))
    rng = np.random.default_rng(3)
    sequences = [together.add() for _ in range(3)]
    apart = [alone.add() for _ in range(3)]
    for i, tokens in enumerate((500, 900, 1400)):
        k, v = randn_kv(rng, tokens, config)
        together.prefill(0, [sequences[i]], k, v)
        alone.prefill(0, [apart[i]], k, v)
    for size in (FLAT, 2.0, PEAKED):
        q, k, v = randn_step(rng, 3, config)
        out = together.decode(0, sequences, q * size, k, v)
        for i in range(3):
            part = slice(i, i + 1)
            mine = alone.decode(0, [apart[i]], q[part] * size, k[part], v[part])
            assert_same_bits(out[part], mine)
    a, b = together.stats(), alone.stats()
    assert (a.fetched_rows, a.mean_mass, a.least_mass) == (
        b.fetched_rows,
        b.mean_mass,
        b.least_mass,
    )
    assert a.fetched_rows < 3 * 3 * 2 * 40


@pytest.mark.cpu("settings are the same for every device")
@pytest.mark.parametrize("wrong", [0.0, -0.5, 1.0000001, 2, math.nan, math.inf, -math.inf])
def test_shares_that_are_none(wrong):
    with pytest.raises(
        ValueError, match=r"policy\.mass: expected a share above 0 and at most 1, or"
    ):
        pk.ParisKV(mass=wrong)


@pytest.mark.cpu("settings are the same for every device")
def test_settings():
    assert pk.ParisKV().mass is None
    assert pk.ParisKV(mass=1).mass == 1.0
    assert pk.ParisKV(mass=5e-324).mass == 5e-324
    assert pk.ParisKV(mass=0.98) != pk.ParisKV(mass=0.97) != pk.ParisKV()
    assert eval(repr(pk.ParisKV(mass=0.98)), {"ParisKV": pk.ParisKV}) == pk.ParisKV(mass=0.98)
    with pytest.raises(ValueError, match=r"policy\.mass: expected none with the group_rule mean"):
        pk.ParisKV(mass=0.9, group_rule="mean_query")
    with pytest.raises(TypeError):
        pk.ParisKV(mass="all")


def test_a_saved_context_may_come_back_to_another_budget(tmp_path, device):
    config = make_config(mass=0.5, top_k=30, block=64, device=device)
    f = filled(config, 900)
    f.cache.save(f.s, tmp_path / "context.pkv")
    q = randn_q(f.rng, 1, config)
    for mass in (0.5, None):
        other = pk.Cache(with_changes(config, mass=mass))
        s = other.load(tmp_path / "context.pkv")
        expected = filled(with_changes(config, mass=mass), 900)
        assert_same_bits(other.decode(0, [s], q), expected.cache.decode(0, [expected.s], q))
