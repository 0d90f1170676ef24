"""Outputs against dense attention in fp64, wherever every row takes part."""

import hypothesis.strategies as st
import numpy as np
import oracle
import pariskv_core as pk
import pytest
import torch
from hypothesis import given
from support import (
    DTYPES,
    HEAD_DIMS,
    assert_output_close,
    assert_same_bits,
    decode_oracle,
    f64,
    filled,
    float32,
    logits_of,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    tensor,
)

GROUPS = (1, 2, 3, 4, 7, 8, 16)
EVERY_ROW = {"top_k": 100_000}


def assert_decodes_densely(config: pk.Config, tokens: int, steps: int = 2, **options) -> pk.Cache:
    f = filled(config, tokens, seed=tokens)
    keys, values = f.k, f.v
    for _ in range(steps):
        q, k, v = randn_step(f.rng, 1, config)
        keys, values = torch.cat([keys, k]), torch.cat([values, v])
        out, lse = f.cache.decode(0, [f.s], q, k, v, return_lse=True, **options)
        expected, expected_lse = oracle.attention(
            f64(q[0]), f64(keys), f64(values), logits_of(options)
        )
        assert_output_close(out[0], expected, config.dtype)
        np.testing.assert_allclose(f64(lse[0]), expected_lse, rtol=1e-5, atol=1e-5)
    return f.cache


@pytest.mark.parametrize("group", GROUPS)
def test_decode_with_top_k_above_n(group, head_dim, dtype, device):
    config = make_config(
        query_heads=2 * group, head_dim=head_dim, dtype=dtype, device=device, **EVERY_ROW
    )
    assert_decodes_densely(config, 150)


@pytest.mark.parametrize("group", [32, 71])
def test_decode_with_one_kv_head(group, head_dim, dtype, device):
    config = make_config(
        query_heads=group, kv_heads=1, head_dim=head_dim, dtype=dtype, device=device, **EVERY_ROW
    )
    assert_decodes_densely(config, 150)


def test_decode_below_the_dense_threshold(dtype, device):
    config = make_config(dtype=dtype, device=device, dense_below=2000)
    cache = assert_decodes_densely(config, 400, steps=60)
    stats = cache.stats()
    assert (stats.searched_tokens, stats.summary_bytes, stats.encoded_keys) == (0, 0, 0)


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 35, 36, 37, 63, 64, 65, 127, 128, 129, 191, 192])
def test_decode_around_every_boundary(tokens, device):
    assert_decodes_densely(make_config(device=device, **EVERY_ROW), tokens, steps=3)


@pytest.mark.parametrize("tokens", [1023, 1024, 1025, 4000])
def test_decode_around_default_segments(tokens, dtype, device):
    config = make_config(dtype=dtype, segment_tokens=1024, head_dim=128, device=device, **EVERY_ROW)
    assert_decodes_densely(config, tokens)


def test_a_search_that_takes_all_rows_but_one_misses_that_one(dtype, device):
    # beta 1, all but the worthless: a key with next to no attention is what is left out.
    config = make_config(
        dtype=dtype, top_k=199, schedule=[(0, 1.0, 1.0)], update=500, device=device
    )
    rng = np.random.default_rng(3)
    cache = pk.Cache(config)
    s = cache.add()
    keys = rng.standard_normal((4 + 200 + 32, 2, 64))
    query = rng.standard_normal(64)
    keys[100] = -4 * query
    k, v = tensor(keys, config), tensor(rng.standard_normal(keys.shape), config)
    cache.prefill(0, [s], k, v)
    q = tensor(np.tile(query * 2, (1, 4, 1)), config)
    _, k1, v1 = randn_step(rng, 1, config)
    out = cache.decode(0, [s], q, k1, v1)
    assert cache.stats().fetched_rows == 2 * 199
    assert not np.isin(100, cache.explain(0, s, q[0]).positions)
    expected, _ = oracle.attention(f64(q[0]), f64(torch.cat([k, k1])), f64(torch.cat([v, v1])))
    assert_output_close(out[0], expected, dtype)


