"""Coarse scores and candidate sets: whole numbers, so equal to the oracle's, not near them."""

import numpy as np
import oracle
import oracle_search
import pariskv_core as pk
import pytest
from support import (
    GROUP_RULES,
    SCORERS,
    SEARCHES,
    config_of,
    decode_oracle,
    filled,
    make_config,
    randn_q,
    tensor,
    with_changes,
)


def assert_equal_to_oracle(cache: pk.Cache, s: int, q, **options) -> oracle_search.Decoded:
    explanation = cache.explain(0, s, q, **options)
    expected = decode_oracle(cache, s, q, **options)
    assert explanation.searched
    assert explanation.zone_begin == cache.regions(s).sink
    assert explanation.zone_tokens == cache.regions(s).retrieval
    for head in range(cache.config.kv_heads):
        np.testing.assert_array_equal(explanation.details.coarse[head], expected.coarse[head])
        candidates = explanation.details.candidate_positions[head]
        np.testing.assert_array_equal(candidates[candidates >= 0], expected.candidates[head])
        assert (candidates[len(expected.candidates[head]) :] == -1).all()
    return expected


@pytest.mark.parametrize("group_rule", GROUP_RULES)
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_every_head_dim(search, group_rule, head_dim, device):
    if "scorer" in search and head_dim > 256:
        pytest.skip("votes of 64 subspaces do not fit a byte: test_config.py sees them refused")
    config = make_config(**search, group_rule=group_rule, head_dim=head_dim, device=device)
    f = filled(config, 1300, seed=head_dim)
    for q in randn_q(f.rng, 4, config):
        assert_equal_to_oracle(f.cache, f.s, q)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_every_group_size(search, group, device):
    config = make_config(**search, query_heads=2 * group, device=device)
    f = filled(config, 1300, seed=group)
    for q in randn_q(f.rng, 3, config):
        assert_equal_to_oracle(f.cache, f.s, q)


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_many_queries_on_one_kv_head(search, device):
    config = make_config(**search, query_heads=32, kv_heads=1, device=device)
    f = filled(config, 1300)
    assert_equal_to_oracle(f.cache, f.s, randn_q(f.rng, 1, config)[0])


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_every_dtype(search, dtype, device):
    config = make_config(**search, dtype=dtype, head_dim=128, device=device)
    f = filled(config, 1300)
    for q in randn_q(f.rng, 3, config):
        assert_equal_to_oracle(f.cache, f.s, q)


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("zone", [9, 63, 64, 65, 127, 128, 129, 1000])
def test_zones_around_segment_borders(scorer, zone, device):
    config = make_config(scorer=scorer, device=device)
    f = filled(config, 4 + zone + 32, seed=zone)
    assert_equal_to_oracle(f.cache, f.s, randn_q(f.rng, 1, config)[0])


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_after_flushes_truncation_and_forks(search, device):
    # The sums behind the common scale, and the counts behind the votes, come and go with keys.
    config = make_config(**search, device=device)
    f = filled(config, 1300)
    q = randn_q(f.rng, 1, config)[0]
    for _ in range(100):
        step = randn_q(f.rng, 1, config)
        f.cache.decode(0, [f.s], step, step[:, :2].contiguous(), step[:, 2:].contiguous())
    assert_equal_to_oracle(f.cache, f.s, q)
    fork = f.cache.fork(f.s)
    f.cache.truncate([fork], drop=170)
    assert_equal_to_oracle(f.cache, fork, q)
    f.cache.prefill(0, [fork], f.k[:111], f.v[:111])
    assert_equal_to_oracle(f.cache, fork, q)
    assert_equal_to_oracle(f.cache, f.s, q)


def test_spread_and_sign_norm_score_by_hand():
    # Two rotated-space twins: keys H s with all signs +, the other all -. Norm 1 each side.
    config = make_config(query_heads=1, kv_heads=1, sink=0, local=0, top_k=1, threads=1)
    signs = oracle.rotation_signs(64, 42)
    along = oracle.walsh_hadamard(np.ones(64)) * signs / 64  # rotates to all ones: one-hot
    keys = np.stack([along, -along] * 8)[:, None]
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], tensor(keys, config), tensor(keys, config))
    norm = float(oracle.five_bits(np.linalg.norm(along)))
    q = tensor(along[None], config)
    # q4 is 15 everywhere, dot = +-64 * 15, mean 0, spread = 15 * 8 * norm: +-8 spreads away. All
    # norms are the same, so what they add to a logit they add to the mean.
    assert norm * 64 * 15 / (15 * 8 * norm) == 8
    expected = [min(255, 8 * 16 + 64), 1] * 8
    assert cache.explain(0, s, q).details.coarse[0].tolist() == expected


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_a_zero_query_ties_everything_and_the_first_keys_win(search, device):
    config = make_config(**search, device=device)
    f = filled(config, 1200)
    q = tensor(np.zeros((4, 64)), config)
    assert_equal_to_oracle(f.cache, f.s, q)
    if "scorer" in search:
        return  # the nearest centroid of a zero query is the one with id 0: no tie
    explanation = f.cache.explain(0, f.s, q)
    # Each of the two heads gives every key 64; together an octave more, as long as one may be.
    assert (explanation.details.coarse == 64 + 32).all()
    candidates = explanation.details.candidate_positions
    assert (candidates == 4 + np.arange(candidates.shape[1])).all()


