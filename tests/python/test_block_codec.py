"""Blocks that share a mean: balance, means and what is left of keys, against the formulas.

The balance and the means are equal to the oracle's to the last bit; signs and levels of what is
left are as near as those of whole keys (test_codec.py).
"""

import numpy as np
import oracle
import oracle_blocks
import pariskv_core as pk
import pytest
from support import assert_same_bits, f64, filled, make_config, rows_of, summary_of, tensor
from test_codec import BORDER, rotated_parts


def cache_with(config: pk.Config, keys: np.ndarray, q=None) -> tuple[pk.Cache, int]:
    cache = pk.Cache(config)
    s = cache.add()
    k = tensor(keys, config)
    v = tensor(np.zeros((len(keys), config.kv_heads, config.value_dim)), config)
    cache.prefill(0, [s], k, v, q=q)
    return cache, s


def balances(cache: pk.Cache, s: int, q=None) -> list[np.ndarray]:
    """S of each kv head, by the oracle, from all that was given."""
    config, sink = cache.config, cache.regions(s).sink
    keys, end = f64(rows_of(cache, s)[0]), oracle_blocks.opening(sink)
    group = config.query_heads // config.kv_heads
    windows = oracle_blocks.observed(sink)
    seen = None if q is None else np.array([f64(q)[window] for window in windows])
    return [
        oracle_blocks.balance(
            keys[:end, head],
            sink,
            config.policy.block,
            None if seen is None else seen[:, :, head * group : (head + 1) * group],
        )
        for head in range(config.kv_heads)
    ]


def assert_equal_to_oracle(cache: pk.Cache, s: int, q=None) -> None:
    """Balance and means to the bit; signs, levels, weights and norms of what is left."""
    summaries, keys = cache.summaries(0, s), f64(rows_of(cache, s)[0])
    size, tokens = cache.config.policy.block, summaries.signs.shape[1]
    zone = summaries.zone_begin, summaries.zone_begin + tokens
    assert tokens > 0 and summaries.block == size
    rotation = oracle.rotation_signs(
        oracle.rotated_dim(cache.config.head_dim), cache.config.policy.seed
    )
    for head, stretch in enumerate(balances(cache, s, q)):
        assert_same_bits(summaries.balance[head], stretch, "balance")
        blocks = oracle_blocks.blocks_of(keys[:, head], zone, size, stretch)
        assert_same_bits(summaries.means[head], blocks.means(), "means")
        left = blocks.residuals(keys[zone[0] : zone[1], head]).astype(np.float64)
        assert_summary_of(summary_of(summaries, head), left, rotation)


def assert_summary_of(summary: oracle.Summary, left: np.ndarray, rotation: np.ndarray) -> None:
    usable = np.isfinite(left).all(axis=1)
    nothing = usable & (left == 0).all(axis=1)
    np.testing.assert_array_equal(summary.norms == 0, ~usable)
    for empty in (~usable, nothing):
        assert (summary.signs[empty] == 0).all() and (summary.weights[empty] == 0).all()
    assert (summary.norms[nothing] == oracle.NORM_SMALLEST).all()

    some = usable & ~nothing
    keys = left[some]
    if not len(keys):
        return
    expected = oracle.encode(keys, rotation)
    parts = rotated_parts(keys)
    radius = np.linalg.norm(parts, axis=-1, keepdims=True)
    share = np.divide(np.abs(parts), radius, where=radius > 0, out=np.zeros_like(parts))
    share = share.reshape(len(keys), -1)
    differ = oracle.sign_matrix(summary.signs[some]) != oracle.sign_matrix(expected.signs)
    assert (share[differ] < BORDER).all()
    moved = summary.magnitudes[some] != expected.magnitudes
    thresholds, _ = oracle.magnitude_levels()
    from_border = np.abs(share[..., None] - thresholds).min(axis=-1)
    assert (from_border[moved] < BORDER).all()
    exact = ~(moved | differ).reshape(*radius.shape[:-1], -1).any(axis=-1)
    step = expected.weights.max(axis=-1, keepdims=True) * (1 + 2**-7) / 255
    error = np.abs(summary.weights[some] - expected.weights)
    assert (error <= 0.501 * step)[exact].all()
    norm = np.linalg.norm(keys, axis=-1)  # whose last bit may decide
    lower, upper = (oracle.five_bits(norm * (1 + sign * 1e-6)) for sign in (-1, 1))
    assert ((lower <= summary.norms[some]) & (summary.norms[some] <= upper)).all()


