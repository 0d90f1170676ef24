"""The promise of docs/search.md: the estimate is right on average over seeds; its spread."""

import math

import numpy as np
from oracle_search import tail_weight
from support import f64, filled, make_config, randn_q, regions_of

TOKENS, SEEDS = 1500, 160


def test_over_seeds_sums_are_those_of_full_attention(device):
    """Two sums make an output. A key that is left with the share p of a head's attention adds
    (w - 1) p^2 |v - out|^2 to the variance."""
    apart, off, promised = [], [], []
    for seed in range(SEEDS):
        sampled = {"block": 64, "tail": "sample", "tail_rows": 16, "top_k": 24}
        config = make_config(**sampled, seed=seed, device=device)
        f = filled(config, TOKENS)
        q = randn_q(np.random.default_rng(5), 1, config)
        found = f.cache.decode(0, [f.s], q, return_lse=True)
        (out, lse), (exact, full_lse) = (
            [f64(part)[0] for part in parts]
            for parts in (found, f.cache.attend(0, [f.s], q, return_lse=True))
        )
        total = np.exp(lse - full_lse)[:, None]
        apart.append(np.hstack([total - 1, total * out - exact]))
        off.append(((out - exact) ** 2).sum(axis=1))

        sink, zone, *_ = regions_of(f.cache, f.s)
        weight = tail_weight(config, sink, sink + zone)
        selected = f.cache.explain(0, f.s, q[0]).positions
        for head in range(4):
            left = np.setdiff1d(np.arange(sink, sink + zone), selected[head // 2])
            k, v = (f64(rows)[left, head // 2] for rows in (f.k, f.v))
            share = np.exp(k @ f64(q)[0, head] / 8 - full_lse[head])
            distance = ((v - exact[head]) ** 2).sum(axis=1)
            promised.append((weight - 1) * (share**2 * distance).sum())
    mean, sigma = np.mean(apart, axis=0), np.std(apart, axis=0) / math.sqrt(SEEDS)
    assert np.abs(mean / sigma).max() < 5
    assert 0.8 < math.sqrt(np.mean(off) / np.mean(promised)) < 1.25
