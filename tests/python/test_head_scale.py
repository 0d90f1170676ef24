"""What makes the heads of a group comparable: how much of its attention a head gives to the zone.

test_score.py holds coarse scores against the oracle; here is what the oracle's numbers are worth,
and what they are for.
"""

import numpy as np
import oracle
import oracle_scale
import pariskv_core as pk
import pytest
import workload
from support import (
    assert_same_bits,
    coarse_oracle,
    config_of,
    f64,
    filled,
    float32,
    make_config,
    randn_kv,
    randn_q,
    tensor,
    with_changes,
)

OCTAVES = np.log2(np.e)
# A line in the place of an exponential or a logarithm is so many octaves off.
LINE = 0.0861


def exact_octaves(query, rows, scale, softcap=0.0, bias=-np.inf) -> float:
    logits = oracle.Logits(scale, softcap).of(rows @ query, len(query))
    return float(oracle.log_sum_exp(np.append(logits, bias))) * OCTAVES


def assert_equal_to_oracle(cache: pk.Cache, s: int, q, **options) -> np.ndarray:
    coarse = cache.explain(0, s, q, **options).details.coarse
    np.testing.assert_array_equal(coarse, coarse_oracle(cache, s, q, **options))
    return coarse


# --- The log-sum-exp of the window, in whole numbers ---------------------------------------------


@pytest.mark.cpu("no engine in it")
@pytest.mark.parametrize("sharpness", [0.0, 0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("rows", [1, 2, 17, 128])
def test_the_window_in_whole_numbers_is_near_the_float_one(sharpness, rows, rng):
    # Rounding to 8 bits costs a logit some 0.7 % of the spread of logits; lines cost the rest.
    for _ in range(40):
        query, keys = rng.standard_normal(128), rng.standard_normal((rows, 128))
        scale = sharpness / np.sqrt(128) + 1e-9
        found = float(oracle_scale.window_octaves(query, keys, scale))
        off = found - exact_octaves(query, keys, scale)
        assert abs(off) < LINE + 1 / 64 + 0.04 * sharpness


@pytest.mark.cpu("no engine in it")
def test_a_rough_logarithm_is_off_by_at_most_its_bound(rng):
    x = np.exp2(rng.uniform(-20, 40, 1000)).astype(np.float32)
    logs = np.array([oracle_scale.rough_log2(v) for v in x])
    assert (logs <= np.log2(x) + 1e-5).all()
    assert (logs >= np.log2(x) - LINE).all()
    t = -rng.uniform(0, 29, 1000).astype(np.float32)
    powers = np.log2([oracle_scale.rough_exp2(v) for v in t])
    assert (powers >= t - 1e-5).all()
    assert (powers <= t + LINE).all()
    assert oracle_scale.rough_exp2(np.float32(-31)) == 0
    assert oracle_scale.rough_exp2(np.float32(np.nan)) == 0


@pytest.mark.cpu("no engine in it")
def test_the_window_knows_caps_biases_and_rows_that_are_no_numbers(rng):
    query, keys = rng.standard_normal(64), rng.standard_normal((50, 64))
    plain = oracle_scale.window_octaves(query, keys, 1.0)
    capped = oracle_scale.window_octaves(query, keys, 1.0, softcap=3.0)
    assert capped <= 3 * OCTAVES + np.log2(50) + LINE < plain
    for bias in (-5.0, 0.0, 40.0):
        found = float(oracle_scale.window_octaves(query, keys, 0.1, bias=bias))
        assert found == pytest.approx(exact_octaves(query, keys, 0.1, bias=bias), abs=0.15)
    for bias in (None, np.nan, np.inf, -np.inf):
        assert oracle_scale.window_octaves(query, keys, 1.0, bias=bias) == plain
    bad = np.concatenate([keys, np.full((2, 64), np.nan), np.full((1, 64), np.inf)])
    bad[-1, 1:] = 0
    assert oracle_scale.window_octaves(query, bad, 1.0) == plain
    assert oracle_scale.window_octaves(query, bad[-3:], 1.0) == -np.inf
    assert oracle_scale.window_octaves(query, np.zeros((4, 64)), 1.0) == 2  # four rows of logit 0
    assert oracle_scale.window_octaves(np.zeros(64), keys[:8], 1.0) == 3
    assert oracle_scale.window_octaves(query, np.zeros((0, 64)), 1.0, bias=0.0) == 0


@pytest.mark.cpu("no engine in it")
@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e30, 3e38])
def test_the_window_is_a_number_for_any_finite_row(size):
    ones = np.ones((1, 64), dtype=np.float32)
    for query in (ones[0], ones[0] * np.float32(size)):
        for rows in (ones * np.float32(size), -ones * np.float32(size)):
            octaves = abs(oracle_scale.window_octaves(query, rows, 0.125))
            assert octaves <= oracle_scale.MOST_STEPS / oracle_scale.OCTAVE_STEPS


