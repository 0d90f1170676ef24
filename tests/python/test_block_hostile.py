"""Blocks that share a mean, of keys and queries that mean harm; see test_hostile.py."""

import numpy as np
import oracle_blocks
import pariskv_core as pk
import pytest
import torch
from support import (
    assert_output_close,
    assert_same_bits,
    assert_same_explanation,
    decode_oracle,
    f64,
    filled,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    tensor,
)

BLOCKS = (64, 256)
LARGEST = {"float32": 3.4e38, "float16": 65504.0, "bfloat16": 3.38e38}


def block_config(block: int = 64, **changes) -> pk.Config:
    return make_config(**{"block": block, "segment_tokens": 256, **changes})


def cache_with(config: pk.Config, k, v, q=None) -> tuple[pk.Cache, int]:
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, v, q=q)
    return cache, s


@pytest.fixture(params=BLOCKS)
def block(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.mark.parametrize(
    ("value", "dims"), [(np.nan, slice(None)), (np.inf, 0), (-np.inf, 63)], ids=str
)
def test_a_bad_key_leaves_the_mean_of_its_block(value, dims, block, dtype, device):
    # In the first block, that sets the balance too, and in a later one: the others are summarised
    # as if it were not there, which only a block with one key less shows.
    config = block_config(block, dtype=dtype, schedule=[(0, 1.0, 1.0)], device=device)
    f = filled(config, 1400)
    for position in (30, 1200):
        k = f.k.clone()
        k[position, 1, dims] = value
        cache, s = cache_with(config, k, f.v)
        assert cache.stats().unusable_keys == 1
        summaries, clean = cache.summaries(0, s), f.cache.summaries(0, f.s)
        assert np.isfinite(summaries.means).all() and np.isfinite(summaries.balance).all()
        assert np.argwhere(summaries.norms == 0).tolist() == [[1, position - 4]]
        assert_same_bits(summaries.signs[0], clean.signs[0])
        first = max(position // block * block, 4)
        others = np.delete(f64(k)[first : (position // block + 1) * block, 1], position - first, 0)
        mean = others.mean(axis=0) / summaries.balance[1]
        levels, step = oracle_blocks.centre_of(f64(k)[:, 1], 4, block, summaries.balance[1])
        step = np.abs(mean - levels * step).max() / 127
        error = np.abs(summaries.means[1, position // block] - mean)
        assert (error < 0.501 * step + 2**-23 * np.abs(mean)).all()
        for _ in range(4):
            step = randn_step(f.rng, 1, config)
            assert torch.isfinite(cache.decode(0, [s], *step)).all()
            found = cache.explain(0, s, step[0][0])
            assert found.details.coarse[1, position - 4] == 0
            assert position not in found.positions[1]
            assert np.isfinite(found.details.estimated).all()


def test_a_block_without_a_usable_key(block, device):
    config = block_config(block, device=device)
    f = filled(config, 1700)
    k = f.k.clone()
    k[256:512, 0, 5] = np.nan
    cache, s = cache_with(config, k, f.v)
    assert cache.stats().unusable_keys == 256
    summaries = cache.summaries(0, s)
    without = summaries.means[0, 256 // block : 512 // block]
    assert np.isfinite(without).all() and (without == without[0]).all()  # what all have in common
    for _ in range(4):
        step = randn_step(f.rng, 1, config)
        out, clean = cache.decode(0, [s], *step), f.cache.decode(0, [f.s], *step)
        assert torch.isfinite(out).all()
        assert_same_bits(out[:, 2:], clean[:, 2:])
        found = cache.explain(0, s, step[0][0])
        assert not ((found.positions[0] >= 256) & (found.positions[0] < 512)).any()
        assert (found.positions >= 4).all()


def test_a_zone_without_a_usable_key(block, device):
    config = block_config(block, device=device)
    f = filled(config, 1320)
    k = f.k.clone()
    k[4:1280] = np.inf
    cache, s = cache_with(config, k, f.v, randn_q(f.rng, 1320, config))
    summaries = cache.summaries(0, s)
    assert (summaries.means == 0).all() and (summaries.balance == 1).all()
    step = randn_step(f.rng, 1, config)
    assert torch.isfinite(cache.decode(0, [s], *step)).all()
    found = cache.explain(0, s, step[0][0])
    assert found.searched and (found.positions == -1).all()


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_queries_that_say_nothing_leave_the_balance_to_keys(value, device):
    config = block_config(device=device)
    f = filled(config, 1300)
    q = randn_q(f.rng, 1300, config)
    q[1020, :2, 7] = value  # of one kv head
    if value == 0:
        q[:, :2] = 0
    cache, s = cache_with(config, f.k, f.v, q)
    without, with_all = f.cache.summaries(0, f.s), cache_with(config, f.k, f.v, q.nan_to_num(1))
    assert_same_bits(cache.summaries(0, s).balance[0], without.balance[0])
    assert_same_bits(cache.summaries(0, s).balance[1], with_all[0].summaries(0, 0).balance[1])
    assert (cache.summaries(0, s).balance[1] != without.balance[1]).any()


@pytest.mark.parametrize("silent", [[5], [5, 37], list(range(60))], ids=str)
def test_channels_that_queries_do_not_use(silent, dtype, device):
    # Their balance is at its floor, and what they hold does not drown the others.
    config = block_config(dtype=dtype, schedule=[(0, 0.1, 0.3)], device=device)
    f = filled(config, 2000)
    q = randn_q(f.rng, 2000, config)
    q[..., silent] = 0
    cache, s = cache_with(config, f.k, f.v, q)
    balance = cache.summaries(0, s).balance
    assert np.isfinite(balance).all()
    assert (balance >= 2.0**-3).all() and (balance <= 2.0**6).all()
    for _ in range(4):
        step = randn_step(f.rng, 1, config)
        step[0][..., silent] = 0
        assert torch.isfinite(cache.decode(0, [s], *step)).all()
        assert np.isfinite(cache.explain(0, s, step[0][0]).details.estimated).all()


def test_queries_of_zeros(block, device):
    # Every key is as good as any other: the first ones are taken, and attended to alike.
    config = block_config(block, device=device)
    f = filled(config, 1400)
    _, k, v = randn_step(f.rng, 1, config)
    q = torch.zeros(1, 4, 64, device=device)
    out = f.cache.decode(0, [f.s], q, k, v)
    found = f.cache.explain(0, f.s, q[0])
    assert (found.details.estimated == 0).all()
    np.testing.assert_array_equal(found.positions, np.tile(np.arange(4, 12), (2, 1)))
    expected = decode_oracle(f.cache, f.s, q[0])
    assert_output_close(out[0], expected.out, "float32")


# --- Keys without a residual ----------------------------------------------------------------------


def test_zero_keys_can_be_selected(block, dtype, device):
    # Where all other keys point away from the query, a zero key is the best there is.
    config = block_config(block, dtype=dtype, device=device)
    f = filled(config, 1400)
    q = randn_q(f.rng, 1, config)
    q[:, 1::2] = q[:, ::2]
    k = -q[:, ::2].expand(1400, -1, -1) + f.k / 4
    zeros = [100, 300, 301, 1200]
    k[zeros] = 0
    cache, s = cache_with(config, k, f.v)
    assert cache.stats().unusable_keys == 0
    found = cache.explain(0, s, q[0])
    for head in range(2):
        assert set(found.positions[head, :4].tolist()) == set(zeros)


def test_a_zone_of_zero_keys(block, dtype, device):
    config = block_config(block, dtype=dtype, device=device)
    f = filled(config, 1400)
    k = torch.zeros_like(f.k)
    cache, s = cache_with(config, k, f.v, randn_q(f.rng, 1400, config))
    assert cache.stats().unusable_keys == 0
    q, k1, v1 = randn_step(f.rng, 1, config)
    out = cache.decode(0, [s], q, k1, v1)
    assert torch.isfinite(out).all()
    found = cache.explain(0, s, q[0])
    assert (found.details.coarse > 0).all()
    assert (found.details.estimated == 0).all() and (found.exact == 0).all()
    np.testing.assert_array_equal(found.positions, np.tile(np.arange(4, 12), (2, 1)))


def test_keys_that_equal_their_mean(block, dtype, device):
    # Constant within a block, each block another: a mean's rounding is all that is left to encode.
    config = block_config(block, dtype=dtype, device=device)
    f = filled(config, 1840)
    k = f.k[:8].repeat_interleave(256, 0)[:1840].clone()
    cache, s = cache_with(config, k, f.v)
    assert cache.stats().unusable_keys == 0
    clear = 0
    for _ in range(16):
        q = randn_q(f.rng, 1, config)[0]
        q[1::2] = q[::2]
        found = cache.explain(0, s, q)
        np.testing.assert_allclose(found.details.estimated, found.exact, atol=0.02)
        for head in range(2):
            logits = f64(k[[4, *range(256, 1792, 256)], head]) @ f64(q[2 * head]) / 8
            best, second = np.sort(logits)[-1], np.sort(logits)[-2]
            if best - second < logits.std() / 4:
                continue
            clear += 1
            first = max(256 * int(logits.argmax()), 4)
            np.testing.assert_array_equal(found.positions[head], first + np.arange(8))
    assert clear > 16


def test_constant_keys(block, dtype, device):
    config = block_config(block, dtype=dtype, device=device)
    f = filled(config, 1400)
    k = f.k[:1].expand(1400, -1, -1).contiguous() * 50
    v = f.v[:1].expand(1400, -1, -1).contiguous()
    cache, s = cache_with(config, k, v)
    q = randn_q(f.rng, 1, config)
    out = cache.decode(0, [s], q, k[:1], v[:1])
    assert_output_close(out[0], f64(v[0]).repeat(2, axis=0), dtype)
    found = cache.explain(0, s, q[0])
    np.testing.assert_array_equal(found.positions, np.tile(np.arange(4, 12), (2, 1)))


# --- Sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", ["same", "either"])
def test_means_of_the_largest_numbers_do_not_overflow(sign, block, dtype, device):
    config = block_config(block, dtype=dtype, device=device)
    f = filled(config, 1400)
    largest = LARGEST[dtype]
    k = tensor(np.full((1400, 2, 64), largest), config)
    if sign == "either":
        k = k * torch.where(f.k < 0, -1.0, 1.0).to(k)
    assert torch.isfinite(k).all()
    cache, s = cache_with(config, k, f.v)
    assert cache.stats().unusable_keys == 0
    summaries = cache.summaries(0, s)
    for name in ("means", "balance", "weights", "norms"):
        assert np.isfinite(getattr(summaries, name)).all(), name
    if sign == "same":
        means = summaries.means.astype(np.float64) * summaries.balance[:, None]
        # 127 levels of a step that is a float: up to a 127th less.
        np.testing.assert_allclose(means, largest, rtol=1 / 127)
    q, k1, v1 = randn_step(f.rng, 1, config)
    for size in (1e-30, 1.0):
        cache.explain(0, s, (q[0].float() * size).to(q))
    found = cache.explain(0, s, q[0]).positions
    assert ((found == -1) | ((found >= 4) & (found < 1348))).all()
    cache.decode(0, [s], q, k1, v1)


@pytest.mark.parametrize("power", [-100, -60, -20, 20, 60])
def test_the_size_of_keys_does_not_show(power, device):
    # Keys times a power of two, queries divided by it: the same logits, if norms stay in range.
    config = block_config(device=device)
    f = filled(config, 1400)
    cache, s = cache_with(config, f.k * 2.0**power, f.v)
    small, same = cache.summaries(0, s), f.cache.summaries(0, f.s)
    assert_same_bits(small.signs, same.signs)
    assert_same_bits(small.magnitudes, same.magnitudes)
    assert_same_bits(small.balance, same.balance)
    assert_same_bits(small.means, same.means * np.float32(2.0**power))
    assert_same_bits(small.weights, same.weights * np.float32(2.0**power))
    q = randn_q(f.rng, 1, config)[0]
    found = cache.explain(0, s, q, scale=0.125 / 2.0**power)
    np.testing.assert_allclose(found.details.estimated, found.exact, atol=0.4)


@pytest.mark.parametrize("size", [1e4, 1e18, 1e35])
def test_a_giant_among_the_keys_is_still_found(size, device):
    config = block_config(schedule=[(0, 0.5, 0.5)], device=device)
    f = filled(config, 1500)
    q, k1, v1 = randn_step(f.rng, 1, config)
    k = f.k.clone()
    for position in (100, 1200):  # before and after the balance was set
        k[position] = (q[0, ::2] + q[0, 1::2]) * size
        cache, s = cache_with(config, k, f.v)
        assert (cache.explain(0, s, q[0]).positions[:, 0] == position).all()
        out = cache.decode(0, [s], q, k1, v1)
        assert_same_bits(out[0], f.v[position].repeat_interleave(2, 0))
        k = f.k.clone()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_query_that_is_no_number(value, dtype, device):
    config = block_config(dtype=dtype, device=device)
    f, twin = filled(config, 1400), filled(config, 1400)
    q, k, v = randn_step(f.rng, 1, config)
    bad = q.clone()
    bad[0, 0, 5] = value
    out = f.cache.decode(0, [f.s], bad, k, v)
    clean = twin.cache.decode(0, [twin.s], q, k, v)
    assert torch.isnan(out[0, 0]).all() and torch.isfinite(out[0, 1]).all()
    assert_same_bits(out[0, 2:], clean[0, 2:])
    found = f.cache.explain(0, f.s, bad[0]).positions
    assert ((found >= 4) & (found < 1348)).all()
    # The sound head of the pair has what it would have alone.
    alone = make_config(block=64, segment_tokens=256, dtype=dtype, query_heads=2, device=device)
    cache, s = cache_with(alone, f.k, f.v)
    cache.decode(0, [s], q[:, [1, 3]].contiguous(), k, v)
    single = cache.explain(0, s, q[0, [1, 3]].contiguous())
    np.testing.assert_array_equal(found[0], single.positions[0])
    step = randn_step(f.rng, 1, config)
    assert_same_bits(f.cache.decode(0, [f.s], *step), twin.cache.decode(0, [twin.s], *step))


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e30, 3e38])
def test_queries_at_the_ends_of_the_float_range(size, device):
    config = block_config(device=device)
    f = filled(config, 1400)
    q = torch.full((1, 4, 64), size, dtype=torch.float32, device=device)
    _, k, v = randn_step(f.rng, 1, config)
    f.cache.decode(0, [f.s], q, k, v)
    found = f.cache.explain(0, f.s, q[0]).positions
    assert ((found == -1) | ((found >= 4) & (found < 1348))).all()


def test_poison_behind_the_end_does_not_matter(device):
    config = block_config(device=device)
    f, twin = filled(config, 1300), filled(config, 1300)
    poison = torch.full((300, 2, 64), float("nan"), device=device)
    f.cache.prefill(0, [f.s], poison, poison)
    f.cache.truncate([f.s], drop=[300])
    for _ in range(100):
        step = randn_step(f.rng, 1, config)
        assert_same_bits(f.cache.decode(0, [f.s], *step), twin.cache.decode(0, [twin.s], *step))
    assert_same_explanation(
        f.cache.explain(0, f.s, step[0][0]), twin.cache.explain(0, twin.s, step[0][0])
    )


def test_subnormal_and_mixed_channels(device):
    # A channel may be quieter than any other by the whole range of a float.
    config = block_config(device=device)
    f = filled(config, 1400)
    k = f.k.clone()
    k[..., 3] *= 1e-42
    k[..., 9] *= 1e30
    cache, s = cache_with(config, k, f.v)
    balance = cache.summaries(0, s).balance
    assert (balance >= 2.0**-3).all() and (balance <= 2.0**6).all()
    assert cache.stats().unusable_keys == 0
    k, v = randn_kv(f.rng, 1, config)
    assert torch.isfinite(cache.decode(0, [s], randn_q(f.rng, 1, config), k, v)).all()