OPTIONS = [
    {"scale": 0.05},
    {"scale": 1.0},
    {"scale": 1e-6},
    {"softcap": 0.5},
    {"softcap": 30.0},
    {"sink_bias": [1.0, -3.0, 0.0, 12.0]},
    {"sink_bias": [-np.inf, 0.0, 1.0, -np.inf]},
    {"scale": 0.3, "softcap": 2.0, "sink_bias": [0.5, 1.5, -0.5, 4.0]},
]


def placed(options: dict, config: pk.Config) -> dict:
    if "sink_bias" not in options:
        return options
    return {**options, "sink_bias": float32(options["sink_bias"], config)}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decode_options(options, dtype, device):
    config = make_config(dtype=dtype, device=device, **EVERY_ROW)
    assert_decodes_densely(config, 150, **placed(options, config))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attend_options(options, dtype, device):
    config = make_config(dtype=dtype, device=device)
    f = filled(config, 150)
    options = placed(options, config)
    q = randn_q(f.rng, 5, config)
    out, lse = f.cache.attend(0, [f.s], q, return_lse=True, **options)
    expected, expected_lse = oracle.causal_attention(f64(q), f64(f.k), f64(f.v), logits_of(options))
    assert_output_close(out, expected, dtype)
    np.testing.assert_allclose(f64(lse), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_in_a_search(options, device):
    config = make_config(device=device, top_k=40)
    f = filled(config, 400)
    options = placed(options, config)
    q, k, v = randn_step(f.rng, 1, config)
    out, lse = f.cache.decode(0, [f.s], q, k, v, return_lse=True, **options)
    positions = f.cache.explain(0, f.s, q[0], **options).positions
    keys, values = f64(torch.cat([f.k, k])), f64(torch.cat([f.v, v]))
    kept = np.r_[:4, 4 + f.cache.regions(f.s).retrieval : 401]
    rows = [np.r_[kept, chosen] for chosen in positions]
    expected, expected_lse = oracle.attention_over(
        f64(q[0]), keys, values, rows, logits_of(options)
    )
    assert_output_close(out[0], expected, "float32")
    np.testing.assert_allclose(f64(lse[0]), expected_lse, rtol=1e-5, atol=1e-5)


def test_the_default_scale_is_one_over_root_head_dim(head_dim):
    f = filled(make_config(head_dim=head_dim), 100)
    q = randn_q(f.rng, 3, f.cache.config)
    plain = f.cache.attend(0, [f.s], q)
    assert_same_bits(plain, f.cache.attend(0, [f.s], q, scale=head_dim**-0.5))


@pytest.mark.parametrize("queries", [1, 2, 31, 32, 33, 149, 150])
@pytest.mark.parametrize("group", [1, 3, 16])
def test_attend_is_causal_and_exact(queries, group, device):
    config = make_config(query_heads=2 * group, device=device)
    f = filled(config, 150)
    q = randn_q(f.rng, queries, config)
    out, lse = f.cache.attend(0, [f.s], q, return_lse=True)
    expected, expected_lse = oracle.causal_attention(f64(q), f64(f.k), f64(f.v))
    assert out.shape == (queries, 2 * group, 64)
    assert lse.shape == (queries, 2 * group)
    assert_output_close(out, expected, "float32")
    np.testing.assert_allclose(f64(lse), expected_lse, rtol=1e-5, atol=1e-5)


def test_attend_every_head_dim_and_dtype(head_dim, dtype, device):
    f = filled(make_config(head_dim=head_dim, dtype=dtype, device=device), 140)
    q = randn_q(f.rng, 9, f.cache.config)
    expected, _ = oracle.causal_attention(f64(q), f64(f.k), f64(f.v))
    assert_output_close(f.cache.attend(0, [f.s], q), expected, dtype)


@pytest.mark.parametrize("tokens", [1, 40, 140])
def test_fast_attend_rounds_weights_alone(tokens, head_dim, dtype, device):
    """Each weight is off by half a unit in its last place, at most; log-sum-exps are not."""
    f = filled(make_config(head_dim=head_dim, dtype=dtype, device=device), 140)
    q = randn_q(f.rng, tokens, f.cache.config)
    exact, exact_lse = f.cache.attend(0, [f.s], q, return_lse=True)
    fast, lse = f.cache.attend(0, [f.s], q, return_lse=True, precision="fast")
    if device == "cpu" or dtype == "float32":
        assert_same_bits(fast, exact)
        assert_same_bits(lse, exact_lse)
        return
    expected, expected_lse = oracle.causal_attention(f64(q), f64(f.k), f64(f.v))
    sizes, _ = oracle.causal_attention(f64(q), f64(f.k), np.abs(f64(f.v)))
    off = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
    assert (np.abs(f64(fast) - expected) <= off * (sizes + np.abs(expected)) + 2e-6).all()
    np.testing.assert_allclose(f64(lse), expected_lse, rtol=1e-5, atol=1e-5)


def test_precision_is_exact_or_fast(device):
    f = filled(make_config(device=device), 100)
    q = randn_q(f.rng, 3, f.cache.config)
    assert_same_bits(f.cache.attend(0, [f.s], q), f.cache.attend(0, [f.s], q, precision="exact"))
    expected = r'\[attend\] precision: expected "exact" or "fast", got "half"'
    with pytest.raises(ValueError, match=expected):
        f.cache.attend(0, [f.s], q, precision="half")
    with pytest.raises(TypeError, match=r"\[attend\] precision: expected a string, got int"):
        f.cache.attend(0, [f.s], q, precision=16)
    with pytest.raises(TypeError, match="precision"):
        f.cache.decode(0, [f.s], q[:1], precision="fast")


def test_attend_a_ragged_batch(dtype, device, rng):
    config = make_config(dtype=dtype, device=device)
    cache = pk.Cache(config)
    totals, lengths = [70, 5, 130, 40, 1], [3, 5, 0, 40, 1]
    sequences = [cache.add() for _ in totals]
    k, v = randn_kv(rng, sum(totals), config)
    cache.prefill(0, sequences, k, v, totals)
    q = randn_q(rng, sum(lengths), config)
    out, lse = cache.attend(0, sequences, q, lengths, return_lse=True)
    at_k, at_q = 0, 0
    for total, length in zip(totals, lengths, strict=True):
        rows, queries = slice(at_k, at_k + total), slice(at_q, at_q + length)
        expected, expected_lse = oracle.causal_attention(
            f64(q[queries]), f64(k[rows]), f64(v[rows])
        )
        assert_output_close(out[queries], expected, dtype)
        np.testing.assert_allclose(f64(lse[queries]), expected_lse, rtol=1e-5, atol=1e-5)
        at_k, at_q = at_k + total, at_q + length


@given(
    tokens=st.integers(1, 200),
    share=st.floats(0, 1),
    group=st.integers(1, 16),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_attend_at_any_shape(tokens, share, group, kv_heads, head_dim, dtype, seed):
    config = make_config(
        query_heads=group * kv_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )
    f = filled(config, tokens, seed)
    q = randn_q(f.rng, int(share * tokens), config)
    expected, _ = oracle.causal_attention(f64(q), f64(f.k), f64(f.v))
    assert_output_close(f.cache.attend(0, [f.s], q), expected, dtype)


def test_large_logits_do_not_overflow(device):
    # exp of these would; the running maximum keeps every term at most 1.
    config = make_config(device=device, **EVERY_ROW)
    f = filled(config, 150)
    q, k, v = randn_step(f.rng, 1, config)
    out, lse = f.cache.decode(0, [f.s], q * 200, k, v, return_lse=True)
    keys, values = torch.cat([f.k, k]), torch.cat([f.v, v])
    expected, expected_lse = oracle.attention(f64(q[0] * 200), f64(keys), f64(values))
    # Logits near 1,000 are known to 1e-4 in fp32, and so is the ratio of two weights.
    np.testing.assert_allclose(f64(out[0]), expected, atol=2e-3)
    np.testing.assert_allclose(f64(lse[0]), expected_lse, rtol=1e-6)


@pytest.mark.parametrize("size", [1e3, 1e30])
def test_equal_rows_share_huge_logits_alike(size, device):
    # Beside such a logit the logarithm of 5 has no bits: no share follows from the log-sum-exp.
    config = make_config(device=device, **EVERY_ROW)
    f = filled(config, 150)
    k = f.k.clone()
    k[30:35] = 0
    k[30:35, :, 0] = size
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, f.v)
    q = torch.zeros_like(randn_q(f.rng, 1, config))
    q[..., 0] = 1e5
    expected = f64(f.v[30:35].mean(0).repeat_interleave(2, 0))
    for bias in ({}, {"sink_bias": float32([0.0, 1.0, -1.0, 50.0], config)}):
        np.testing.assert_allclose(f64(cache.attend(0, [s], q, **bias)[0]), expected, atol=1e-5)
    row = [x.new_zeros(1, *x.shape[1:]) for x in (k, f.v)]
    np.testing.assert_allclose(f64(cache.decode(0, [s], q, *row)[0]), expected, atol=1e-5)


def test_an_empty_sequence_sees_only_its_own_token(device):
    config = make_config(device=device)
    cache = pk.Cache(config)
    s = cache.add()
    q, k, v = randn_step(np.random.default_rng(0), 1, config)
    out, lse = cache.decode(0, [s], q, k, v, return_lse=True)
    assert_same_bits(out[0], v[0].repeat_interleave(2, 0))
    expected = (f64(q[0]) * f64(k[0].repeat_interleave(2, 0))).sum(-1) / 8
    np.testing.assert_allclose(f64(lse[0]), expected, atol=1e-5)


def test_a_sink_bias_takes_its_share_of_the_attention(device):
    config = make_config(device=device)
    f = filled(config, 20)
    q = randn_q(f.rng, 1, config)
    plain, lse = f.cache.attend(0, [f.s], q, return_lse=True)
    bias = lse[0] + float32([0.0, 1.0, -1.0, 50.0], config)
    biased, with_bias = f.cache.attend(0, [f.s], q, sink_bias=bias, return_lse=True)
    share = 1 / (1 + np.exp([0.0, 1.0, -1.0, 50.0]))
    np.testing.assert_allclose(f64(biased[0]), f64(plain[0]) * share[:, None], atol=1e-6)
    np.testing.assert_allclose(f64(with_bias[0]), f64(lse[0]) - np.log(share), atol=1e-5)


def test_decode_and_attend_agree(dtype, device):
    config = make_config(dtype=dtype, device=device, **EVERY_ROW)
    f = filled(config, 170)
    q, k, v = randn_step(f.rng, 1, config)
    decoded = f.cache.decode(0, [f.s], q, k, v)
    attended = f.cache.attend(0, [f.s], q)
    np.testing.assert_allclose(
        f64(decoded), f64(attended), rtol=2 * 2.0**-8 if dtype == "bfloat16" else 2.0**-9, atol=1e-5
    )


def test_searched_keys_never_exceed_the_zone(device):
    # A step whose log-sum-exp were above the dense one would have counted a row twice.
    config = make_config(device=device, top_k=30)
    f = filled(config, 500)
    for _ in range(100):
        q, k, v = randn_step(f.rng, 1, config)
        _, lse = f.cache.decode(0, [f.s], q, k, v, return_lse=True)
        _, everything = f.cache.attend(0, [f.s], q, return_lse=True)
        assert (lse <= everything + 1e-5).all()
    assert decode_oracle(f.cache, f.s, q[0]).searched