def loud_keys(rng: np.random.Generator, tokens: int, heads: int, dim: int) -> np.ndarray:
    """With a mean that changes slowly, and channels of very different size."""
    drift = np.cumsum(rng.standard_normal((tokens, heads, dim)), axis=0) / 8
    sizes = np.exp(rng.normal(0, 1, (heads, dim)))
    return (rng.standard_normal((tokens, heads, dim)) + drift + 3) * sizes


@pytest.mark.parametrize(
    ("block", "dtype", "queries"),
    [(64, "float32", True), (128, "bfloat16", False), (256, "float16", True)],
)
def test_summaries_follow_the_formulas(block, dtype, queries, head_dim, rng):
    config = make_config(block=block, head_dim=head_dim, dtype=dtype)
    q = rng.standard_normal((1200, 4, head_dim)) * np.exp(rng.normal(0, 1, head_dim))
    prompt = tensor(q, config) if queries else None
    cache, s = cache_with(config, loud_keys(rng, 1200, 2, head_dim), prompt)
    assert_equal_to_oracle(cache, s, prompt)


@pytest.mark.parametrize("sink", [0, 1, 60, 64, 100, 256, 300])
@pytest.mark.parametrize("block", [64, 256])
def test_a_sink_may_end_within_a_block(block, sink, rng):
    # Its keys are in no mean; the first block's mean is that of what is left of it.
    config = make_config(block=block, sink=sink)
    keys = loud_keys(rng, 1700, 2, 64)
    keys[:sink] *= 100
    prompt = tensor(rng.standard_normal((1700, 4, 64)), config)
    cache, s = cache_with(config, keys, prompt)
    assert cache.regions(s).sink == sink
    assert_equal_to_oracle(cache, s, prompt)


def test_groups_are_heard_in_full(rng):
    config = make_config(block=64, query_heads=12, kv_heads=3, head_dim=80)
    prompt = tensor(rng.standard_normal((1200, 12, 80)) * rng.uniform(0.1, 5, (12, 80)), config)
    cache, s = cache_with(config, loud_keys(rng, 1200, 3, 80), prompt)
    assert_equal_to_oracle(cache, s, prompt)


@pytest.mark.parametrize("kind", ["nan", "zero", "constant", "huge", "tiny", "silent channels"])
def test_keys_of_every_kind(kind, dtype, rng):
    block = 256 if dtype == "bfloat16" else 64
    config = make_config(block=block, dtype=dtype)
    keys = loud_keys(rng, 1400, 2, 64)
    q = rng.standard_normal((1400, 4, 64))
    if kind == "nan":
        keys[[10, 1023, 1024, 1200], [0, 1, 0, 1], 5] = np.nan, np.inf, -np.inf, np.nan
        keys[512:576] = keys[1088:1152] = np.nan
    elif kind == "zero":
        keys[rng.random((1400, 2)) < 0.3] = 0
        keys[300:600] = keys[1100:1300] = 0
    elif kind == "constant":
        keys[:] = keys[:1]
    elif kind == "huge":
        keys[100] = keys[1200] = 65504 if dtype == "float16" else 1e36
    elif kind == "tiny":
        keys *= 1e-6 if dtype == "float16" else 1e-37
    else:
        keys[..., ::3] = 0
        q[..., ::4] = 0
        keys[..., [5, 37]] = q[..., [7, 39]] = 0  # and both of a pair
    prompt = tensor(q, config)
    cache, s = cache_with(config, keys, prompt)
    assert_equal_to_oracle(cache, s, prompt)


