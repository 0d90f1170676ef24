"""A budget by error: rows until what the sample adds for the others is small, and its estimate."""

import math

import numpy as np
import oracle
import pariskv_core as pk
import pytest
import torch
from oracle_error import LEAST_ROWS, HeadError
from oracle_search import tail_weight
from support import (
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

# Of logits: a few keys have nearly all of the attention, or none has much of it.
PEAKED, FLAT = 6.0, 0.3
SIZES = (FLAT, 1.0, 2.0, 3.0, PEAKED)
SAMPLED = {"block": 64, "tail": "sample", "tail_rows": 16}
SEARCHES = {
    "sign_norm": {"block": 0},
    "blocks": {"block": 64},
    "votes": {"scorer": "votes", "block": 0},
}


def sampled_config(**fields) -> pk.Config:
    return make_config(**{**SAMPLED, "top_k": 60, **fields})


def counts_of(explanation) -> np.ndarray:
    return (explanation.positions >= 0).sum(axis=1)


def is_borderline(head: HeadError, error: float, rows: int) -> bool:
    """Rounding decides whether the last row is taken, or one more."""
    near = head.left[max(rows - 1, 0) : rows + 1]
    return bool((np.abs(near / head.allowed(error) - 1) < 3e-3).any())


@pytest.mark.parametrize("error", [0.7, 0.3, 0.1, 0.03, 0.01, 1e-4])
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_rows_are_the_oracles(search, error, device):
    config = sampled_config(**search, error=error, query_heads=6, device=device)
    f = filled(config, 1500)
    counts = set()
    for size in SIZES:
        q = randn_q(f.rng, 1, config)[0] * size
        why, expected = f.cache.explain(0, f.s, q), decode_oracle(f.cache, f.s, q)
        for head in range(config.kv_heads):
            mine, theirs = why.positions[head], expected.positions[head]
            mine, judge = mine[mine >= 0], expected.errors[head]
            assert (np.diff(why.worth[head][: len(mine)]) <= 0).all()
            if not is_borderline(judge, error, len(theirs)):
                assert len(mine) == len(theirs)
            assert abs(len(mine) - len(theirs)) <= 1
            # Rows of almost the same worth may trade places.
            assert len(set(mine) ^ set(theirs)) <= abs(len(mine) - len(theirs)) + 2
            assert LEAST_ROWS <= len(mine) <= 60
            if len(mine) < 60:
                assert judge.left[len(mine)] <= judge.allowed(error) * (1 + 3e-3)
            counts.add(len(mine))
            np.testing.assert_allclose(why.details.error[head], judge.told(mine), rtol=5e-3)
        np.testing.assert_allclose(why.details.mass, expected.mass, atol=2e-3 + 1 / 60)
    if error == 1e-4:
        assert max(counts) == 60
    if error == 0.7:
        assert min(counts) == LEAST_ROWS


@pytest.mark.parametrize("top_k", [1, 7, 16, 17])
def test_few_rows_at_most_are_all_of_them_or_sixteen(top_k, device):
    config = sampled_config(error=0.99, top_k=top_k, device=device)
    f = filled(config, 1500)
    for size in SIZES:
        why = f.cache.explain(0, f.s, randn_q(f.rng, 1, config)[0] * size)
        assert counts_of(why).min() == min(top_k, LEAST_ROWS)


def test_a_smaller_error_takes_more_of_the_same_rows(device):
    config = sampled_config(device=device)
    f = filled(config, 1500)
    q = randn_q(f.rng, 1, config)[0] * 2
    before = [[]] * 2
    for error in (0.9, 0.3, 0.1, 0.03, 0.01, 1e-9, None):
        g = filled(with_changes(config, error=error), 1500)
        rows = [row[row >= 0].tolist() for row in g.cache.explain(0, g.s, q).positions]
        assert all(mine[: len(fewer)] == fewer for mine, fewer in zip(rows, before, strict=True))
        before = rows
    assert all(len(row) == 60 for row in before)


def test_heads_of_one_step_take_what_each_needs(device):
    config = sampled_config(error=0.1, top_k=200, tail_rows=64, device=device)
    f = filled(config, 3000)
    flat = randn_q(f.rng, 1, config)[0] * FLAT
    one = tensor(np.repeat(f64(f.k[1500]), 2, axis=0) * 4, config)  # looks for one key of the zone
    both = torch.cat([one[:2], randn_q(f.rng, 1, config)[0, 2:] * 1.2])
    why = f.cache.explain(0, f.s, both)
    few, many = counts_of(why)
    assert few == LEAST_ROWS and many > 3 * LEAST_ROWS
    assert why.positions[0, 0] == 1500 and why.details.mass[0] > 0.99
    # Where attention is even no row has much of it: the sample alone is good enough.
    assert (counts_of(f.cache.explain(0, f.s, flat)) == LEAST_ROWS).all()


@pytest.mark.parametrize("error", [None, 0.1])
@pytest.mark.parametrize("append", [True, False])
def test_decode_returns_what_explain_predicts(error, append, dtype, device):
    config = sampled_config(error=error, dtype=dtype, device=device)
    f = filled(config, 1300)
    for size in SIZES:
        q, k, v = randn_step(f.rng, 1, config)
        new = (k, v) if append else ()
        out, lse, told = f.cache.decode(
            0, [f.s], q * size, *new, return_lse=True, return_error=True
        )
        again = f.cache.decode(0, [f.s], q * size, return_error=True)
        why = f.cache.explain(0, f.s, q[0] * size)
        assert tuple(told.shape) == (1, 2) and told.dtype == torch.float32
        assert_same_bits(told[0], why.details.error)
        assert_same_bits(again[1], told)
        assert_same_bits(again[0], out)
        assert tuple(lse.shape) == (1, 4)


def test_the_error_is_written_where_it_is_asked_for(dtype, device):
    config = sampled_config(dtype=dtype, device=device)
    f = filled(config, 1300)
    q, k, v = randn_step(f.rng, 1, config)
    out, told = f.cache.decode(0, [f.s], q, k, v, return_error=True)
    written = torch.full((1, 2), 7.0, device=device)
    again = f.cache.decode(0, [f.s], q, error=written)
    assert_same_bits(again, out)
    assert_same_bits(written, told)
    with pytest.raises(ValueError, match="error: expected none beside return_error"):
        f.cache.decode(0, [f.s], q, error=written, return_error=True)
    with pytest.raises(ValueError, match=r"error: expected .*1, 2"):
        f.cache.decode(0, [f.s], q, error=torch.zeros(2, 2, device=device))


def test_to_ask_for_the_error_changes_nothing(dtype, device):
    config = sampled_config(dtype=dtype, device=device)
    f, g = filled(config, 1600), filled(config, 1600)
    for _ in range(4):
        q, k, v = randn_step(f.rng, 1, config)
        out, lse = f.cache.decode(0, [f.s], q * 2, k, v, return_lse=True)
        mine = g.cache.decode(0, [g.s], q * 2, k, v, return_lse=True, return_error=True)
        assert_same_bits(mine[0], out)
        assert_same_bits(mine[1], lse)
    a, b = f.cache.stats(), g.cache.stats()
    assert a.fetched_rows == b.fetched_rows == 4 * 2 * 60
    assert math.isnan(a.mean_error) and math.isnan(a.worst_error) and math.isnan(a.mean_mass)
    assert 0 < b.mean_error < b.worst_error and 0 < b.least_mass < b.mean_mass < 1


def test_the_prediction_is_near_the_truth(device):
    """Of outputs, over seeds of the sample: root mean square, beside values of size 1."""
    predicted, true = [], []
    for seed in range(24):
        config = sampled_config(seed=seed, top_k=24, schedule=[(0, 1, 1)], device=device)
        f = filled(config, 1500)
        rng = np.random.default_rng(5)
        for size in (1.0, 1.6):
            q = randn_q(rng, 1, config) * size
            out, error = f.cache.decode(0, [f.s], q, return_error=True)
            exact = f64(f.cache.attend(0, [f.s], q))
            apart = ((f64(out) - exact) ** 2).mean(axis=2).reshape(2, 2).mean(axis=1)
            predicted.append(f64(error)[0] ** 2)
            true.append(apart)
    ratio = math.sqrt(np.mean(predicted) / np.mean(true))
    assert 0.7 < ratio < 1.5


def test_nothing_is_estimated_where_all_rows_are_attended_to(device):
    config = sampled_config(error=0.1, dense_below=400, device=device)
    rng, cache = np.random.default_rng(0), pk.Cache(config)
    sequences = [cache.add() for _ in range(3)]
    for s, tokens in zip(sequences, (1400, 200, 90), strict=True):
        cache.prefill(0, [s], *randn_kv(rng, tokens, config))
    q = randn_q(rng, 3, config) * 2
    error = f64(cache.decode(0, sequences, q, return_error=True)[1])
    assert (error[0] > 0).all() and (error[1:] == 0).all()
    assert cache.stats().worst_error == pytest.approx(error.max(), abs=1e-6)
    # A tail that has all of the zone is no estimate either.
    config = sampled_config(error=1e-6, tail_rows=1024, device=device)
    f = filled(config, 1300)
    assert tail_weight(config, 4, 4 + regions_of(f.cache, f.s)[1]) == 1
    _, error = f.cache.decode(0, [f.s], randn_q(rng, 1, config) * 2, return_error=True)
    assert (f64(error) == 0).all()
    assert f.cache.stats().fetched_rows == 2 * LEAST_ROWS


def test_outputs_are_of_the_rows_that_were_taken(device):
    """Against fixed rows of that number, head by head."""
    fields = {"schedule": [(0, 0.5, 0.3)], "min_candidates_per_row": 1}
    config = sampled_config(error=0.2, kv_heads=1, query_heads=2, **fields, device=device)
    f = filled(config, 1300)
    for size in SIZES:
        q = randn_q(f.rng, 1, config) * size
        out, lse = f.cache.decode(0, [f.s], q, return_lse=True)
        rows = int(counts_of(f.cache.explain(0, f.s, q[0]))[0])
        fixed = filled(with_changes(config, error=None, top_k=rows), 1300)
        expected = fixed.cache.decode(0, [fixed.s], q, return_lse=True)
        assert_same_bits(out, expected[0])
        assert_same_bits(lse, expected[1])


def test_stats_have_the_mean_and_the_worst(device):
    config = sampled_config(error=0.05, top_k=30, layers=2, device=device)
    f = filled(config, 1300)
    assert math.isnan(f.cache.stats().mean_error)
    errors, masses = [], []
    for size in SIZES:
        q = randn_q(f.rng, 1, config) * size
        for layer in range(2):
            f.cache.decode(layer, [f.s], q)
            details = f.cache.explain(layer, f.s, q[0]).details
            errors.append(details.error)
            masses.append(details.mass)
            # explain is not counted.
            stats = f.cache.stats()
            np.testing.assert_allclose(stats.mean_error, np.mean(errors), atol=1e-5)
            np.testing.assert_allclose(stats.worst_error, np.max(errors), atol=1e-5)
            np.testing.assert_allclose(stats.mean_mass, np.mean(masses), atol=1e-5)
            np.testing.assert_allclose(stats.least_mass, np.min(masses), atol=1e-5)
    assert "mean_error=" in repr(stats) and "worst_error=" in repr(stats)
    assert "mean_mass=" in repr(stats) and "least_mass=" in repr(stats)


def test_the_estimated_mass_is_near_the_truth(device):
    config = sampled_config(query_heads=6, schedule=[(0, 0.1, 0.2)], device=device)
    f = filled(config, 6000, queries=True)
    keys = f64(f.k)
    sink, zone, *_ = regions_of(f.cache, f.s)
    for size in SIZES:
        q = randn_q(f.rng, 1, config)[0] * size
        why = f.cache.explain(0, f.s, q)
        for head in range(config.kv_heads):
            own = np.r_[0:sink, sink + zone : len(keys), why.positions[head]]
            logits = f64(q[3 * head : 3 * head + 3]) @ keys[:, head].T / 8
            shares = np.exp(logits - oracle.log_sum_exp(logits)[:, None])
            true = shares[:, own].sum(axis=1).mean()
            assert abs(why.details.mass[head] - true) < 0.08


HOSTILE = {
    "zero": lambda q: q * 0,
    "one nan": lambda q: torch.cat([q[:1] * float("nan"), q[1:]]),
    "all nan": lambda q: q * float("nan"),
    "infinite": lambda q: q * float("inf"),
    "huge": lambda q: q * 1e30,
    "tiny": lambda q: q * 1e-30,
}


@pytest.mark.parametrize("error", [None, 0.1])
@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_queries_that_mean_harm(make, error, device):
    config = sampled_config(error=error, top_k=40, device=device)
    f = filled(config, 1300)
    plain = randn_q(f.rng, 1, config)[0]
    q = make(plain)
    out, told = f.cache.decode(0, [f.s], q[None], return_error=True)
    why = f.cache.explain(0, f.s, q)
    counts, told = counts_of(why), f64(told)[0]
    np.testing.assert_array_equal(told, why.details.error)
    assert (counts <= 40).all()
    usable = np.isfinite(f64(q)).all(axis=1)
    for head in range(2):
        heard = usable[2 * head : 2 * head + 2]
        if not heard.any():
            assert counts[head] == 40 and np.isnan(told[head]) and np.isnan(why.details.mass[head])
        elif heard.all() and np.abs(f64(q)).max() < 1e20:
            assert told[head] > 0 and 0 < why.details.mass[head] <= 1
            assert np.isfinite(f64(out)[0, 2 * head : 2 * head + 2]).all()
    if HOSTILE["one nan"] is make:  # the other query decides alone
        alone = f.cache.explain(0, f.s, torch.cat([plain[1:2], plain[1:]]))
        assert counts[0] == counts_of(alone)[0]
        np.testing.assert_allclose(told[0], alone.details.error[0], rtol=1e-5)


def test_keys_that_are_no_numbers_are_not_taken(device):
    config = sampled_config(error=0.05, top_k=40, device=device)
    k, v = randn_kv(np.random.default_rng(0), 1300, config)
    k[100:140] = float("nan")
    k[300, 1, 3] = float("inf")
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, v)
    for size in SIZES:
        q = randn_q(np.random.default_rng(1), 1, config) * size
        why = cache.explain(0, s, q[0])
        assert not np.isin(why.positions, np.arange(100, 140)).any()
        assert np.isfinite(why.details.error).all() and np.isfinite(why.details.mass).all()
        assert np.isfinite(f64(cache.decode(0, [s], q))).all()


