"""Keys to summaries, against the paper's formulas in fp64."""

import numpy as np
import oracle
import pariskv_core as pk
import pytest
from support import assert_same_bits, f64, make_config, tensor

# Where the oracle's rotated value is nearer than this to a border (relative to its subspace),
# fp32 may fall on the other side: rotation sums 128 terms, so a few units of 2^-24 each.
BORDER = 2e-5


def encoded(keys: np.ndarray, **changes):
    """The engine's summaries of (tokens, kv_heads, head_dim) keys, and the keys as it saw them."""
    config = make_config(
        kv_heads=keys.shape[1],
        query_heads=keys.shape[1],
        head_dim=keys.shape[2],
        sink=0,
        local=0,
        **changes,
    )
    cache = pk.Cache(config)
    s = cache.add()
    k = tensor(keys, config)
    cache.prefill(0, [s], k, k)
    return cache.summaries(0, s), f64(k).swapaxes(0, 1)


def rotated_parts(keys: np.ndarray, seed: int = 42) -> np.ndarray:
    signs = oracle.rotation_signs(oracle.rotated_dim(keys.shape[-1]), seed)
    rotated = oracle.rotate(keys, signs) / np.sqrt(len(signs))
    return rotated.reshape(*keys.shape[:-1], -1, oracle.SUBSPACE)


@pytest.mark.cpu("constants")
def test_levels_are_lloyd_max_of_the_beta_density():
    thresholds, centres = oracle.magnitude_levels()
    mine = pk.magnitude_levels()
    np.testing.assert_allclose(mine[0], thresholds, rtol=0, atol=1e-9)
    np.testing.assert_allclose(mine[1], centres, rtol=0, atol=1e-9)


@pytest.mark.cpu("constants")
def test_levels_are_near_those_of_samples():
    # No formula: the mean of |u_j| within each cell, u uniform on the sphere in 8 dimensions.
    sample = np.random.default_rng(0).standard_normal((200_000, 8))
    t = np.abs(sample / np.linalg.norm(sample, axis=1, keepdims=True)).ravel()
    thresholds, centres = pk.magnitude_levels()
    cells = np.searchsorted(thresholds, t)
    means = [t[cells == level].mean() for level in range(8)]
    # 1.6 M samples: a cell's mean is known to about 1e-4.
    np.testing.assert_allclose(centres, means, atol=5e-4)
    # Centres are kept to the precision of a half, thresholds are not.
    np.testing.assert_allclose(thresholds, (np.array(centres)[1:] + centres[:-1]) / 2, atol=2.5e-4)
    assert (np.float16(centres) == centres).all()


@pytest.mark.cpu("constants")
@pytest.mark.parametrize("seed", [0, 42, 2**63, 2**64 - 1])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rotation_signs_are_the_documented_generator(dim, seed):
    assert pk.rotation_signs(dim, seed) == oracle.rotation_signs(dim, seed).tolist()


@pytest.mark.cpu("constants")
def test_rotation_signs_do_not_depend_on_how_many_are_asked_for():
    assert pk.rotation_signs(256, 7)[:64] == pk.rotation_signs(64, 7)


def test_summaries_follow_the_formulas(head_dim, dtype, rng):
    summaries, keys = encoded(rng.standard_normal((300, 2, head_dim)) * 3, dtype=dtype)
    signs = oracle.rotation_signs(oracle.rotated_dim(head_dim), 42)
    expected = oracle.encode(keys, signs)
    parts = rotated_parts(keys)
    radius = np.linalg.norm(parts, axis=-1, keepdims=True)
    share = np.abs(parts) / radius

    differ = oracle.sign_matrix(summaries.signs) != oracle.sign_matrix(expected.signs)
    assert (share.reshape(differ.shape)[differ] < BORDER).all()

    thresholds, _ = oracle.magnitude_levels()
    from_border = np.abs(share[..., None] - thresholds).min(axis=-1).reshape(differ.shape)
    moved = summaries.magnitudes != expected.magnitudes
    assert (from_border[moved] < BORDER).all()
    assert summaries.magnitudes.max() == 7

    # A weight is one of 255 steps of the key's heaviest, whose own step is a 2^-8 wide.
    exact = ~(moved | differ).reshape(*radius.shape[:-1], -1).any(axis=-1)
    step = expected.weights.max(axis=-1, keepdims=True) * (1 + 2**-7) / 255
    error = np.abs(summaries.weights - expected.weights)
    assert (error <= 0.501 * step)[exact].all()

    np.testing.assert_array_equal(summaries.norms, oracle.five_bits(np.linalg.norm(keys, axis=-1)))


