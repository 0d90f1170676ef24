"""Exact attention on a GPU: the way that rows take makes no difference."""

import pariskv_core as pk
import pytest
import torch
from support import assert_same_bits, make_config, randn_kv, randn_q

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_where_rows_lie_makes_no_difference_to_attend(dtype, head_dim, precision, rng):
    """Over several windows of rows in host memory, as over rows that stay on the device."""
    config = make_config(
        query_heads=32,
        kv_heads=16,
        head_dim=head_dim,
        dtype=dtype,
        segment_tokens=1024,
        device="cuda:0",
    )
    caches = [pk.Cache(config), pk.Cache(config.replace(placement="device"))]
    sequences = [cache.add() for cache in caches]
    k, v = randn_kv(rng, 11_000, config)
    for cache, s in zip(caches, sequences, strict=True):
        cache.prefill(0, [s], k, v)
    for tokens in (1, 40, 3_000):
        q = randn_q(rng, tokens, config)
        for _ in range(2):  # rows may still have been on their way the first time
            results = [
                cache.attend(0, [s], q, return_lse=True, precision=precision)
                for cache, s in zip(caches, sequences, strict=True)
            ]
            for mine, theirs in zip(*results, strict=True):
                assert_same_bits(mine, theirs)
            torch.cuda.synchronize()
    for cache in caches:
        cache.close()


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fast_weights_are_rounded_once(dtype, head_dim, rng):
    """Off by the rounding of weights, unlike the exact form; a huge key stays the heaviest."""
    config = make_config(
        query_heads=8,
        kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        segment_tokens=64,
        device="cuda:0",
    )
    k, v = randn_kv(rng, 5_000, config)
    k[777, 0] = torch.sign(k[777, 0]) * (1e4 if dtype == "float16" else 1e30)
    with pk.Cache(config) as cache:
        s = cache.add()
        cache.prefill(0, [s], k, v)
        for tokens in (1, 20, 1_000, 5_000):
            q = randn_q(rng, tokens, config)
            exact, exact_lse = cache.attend(0, [s], q, return_lse=True)
            fast, lse = cache.attend(0, [s], q, return_lse=True, precision="fast")
            assert torch.equal(exact.isnan(), fast.isnan())
            torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-5)
            apart = (exact.float() - fast.float()).nan_to_num()
            size = exact.float().nan_to_num().square().mean().sqrt()
            assert 0 < apart.square().mean().sqrt() < (3e-3 if dtype == "bfloat16" else 4e-4) * size
