"""Infinite values and keys: the output is NaN where full attention's is not finite."""

from __future__ import annotations

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import DTYPES, f64, make_config, randn_kv, randn_q, randn_step

TOKENS = 1400
SAMPLED = {"block": 64, "tail": "sample"}
POLICIES = {
    "without a tail": pk.ParisKV(top_k=20, block=0, tail="none"),
    "tail": pk.ParisKV(top_k=20, tail_rows=32, **SAMPLED),
    "budget": pk.ParisKV(top_k=40, tail_rows=32, error=0.05, **SAMPLED),
    "votes": pk.ParisKV(top_k=20, block=0, tail="none", scorer="votes"),
    "kept rows": pk.HardKV(most=60, p=0.8),
    "pages": pk.PRKV(budget=96, page=8, static_share=0.25),
}
# Each attends to every row, exactly or as one of the tail.
ALL_ROWS = {
    "all selected": pk.ParisKV(top_k=4000, block=0, tail="none"),
    "all in the tail": pk.ParisKV(top_k=20, tail_rows=1024, **SAMPLED),
    "all kept": pk.HardKV(most=4000, p=1.0),
    "all pages": pk.PRKV(budget=4000, page=8, static_share=0.0),
}


def config_of(policy, **changes) -> pk.Config:
    config = make_config(update=16, head_dim=128, value_dim=128, segment_tokens=256, **changes)
    return config.replace(policy=policy)


def is_nan(x: torch.Tensor) -> np.ndarray:
    """Where an output is NaN; infinite it never is."""
    x = f64(x)
    assert not np.isinf(x).any()
    return np.isnan(x)


def scattered(rng: np.random.Generator, config: pk.Config) -> tuple[torch.Tensor, ...]:
    """k, v, q of a prompt: in dimension d of the first 96, one row's value is infinite."""
    k, v = randn_kv(rng, TOKENS, config)
    for d in range(96):
        v[d * TOKENS // 96, :, d] = np.inf if d % 3 else -np.inf
    return k, v, randn_q(rng, TOKENS, config)


def expected_of_all(config: pk.Config, in_eight_bits: bool) -> np.ndarray:
    """Where every row is attended to: (value_dim). Of a V in 8 bits all is NaN if any number is."""
    return (np.arange(config.value_dim) < 96) | in_eight_bits


def filled(config: pk.Config, k, v, q) -> tuple[pk.Cache, int]:
    cache = pk.Cache(config)
    s = cache.add()
    cache.prefill(0, [s], k, v, q=q)
    return cache, s


@pytest.mark.parametrize("policy", ALL_ROWS.values(), ids=ALL_ROWS.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_value_of_any_row_reaches_the_output(policy, dtype, rng):
    config = config_of(policy, dtype=dtype)
    cache, s = filled(config, *scattered(rng, config))
    expected = expected_of_all(config, in_eight_bits=policy == ALL_ROWS["all in the tail"])
    for _ in range(3):
        out, lse = cache.decode(0, [s], *randn_step(rng, 1, config), return_lse=True)
        assert (is_nan(out) == expected).all()
        assert torch.isfinite(lse).all()
    for tokens in (1, 5, 40):  # as many rows of the prompt as all of these queries see
        out = cache.attend(0, [s], randn_q(rng, tokens, config))
        assert (is_nan(out)[-1] == expected_of_all(config, in_eight_bits=False)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_key_of_a_resident_row(dtype, rng):
    """A logit of infinity leaves NaN alone; of minus infinity, in the row's infinite values."""
    config = config_of(POLICIES["tail"], dtype=dtype)
    k, v = randn_kv(rng, TOKENS, config)
    k[-2, 0, 5] = np.inf
    v[-2, 0, 7] = -np.inf
    cache, s = filled(config, k, v, randn_q(rng, TOKENS, config))
    q, k, v = randn_step(rng, 1, config)
    out, lse = cache.decode(0, [s], q, k, v, return_lse=True)
    below = np.arange(config.value_dim) == 7
    group = config.query_heads // config.kv_heads
    for head in range(config.query_heads):
        rises = head < group and q[0, head, 5] > 0
        expected = True if rises else below if head < group else False
        assert (is_nan(out)[0, head] == expected).all()
        assert bool(torch.isnan(lse[0, head])) == bool(rises)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_key_of_the_zone_leaves_no_trace(dtype, rng):
    """Where a key of the zone is not finite its row counts for nothing, in the tail as well."""
    config = config_of(POLICIES["tail"], dtype=dtype)
    k, v = randn_kv(rng, TOKENS, config)
    k[48:1300:16] = np.nan
    k[64:1300:64, 1, 0] = np.inf
    if config.device == "cpu":  # a GPU adds nothing times these values of the tail: NaN
        v[48:1300:16] = np.nan
    cache, s = filled(config, k, v, randn_q(rng, TOKENS, config))
    for _ in range(3):
        out, lse = cache.decode(0, [s], *randn_step(rng, 1, config), return_lse=True)
        assert torch.isfinite(out).all() and torch.isfinite(lse).all()


@pytest.mark.cuda
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("placement", ["host", "device"])
def test_infinite_values_have_the_cpus_is_nan(policy, dtype, placement, rng):
    """A dimension shows whether its row is resident, selected, in the tail, or left out."""
    configs = [
        config_of(policy, dtype=dtype, device="cpu"),
        config_of(policy, dtype=dtype, device="cuda").replace(placement=placement),
    ]
    k, v, q = (x.cpu() for x in scattered(rng, configs[0]))
    caches = [filled(c, *(x.to(c.device) for x in (k, v, q))) for c in configs]
    for step in range(40):  # past two flushes
        q, k, v = (x.cpu() for x in randn_step(rng, 1, configs[0]))
        if step == 3:
            v[0, 0, 100] = -np.inf
        if step == 20:
            q[0, 1, 0] = np.inf
        mine, theirs = (
            cache.decode(0, [s], *(x.to(c.device) for x in (q, k, v)))
            for (cache, s), c in zip(caches, configs, strict=True)
        )
        assert (is_nan(mine) == is_nan(theirs)).mean() > 0.999  # rows of equal worth trade places
    q = randn_q(rng, 90, configs[0]).cpu()
    for precision in ("exact", "fast"):
        mine, theirs = (
            cache.attend(0, [s], q.to(c.device), precision=precision)
            for (cache, s), c in zip(caches, configs, strict=True)
        )
        assert (is_nan(mine) == is_nan(theirs)).all()