@pytest.mark.cpu("no engine in it")
def test_which_rows_are_looked_at():
    assert oracle_scale.window_rows(1000, 4, 700).tolist() == [0, 1, 2, 3, *range(887, 999)]
    assert oracle_scale.window_rows(1000, 40, 950).tolist() == [*range(16), *range(950, 999)]
    assert oracle_scale.window_rows(1000, 0, 1000).tolist() == []
    assert oracle_scale.window_rows(1000, 0, 999).tolist() == []


@pytest.mark.parametrize("block", [0, 64])
@pytest.mark.parametrize(
    ("sink", "local", "update"), [(0, 0, 8), (1, 1, 1), (16, 112, 8), (20, 200, 48), (0, 113, 300)]
)
def test_windows_of_every_size(sink, local, update, dtype, device, block):
    config = make_config(
        block=block, sink=sink, local=local, update=update, dtype=dtype, device=device
    )
    f = filled(config, 1500, seed=local)
    for i in range(30):
        q = randn_q(f.rng, 1, config)
        f.cache.decode(0, [f.s], q, *randn_kv(f.rng, 1, config))
        if i % 7 == 0:
            assert_equal_to_oracle(f.cache, f.s, q[0] * 4)


def test_window_sums_skip_the_newest_row_and_the_middle(device):
    config = make_config(sink=30, local=200, device=device)
    f = filled(config, 600)
    q = randn_q(f.rng, 1, config)[0]
    coarse = []
    for place in (None, 20, 450, -1, 3, -2):
        k = f.k.clone()
        if place is not None:
            k[place] = q[::2] * 10
        cache = pk.Cache(config)
        s = cache.add()
        cache.prefill(0, [s], k, f.v)
        coarse.append(assert_equal_to_oracle(cache, s, q))
    for same in coarse[1:4]:
        np.testing.assert_array_equal(same, coarse[0])
    for other in coarse[4:]:
        assert (other != coarse[0]).any()


# --- What a group makes of it ---------------------------------------------------------------------


def shares(pair: pk.Explanation, alone: list[pk.Explanation]) -> list[float]:
    """Of each head's own candidates: how many the pair has taken."""
    taken = pair.details.candidate_positions[0]
    return [np.isin(one.details.candidate_positions[0], taken).mean() for one in alone]


def candidates_by_head(cache, s, q, **options) -> list[float]:
    pair = cache.explain(0, s, q, **options)
    single = pk.Cache(with_changes(cache.config, query_heads=1))
    t = single.add()
    k, v = (
        tensor(np.zeros((cache.length(s, 0), 1, 64)), cache.config) for _ in range(2)
    )  # read back, so that rows placed by a test are there
    cache.read(0, s, 0, len(k), out=(k, v))
    single.prefill(0, [t], k, v)
    return shares(pair, [single.explain(0, t, q[h : h + 1]) for h in range(2)])


@pytest.fixture
def pair(device):
    config = make_config(query_heads=2, kv_heads=1, schedule=[(0, 0.1, 0.3)], device=device)
    f = filled(config, 1000)
    # Two heads of the same sharpness that want different rows.
    q = randn_q(f.rng, 1, config)[0] * 2
    return f, q / q.norm(dim=1, keepdim=True) * 16


@pytest.mark.parametrize("place", [0, -3])
def test_a_head_that_lives_on_its_window_gets_fewer_candidates(pair, place):
    f, q = pair
    before = candidates_by_head(f.cache, f.s, q)
    assert min(before) > 0.3
    for head in range(2):
        k = f.k.clone()
        other = q[1 - head] / q[1 - head].norm()
        own = q[head] - (q[head] @ other) * other
        k[place, 0] = own / own.norm() * 10
        cache = pk.Cache(f.cache.config)
        s = cache.add()
        cache.prefill(0, [s], k, f.v)
        assert_equal_to_oracle(cache, s, q)
        after = candidates_by_head(cache, s, q)
        assert after[head] < 0.2 < 0.95 < after[1 - head]


