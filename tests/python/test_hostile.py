"""Keys and queries that mean harm: what they may not do is be selected, spread, or crash."""

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    GROUP_RULES,
    SCORERS,
    assert_output_close,
    assert_same_bits,
    assert_same_explanation,
    assert_same_summaries,
    decode_oracle,
    f64,
    filled,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    tensor,
    with_changes,
)

UNUSABLE = {
    "zero": 0.0,
    "negative zero": -0.0,
    "nan": np.nan,
    "inf": np.inf,
    "-inf": -np.inf,
}


def cache_with(config: pk.Config, k: torch.Tensor, v: torch.Tensor) -> tuple[pk.Cache, int]:
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, v)
    return cache, s


def poisoned(k: torch.Tensor, position: int, head: int, value: float, dims=slice(None)):
    k = k.clone()
    k[position, head, dims] = value
    return k


@pytest.mark.parametrize("value", UNUSABLE.values(), ids=UNUSABLE.keys())
@pytest.mark.parametrize("group_rule", GROUP_RULES)
@pytest.mark.parametrize("scorer", SCORERS)
def test_an_unusable_key_is_counted_and_never_selected(scorer, group_rule, value, dtype, device):
    config = make_config(
        scorer=scorer, group_rule=group_rule, dtype=dtype, schedule=[(0, 1.0, 1.0)], device=device
    )
    f = filled(config, 300)
    k = poisoned(f.k, 100, 1, value)
    cache, s = cache_with(config, k, f.v)
    assert cache.stats().unusable_keys == 1
    assert f.cache.stats().unusable_keys == 0
    assert (cache.summaries(0, s).norms == 0).sum() == 1
    for _ in range(8):
        step = randn_step(f.rng, 1, config)
        out = cache.decode(0, [s], *step)
        assert torch.isfinite(out).all()
        explanation = cache.explain(0, s, step[0][0])
        assert explanation.details.coarse[1, 96] == 0
        assert 100 not in explanation.details.candidate_positions[1]
        assert 100 not in explanation.positions[1]
        # The other kv head does not notice.
        clean = f.cache.decode(0, [f.s], *step)
        assert_same_bits(out[:, :2], clean[:, :2])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dim", [0, 31, 63])
def test_one_bad_element_spoils_the_key_and_nothing_else(value, dim, device):
    # Against a zero key in the same place: all that is unusable is unusable alike.
    config = make_config(device=device)
    f = filled(config, 300)
    bad = cache_with(config, poisoned(f.k, 200, 0, value, dim), f.v)
    zero = cache_with(config, poisoned(f.k, 200, 0, 0.0), f.v)
    for _ in range(60):
        step = randn_step(f.rng, 1, config)
        out = [c.decode(0, [s], *step) for c, s in (bad, zero)]
        assert_same_bits(*out)
    assert_same_explanation(*(c.explain(0, s, step[0][0]) for c, s in (bad, zero)))
    assert_same_summaries(*(c.summaries(0, s) for c, s in (bad, zero)))


def test_unusable_keys_are_uncounted_when_they_leave(device):
    config = make_config(device=device)
    rng = np.random.default_rng(0)
    k, v = randn_kv(rng, 300, config)
    k[250:260, 0] = 0
    k[:2] = np.nan  # in the sink: not the zone's business
    cache, s = cache_with(config, k, v)
    assert cache.stats().unusable_keys == 10
    fork = cache.fork(s)
    assert cache.stats().unusable_keys == 20
    cache.truncate([s], drop=10)  # the zone ends at 258 now
    assert cache.stats().unusable_keys == 8 + 10
    cache.remove(fork)
    assert cache.stats().unusable_keys == 8
    cache.truncate([s], drop=60)
    assert cache.stats().unusable_keys == 0


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_zone_without_a_usable_key(scorer, device):
    config = make_config(scorer=scorer, device=device)
    rng = np.random.default_rng(0)
    k, v = randn_kv(rng, 200, config)
    k[4:168] = 0
    v[4:168] = np.nan  # and never touched
    cache, s = cache_with(config, k, v)
    step = randn_step(rng, 1, config)
    out = cache.decode(0, [s], *step)
    explanation = cache.explain(0, s, step[0][0])
    assert explanation.searched
    assert (explanation.positions == -1).all()
    assert cache.stats().fetched_rows == 0
    only = pk.Cache(config)
    t = only.add()
    only.prefill(0, [t], torch.cat([k[:4], k[168:]]), torch.cat([v[:4], v[168:]]))
    np.testing.assert_allclose(f64(out), f64(only.decode(0, [t], *step)), atol=1e-6)


