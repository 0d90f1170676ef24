"""Structured keys and queries that look like a language model's, deterministic, in NumPy.

On iid keys the exact best rows hold next to no attention, so a broken retriever scores like a
good one. These keys have what real ones have: an anisotropic spectrum, topics that last, outlier
channels, rotary positions, attention sinks, and planted rows that one query each is after.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROPE_THETA = 5e5
TOPIC_TOKENS = 256
OUTLIER_PAIRS = 4
OUTLIER_MEAN = 8.0


def rope(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotary positions on (..., tokens, head_dim), halves paired."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * ROPE_THETA ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


@dataclass
class Workload:
    keys: np.ndarray  # (tokens, kv_heads, head_dim), after RoPE
    values: np.ndarray  # (tokens, kv_heads, head_dim)
    queries: np.ndarray  # (steps, query_heads, head_dim), after RoPE
    planted: np.ndarray  # (steps): the position that step's queries are after


@dataclass(frozen=True)
class Spec:
    tokens: int
    steps: int = 16
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    outliers: bool = True
    seed: int = 0
    # Standard deviation of a query's logits over the keys: how peaked attention is.
    sharpness: float = 2.0
    # By how much a planted row's logit is above the best of all others.
    margin: float = 1.0


def make(spec: Spec) -> Workload:
    rng = np.random.default_rng(spec.seed)
    positions = np.arange(spec.tokens)
    # Targets at all depths, away from the sinks at the front and the window at the back.
    planted = np.linspace(16, spec.tokens * 0.9, spec.steps).astype(np.int64)
    heads = [_head(rng, spec, positions, planted) for _ in range(spec.kv_heads)]
    keys = np.stack([keys for keys, _ in heads], axis=1)
    queries = np.concatenate([queries for _, queries in heads], axis=1)
    return Workload(keys, rng.standard_normal(keys.shape), queries, planted)


def _head(
    rng: np.random.Generator, spec: Spec, positions: np.ndarray, planted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Keys (tokens, head_dim) of one kv head and queries (steps, group, head_dim) of its group."""
    dim = spec.head_dim
    basis, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
    spectrum = 3 * (1 + np.arange(dim)) ** -0.5
    topics = rng.standard_normal((spec.tokens // TOPIC_TOKENS + 1, dim))

    noise = rng.standard_normal((spec.tokens, dim))
    plain = ((0.6 * topics[positions // TOPIC_TOKENS] + 0.8 * noise) * spectrum) @ basis.T
    if spec.outliers:
        # Low-frequency pairs: the last of each half.
        channels = np.r_[dim // 2 - OUTLIER_PAIRS : dim // 2, dim - OUTLIER_PAIRS : dim]
        plain[:, channels] += OUTLIER_MEAN * rng.choice([-1.0, 1.0], len(channels))
    plain[:4] = plain.mean(axis=0)  # attention sinks: along the mean
    keys = rope(plain, positions)

    # The group's heads ask for a topic they share; they agree less and less, from 0.9 to 0.3.
    agree = np.linspace(0.9, 0.3, spec.group)[:, None]
    queries = np.empty((spec.steps, spec.group, dim))
    for step, target in enumerate(planted):
        shared = 0.6 * topics[target // TOPIC_TOKENS] + 0.8 * rng.standard_normal(dim)
        own = rng.standard_normal((spec.group, dim))
        latent = agree * shared + np.sqrt(1 - agree**2) * own
        q = rope((latent * spectrum) @ basis.T, np.full(spec.group, spec.tokens))
        logits = q @ keys.T / np.sqrt(dim)
        q *= spec.sharpness / logits.std(axis=1, keepdims=True)
        queries[step] = q
        # The smallest change that makes the target every head's best row by the margin.
        best = (q @ keys.T).max(axis=1) + spec.margin * np.sqrt(dim)
        keys[target] += np.linalg.pinv(q) @ (best - q @ keys[target])
    return keys, queries
