"""Blocks that share a mean, searched: scores, candidates, estimates and rows, by the oracle.

test_score.py, test_estimate.py and test_select.py run over blocks as well; here is what only
blocks have: means far apart, a zone that begins or is cut within a block, keys without a residual.
"""

import numpy as np
import oracle_blocks
import pariskv_core as pk
import pytest
from support import (
    GROUP_RULES,
    assert_output_close,
    coarse_oracle,
    decode_oracle,
    explained,
    f64,
    filled,
    float32,
    make_config,
    randn_q,
    randn_step,
    rows_of,
    tensor,
)


@pytest.fixture(params=[64, 256])
def block(request: pytest.FixtureRequest) -> int:
    return request.param


def cache_with(config: pk.Config, keys: np.ndarray, q=None) -> tuple[pk.Cache, int]:
    cache = pk.Cache(config)
    s = cache.add()
    k = tensor(keys, config)
    cache.prefill(0, [s], k, tensor(np.nan_to_num(keys, posinf=0.0), config), q=q)
    return cache, s


def spread_keys(rng: np.random.Generator, tokens: int, config: pk.Config, apart: float = 2.0):
    """Blocks of 64 whose means are as far apart as that, and channels of very different size."""
    shape = (tokens, config.kv_heads, config.head_dim)
    means = rng.standard_normal((-(-tokens // 64), *shape[1:])).repeat(64, axis=0)[:tokens] * apart
    return (rng.standard_normal(shape) + means) * np.exp(rng.normal(0, 1, shape[1:]))


def assert_candidates_equal(cache: pk.Cache, s: int, q, **options):
    explanation = cache.explain(0, s, q, **options)
    expected = decode_oracle(cache, s, q, **options)
    assert explanation.searched
    for head in range(cache.config.kv_heads):
        np.testing.assert_array_equal(explanation.details.coarse[head], expected.coarse[head])
        candidates = explanation.details.candidate_positions[head]
        np.testing.assert_array_equal(candidates[candidates >= 0], expected.candidates[head])
    return explanation, expected


@pytest.mark.parametrize("apart", [0.0, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_means_that_are_far_apart(head_dim, apart, block, device, rng):
    # From blocks that hardly differ to blocks of which one has all the attention: the byte of a
    # score follows the best ones.
    config = make_config(block=block, head_dim=head_dim, query_heads=6, device=device)
    prompt = randn_q(rng, 1500, config)
    cache, s = cache_with(config, spread_keys(rng, 1500, config, apart), prompt)
    for size in (0.2, 1.0, 6.0):
        assert_candidates_equal(cache, s, randn_q(rng, 1, config)[0] * size)


def test_scores_saturate_at_the_bottom_and_not_at_the_top(device, rng):
    # One block of 312 lies 17 spreads above the average key, of which a byte has 12: all scores are
    # lowered, so that the block's keys are still told apart.
    config = make_config(block=64, kv_heads=1, query_heads=2, device=device)
    keys = rng.standard_normal((20_000, 1, 64))
    direction = rng.standard_normal(64)
    keys[1024:1088, 0] += direction * 12
    cache, s = cache_with(config, keys)
    q = tensor(np.tile(direction, (2, 1)) * 0.2, config)
    explanation, _ = assert_candidates_equal(cache, s, q)
    coarse = explanation.details.coarse[0]
    block = np.arange(1020, 1084)
    assert coarse[block].min() > np.delete(coarse, block).max()
    assert len(np.unique(coarse[block])) > 5
    assert (coarse[block] == 255).sum() <= 2
    assert np.median(coarse) < 30


@pytest.mark.parametrize("sink", [0, 1, 60, 64, 100, 300])
@pytest.mark.parametrize("local", [0, 32])
def test_a_zone_that_begins_within_a_block(sink, local, block, device, rng):
    config = make_config(block=block, sink=sink, local=local, device=device)
    cache, s = cache_with(config, spread_keys(rng, 1900, config))
    for q in randn_q(rng, 2, config):
        assert_candidates_equal(cache, s, q)
    cache.truncate([s], drop=333)  # cut within a block, and again to where the sink is all there is
    assert_candidates_equal(cache, s, q)


def test_more_blocks_than_a_chunk_of_their_sums(device, rng):
    # 64 blocks are summed before they are added to others; a sink of 300 shifts where that is.
    config = make_config(block=64, kv_heads=1, query_heads=2, sink=300, device=device)
    cache, s = cache_with(config, spread_keys(rng, 6_000, config, 3.0))
    for size in (0.3, 5.0):
        assert_candidates_equal(cache, s, randn_q(rng, 1, config)[0] * size)


@pytest.mark.parametrize("kind", ["nan", "zero", "constant", "giant", "block of nan", "one key"])
def test_keys_of_every_kind(kind, dtype, device, rng):
    block = 256 if dtype == "bfloat16" else 64
    config = make_config(block=block, dtype=dtype, device=device)
    keys = spread_keys(rng, 1500, config)
    if kind == "nan":
        keys[rng.random((1500, 2)) < 0.1, 5] = np.nan
        keys[-300:] = np.nan_to_num(keys[-300:])
    elif kind == "zero":
        keys[rng.random((1500, 2)) < 0.5] = 0
    elif kind == "constant":
        keys[:] = keys[:1]
    elif kind == "giant":
        keys[100, 0] *= 1e3
        keys[600, 1] *= 1e3
    elif kind == "block of nan":
        keys[256:512, 0] = np.inf
    else:
        keys[4:-300, 0] = np.nan
        keys[300, 0] = 1
    cache, s = cache_with(config, keys, randn_q(rng, 1500, config))
    for q in randn_q(rng, 2, config):
        found = cache.explain(0, s, q).details.coarse
        np.testing.assert_array_equal(found, coarse_oracle(cache, s, q))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e30, 3e38])
def test_queries_of_every_kind(value, size, device, rng):
    config = make_config(block=64, query_heads=4, kv_heads=1, device=device)
    cache, s = cache_with(config, spread_keys(rng, 1200, config))
    q = randn_q(rng, 1, config)[0]
    q[0, 3] = value
    q[1] *= size
    q[2] = 0
    np.testing.assert_array_equal(cache.explain(0, s, q).details.coarse, coarse_oracle(cache, s, q))


@pytest.mark.parametrize("group_rule", GROUP_RULES)
@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.7}, {"softcap": 5.0}, {"sink_bias": True}], ids=str
)
def test_options_reach_the_means(options, group_rule, block, device, rng):
    config = make_config(block=block, query_heads=6, group_rule=group_rule, device=device)
    if "sink_bias" in options:
        options = {"sink_bias": float32(rng.standard_normal(6) * 5, config)}
    cache, s = cache_with(config, spread_keys(rng, 1300, config))
    for q in randn_q(rng, 2, config):
        explanation, expected = assert_candidates_equal(cache, s, q, **options)
        for head in range(2):
            chosen = np.searchsorted(expected.candidates[head], explanation.positions[head])
            assert (np.take(expected.candidates[head], chosen) == explanation.positions[head]).all()
            searchers = expected.estimates[head][:, chosen]
            mine = explained(explanation)["estimated"][3 * head : 3 * head + 3]
            np.testing.assert_allclose(
                mine, np.broadcast_to(searchers, mine.shape), rtol=1e-4, atol=5e-4
            )