@pytest.mark.parametrize("tokens", [20, 100, 1060, 1130, 1600])
def test_zones_that_are_hardly_larger_than_top_k(tokens, device):
    config = sampled_config(error=0.1, top_k=1050, update=16, device=device)
    f = filled(config, tokens)
    for size in (FLAT, PEAKED):
        q, k, v = randn_step(f.rng, 1, config)
        out, error = f.cache.decode(0, [f.s], q * size, k, v, return_error=True)
        assert np.isfinite(f64(out)).all()
        why = f.cache.explain(0, f.s, q[0] * size)
        zone = regions_of(f.cache, f.s)[1]
        assert why.searched == (zone > 1050)
        assert ((f64(error) > 0) == why.searched).all()
        assert (counts_of(why) <= 1050).all()


def test_batches_and_threads_take_the_same_rows(device):
    config = sampled_config(error=0.1, device=device)
    together, alone = pk.Cache(config), pk.Cache(config.replace(threads=1))
    rng = np.random.default_rng(3)
    sequences = [together.add() for _ in range(3)]
    apart = [alone.add() for _ in range(3)]
    for i, tokens in enumerate((1100, 1300, 1800)):
        k, v = randn_kv(rng, tokens, config)
        together.prefill(0, [sequences[i]], k, v)
        alone.prefill(0, [apart[i]], k, v)
    for size in SIZES:
        q, k, v = randn_step(rng, 3, config)
        both = together.decode(0, sequences, q * size, k, v, return_error=True)
        for i in range(3):
            part = slice(i, i + 1)
            mine = alone.decode(0, [apart[i]], q[part] * size, k[part], v[part], return_error=True)
            for a, b in zip(both, mine, strict=True):
                assert_same_bits(a[part], b)
    a, b = together.stats(), alone.stats()
    for name in ("fetched_rows", "mean_error", "worst_error", "mean_mass", "least_mass"):
        assert getattr(a, name) == getattr(b, name), name
    assert a.fetched_rows < len(SIZES) * 3 * 2 * 60