def test_a_sink_bias_is_a_window_too(pair, device):
    f, q = pair
    config = f.cache.config
    plain = f.cache.explain(0, f.s, q).details.coarse
    for head in range(2):
        bias = np.zeros(2)
        bias[head] = 18
        found = candidates_by_head(f.cache, f.s, q, sink_bias=float32(bias, config))
        assert_equal_to_oracle(f.cache, f.s, q, sink_bias=float32(bias, config))
        assert found[head] < 0.2 < 0.95 < found[1 - head]
    wrong = () if device == "cpu" else (np.inf, np.nan)  # the CPU refuses them
    for nothing in (-np.inf, -1e38, *wrong):
        bias = float32(np.full(2, nothing), config)
        np.testing.assert_array_equal(
            f.cache.explain(0, f.s, q, sink_bias=bias).details.coarse, plain
        )


def test_a_softcap_bounds_the_windows_share(pair):
    f, q = pair
    k = f.k.clone()
    k[0, 0] = q[0] / q[0].norm() * 50
    cache = pk.Cache(f.cache.config)
    s = cache.add()
    cache.prefill(0, [s], k, f.v)
    free, capped = (candidates_by_head(cache, s, q, softcap=cap) for cap in (0.0, 4.0))
    assert free[0] < 0.2 < capped[0]
    assert_equal_to_oracle(cache, s, q, softcap=4.0)


def test_one_searcher_has_no_window(pair, device):
    # Alone, or as the mean of a group, a query's scores are compared with nobody's.
    f, q = pair
    for changes in ({"query_heads": 1}, {"group_rule": "mean_query"}):
        coarse = []
        for size in (1.0, 30.0):
            config = with_changes(f.cache.config, **changes)
            k = f.k.clone()
            k[:4] *= size
            cache = pk.Cache(config)
            s = cache.add()
            cache.prefill(0, [s], k, f.v)
            coarse.append(assert_equal_to_oracle(cache, s, q[: config.query_heads]))
        np.testing.assert_array_equal(*coarse)


@pytest.mark.parametrize("block", [0, 64])
@pytest.mark.parametrize("group", [2, 8, 9, 16, 17, 33])
def test_groups_with_caps_and_biases(group, device, block):
    config = make_config(block=block, query_heads=group, kv_heads=1, head_dim=96, device=device)
    f = filled(config, 1200, seed=group)
    bias = float32(f.rng.standard_normal(group) * 5, config)
    for options in ({"softcap": 5.0}, {"sink_bias": bias}, {"scale": 0.4, "softcap": 2.0}):
        q = randn_q(f.rng, 1, config)[0] * 3
        assert_equal_to_oracle(f.cache, f.s, q, **options)


def test_a_query_and_a_scale_that_cancel_change_nothing(device):
    config = make_config(device=device)
    f = filled(config, 400)
    q = randn_q(f.rng, 1, config)[0]
    plain = f.cache.explain(0, f.s, q, scale=0.125).details.coarse
    for factor in (2.0**-40, 0.5, 2.0**60):
        scaled = f.cache.explain(0, f.s, q * factor, scale=0.125 / factor)
        np.testing.assert_array_equal(plain, scaled.details.coarse)
    near = f.cache.explain(0, f.s, q * 3.7, scale=0.125 / 3.7).details.coarse
    assert np.abs(near.astype(int) - plain).max() <= 1


@pytest.mark.parametrize("block", [0, 64])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_heads_of_a_group(value, device, block):
    config = make_config(block=block, query_heads=3, kv_heads=1, device=device)
    f = filled(config, 1200)
    q = randn_q(f.rng, 1, config)[0]
    q[0, 3] = value
    assert_equal_to_oracle(f.cache, f.s, q)
    q[1:, 5] = value
    # Heads that score nothing, joined twice: two octaves of as many steps as one may have.
    assert (f.cache.explain(0, f.s, q).details.coarse == 2 * 32).all()


@pytest.mark.parametrize("block", [0, 64])
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e15, 1e25, 3e37])
def test_heads_of_very_different_size(size, device, block):
    config = make_config(block=block, query_heads=3, kv_heads=1, device=device)
    f = filled(config, 1200)
    q = randn_q(f.rng, 1, config)[0]
    q[1] = q[1] * size
    assert_equal_to_oracle(f.cache, f.s, q)


