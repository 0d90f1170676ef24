"""Rows of every shape: large heads, and values of another size than keys."""

import numpy as np
import oracle
import pariskv_core as pk
import pytest
import torch
from support import (
    assert_output_close,
    assert_same_bits,
    assert_same_sequence,
    bits,
    decode_oracle,
    f64,
    filled,
    make_config,
    randn_q,
    randn_step,
    regions_of,
    rows_of,
)

# head_dim and value_dim: DeepSeek's heads among them, and the ends of what there is.
FORMATS = [(192, 192), (512, 512), (192, 128), (64, 512), (512, 64), (80, 96)]
ids = [f"{k}/{v}" for k, v in FORMATS]
of_every_format = pytest.mark.parametrize(("head_dim", "value_dim"), FORMATS, ids=ids)


@of_every_format
def test_a_searched_decode_follows_the_oracle(head_dim, value_dim, dtype, device):
    config = make_config(head_dim=head_dim, value_dim=value_dim, dtype=dtype, device=device)
    f = filled(config, 400)
    for _ in range(50):  # past a flush
        q, k, v = randn_step(f.rng, 1, config)
        out, lse = f.cache.decode(0, [f.s], q, k, v, return_lse=True)
    assert out.shape == (1, config.query_heads, value_dim)
    explanation = f.cache.explain(0, f.s, q[0])
    keys, values = (f64(x) for x in rows_of(f.cache, f.s))
    sink, zone, _, _ = regions_of(f.cache, f.s)
    kept = np.r_[:sink, sink + zone : len(keys)]
    rows = [np.r_[kept, positions] for positions in explanation.positions]
    expected, expected_lse = oracle.attention_over(f64(q[0]), keys, values, rows)
    assert_output_close(out[0], expected, dtype)
    np.testing.assert_allclose(f64(lse[0]), expected_lse, rtol=1e-5, atol=1e-5)


@of_every_format
def test_a_search_sees_keys_alone(head_dim, value_dim, dtype, device):
    config = make_config(head_dim=head_dim, value_dim=value_dim, dtype=dtype, device=device)
    f = filled(config, 400)
    q = randn_q(f.rng, 1, config)[0]
    explanation, expected = f.cache.explain(0, f.s, q), decode_oracle(f.cache, f.s, q)
    coarse = np.stack([explanation.details.coarse[head] for head in range(config.kv_heads)])
    np.testing.assert_array_equal(coarse, np.stack(expected.coarse))
    for head in range(config.kv_heads):
        found = explanation.details.candidate_positions[head]
        np.testing.assert_array_equal(np.sort(found[found >= 0]), expected.candidates[head])
        best = explanation.positions[head]
        worth = expected.worth[head][np.searchsorted(expected.candidates[head], best)]
        np.testing.assert_allclose(explanation.worth[head], worth, rtol=1e-4)


@of_every_format
def test_attend_is_exact(head_dim, value_dim, dtype, device):
    config = make_config(head_dim=head_dim, value_dim=value_dim, dtype=dtype, device=device)
    f = filled(config, 140)
    q = randn_q(f.rng, 37, config)
    out, lse = f.cache.attend(0, [f.s], q, return_lse=True)
    expected, expected_lse = oracle.causal_attention(f64(q), f64(f.k), f64(f.v))
    assert out.shape == (37, config.query_heads, value_dim)
    assert_output_close(out, expected, dtype)
    np.testing.assert_allclose(f64(lse), expected_lse, rtol=1e-5, atol=1e-5)


@of_every_format
def test_rows_come_back_as_they_went_in(head_dim, value_dim, device):
    config = make_config(head_dim=head_dim, value_dim=value_dim, device=device)
    f = filled(config, 150)
    k, v = f.cache.read(0, f.s, 3, 149)
    assert k.shape == (146, config.kv_heads, head_dim)
    assert v.shape == (146, config.kv_heads, value_dim)
    assert_same_bits(k, f.k[3:149], "k")
    assert_same_bits(v, f.v[3:149], "v")


@of_every_format
def test_forks_and_truncation(head_dim, value_dim, dtype, device):
    config = make_config(head_dim=head_dim, value_dim=value_dim, dtype=dtype, device=device)
    f = filled(config, 300)
    other = f.cache.fork(f.s)
    q, k, v = randn_step(f.rng, 1, config)
    f.cache.decode(0, [other], q, k, v)
    f.cache.truncate([other], drop=1)
    assert_same_sequence(f.cache, f.s, f.cache, other, q[0])
    f.cache.truncate([other], drop=150)
    shorter = pk.Cache(config)
    s = shorter.add()
    shorter.prefill(0, [s], f.k[:150], f.v[:150])
    assert_same_sequence(f.cache, other, shorter, s, q[0])


@pytest.mark.parametrize("value_dim", [64, 80, 512])
def test_value_size_does_not_change_the_selection(value_dim, device):
    """The same keys and queries, and the values that all sizes have in common."""
    wide = filled(make_config(value_dim=512, device=device), 400)
    cache = pk.Cache(make_config(value_dim=value_dim, device=device))
    s = cache.add()
    cache.prefill(0, [s], wide.k, wide.v[..., :value_dim].contiguous())
    q, k, v = randn_step(wide.rng, 1, wide.cache.config)
    expected, lse = wide.cache.decode(0, [wide.s], q, k, v, return_lse=True)
    out, same_lse = cache.decode(0, [s], q, k, v[..., :value_dim], return_lse=True)
    assert_same_bits(lse, same_lse)
    if device == "cpu":  # a GPU adds values of different sizes up in different tiles
        assert_same_bits(out, expected[..., :value_dim])
    a, b = wide.cache.explain(0, wide.s, q[0]), cache.explain(0, s, q[0])
    np.testing.assert_array_equal(a.positions, b.positions)
    np.testing.assert_array_equal(bits(a.worth), bits(b.worth))


def test_value_dim_is_head_dim_when_left_out():
    assert make_config(head_dim=96).value_dim == 96
    assert make_config(head_dim=96, value_dim=0).value_dim == 96
    assert make_config(head_dim=96, value_dim=64).value_dim == 64


def test_values_of_the_wrong_size_are_refused(device):
    config = make_config(head_dim=192, value_dim=128, device=device)
    f = filled(config, 20)
    q, k, v = randn_step(f.rng, 1, config)
    wide = torch.cat([v, v], dim=-1)[..., :192]
    with pytest.raises(ValueError, match=r"\[decode\] v: expected \(1, 2, 128\)"):
        f.cache.decode(0, [f.s], q, k, wide)
    with pytest.raises(ValueError, match=r"\[decode\] out: expected \(1, 4, 128\)"):
        f.cache.decode(0, [f.s], q, k, v, out=torch.empty(1, 4, 192))
    with pytest.raises(ValueError, match=r"\[prefill\] v: expected \(1, 2, 128\)"):
        f.cache.prefill(0, [f.s], k, wide)
    with pytest.raises(ValueError, match=r"\[attend\] out: expected \(1, 4, 128\)"):
        f.cache.attend(0, [f.s], q, out=torch.empty(1, 4, 192))
    with pytest.raises(ValueError, match=r"\[read\] v: expected \(20, 2, 128\)"):
        f.cache.read(0, f.s, 0, 20, out=(torch.empty(20, 2, 192), torch.empty(20, 2, 192)))
    assert f.cache.length(f.s) == 20