@pytest.fixture(params=[64, 256])
def block(request: pytest.FixtureRequest) -> int:
    return request.param


def test_shapes_and_types_are_as_documented(block, head_dim, rng):
    config = make_config(block=block, head_dim=head_dim, sink=100)
    cache, s = cache_with(config, rng.standard_normal((1700, 2, head_dim)))
    summaries = cache.summaries(0, s)
    end = (1700 - 32) // block * block
    assert (summaries.block, summaries.zone_begin) == (block, 100)
    assert summaries.signs.shape == (2, end - 100, oracle.rotated_dim(head_dim) // 8)
    assert summaries.means.shape == (2, end // block - 100 // block, head_dim)
    assert summaries.balance.shape == (2, head_dim)
    assert summaries.means.dtype == summaries.balance.dtype == np.float32


def test_whole_keys_have_no_means():
    f = filled(make_config(), 400)
    summaries = f.cache.summaries(0, f.s)
    assert summaries.block == 0
    assert summaries.means.size == summaries.balance.size == 0


def test_before_a_zone_opens_nothing_is_summarised(block):
    f = filled(make_config(block=block), 1055, queries=True)
    summaries = f.cache.summaries(0, f.s)
    assert summaries.signs.shape[:2] == (2, 0)
    assert summaries.means.size == summaries.balance.size == 0


def test_products_are_told_apart_and_add_up(rng):
    # <q, k> = <S q, m> + <S q, k / S - m>, to the rounding of what is left.
    config = make_config(block=64, head_dim=96)
    cache, s = cache_with(config, loud_keys(rng, 1300, 2, 96))
    keys, balance = f64(rows_of(cache, s)[0]), cache.summaries(0, s).balance
    for head in range(2):
        blocks = oracle_blocks.blocks_of(keys[:, head], (4, 1216), 64, balance[head])
        query = rng.standard_normal(96) * balance[head]
        means = blocks.means().astype(np.float64)[blocks.of(np.arange(1212))]
        left = blocks.residuals(keys[4:1216, head]).astype(np.float64)
        told = (means + left) @ query
        truth = (keys[4:1216, head] / balance[head]) @ query
        np.testing.assert_allclose(told, truth, atol=1e-5 * np.abs(truth).max())


def test_a_balance_makes_channels_alike(rng):
    # Where queries ask softly for what is loud in keys, signs are not those of a few channels.
    sizes = np.ones(64)
    sizes[[3, 35]] = 25
    keys = rng.standard_normal((1200, 1, 64)) * sizes
    config = make_config(block=64, kv_heads=1, query_heads=2)
    prompt = tensor(rng.standard_normal((1200, 2, 64)) / sizes, config)
    cache, s = cache_with(config, keys, prompt)
    balance = cache.summaries(0, s).balance[0].astype(np.float64)
    quiet = np.delete(balance, [3, 35])
    np.testing.assert_allclose(balance[[3, 35]] / np.median(quiet), 25, rtol=0.15)
    left = (keys[:, 0] / balance).std(axis=0)
    assert left.max() / left.min() < 1.5


def test_half_a_head_apart_channels_share_a_balance(rng):
    config = make_config(block=64, head_dim=80)
    keys = loud_keys(rng, 1200, 2, 80)
    for prompt in (None, tensor(rng.standard_normal((1200, 4, 80)), config)):
        balance = cache_with(config, keys, prompt)[0].summaries(0, 0).balance
        np.testing.assert_array_equal(balance[:, :40], balance[:, 40:])


def test_the_first_keys_set_the_balance_and_no_later_ones(rng):
    config = make_config(block=64)
    keys = loud_keys(rng, 1600, 2, 64)
    first = cache_with(config, keys)[0].summaries(0, 0).balance
    keys[1024:] *= rng.uniform(1, 50, 64)
    assert_same_bits(cache_with(config, keys)[0].summaries(0, 0).balance, first)
    keys[1023, 0, 7] += 200
    assert (cache_with(config, keys)[0].summaries(0, 0).balance[0] != first[0]).any()