@pytest.mark.parametrize("scorer", SCORERS)
def test_ties_go_to_the_lower_position(scorer, device, rng):
    # 12 different keys, each many times over: the threshold cuts through a crowd of equals.
    config = make_config(scorer=scorer, device=device)
    kinds = rng.standard_normal((12, 2, 64))
    keys = kinds[rng.integers(0, 12, 900)]
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], tensor(keys, config), tensor(keys, config))
    q = randn_q(rng, 1, config)[0]
    expected = assert_equal_to_oracle(cache, s, q)
    for head in range(2):
        coarse = expected.coarse[head]
        chosen = np.isin(np.arange(len(coarse)), expected.candidates[head] - 4)
        threshold = coarse[chosen].min()
        tied = coarse == threshold
        assert tied.sum() > (tied & chosen).sum() > 0
        assert np.flatnonzero(tied & chosen).max() < np.flatnonzero(tied & ~chosen).min()


@pytest.mark.parametrize("scorer", SCORERS)
def test_unusable_keys_score_zero_and_are_in_no_sum(scorer, device, rng):
    config = make_config(scorer=scorer, device=device)
    keys = rng.standard_normal((500, 2, 64))
    keys[rng.random((500, 2)) < 0.3] = 0
    keys[17, 1, 5] = np.nan
    keys[18, 0, 5] = np.inf
    cache = pk.Cache(config)
    s = cache.add()
    values = np.nan_to_num(keys, posinf=0.0)
    cache.prefill(0, [s], tensor(keys, config), tensor(values, config))
    q = randn_q(rng, 1, config)[0]
    explanation = cache.explain(0, s, q)
    usable = np.isfinite(keys).all(-1) & (keys != 0).any(-1)
    zone = usable[4:-32].T
    np.testing.assert_array_equal(explanation.details.coarse == 0, ~zone)
    assert_equal_to_oracle(cache, s, q)


@pytest.mark.parametrize("scorer", SCORERS)
def test_fewer_usable_keys_than_candidates(scorer, device, rng):
    config = make_config(scorer=scorer, device=device, schedule=[(0, 0.5, 0.5)])
    keys = np.zeros((300, 2, 64))
    keys[50:60, 0] = rng.standard_normal((10, 64))
    keys[90:93, 1] = rng.standard_normal((3, 64))
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], tensor(keys, config), tensor(keys, config))
    explanation = cache.explain(0, s, randn_q(rng, 1, config)[0])
    found = [set(row[row >= 0].tolist()) for row in explanation.details.candidate_positions]
    assert found == [set(range(50, 60)), set(range(90, 93))]
    assert (explanation.positions[1] >= 0).sum() == 3
    assert np.isnan(explanation.worth[1][3:]).all()


@pytest.mark.parametrize(
    ("schedule", "floor", "expected"),
    [
        ([(0, 0.05, 0.25)], 1, 50),
        ([(0, 0.0501, 0.25)], 1, 51),
        ([(0, 0.001, 0.25)], 4, 32),  # never fewer than 4 for each of the 8 rows
        ([(0, 0.001, 0.25)], 500, 1000),
        ([(0, 1.0, 1.0)], 1, 1000),
        ([(0, 0.5, 0.5), (1000, 0.1, 0.2)], 1, 100),
        ([(0, 0.5, 0.5), (1001, 0.1, 0.2)], 1, 500),
    ],
)
def test_the_schedule_says_how_many_candidates(schedule, floor, expected):
    config = make_config(schedule=schedule, min_candidates_per_row=floor)
    f = filled(config, 1000 + 36)
    explanation = f.cache.explain(0, f.s, randn_q(f.rng, 1, config)[0])
    assert explanation.zone_tokens == 1000
    assert explanation.details.candidate_positions.shape == (2, expected)
    assert (explanation.details.candidate_positions >= 4).all()


def test_the_vote_ratio_follows_the_schedule():
    f = filled(make_config(scorer="votes", schedule=[(0, 0.25, 0.05)]), 600)
    other = pk.Cache(with_changes(f.cache.config, schedule=[(0, 0.25, 0.05), (500, 0.25, 0.9)]))
    s = other.add()
    other.prefill(0, [s], f.k, f.v)
    q = randn_q(f.rng, 1, other.config)[0]
    assert_equal_to_oracle(f.cache, f.s, q)
    assert_equal_to_oracle(other, s, q)
    # More keys may vote: scores rise.
    few, many = f.cache.explain(0, f.s, q).details.coarse, other.explain(0, s, q).details.coarse
    assert (few <= many).all()
    assert (few < many).any()


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_a_power_of_two_in_the_query_changes_nothing(search, device):
    config = make_config(**search, device=device)
    f = filled(config, 1200)
    q = randn_q(f.rng, 1, config)[0]
    plain = f.cache.explain(0, f.s, q)
    for factor in (2.0**-40, 0.5, 2.0**60):
        # What counts is the size of logits.
        scaled = f.cache.explain(0, f.s, q * factor, scale=0.125 / factor)
        np.testing.assert_array_equal(plain.details.coarse, scaled.details.coarse)
        np.testing.assert_array_equal(
            plain.details.candidate_positions, scaled.details.candidate_positions
        )


@pytest.mark.slow
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_a_long_zone_under_the_published_schedule(search, device):
    config = config_of(
        layers=1,
        query_heads=8,
        kv_heads=2,
        head_dim=128,
        dtype="float32",
        dense_below=0,
        device=device,
        **search,
    )
    f = filled(config, 12_000)
    assert_equal_to_oracle(f.cache, f.s, randn_q(f.rng, 1, config)[0])
