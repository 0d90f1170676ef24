"""Exact attention on a GPU: the way that rows take makes no difference."""

import pariskv_core as pk
import pytest
import torch
from support import assert_same_bits, make_config, randn_kv, randn_q

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_where_rows_lie_makes_no_difference_to_attend(dtype, rng):
    """Over several windows of rows in host memory, as over rows that stay on the device."""
    config = make_config(
        query_heads=32, kv_heads=16, head_dim=256, dtype=dtype, segment_tokens=1024, device="cuda:0"
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
                cache.attend(0, [s], q, return_lse=True)
                for cache, s in zip(caches, sequences, strict=True)
            ]
            for mine, theirs in zip(*results, strict=True):
                assert_same_bits(mine, theirs)
            torch.cuda.synchronize()
    for cache in caches:
        cache.close()
