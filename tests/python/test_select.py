"""From candidates to rows: what a row is worth to its group, and the best of them."""

import numpy as np
import oracle
import oracle_search
import pariskv_core as pk
import pytest
from support import (
    GROUP_RULES,
    SEARCHES,
    assert_output_close,
    decode_oracle,
    f64,
    filled,
    float32,
    make_config,
    randn_q,
    randn_step,
    regions_of,
    rows_of,
    tensor,
)

# Worth is an fp32 exponential of an fp32 logit of size 10 at most: near 1e-6 each.
WORTH = 2e-5


def assert_selection_matches(
    explanation, expected: oracle_search.Decoded, config: pk.Config
) -> None:
    for head in range(config.kv_heads):
        candidates, worth = expected.candidates[head], expected.worth[head]
        chosen = explanation.positions[head]
        chosen = chosen[chosen >= 0]
        assert len(chosen) == min(config.policy.top_k, len(candidates))
        assert len(set(chosen.tolist())) == len(chosen)
        assert np.isin(chosen, candidates).all()
        mine = explanation.worth[head][: len(chosen)]
        truth = worth[np.searchsorted(candidates, chosen)]
        size = np.abs(worth).max()
        np.testing.assert_allclose(mine, truth, rtol=WORTH, atol=WORTH * size * 1e-2)
        assert (np.diff(mine) <= 0).all()
        # Nobody left out is worth more than somebody taken, but for rounding.
        left = np.delete(worth, np.searchsorted(candidates, chosen))
        if len(left):
            assert left.max() <= truth.min() + WORTH * size


@pytest.mark.parametrize("group_rule", GROUP_RULES)
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_the_best_rows_by_worth(search, group_rule, group, device):
    config = make_config(
        group_rule=group_rule, query_heads=2 * group, head_dim=128, device=device, **search
    )
    f = filled(config, 1300, seed=group)
    for q in randn_q(f.rng, 3, config):
        explanation = f.cache.explain(0, f.s, q)
        assert_selection_matches(explanation, decode_oracle(f.cache, f.s, q), config)


@pytest.mark.parametrize("group_rule", GROUP_RULES)
@pytest.mark.parametrize("option", ["scale", "softcap", "sink_bias"])
def test_options_change_the_worth_of_rows(group_rule, option, device):
    config = make_config(group_rule=group_rule, device=device)
    f = filled(config, 600)
    q = randn_q(f.rng, 1, config)[0]
    value = {"scale": 0.4, "softcap": 1.5, "sink_bias": float32([3.0, -2.0, 0.5, 5.0], config)}
    options = {option: value[option]}
    explanation = f.cache.explain(0, f.s, q, **options)
    assert_selection_matches(explanation, decode_oracle(f.cache, f.s, q, **options), config)


@pytest.mark.parametrize("block", [0, 256])
def test_every_dtype_and_head_dim(block, dtype, head_dim, device):
    config = make_config(block=block, dtype=dtype, head_dim=head_dim, device=device)
    f = filled(config, 1300)
    q = randn_q(f.rng, 1, config)[0]
    assert_selection_matches(f.cache.explain(0, f.s, q), decode_oracle(f.cache, f.s, q), config)


@pytest.mark.parametrize("group_rule", GROUP_RULES)
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_decode_attends_to_the_explained_rows(search, group_rule, dtype, device):
    config = make_config(**search, group_rule=group_rule, dtype=dtype, device=device)
    f = filled(config, 1300)
    for _ in range(60):  # past a flush
        q, k, v = randn_step(f.rng, 1, config)
        out, lse = f.cache.decode(0, [f.s], q, k, v, return_lse=True)
    explanation = f.cache.explain(0, f.s, q[0])
    keys, values = (f64(x) for x in rows_of(f.cache, f.s))
    sink, zone, _, _ = regions_of(f.cache, f.s)
    kept = np.r_[:sink, sink + zone : len(keys)]
    rows = [np.r_[kept, positions] for positions in explanation.positions]
    expected, expected_lse = oracle.attention_over(f64(q[0]), keys, values, rows)
    assert_output_close(out[0], expected, dtype)
    np.testing.assert_allclose(f64(lse[0]), expected_lse, rtol=1e-5, atol=1e-5)


def test_the_whole_step_against_the_oracle(device):
    # Wide candidate sets and well-separated worths: the same rows, so the same output.
    config = make_config(head_dim=128, device=device)
    f = filled(config, 500)
    agreed = 0
    for _ in range(10):
        q, k, v = randn_step(f.rng, 1, config)
        out, lse = f.cache.decode(0, [f.s], q, k, v, return_lse=True)
        expected = decode_oracle(f.cache, f.s, q[0])
        chosen = f.cache.explain(0, f.s, q[0]).positions
        if all(
            set(a.tolist()) == set(b.tolist())
            for a, b in zip(chosen, expected.positions, strict=True)
        ):
            agreed += 1
            assert_output_close(out[0], expected.out, "float32")
            np.testing.assert_allclose(f64(lse[0]), expected.lse, rtol=1e-5, atol=1e-5)
    # Two rows within rounding of one another at the last place are rare.
    assert agreed >= 9


def contested(config: pk.Config, window_norm: float):
    """A zone that two heads want different rows of, behind a window that may satisfy head 0.

    Head 0 looks along dimension 0: 20 rows of the zone answer it strongly. Head 1 looks along
    dimension 1: 20 others answer it, less strongly. The window holds rows for head 0 alone, of
    the given norm.
    """
    keys = np.random.default_rng(5).standard_normal((4 + 300 + 32, 1, 64)) * 0.05
    for_first, for_second = np.arange(10, 30), np.arange(200, 220)
    keys[for_first, 0, 0] += 8.0
    keys[for_second, 0, 1] += 5.0
    keys[-32:, 0, 0] += window_norm
    q = np.zeros((2, 64))
    q[0, 0] = q[1, 1] = 8.0
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], tensor(keys, config), tensor(keys, config))
    positions = cache.explain(0, s, tensor(q, config)).positions[0]
    return np.isin(positions, for_first).sum(), np.isin(positions, for_second).sum()


