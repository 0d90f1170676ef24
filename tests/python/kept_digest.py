"""What HardKV and PRKV keep of some sequences, and a hash of what steps returned.

Part of what digest.py prints: PARISKV_CPU_LEVEL is read once per process.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pariskv_core as pk
from support import DTYPES, bits, randn_kv, randn_q, randn_step

POLICIES = {
    "hardkv": pk.HardKV(most=50, p=0.8),
    "dropped": pk.HardKV(most=50, p=0.8, placement="dropped"),
    "prkv": pk.PRKV(budget=96, page=16),
}


def run(policy: str, dtype: str, head_dim: int, group: int, threads: int) -> dict:
    config = pk.Config(
        layers=1,
        query_heads=2 * group,
        kv_heads=2,
        head_dim=head_dim,
        value_dim=head_dim,
        dtype=dtype,
        local=20,
        update=30,
        policy=POLICIES[policy],
        dense_below=0,
        segment_tokens=64,
        threads=threads,
    )
    rng = np.random.default_rng(head_dim)
    cache = pk.Cache(config)
    s = cache.add()
    k, v = randn_kv(rng, 400, config)
    k[100:140, 0, 3] = np.nan
    cache.prefill(0, [s], k, v, q=randn_q(rng, 400, config))
    digest = hashlib.sha256()
    for _ in range(40):
        out = cache.decode(0, [s], *randn_step(rng, 1, config))
        digest.update(np.ascontiguousarray(bits(out)).tobytes())
    explanation = cache.explain(0, s, randn_q(rng, 1, config)[0])
    details = explanation.details
    return {
        "kept": explanation.kept.tolist(),
        "held": details.held.tolist() if policy != "prkv" else None,
        "positions": explanation.positions.tolist(),
        "scores": details.page_scores.tolist() if policy == "prkv" else None,
        "outputs": digest.hexdigest(),
    }


def all_kept(threads: int) -> dict[str, str]:
    return {
        f"{policy} {dtype} {head_dim}": json.dumps(run(policy, dtype, head_dim, group, threads))
        for policy in POLICIES
        for dtype in DTYPES
        for head_dim, group in ((64, 1), (80, 3), (128, 4), (256, 7))
    }
