"""A sequence under HardKV, everything that is done to it, and the oracle's model of it."""

from __future__ import annotations

import copy
from typing import TypeVar

import numpy as np
import oracle
import pariskv_core as pk
import torch
from oracle_hardkv import Model, Query
from support import (
    ARITHMETIC,
    ROUNDING,
    current_device,
    f64,
    randn_kv,
    randn_q,
    regions_of,
    rows_of,
    tensor,
)


def make_config(policy: pk.HardKV | None = None, **changes) -> pk.Config:
    fields = {
        "layers": 1,
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "value_dim": 64,
        "dtype": "float32",
        "sink": 4,
        "local": 16,
        "update": 24,
        "dense_below": 0,
        "policy": policy or pk.HardKV(most=24),
        "segment_tokens": 64,
        "threads": 2,
        "device": current_device(),
    }
    return pk.Config(**{**fields, **changes})


def f32(array: torch.Tensor) -> np.ndarray:
    return array.float().cpu().numpy()


def kept_of(positions: np.ndarray) -> list[list[int]]:
    return [[int(p) for p in head if p >= 0] for head in positions]


class Life:
    """A sequence and its model, which have everything done to both of them."""

    def __init__(self, config: pk.Config, seed: int = 0, cache: pk.Cache | None = None):
        self.config = config
        self.rng = np.random.default_rng(seed)
        self.cache = cache or pk.Cache(config)
        self.s = self.cache.add()
        self.model = self.make_model()
        self.values = np.zeros((0, config.kv_heads, config.value_dim))

    def make_model(self) -> Model:
        return Model(self.cache.config)

    def keys(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = randn_kv(self.rng, count, self.cache.config)
        k *= tensor(self.rng.gamma(1, 1, (count, self.config.kv_heads, 1)), self.config)
        self.values = np.concatenate([self.values, f32(v)])
        return k, v

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        return self.model.k.astype(np.float64), self.values

    def prefill(self, count: int, queries: bool = True, **options) -> None:
        k, v = self.keys(count)
        q = randn_q(self.rng, count, self.config) if queries else None
        self.cache.prefill(0, [self.s], k, v, q=q, **options)
        asked = [Query(row, **options) for row in f32(q)] if queries else None
        self.model.prefill(f32(k), asked)

    def attend(self, count: int, **options) -> None:
        q, (k, v) = randn_q(self.rng, count, self.config), self.keys(count)
        out = self.cache.attend(0, [self.s], q, k=k, v=v, **options)
        self.model.attend(f32(k), [Query(row, **options) for row in f32(q)])
        logits = oracle.Logits(options.get("scale"), options.get("softcap", 0.0))
        expected, _ = oracle.causal_attention(f64(q), *self.rows(), logits)
        self.close(out, expected)

    def decode(self, **options) -> None:
        q, (k, v) = randn_q(self.rng, 1, self.config), self.keys(1)
        out, lse = self.cache.decode(0, [self.s], q, k, v, return_lse=True, **options)
        self.model.decode(f32(k), Query(f32(q)[0], **options))
        logits = oracle.Logits(options.get("scale"), options.get("softcap", 0.0))
        expected, totals = oracle.attention_over(
            f64(q)[0], *self.rows(), self.model.attended(), logits
        )
        self.close(out[0], expected)
        atol = 1e-3 if self.config.device.startswith("cuda") else 1e-4
        np.testing.assert_allclose(f64(lse)[0], totals, rtol=1e-5, atol=atol)

    def flush(self) -> None:
        self.cache.flush([self.s])
        self.model.flush()

    def truncate(self, count: int) -> None:
        count = min(count, len(self.model.k))
        self.cache.truncate([self.s], drop=count)
        self.model.truncate(count)
        self.values = self.values[: len(self.model.k)]

    def fork(self) -> Life:
        twin = copy.copy(self)
        twin.s, twin.model = self.cache.fork(self.s), self.model.copy()
        twin.rng = np.random.default_rng(int(self.rng.integers(2**31)))
        return twin

    def close(self, out: torch.Tensor, expected: np.ndarray) -> None:
        # The sums of a step are floats; a weight that 16 bits round differs by a unit or two.
        sums = 2e-3 if self.config.device.startswith("cuda") else 20 * ARITHMETIC
        allowed = ROUNDING[self.config.dtype] * np.abs(expected) + sums
        assert (np.abs(f64(out) - expected) <= allowed).all()

    def kept(self) -> tuple[list[list[int]], list[list[int]]]:
        q = randn_q(self.rng, 1, self.config)[0]
        explanation = self.cache.explain(0, self.s, q)
        assert not explanation.searched
        if explanation.details is None:
            assert explanation.kept.size == 0
            return [], []
        assert isinstance(explanation.details, pk.HardKVExplanation)
        return kept_of(explanation.kept), kept_of(explanation.details.held)

    def check(self) -> None:
        assert regions_of(self.cache, self.s) == self.model.regions.counts()
        for stored, given in zip(rows_of(self.cache, self.s), self.rows(), strict=True):
            assert np.array_equal(f32(stored), given)
        kept, held = self.kept()
        heads = self.model.heads or []
        if len(self.model.k) < self.cache.config.dense_below:
            heads = []
        assert kept == [head.kept for head in heads]
        assert held == [sorted(head.held) for head in heads]


L = TypeVar("L", bound=Life)


def random_life(life: L, seed: int, steps: int, prompt: int, turn: int) -> list[L]:
    """Everything in any order, done to a life and its forks. All are checked after every deed.

    prompt, turn  a prefill and an `attend` have fewer tokens
    """
    lives = [life]
    rng = np.random.default_rng(1000 + seed)
    options = [{}, {"scale": 0.5}, {"softcap": 2.0}, {"scale": 0.07, "softcap": 5.0}]
    for step in range(steps):
        life = lives[rng.integers(len(lives))]
        some = options[rng.integers(4)]
        deed = rng.integers(12)
        if step == 0 or deed == 0:
            life.prefill(int(rng.integers(1, prompt)), queries=bool(rng.integers(4)), **some)
        elif deed <= 6:
            for _ in range(rng.integers(1, 30)):
                life.decode(**some)
        elif deed == 7:
            life.attend(int(rng.integers(1, turn)), **some)
        elif deed == 8:
            life.flush()
        elif deed == 9 and len(lives) < 4:
            lives.append(life.fork())
        else:
            life.truncate(int(rng.integers(1, [8, 40, 90][rng.integers(3)])))
        for each in lives:
            each.check()
    return lives
