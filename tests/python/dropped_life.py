"""Sequences under HardKV(placement="dropped"), alone and beside one that stores all rows."""

from __future__ import annotations

import numpy as np
import pariskv_core as pk
import torch
from hardkv_life import kept_of, make_config
from support import assert_same_bits, randn_kv, randn_q, randn_step

DROPPED = pk.HardKV(most=24, placement="dropped")


def kept_rows(cache: pk.Cache, s: int) -> tuple[list[list[int]], list[list[int]]]:
    config = cache.config
    dtype, device = getattr(torch, config.dtype), config.device
    q = torch.zeros((config.query_heads, config.head_dim), dtype=dtype, device=device)
    found = cache.explain(0, s, q)
    if found.details is None:
        return [], []
    return kept_of(found.kept), kept_of(found.details.held)


def started(config: pk.Config, tokens: int = 300, steps: int = 60, seed: int = 0) -> tuple:
    """A cache whose sequence has rows dropped, and the generator of its rows."""
    rng = np.random.default_rng(seed)
    cache = pk.Cache(config)
    s = cache.add()
    k, v = randn_kv(rng, tokens, config)
    cache.prefill(0, [s], k, v, q=randn_q(rng, tokens, config))
    for _ in range(steps):
        cache.decode(0, [s], *randn_step(rng, 1, config))
    return cache, s, rng


def first_dropped(cache: pk.Cache) -> int:
    """Segments of the sink stay."""
    size = cache.config.segment_tokens
    return -(-cache.config.sink // size) * size


class Pair:
    """The same life with rows that stay stored and with rows that are dropped."""

    def __init__(self, policy: pk.HardKV, seed: int, **changes):
        self.host = pk.Cache(make_config(policy, **changes))
        self.config = self.host.config.replace(policy=policy.replace(placement="dropped"))
        self.dropped = pk.Cache(self.config)
        self.rng = np.random.default_rng(seed)
        self.sequences: list[int] = []

    def both(self, call):
        mine, theirs = call(self.host), call(self.dropped)
        if isinstance(mine, int):
            assert mine == theirs
        elif mine is not None:
            for a, b in zip(mine, theirs, strict=True):
                assert_same_bits(a, b)
        return mine

    def add(self, tokens: int, chunks: int = 1) -> None:
        (k, v), q = randn_kv(self.rng, tokens, self.config), randn_q(self.rng, tokens, self.config)
        s = self.both(lambda cache: cache.add())
        for part in torch.arange(tokens).chunk(chunks):
            self.both(lambda cache: cache.prefill(0, [s], k[part], v[part], q=q[part]))  # noqa: B023
        self.sequences.append(s)

    def decode(self) -> None:
        step = randn_step(self.rng, len(self.sequences), self.config)
        self.both(lambda cache: cache.decode(0, self.sequences, *step, return_lse=True))

    def truncate(self, s: int, count: int) -> None:
        """Where rows are gone, no more than the zone is spared: kept rows of a zone that is cut
        are chosen anew where all of it is stored."""
        regions = self.dropped.regions(s)
        most = regions.buffer if regions.dropped else self.dropped.length(s) - self.config.local
        count = min(count, most)
        if count > 0:
            self.both(lambda cache: cache.truncate([s], drop=count))

    def check(self) -> None:
        for s in self.sequences:
            assert kept_rows(self.host, s) == kept_rows(self.dropped, s)
        mine, theirs = self.host.stats(), self.dropped.stats()
        assert (mine.keeps, mine.kept_rows) == (theirs.keeps, theirs.kept_rows)
        assert mine.dropped_rows == 0