@pytest.mark.parametrize("scale", [1e4, 1e18])
@pytest.mark.parametrize("scorer", SCORERS)
def test_huge_keys_are_scored_like_small_ones(scorer, scale, device):
    config = make_config(scorer=scorer, schedule=[(0, 0.5, 0.5)], device=device)
    rng = np.random.default_rng(1)
    k, v = randn_kv(rng, 400, config)
    q, k1, v1 = randn_step(rng, 1, config)
    k[123] = (q[0, ::2] + q[0, 1::2]) * scale
    cache, s = cache_with(config, k, v)
    out = cache.decode(0, [s], q, k1, v1)
    assert cache.stats().unusable_keys == 0
    assert (cache.explain(0, s, q[0]).positions[:, 0] == 123).all()
    # All attention is on that row.
    assert_same_bits(out[0], v[123].repeat_interleave(2, 0))


def test_a_giant_among_the_keys_does_not_blind_the_search(device):
    # Its norm enters the common scale of scores; candidates must still be the oracle's.
    config = make_config(device=device)
    rng = np.random.default_rng(1)
    k, v = randn_kv(rng, 400, config)
    k[50] *= 1e4
    cache, s = cache_with(config, k, v)
    for q in randn_q(rng, 4, config):
        expected = decode_oracle(cache, s, q)
        explanation = cache.explain(0, s, q)
        for head in range(2):
            np.testing.assert_array_equal(explanation.details.coarse[head], expected.coarse[head])
            np.testing.assert_array_equal(
                explanation.details.candidate_positions[head], expected.candidates[head]
            )


@pytest.mark.parametrize("scorer", SCORERS)
def test_duplicates_of_one_key(scorer, device):
    config = make_config(scorer=scorer, device=device)
    rng = np.random.default_rng(2)
    k, v = randn_kv(rng, 1, config)
    k, v = k.expand(500, -1, -1).contiguous(), v.expand(500, -1, -1).contiguous()
    cache, s = cache_with(config, k, v)
    q = randn_q(rng, 1, config)
    out = cache.decode(0, [s], q, k[:1], v[:1])
    assert_output_close(out[0], f64(v[0]).repeat(2, axis=0), "float32")
    explanation = cache.explain(0, s, q[0])
    np.testing.assert_array_equal(explanation.positions, np.tile(np.arange(4, 12), (2, 1)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("group_rule", GROUP_RULES)
@pytest.mark.parametrize("scorer", SCORERS)
def test_a_query_that_is_no_number(scorer, group_rule, value, dtype, device):
    config = make_config(scorer=scorer, group_rule=group_rule, dtype=dtype, device=device)
    f, twin = filled(config, 300), filled(config, 300)
    other, alike = f.cache.add(), twin.cache.add()
    for cache, s in ((f.cache, other), (twin.cache, alike)):
        cache.prefill(0, [s], f.k[:200], f.v[:200])
    q, k, v = randn_step(f.rng, 2, config)
    bad = q.clone()
    bad[0, 0, 5] = value
    out = f.cache.decode(0, [f.s, other], bad, k, v)
    clean = twin.cache.decode(0, [twin.s, alike], q, k, v)
    # The other sequence, and the other kv head of the same one, are as if nothing had been.
    assert torch.isnan(out[0, 0]).all()
    assert torch.isfinite(out[0, 1]).all()
    assert_same_bits(out[1], clean[1])
    assert_same_bits(out[0, 2:], clean[0, 2:])
    explanation = f.cache.explain(0, f.s, bad[0])
    found = explanation.positions[explanation.positions >= 0]
    assert ((found >= 4) & (found < 4 + explanation.zone_tokens)).all()
    f.cache.attend(0, [f.s], bad[:1])
    # Nor does the next step remember.
    step = randn_step(f.rng, 2, config)
    assert_same_bits(
        f.cache.decode(0, [f.s, other], *step), twin.cache.decode(0, [twin.s, alike], *step)
    )


@pytest.mark.parametrize("ratio", [0.25, 0.75])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("scorer", SCORERS)
def test_a_broken_query_head_has_no_say_in_its_group(scorer, value, ratio, device):
    # What the sound head of the pair gets is what it would get alone, down to the last candidate.
    pair = make_config(
        scorer=scorer, kv_heads=1, query_heads=2, schedule=[(0, ratio, 0.3)], device=device
    )
    alone = with_changes(pair, query_heads=1)
    f, single = filled(pair, 400), filled(alone, 400)
    for _ in range(10):
        q, k, v = randn_step(f.rng, 1, pair)
        q[0, 0, 9] = value
        out = f.cache.decode(0, [f.s], q, k, v)
        expected = single.cache.decode(0, [single.s], q[:, 1:], k, v)
        found = f.cache.explain(0, f.s, q[0])
        sound = single.cache.explain(0, single.s, q[0, 1:])
        np.testing.assert_array_equal(
            found.details.candidate_positions, sound.details.candidate_positions
        )
        np.testing.assert_array_equal(found.positions, sound.positions)
        assert_same_bits(out[:, 1:], expected)


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e30, 3e38])
def test_queries_at_the_ends_of_the_float_range(size, device):
    config = make_config(device=device)
    f = filled(config, 300)
    q = torch.full((1, 4, 64), size, dtype=torch.float32, device=device)
    _, k, v = randn_step(f.rng, 1, config)
    f.cache.decode(0, [f.s], q, k, v)
    explanation = f.cache.explain(0, f.s, q[0])
    found = explanation.positions[explanation.positions >= 0]
    assert ((found >= 4) & (found < 4 + explanation.zone_tokens)).all()
    assert len({tuple(row) for row in explanation.positions}) <= 2