def test_shapes_and_types_are_as_documented(head_dim, rng):
    summaries, _ = encoded(rng.standard_normal((70, 3, head_dim)))
    rotated = oracle.rotated_dim(head_dim)
    assert summaries.zone_begin == 0
    assert summaries.signs.shape == (3, 70, rotated // 8)
    assert summaries.magnitudes.shape == (3, 70, rotated)
    assert summaries.weights.shape == (3, 70, rotated // 8)
    assert summaries.norms.shape == (3, 70)
    assert summaries.signs.dtype == summaries.magnitudes.dtype == np.uint8
    assert summaries.weights.dtype == summaries.norms.dtype == np.float32


@pytest.mark.parametrize("power", [-80, -20, -3, 5, 30, 100])
def test_a_power_of_two_changes_the_size_alone(power, rng):
    keys = rng.standard_normal((64, 1, 128)).astype(np.float32)
    plain, _ = encoded(keys)
    scaled, _ = encoded(keys * np.float32(2.0) ** power)
    assert_same_bits(plain.signs, scaled.signs)
    assert_same_bits(plain.magnitudes, scaled.magnitudes)
    assert_same_bits(np.ldexp(plain.weights, power), scaled.weights)
    within = np.ldexp(np.linalg.norm(keys, axis=-1).T.astype(np.float64), power)
    np.testing.assert_array_equal(scaled.norms, oracle.five_bits(within))


def test_norms_have_five_bits_and_ends():
    sizes = np.geomspace(1e-6, 1e6, 500)
    keys = np.zeros((500, 1, 64))
    keys[:, 0, 11] = sizes
    summaries, seen = encoded(keys)
    norms, sizes = summaries.norms[0].astype(np.float64), seen[0, :, 11]
    assert norms.min() == oracle.NORM_SMALLEST
    assert norms.max() == oracle.NORM_LARGEST
    inside = (sizes > oracle.NORM_SMALLEST) & (sizes < oracle.NORM_LARGEST)
    assert (np.abs(norms / sizes - 1)[inside] <= 1 / 32).all()
    mantissa, _ = np.frexp(norms)
    np.testing.assert_array_equal(mantissa * 32, np.rint(mantissa * 32))


@pytest.mark.parametrize("head_dim", [80, 96])
def test_odd_sizes_equal_zero_padding_by_hand(head_dim, rng):
    keys = rng.standard_normal((100, 2, head_dim))
    padded = np.zeros((100, 2, 128))
    padded[..., :head_dim] = keys
    odd, even = encoded(keys)[0], encoded(padded)[0]
    for name in ("signs", "magnitudes", "weights", "norms"):
        assert_same_bits(getattr(odd, name), getattr(even, name), name)


def test_one_hot_keys_have_equal_parts():
    # H e_i has entries of one size: every level is that of 1 / sqrt(8), signs are H's column.
    keys = np.zeros((64, 1, 64))
    keys[np.arange(64), 0, np.arange(64)] = 2.0
    summaries, _ = encoded(keys)
    level = int(np.searchsorted(oracle.magnitude_levels()[0], 8**-0.5))
    assert (summaries.magnitudes == level).all()
    signs = oracle.rotation_signs(64, 42)
    matrix = oracle.walsh_hadamard(np.eye(64)) * signs[:, None]
    np.testing.assert_array_equal(oracle.sign_matrix(summaries.signs)[0], matrix)
    assert (summaries.norms == 2).all()


def test_the_seed_changes_the_rotation(rng):
    keys = rng.standard_normal((50, 1, 64))
    a, b, again = (encoded(keys, seed=seed)[0] for seed in (1, 2, 1))
    assert (a.signs != b.signs).any()
    assert_same_bits(a.signs, again.signs)
    assert_same_bits(a.norms, b.norms)


def test_a_summary_does_not_depend_on_the_position(rng):
    # Across segment borders, in any head, encoded at prefill or at a flush.
    key = rng.standard_normal(128)
    keys = np.tile(key, (200, 3, 1))
    at_prefill, _ = encoded(keys)
    at_flush, _ = encoded(keys, segment_tokens=128, threads=1)
    for name in ("signs", "magnitudes", "weights", "norms"):
        values = getattr(at_prefill, name)
        assert_same_bits(values, np.broadcast_to(values[:1, :1], values.shape), name)
        assert_same_bits(values, getattr(at_flush, name), name)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 1e37])
def test_keys_near_the_ends_of_the_float_range_are_summarised(scale, rng):
    # Squares of these overflow or vanish in fp32: signs and levels must not notice.
    keys = rng.standard_normal((40, 1, 64)).astype(np.float32) * np.float32(scale)
    summaries, seen = encoded(keys)
    expected = oracle.encode(seen, oracle.rotation_signs(64, 42))
    share = np.abs(rotated_parts(seen))
    share = (share / np.linalg.norm(rotated_parts(seen), axis=-1, keepdims=True)).reshape(1, 40, 64)
    differ = oracle.sign_matrix(summaries.signs) != oracle.sign_matrix(expected.signs)
    assert (share[differ] < BORDER).all()
    assert (summaries.magnitudes != expected.magnitudes).mean() < 1e-3
    largest = expected.weights.max(axis=-1, keepdims=True)
    error = np.abs(summaries.weights / largest - expected.weights / largest)
    assert error.max() < 0.51 / 255 * (1 + 2**-7)