def test_a_head_served_by_its_window_has_no_claim(device):
    config = make_config(query_heads=2, kv_heads=1, top_k=20, device=device)
    # With nothing in the window both heads live on the zone and share; else head 0 has no voice.
    first, second = contested(config, window_norm=0.0)
    assert first + second == 20
    assert first >= 5
    assert contested(config, window_norm=16.0) == (0, 20)


def test_a_sink_bias_is_resident_too(device):
    # A large bias for head 0 says that it is served without any row.
    config = make_config(query_heads=2, kv_heads=1, top_k=20, device=device)
    f = filled(config, 500)
    q = randn_q(f.rng, 1, config)[0]
    plain = f.cache.explain(0, f.s, q)
    biased = f.cache.explain(0, f.s, q, sink_bias=float32([40.0, -40.0], config))
    alone = f.cache.explain(0, f.s, q, sink_bias=float32([-40.0, -40.0], config))
    np.testing.assert_array_equal(plain.positions, alone.positions)
    # Only head 1 counts now: its estimates fall along the list.
    assert (np.diff(biased.details.estimated[1]) <= 1e-5).all()
    assert (np.diff(plain.details.estimated[1]) > 1e-5).any()


def test_opposite_heads_cancel_in_the_mean_and_not_in_the_mass(device, rng):
    direction = rng.standard_normal(64)
    keys = rng.standard_normal((400, 1, 64)) * 0.3
    liked, disliked = np.arange(40, 44), np.arange(240, 244)
    keys[liked, 0] += direction
    keys[disliked, 0] -= direction
    q = np.stack([direction, -direction]) * 3
    found = {}
    for group_rule in GROUP_RULES:
        config = make_config(
            query_heads=2,
            kv_heads=1,
            group_rule=group_rule,
            schedule=[(0, 0.1, 0.3)],
            device=device,
        )
        cache = pk.Cache(config)
        s = cache.add()
        cache.prefill(0, [s], tensor(keys, config), tensor(keys, config))
        explanation = cache.explain(0, s, tensor(q, config))
        found[group_rule] = set(explanation.positions[0].tolist())
        if group_rule == "mean_query":
            np.testing.assert_array_equal(explanation.worth[0], np.zeros(8))
    assert found["attention_mass"] == {*liked, *disliked}
    assert not found["mean_query"] & {*liked, *disliked}


def test_equal_worth_goes_to_the_lower_position(device, rng):
    config = make_config(device=device, schedule=[(0, 1.0, 1.0)])
    key = rng.standard_normal((1, 2, 64))
    keys = np.tile(key, (400, 1, 1))
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], tensor(keys, config), tensor(keys, config))
    explanation = cache.explain(0, s, randn_q(rng, 1, config)[0])
    np.testing.assert_array_equal(explanation.positions, np.tile(np.arange(4, 12), (2, 1)))


@pytest.mark.parametrize(("zone", "searched"), [(0, False), (7, False), (8, False), (9, True)])
def test_a_zone_that_top_k_covers_is_not_searched(zone, searched):
    f = filled(make_config(top_k=8), 36 + zone)
    explanation = f.cache.explain(0, f.s, randn_q(f.rng, 1, f.cache.config)[0])
    assert explanation.searched is searched
    assert explanation.zone_tokens == zone
    assert explanation.positions.shape == (2, 8 if searched else 0)
    details = explanation.details
    assert (details.candidate_positions.shape[1] == 9) if searched else (details is None)


@pytest.mark.parametrize(("below", "searched"), [(200, True), (201, True), (202, False)])
def test_the_dense_threshold_counts_the_new_token(below, searched):
    f = filled(make_config(dense_below=below), 200)
    f.cache.decode(0, [f.s], *randn_step(f.rng, 1, f.cache.config))
    stats = f.cache.stats()
    assert stats.decode_tokens == 1
    assert stats.searched_tokens == int(searched)
    assert f.cache.explain(0, f.s, randn_q(f.rng, 1, f.cache.config)[0]).searched is searched


def test_searches_are_counted(device):
    config = make_config(layers=2, top_k=8, schedule=[(0, 0.25, 0.3)], device=device)
    f = filled(config, 4 + 200 + 32)
    short = f.cache.add()
    q, k, v = randn_step(f.rng, 2, config)
    for layer in range(2):
        f.cache.decode(layer, [f.s, short], q, k, v)
    stats = f.cache.stats()
    assert stats.decode_tokens == 4  # two sequences, two layers
    assert stats.searched_tokens == 2
    assert stats.candidates == 2 * 2 * 50  # layers, kv heads, a quarter of the zone
    assert stats.fetched_rows == 2 * 2 * 8


def test_explaining_changes_nothing(device):
    config = make_config(device=device)
    f, twin = filled(config, 400), filled(config, 400)
    for q in randn_q(np.random.default_rng(9), 5, config):
        f.cache.explain(0, f.s, q)
    stats, other = f.cache.stats(), twin.cache.stats()
    for name in ("searched_tokens", "candidates", "fetched_rows", "decode_tokens", "tokens"):
        assert getattr(stats, name) == getattr(other, name), name
    step = randn_step(f.rng, 1, config)
    assert f.cache.decode(0, [f.s], *step).equal(twin.cache.decode(0, [twin.s], *step))