def test_a_bad_value_row_reaches_only_queries_that_attend_to_it(device):
    config = make_config(device=device)
    f = filled(config, 300)
    v = f.v.clone()
    v[150] = np.nan
    cache, s = cache_with(config, f.k, v)
    spoiled = 0
    for _ in range(20):
        step = randn_step(f.rng, 1, config)
        out, clean = cache.decode(0, [s], *step), f.cache.decode(0, [f.s], *step)
        positions = cache.explain(0, s, step[0][0]).positions
        for head in range(2):
            mine = slice(2 * head, 2 * head + 2)
            if 150 in positions[head]:
                spoiled += 1
                assert torch.isnan(out[0, mine]).all()
            else:
                assert_same_bits(out[0, mine], clean[0, mine])
    assert spoiled < 40


def test_rows_that_are_no_longer_there_do_not_matter(device):
    # Poison behind the end of a sequence, in blocks that stay: truncated, then written over.
    config = make_config(device=device)
    f, twin = filled(config, 200), filled(config, 200)
    poison = torch.full((100, 2, 64), float("nan"), device=device)
    f.cache.prefill(0, [f.s], poison, poison)
    f.cache.truncate([f.s], drop=100)
    for _ in range(120):
        step = randn_step(f.rng, 1, config)
        assert_same_bits(f.cache.decode(0, [f.s], *step), twin.cache.decode(0, [twin.s], *step))
        q = step[0]
        assert_same_bits(f.cache.attend(0, [f.s], q), twin.cache.attend(0, [twin.s], q))
    assert_same_explanation(f.cache.explain(0, f.s, q[0]), twin.cache.explain(0, twin.s, q[0]))


def test_a_removed_sequence_leaves_no_poison(device):
    config = make_config(device=device)
    f, twin = filled(config, 200), filled(config, 200)
    bad = f.cache.add()
    poison = torch.full((700, 2, 64), float("nan"), device=device)
    f.cache.prefill(0, [bad], poison, poison)
    f.cache.remove(bad)
    k, v = randn_kv(f.rng, 300, config)
    again, alike = f.cache.add(), twin.cache.add()
    f.cache.prefill(0, [again], k, v)
    twin.cache.prefill(0, [alike], k, v)
    for _ in range(60):
        step = randn_step(f.rng, 2, config)
        assert_same_bits(
            f.cache.decode(0, [f.s, again], *step), twin.cache.decode(0, [twin.s, alike], *step)
        )


def test_gaps_between_rows_of_a_view_are_not_read(device):
    config = make_config(device=device)
    f, twin = filled(config, 200), filled(config, 200)

    def gapped(x: torch.Tensor) -> torch.Tensor:
        wide = torch.full((x.shape[0] * 3, x.shape[1] * 2, x.shape[2] + 5), float("nan"))
        wide = wide.to(x)
        view = wide[1::3, ::2, 2:-3]
        view.copy_(x)
        return view

    step = randn_step(f.rng, 1, config)
    assert_same_bits(
        f.cache.decode(0, [f.s], *(gapped(x) for x in step)), twin.cache.decode(0, [twin.s], *step)
    )
    k, v = randn_kv(f.rng, 100, config)
    f.cache.prefill(0, [f.s], gapped(k), gapped(v))
    twin.cache.prefill(0, [twin.s], k, v)
    q = randn_q(f.rng, 4, config)
    assert_same_bits(f.cache.attend(0, [f.s], gapped(q)), twin.cache.attend(0, [twin.s], q))


def test_subnormal_keys_are_usable(device):
    config = make_config(device=device)
    rng = np.random.default_rng(3)
    k, v = randn_kv(rng, 200, config)
    k[100, 0] = tensor(np.full(64, 1e-42), config)
    cache, s = cache_with(config, k, v)
    assert cache.stats().unusable_keys == 0
    assert cache.summaries(0, s).norms[0, 96] > 0
    assert torch.isfinite(cache.decode(0, [s], *randn_step(rng, 1, config))).all()