@pytest.mark.cpu("settings are the same for every device")
@pytest.mark.parametrize("wrong", [0.0, -0.5, 1.0, 2, math.nan, math.inf, -math.inf])
def test_errors_that_are_none(wrong):
    with pytest.raises(
        ValueError, match=r"policy\.error: expected an error above 0 and below 1, or none, got"
    ):
        pk.ParisKV(error=wrong)


@pytest.mark.cpu("settings are the same for every device")
def test_settings():
    assert pk.ParisKV().error is None
    assert pk.ParisKV(error=0.01).error == 0.01
    assert pk.ParisKV(error=5e-324).error == 5e-324
    assert pk.ParisKV(error=0.01) != pk.ParisKV(error=0.02) != pk.ParisKV()
    assert eval(repr(pk.ParisKV(error=0.01)), {"ParisKV": pk.ParisKV}) == pk.ParisKV(error=0.01)
    with pytest.raises(ValueError, match=r"policy\.error: expected none with the group_rule mean"):
        pk.ParisKV(error=0.1, group_rule="mean_query")
    for without in ({"tail": "none"}, {"block": 0}, {"scorer": "votes"}):
        with pytest.raises(ValueError, match=r"policy\.error: expected none without a tail, got"):
            pk.ParisKV(error=0.1, **without)
    assert pk.ParisKV(error=0.1, block=0, tail="sample").error == 0.1
    with pytest.raises(TypeError):
        pk.ParisKV(error="all")
    with pytest.raises(TypeError, match="mass"):
        pk.ParisKV(mass=0.9)


