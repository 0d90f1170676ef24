"""The 4-bit estimate of a logit: right from the summaries, and right about the keys on average."""

import numpy as np
import oracle
import pytest
from support import decode_oracle, explained, f64, filled, make_config, randn_q, rows_of, tensor

# The promise is 2^-12 of |k||q| scale; fp32 sums of 256 terms stay well inside.
PROMISED = 2.0**-12


def all_but_one(tokens: int, block: int = 0, **changes):
    """A cache whose zone is searched with everything a candidate and all but one row selected."""
    sizes = {"sink": 4, "local": 32, "schedule": [(0, 1.0, 1.0)]}
    zone = (tokens - 32) // max(block, 1) * max(block, 1) - 4
    config = make_config(**{**sizes, "block": block, "top_k": zone - 1, **changes})
    return filled(config, tokens, seed=tokens, queries=block > 0)


def estimates_by_position(explanation, zone: int, rows: str) -> np.ndarray:
    """(query_heads, zone) with NaN where a row was not selected."""
    values = explained(explanation)[rows]
    group = len(values) // len(explanation.positions)
    placed = np.full((len(values), zone), np.nan)
    for h, row in enumerate(values):
        placed[h, explanation.positions[h // group] - explanation.zone_begin] = row
    return placed


@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("block", [0, 64])
def test_estimates_follow_the_summaries(block, options, head_dim, device):
    f = all_but_one(1200 if block else 300, block, head_dim=head_dim, device=device)
    config = f.cache.config
    q = randn_q(f.rng, 1, config)[0]
    explanation = f.cache.explain(0, f.s, q, **options)
    zone = explanation.zone_tokens
    placed = estimates_by_position(explanation, zone, "estimated")
    expected = np.concatenate(decode_oracle(f.cache, f.s, q, **options).estimates)
    scale = options.get("scale", head_dim**-0.5)
    sizes = np.linalg.norm(f64(q), axis=-1)[:, None] * np.repeat(
        np.linalg.norm(f64(f.k)[4 : 4 + zone].swapaxes(0, 1), axis=-1), 2, axis=0
    )
    seen = ~np.isnan(placed)
    assert (seen.sum(axis=1) == zone - 1).all()
    error = np.abs(placed - expected) / (sizes * scale)
    assert error[seen].max() < PROMISED


@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"softcap": 5.0}], ids=str)
def test_exact_logits_are_exact(options, dtype, device):
    f = all_but_one(300, dtype=dtype, device=device)
    q = randn_q(f.rng, 1, f.cache.config)[0]
    explanation = f.cache.explain(0, f.s, q, **options)
    placed = estimates_by_position(explanation, 264, "exact")
    keys = f64(f.k)[4:268]
    logits = oracle.Logits(options.get("scale"), options.get("softcap", 0.0))
    for h, query in enumerate(f64(q)):
        expected = logits.of(keys[:, h // 2] @ query, 64)
        seen = ~np.isnan(placed[h])
        np.testing.assert_allclose(placed[h][seen], expected[seen], rtol=0, atol=1e-5)


@pytest.mark.parametrize("block", [0, 256])
def test_estimates_are_unbiased(block, head_dim):
    """Regressed on the truth, the estimate has slope 1 and no offset."""
    f = all_but_one(2000, block, head_dim=head_dim)
    truth, estimated = [], []
    for q in randn_q(f.rng, 8, f.cache.config):
        explanation = f.cache.explain(0, f.s, q)
        seen = ~np.isnan(explanation.exact)
        truth.append(explanation.exact[seen])
        estimated.append(explanation.details.estimated[seen])
    truth, estimated = np.concatenate(truth).astype(float), np.concatenate(estimated).astype(float)
    error = estimated - truth
    spread = error.std() / np.sqrt(len(error))
    # 63,000 pairs that share 4,000 keys: allow for less independence than the count suggests.
    assert abs(error.mean()) < 8 * spread
    slope = (truth @ estimated) / (truth @ truth)
    assert abs(slope - 1) < 2e-3
    # Eight levels leave about 7 % of a logit's own spread.
    assert error.std() < 0.09 * truth.std()


def test_a_key_along_the_query_is_estimated_nearly_exactly(rng):
    # <v, u> / alpha is 1 by construction: what remains is the rounding of the weights.
    f = all_but_one(100)
    config = f.cache.config
    query = rng.standard_normal(64)
    keys = np.tile(query, (100, 2, 1)) * rng.uniform(0.5, 2.0, (100, 1, 1))
    s = f.cache.add()
    f.cache.prefill(0, [s], tensor(keys, config), tensor(keys, config))
    explanation = f.cache.explain(0, s, tensor(np.tile(query, (4, 1)), config))
    np.testing.assert_allclose(explanation.details.estimated, explanation.exact, rtol=1 / 255)


def test_weights_of_a_summary_carry_the_norm(rng):
    # The sum over subspaces of w_b <v_b, k_b> is |k|^2: the estimate of a key with itself.
    f = all_but_one(100)
    summaries = f.cache.summaries(0, f.s)
    signs = oracle.rotation_signs(64, f.cache.config.policy.seed)
    keys, _ = (f64(x) for x in rows_of(f.cache, f.s))
    _, centres = oracle.magnitude_levels()
    for head in range(2):
        zone = keys[4:68, head]
        rotated = oracle.rotate(zone, signs) / 8
        vectors = oracle.sign_matrix(summaries.signs[head]) * centres[summaries.magnitudes[head]]
        products = (vectors * rotated).reshape(64, 8, 8).sum(axis=-1)
        own = (summaries.weights[head] * products).sum(axis=-1)
        np.testing.assert_allclose(own, (zone**2).sum(axis=-1), rtol=1 / 255)


@pytest.mark.parametrize("group_rule", ["attention_mass", "mean_query"])
def test_every_query_head_has_its_own_exact_logit(group_rule):
    f = all_but_one(200, group_rule=group_rule, query_heads=6)
    q = randn_q(f.rng, 1, f.cache.config)[0]
    explanation = f.cache.explain(0, f.s, q)
    keys = f64(f.k)
    assert explanation.exact.shape == (6, 163)
    for h, query in enumerate(f64(q)):
        expected = keys[explanation.positions[h // 3], h // 3] @ query / 8
        np.testing.assert_allclose(explanation.exact[h], expected, atol=1e-5)
