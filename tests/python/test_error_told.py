"""The error that steps tell, beside the true one: where keys that are no candidates have most of
the attention, and where estimates of logits are far off."""

import math

import numpy as np
import pariskv_core as pk
import pytest
from oracle_error import LEAST_ROWS, rows_within, worth_bins
from support import f64, filled, make_config, randn_q, tensor

TOKENS = 8192
SIZES = (0.3, 1.0, 2.0)


def even(rng: np.random.Generator, tokens: int) -> np.ndarray:
    return rng.standard_normal((tokens, 1, 64))


def cauchy(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Keys of any direction, a few of them 30 times as long as most."""
    keys = even(rng, tokens)
    lengths = np.minimum(np.abs(rng.standard_cauchy((tokens, 1, 1))), 30)
    return 8 * lengths * keys / np.linalg.norm(keys, axis=2, keepdims=True)


# Keys, the spread of their logits where lengths are even, and steps: the sharper, the more.
KINDS = {
    "sharp": (even, 6.0, 120),
    "peaked": (even, 3.0, 40),
    "ordinary": (even, 1.0, 10),
    "flat": (even, 0.05, 10),
    "long keys": (cauchy, 0.2, 60),
    "longer keys": (cauchy, 0.5, 400),
}


def told_and_true(kind: str, seed: int, device: str, **policy) -> np.ndarray:
    """(steps, 2): errors as shares of the values' spread."""
    keys, spread, steps = KINDS[kind]
    config = pk.Config(
        layers=1, query_heads=4, kv_heads=1, head_dim=64, dtype="float32", device=device,
        dense_below=2048, policy=pk.ParisKV(**policy),
    )  # fmt: skip
    rng, cache = np.random.default_rng(seed), pk.Cache(config)
    k, v = keys(rng, TOKENS), even(rng, TOKENS)
    s = cache.add()
    early = tensor(spread * rng.standard_normal((TOKENS, 4, 64)), config)
    cache.prefill(0, [s], tensor(k, config), tensor(v, config), q=early)
    found = []
    for _ in range(steps):
        q = tensor(spread * rng.standard_normal((1, 4, 64)), config)
        out, error = cache.decode(0, [s], q, return_error=True)
        apart = f64(out) - f64(cache.attend(0, [s], q))
        found.append([float(error[0, 0]), math.sqrt((apart**2).mean()) / v.std()])
    return np.array(found)


def rms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.square(x).mean(axis=0))


@pytest.mark.parametrize("policy", [{}, {"error": 0.01, "top_k": 400}], ids=["fixed", "budget"])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_told_within_a_factor_of_two(kind, policy, device):
    told, true = rms(np.concatenate([told_and_true(kind, i, device, **policy) for i in range(2)]))
    if true > 1e-4:  # else all heavy keys are selected, and nothing but rounding is left
        assert 0.5 < told / true < 2
    else:
        assert kind == "longer keys" and not policy and told < 2e-4


def test_a_budget_does_not_stop_before_heavy_keys(device):
    """Estimated logits of long keys are off by some nats: their shares are not to be trusted."""
    KINDS["longest keys"] = cauchy, 1.0, 300
    true = np.concatenate(
        [told_and_true("longest keys", i, device, error=0.01, top_k=400)[:, 1] for i in range(6)]
    )
    assert rms(true) < 0.002 and true.max() < 0.05


def test_before_rows_are_drawn_the_expected_error_is_told(device):
    """A sequence that is cut to other intervals has no copies of its tail until it is decoded."""
    config = make_config(block=64, tail="sample", tail_rows=16, top_k=60, device=device)
    f = filled(config, 3000)
    f.cache.truncate([f.s], keep=[2000])
    q = randn_q(f.rng, 1, config)
    before = [f.cache.explain(0, f.s, q[0] * size).details.error for size in SIZES]
    for size, expected in zip(SIZES, before, strict=True):
        error = f64(f.cache.decode(0, [f.s], q * size, return_error=True)[1])[0]
        after = f.cache.explain(0, f.s, q[0] * size).details.error
        np.testing.assert_array_equal(error, after)
        assert (expected != after).all()
        np.testing.assert_allclose(np.log2(expected / after), 0, atol=1.3)


def test_the_oracles_count_is_by_the_errors_and_ends_with_a_bin():
    errors = np.array([0.5, *np.linspace(0.4, 0.0, 40)])
    apart = 2.0 ** -np.linspace(0.2, 10.2, 40)  # two to an octave
    bins = worth_bins(apart)
    assert len(set(bins.tolist())) == 40 and bins.min() > 0
    assert rows_within(errors, 0.45, bins) == LEAST_ROWS
    assert rows_within(errors, 0.1, bins) == 31
    alike = np.where(np.arange(40) < 35, 0.01, 0.001)
    assert rows_within(errors, 0.1, worth_bins(alike)) == 35
    little = worth_bins(np.where(np.arange(40) < 20, 0.01, 1e-6))
    assert rows_within(errors, 0.39, little) == 20
    assert rows_within(errors, 0.1, little) == 40
    assert rows_within(errors, 0.39, worth_bins(np.full(40, 1e-6))) == 40
    assert rows_within(np.zeros(41), 0.45, worth_bins(np.full(40, 1e-6))) == LEAST_ROWS