@pytest.mark.parametrize("block", [0, 64])
def test_a_window_of_zeros_and_of_no_numbers(device, block):
    config = make_config(block=block, device=device)
    f = filled(config, 1200)
    q = randn_q(f.rng, 1, config)[0] * 3
    coarse = []
    for value in (0.0, np.nan, np.inf):
        k = f.k.clone()
        k[1] = value
        k[-3, :, 2:] = value
        cache = pk.Cache(config)
        s = cache.add()
        cache.prefill(0, [s], k, f.v)
        coarse.append(assert_equal_to_oracle(cache, s, q))
    assert_same_bits(coarse[1], coarse[2])


def test_one_number_that_is_none_takes_its_row_out(dtype, head_dim, device):
    config = make_config(dtype=dtype, head_dim=head_dim, device=device)
    f = filled(config, 400)
    q = randn_q(f.rng, 1, config)[0] * 3
    for d in (0, 5, 7, head_dim // 2, head_dim - 1):
        for value in (np.nan, -np.inf):
            k = f.k.clone()
            k[1, :, d] = value
            k[-3, 0, head_dim - 1 - d] = value
            cache = pk.Cache(config)
            s = cache.add()
            cache.prefill(0, [s], k, f.v)
            assert_equal_to_oracle(cache, s, q)


def test_a_zone_without_usable_keys_has_no_scores(device):
    config = make_config(device=device)
    rng = np.random.default_rng(0)
    k, v = randn_kv(rng, 300, config)
    k[4:-32, 0] = 0
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, v)
    coarse = assert_equal_to_oracle(cache, s, randn_q(rng, 1, config)[0])
    assert (coarse[0] == 0).all() and (coarse[1] > 0).all()
    k[50, 0] = 1.0  # and one with a single one
    one = pk.Cache(config)
    t = one.add()
    one.prefill(0, [t], k, v)
    assert_equal_to_oracle(one, t, randn_q(rng, 1, config)[0])


# --- Is it better? --------------------------------------------------------------------------------


def standardised(queries, summary: oracle.Summary, signs) -> np.ndarray:
    """The first version of the score: each head's, less their mean, over their spread."""
    key_signs, norms = oracle.sign_matrix(summary.signs), summary.norms.astype(np.float64)
    best = np.full(len(norms), -np.inf)
    for query in queries:
        q4 = oracle_scale.quantised_query(query, signs).astype(np.float64)
        products = (key_signs @ q4) * norms
        spread = np.sqrt((q4 @ q4) * (norms**2).mean())
        best = np.maximum(best, (products - products.mean()) / spread)
    return best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outliers", "ratio", "gain"),
    [(False, 0.05, 0.003), (False, 0.02, 0.006), (True, 0.05, 0.02), (True, 0.02, 0.015)],
)
def test_scores_catch_more_attention_than_the_first_version(outliers, ratio, gain, device):
    top_k = 100
    load = workload.make(workload.Spec(tokens=16_384, steps=12, outliers=outliers))
    config = config_of(
        layers=1,
        query_heads=8,
        kv_heads=2,
        head_dim=128,
        dtype="float32",
        top_k=top_k,
        schedule=[(0, ratio, 0.2)],
        device=device,
    )
    cache = pk.Cache(config)
    s = cache.add()
    k = tensor(load.keys, config)
    cache.prefill(0, [s], k, tensor(load.values, config))
    keys, signs = f64(k), oracle.rotation_signs(128, config.policy.seed)
    sink, zone = cache.regions(s).sink, cache.regions(s).retrieval
    summaries = cache.summaries(0, s)
    caught = {"now": [], "first": []}
    for step in load.queries:
        q = tensor(step, config)
        found = cache.explain(0, s, q).details.candidate_positions - sink
        for head in range(2):
            queries = f64(q)[4 * head : 4 * head + 4]
            mass = oracle.group_attention(queries, keys[:, head])[sink : sink + zone]
            summary = oracle.Summary(summaries.signs[head], None, None, summaries.norms[head])
            before = np.argsort(-standardised(queries, summary, signs))[: found.shape[1]]
            attainable = np.sort(mass)[-top_k:].sum()
            for name, candidates in (("now", found[head]), ("first", before)):
                caught[name].append(np.sort(mass[candidates])[-top_k:].sum() / attainable)
    assert np.mean(caught["now"]) > np.mean(caught["first"]) + gain