def test_an_estimate_is_the_means_logit_and_the_residuals(block, device, rng):
    # Against exact logits: the mean's part is exact to a step of 1/64 octave, and what is left of
    # a key is far less than the key.
    config = make_config(block=block, schedule=[(0, 1.0, 1.0)], top_k=400, device=device)
    keys = rng.standard_normal((1500, 2, 64)) + 40 * rng.standard_normal((1, 2, 64))
    cache, s = cache_with(config, keys)
    errors, sizes = [], []
    for q in randn_q(rng, 4, config):
        explanation = cache.explain(0, s, q)
        errors.append(explanation.details.estimated - explanation.exact)
        sizes.append(np.linalg.norm(f64(q), axis=1)[:, None] / 8 + 0 * errors[-1])
    error = np.concatenate(errors).ravel() / np.concatenate(sizes).ravel()
    # Logits of size 40; of keys of size one, 7 to 9 % of a logit's spread is what codes leave.
    assert np.abs(error.mean()) < 0.01
    assert error.std() < 0.1


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_the_whole_step_against_the_oracle(rule, block, dtype, device, rng):
    config = make_config(
        block=block, dtype=dtype, head_dim=128, group_rule=rule, top_k=20, device=device
    )
    f = filled(config, 1500, queries=True)
    agreed = 0
    for _ in range(10):
        q, k, v = randn_step(f.rng, 1, config)
        out, lse = f.cache.decode(0, [f.s], q * 2, k, v, return_lse=True)
        explanation, expected = assert_candidates_equal(f.cache, f.s, q[0] * 2)
        if all(
            set(a.tolist()) == set(b.tolist())
            for a, b in zip(explanation.positions, expected.positions, strict=True)
        ):
            agreed += 1
            assert_output_close(out[0], expected.out, dtype)
            np.testing.assert_allclose(f64(lse[0]), expected.lse, rtol=1e-5, atol=1e-5)
    assert agreed >= 8


def test_the_oracles_own_logits_of_means_are_those_of_floats(rng):
    # Whole steps, which all of the above goes by, are near the products that they stand for.
    config = make_config(block=64)
    cache, s = cache_with(config, spread_keys(rng, 1500, config))
    keys, balance = f64(rows_of(cache, s)[0]), cache.summaries(0, s).balance
    for head in range(2):
        blocks = oracle_blocks.blocks_of(keys[:, head], (4, 1408), 64, balance[head])
        query = rng.standard_normal(64)
        steps = blocks.logits(blocks.stretched(query), 0.125)
        truth = blocks.means().astype(np.float64) @ (query * balance[head]) / 8
        np.testing.assert_allclose(steps * np.log(2) / 64, truth, atol=0.012)