UNKNOWN = {
    "no tail": {"tail": "none"},
    "mean_query": {"group_rule": "mean_query"},
}


@pytest.mark.parametrize("fields", UNKNOWN.values(), ids=UNKNOWN)
def test_without_a_sample_or_shares_no_error_is_known(fields, device):
    config = sampled_config(**fields, device=device)
    f = filled(config, 1300)
    q, k, v = randn_step(f.rng, 1, config)
    length = f.cache.length(f.s)
    with pytest.raises(ValueError, match=r"\[decode\] error: expected a policy that estimates"):
        f.cache.decode(0, [f.s], q, k, v, return_error=True)
    assert f.cache.length(f.s) == length
    details = f.cache.explain(0, f.s, q[0]).details
    assert details.error.shape == details.mass.shape == (0,)


@pytest.mark.parametrize("policy", [pk.HardKV(), pk.PRKV(budget=64, page=8)], ids=["hard", "prkv"])
def test_other_policies_know_no_error(policy, device):
    config = make_config(device=device).replace(policy=policy)
    f = filled(config, 300)
    with pytest.raises(ValueError, match=r"\[decode\] error: expected a policy that estimates"):
        f.cache.decode(0, [f.s], randn_q(f.rng, 1, config), return_error=True)


def test_bad_flags(device):
    config = sampled_config(device=device)
    f = filled(config, 300)
    q = randn_q(f.rng, 1, config)
    with pytest.raises(TypeError, match="return_error: expected True or False"):
        f.cache.decode(0, [f.s], q, return_error=1)
    with pytest.raises(TypeError, match="return_error"):
        f.cache.attend(0, [f.s], q, return_error=True)


