"""The paper's mathematics in fp64 NumPy: what every backend is held against.

Written to be read beside the formulas, not to be fast: the codec and attention here, the search
in oracle_search.py. What is not fixed to the bit is compared to a tolerance that the test states.

Shapes: keys and values (tokens, kv_heads, dim), queries (query_heads, head_dim), summaries
(kv_heads, tokens, ...). Query head h shares kv head h // group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SUBSPACE = 8
# The norm that the coarse score sees: 5 significant bits within these ends.
NORM_SMALLEST = 17 / 512
NORM_LARGEST = 1984.0


# --- Rotation ----------------------------------------------------------------------------------


def rotated_dim(head_dim: int) -> int:
    return 1 << (head_dim - 1).bit_length()


def rotation_signs(count: int, seed: int) -> np.ndarray:
    """Sign i is the top bit of SplitMix64's finaliser of seed + (i + 1) * golden ratio."""
    mask = (1 << 64) - 1
    signs = []
    for i in range(count):
        z = (seed + (i + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        signs.append(-1.0 if z >> 63 else 1.0)
    return np.array(signs)


def walsh_hadamard(x: np.ndarray) -> np.ndarray:
    """Unscaled, over the last axis, butterflies 1, 2, 4, ...; in the dtype of x."""
    shape, dim = x.shape, x.shape[-1]
    half = 1
    while half < dim:
        pairs = x.reshape(*shape[:-1], dim // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        with np.errstate(over="ignore", invalid="ignore"):
            x = np.stack([a + b, a - b], axis=-2).reshape(shape)
        half *= 2
    return x


def rotate(x: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """H diag(s) x, zero-padded to a power of two, without the 1 / sqrt(rotated_dim)."""
    padded = np.zeros((*x.shape[:-1], len(signs)), dtype=x.dtype)
    padded[..., : x.shape[-1]] = x
    return walsh_hadamard(padded * signs.astype(x.dtype))


# --- Codec -------------------------------------------------------------------------------------


def magnitude_density(t: np.ndarray) -> np.ndarray:
    """Density of |u_j|, u uniform on the sphere in 8 dimensions: u_j^2 is Beta(1/2, 7/2)."""
    beta = math.gamma(0.5) * math.gamma(3.5) / math.gamma(4.0)
    square = t * t
    return 2 * t * square**-0.5 * (1 - square) ** 2.5 / beta


@functools.cache
def magnitude_levels() -> tuple[np.ndarray, np.ndarray]:
    """Thresholds (7) and centres (8) of the Lloyd-Max quantiser of that density."""
    nodes, weights = np.polynomial.legendre.leggauss(64)
    centres = (np.arange(8) + 0.5) / 8
    for _ in range(10_000):
        thresholds = (centres[:-1] + centres[1:]) / 2
        low, high = np.r_[0.0, thresholds], np.r_[thresholds, 1.0]
        t = (high + low)[:, None] / 2 + (high - low)[:, None] / 2 * nodes
        mass = magnitude_density(t) * weights
        means = (mass * t).sum(axis=1) / mass.sum(axis=1)
        moved = np.abs(means - centres).max()
        centres = means
        if moved < 1e-15:
            break
    # Kept to the precision of a half; thresholds lie between the exact ones.
    return (centres[:-1] + centres[1:]) / 2, centres.astype(np.float16).astype(np.float64)


def five_bits(norm: np.ndarray) -> np.ndarray:
    """The nearest number with 5 significant bits, halves away from zero, within its ends."""
    mantissa, exponent = np.frexp(norm)
    rounded = np.ldexp(np.floor(mantissa * 32 + 0.5) / 32, exponent)
    return np.clip(rounded, NORM_SMALLEST, NORM_LARGEST)


@dataclass
class Summary:
    """What is kept of keys: (..., subspaces) and (..., rotated_dim) as in Cache.summaries."""

    signs: np.ndarray
    magnitudes: np.ndarray
    weights: np.ndarray
    norms: np.ndarray


def sign_matrix(sign_bytes: np.ndarray) -> np.ndarray:
    """(..., subspaces) bytes to (..., rotated_dim) of +1 and -1; bit j is dimension 8b + j."""
    bits = np.unpackbits(sign_bytes, axis=-1, bitorder="little")
    return bits.astype(np.float64) * 2 - 1


def encode(keys: np.ndarray, signs: np.ndarray) -> Summary:
    """Keys (..., head_dim), every one finite and not zero, to their summaries, unrounded."""
    thresholds, centres = magnitude_levels()
    norm = np.linalg.norm(keys, axis=-1)
    unit = rotate(keys / norm[..., None], signs) / math.sqrt(len(signs))
    parts = unit.reshape(*unit.shape[:-1], -1, SUBSPACE)
    radius = np.linalg.norm(parts, axis=-1)
    direction = np.divide(
        parts, radius[..., None], where=radius[..., None] > 0, out=np.zeros_like(parts)
    )
    levels = np.searchsorted(thresholds, np.abs(direction), side="right")
    signed = np.where(parts >= 0, centres[levels], -centres[levels])
    alpha = (signed * direction).sum(axis=-1)
    weights = np.divide(norm[..., None] * radius, alpha, where=alpha > 0, out=np.zeros_like(radius))
    sign_bytes = np.packbits(parts >= 0, axis=-1, bitorder="little")[..., 0]
    magnitudes = levels.reshape(unit.shape).astype(np.uint8)
    return Summary(sign_bytes, magnitudes, weights, five_bits(norm))


def estimate(summary: Summary, query: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """<k, q> of every key (tokens, ...) from its summary: sum of w_b <v_b, q_b>."""
    _, centres = magnitude_levels()
    vectors = sign_matrix(summary.signs) * centres[summary.magnitudes]
    rotated = rotate(query, signs) / math.sqrt(len(signs))
    parts = (vectors * rotated).reshape(*summary.weights.shape, SUBSPACE)
    return (summary.weights * parts.sum(axis=-1)).sum(axis=-1)


# --- Coarse scores: exact integers -------------------------------------------------------------


def log_sum_exp(x: np.ndarray, axis: int = -1) -> np.ndarray:
    top = x.max(axis=axis, keepdims=True, initial=-np.inf)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.squeeze(np.log(np.exp(x - shift).sum(axis=axis, keepdims=True)) + shift, axis)


@dataclass(frozen=True)
class Logits:
    """How logits are made of q.k; scale None is 1 / sqrt(head_dim)."""

    scale: float | None = None
    softcap: float = 0.0
    sink_bias: np.ndarray | None = None

    def factor(self, head_dim: int) -> float:
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale

    def of(self, products: np.ndarray, head_dim: int) -> np.ndarray:
        logits = products * self.factor(head_dim)
        return self.softcap * np.tanh(logits / self.softcap) if self.softcap else logits


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, logits: Logits = Logits()
) -> tuple[np.ndarray, np.ndarray]:
    """One token's queries over all rows: output (query_heads, value_dim) and log-sum-exp."""
    return attention_over(q, k, v, [np.arange(len(k))] * k.shape[1], logits)


def attention_over(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    rows: Sequence[np.ndarray],
    logits: Logits = Logits(),
) -> tuple[np.ndarray, np.ndarray]:
    """The same over the rows given for each kv head."""
    group = len(q) // k.shape[1]
    out, lse = np.zeros((len(q), v.shape[-1])), np.zeros(len(q))
    for h, query in enumerate(q):
        head = h // group
        x = logits.of(k[rows[head], head] @ query, q.shape[-1])
        bias = -np.inf if logits.sink_bias is None else logits.sink_bias[h]
        lse[h] = log_sum_exp(np.append(x, bias))
        if np.isfinite(lse[h]):
            out[h] = np.exp(x - lse[h]) @ v[rows[head], head]
    return out, lse


def causal_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, logits: Logits = Logits()
) -> tuple[np.ndarray, np.ndarray]:
    """The last len(q) tokens, each over everything up to itself."""
    before = len(k) - len(q)
    steps = [
        attention(query, k[: before + i + 1], v[: before + i + 1], logits)
        for i, query in enumerate(q)
    ]
    if not steps:
        return np.zeros((*q.shape[:2], v.shape[-1])), np.zeros(q.shape[:2])
    return np.stack([out for out, _ in steps]), np.stack([lse for _, lse in steps])


# --- What a row is worth -----------------------------------------------------------------------


def group_attention(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """What each key (tokens, head_dim) gets of a group's queries, on the average: (tokens)."""
    logits = Logits().of(queries @ keys.T, keys.shape[1])
    return np.exp(logits - log_sum_exp(logits)[:, None]).mean(axis=0)