def test_a_saved_context_may_come_back_to_another_budget(tmp_path, device):
    config = sampled_config(error=0.1, top_k=30, device=device)
    f = filled(config, 1300)
    f.cache.save(f.s, tmp_path / "context.pkv")
    q = randn_q(f.rng, 1, config) * 2
    for error in (0.1, 0.3, None):
        other = pk.Cache(with_changes(config, error=error))
        s = other.load(tmp_path / "context.pkv")
        expected = filled(with_changes(config, error=error), 1300)
        assert_same_bits(other.decode(0, [s], q), expected.cache.decode(0, [expected.s], q))


def test_forks_chunks_and_cuts_take_the_same_rows(device):
    config = sampled_config(error=0.1, device=device)
    f = filled(config, 1300)
    k, v = rows_of(f.cache, f.s)
    cache = pk.Cache(config)
    s = cache.add()
    for begin in range(0, 1300, 130):
        cache.prefill(0, [s], k[begin : begin + 130], v[begin : begin + 130])
    forked = cache.fork(s)
    cache.prefill(0, [forked], k[:200], v[:200])
    cache.truncate([forked], keep=[1300])
    for size in SIZES:
        q = randn_q(f.rng, 1, config) * size
        expected = f.cache.decode(0, [f.s], q, return_error=True)
        for sequence in (s, forked):
            found = cache.decode(0, [sequence], q, return_error=True)
            for a, b in zip(found, expected, strict=True):
                assert_same_bits(a, b)
