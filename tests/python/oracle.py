"""The paper's mathematics in fp64 NumPy: what every backend is held against.

Written to be read beside the formulas, not to be fast. Where the contract fixes integers (the
quantised query, the coarse score, the votes) the same integers come out here, so those are
compared exactly; everything else is compared to a tolerance that the test states.

Shapes: keys and values (tokens, kv_heads, head_dim), queries (query_heads, head_dim), summaries
(kv_heads, tokens, ...). Query head h shares kv head h // group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SUBSPACE = 8
TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)
QUERY_LEVELS = 15
SCORE_STEPS = 16
SCORE_SHIFT = 4
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
    products = (vectors * rotated).reshape(*vectors.shape[:-1], -1, SUBSPACE).sum(axis=-1)
    return (summary.weights * products).sum(axis=-1)


# --- Coarse scores: exact integers -------------------------------------------------------------


def quantised_query(query: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """The rotated query in whole steps of its largest element; fp32 like every backend."""
    rotated = rotate(query.astype(np.float32), signs)
    largest = np.abs(rotated).max()
    if not np.isfinite(rotated).all() or largest == 0:
        return np.zeros(len(signs), dtype=np.int64)
    step = np.float32(QUERY_LEVELS) / largest
    return np.rint(rotated * step).astype(np.int64)


def fused_multiply_add(a: np.ndarray, b: np.float32, c: np.float32) -> np.ndarray:
    """fp32 a * b + c rounded once: the fp64 sum is rounded to odd, which fp32 rounds right."""
    product, addend = a.astype(np.float64) * np.float64(b), np.float64(c)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    even = total.view(np.int64) % 2 == 0
    nudged = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, nudged, total).astype(np.float32)


def searching(queries: np.ndarray) -> np.ndarray:
    """Those that search at all: a query that is not finite has no say."""
    return queries[np.isfinite(queries).all(axis=-1)]


def sign_norm_scores(summary: Summary, queries: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Scores 0 to 255 of one kv head's keys: the best of the group's heads on a common scale."""
    key_signs, norms = sign_matrix(summary.signs), summary.norms.astype(np.float64)
    usable = norms > 0
    count = usable.sum()
    best = np.ones(len(norms), dtype=np.float32)
    sums = (key_signs * norms[:, None])[usable].sum(axis=0)
    for query in searching(queries):
        q4 = quantised_query(query, signs)
        variance = float((q4 * q4).sum()) * ((norms * norms).sum() / count) if count else 0.0
        gain, offset = 0.0, float(SCORE_SHIFT * SCORE_STEPS)
        if variance > 0:
            gain = SCORE_STEPS / math.sqrt(variance)
            offset -= (sums @ q4) / count * gain
        with np.errstate(invalid="ignore"):
            product = ((key_signs @ q4) * norms).astype(np.float32)  # 12 + 5 bits: exact
        best = np.maximum(best, fused_multiply_add(product, np.float32(gain), np.float32(offset)))
    scores = np.floor(np.minimum(best, 255)).astype(np.uint8)
    return np.where(usable, scores, 0).astype(np.uint8)


def centroid_votes(part: np.ndarray, counts: np.ndarray, keys: int, ratio: float) -> np.ndarray:
    """Votes (256) of one subspace: from the nearest centroid down while a tier has room."""
    nearness = np.zeros(256, dtype=np.float32)
    ids = np.arange(256)
    for j in range(SUBSPACE):
        nearness = nearness + np.where(ids >> j & 1, part[j], -part[j])
    order = np.argsort(-nearness, kind="stable")  # ties to the lower id
    before = np.cumsum(counts[order]) - counts[order]
    votes = np.zeros(256, dtype=np.int64)
    for tier in TIERS:
        votes[order] += before < math.ceil(keys * ratio * tier)
    return votes


def vote_scores(
    summary: Summary, queries: np.ndarray, signs: np.ndarray, ratio: float
) -> np.ndarray:
    """1 + the votes of a key's centroids, the most of any head; 0 for unusable keys."""
    usable = summary.norms > 0
    best = np.zeros(len(usable), dtype=np.int64)
    for query in searching(queries):
        rotated = rotate(query.astype(np.float32), signs)
        total = np.zeros(len(usable), dtype=np.int64)
        for b in range(len(signs) // SUBSPACE):
            ids = summary.signs[:, b]
            counts = np.bincount(ids[usable], minlength=256)
            part = rotated[b * SUBSPACE : (b + 1) * SUBSPACE]
            total += centroid_votes(part, counts, int(usable.sum()), ratio)[ids]
        best = np.maximum(best, total)
    return np.where(usable, 1 + best, 0).astype(np.uint8)


def best_scores(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` best scores above 0, ties to the lower index, ascending."""
    order = np.argsort(-scores.astype(np.int64), kind="stable")
    order = order[scores[order] > 0]
    return np.sort(order[:count])


def schedule_step(config, zone_tokens: int) -> tuple[float, float]:
    """(candidate ratio, vote ratio) for a zone of this many tokens."""
    steps = [step for step in config.schedule if step[0] <= zone_tokens]
    return tuple((steps or config.schedule[:1])[-1][1:])


def candidate_count(config, zone_tokens: int) -> int:
    share = math.ceil(schedule_step(config, zone_tokens)[0] * zone_tokens)
    return min(zone_tokens, max(share, config.min_candidates_per_row * config.top_k))


# --- Attention ---------------------------------------------------------------------------------


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

    def of(self, products: np.ndarray, head_dim: int) -> np.ndarray:
        logits = products * (1 / math.sqrt(head_dim) if self.scale is None else self.scale)
        return self.softcap * np.tanh(logits / self.softcap) if self.softcap else logits


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, logits: Logits = Logits()
) -> tuple[np.ndarray, np.ndarray]:
    """One token's queries over all rows: output (query_heads, head_dim) and log-sum-exp."""
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
    out, lse = np.zeros(q.shape), np.zeros(len(q))
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
        return np.zeros(q.shape), np.zeros(q.shape[:2])
    return np.stack([out for out, _ in steps]), np.stack([lse for _, lse in steps])


# --- What a row is worth -----------------------------------------------------------------------


def attention_mass(estimates: np.ndarray, resident: np.ndarray) -> np.ndarray:
    """Mean over the group of exp(e_h(i) - L_h); estimates (group, candidates), R_h (group)."""
    everything = np.logaddexp(resident, log_sum_exp(estimates))[:, None]
    return np.where(np.isfinite(everything), np.exp(estimates - everything), 0).mean(axis=0)


def group_mean(queries: np.ndarray) -> np.ndarray:
    """The mean query of a group, in fp32 like every backend (the search it feeds is exact)."""
    total = np.zeros(queries.shape[-1], dtype=np.float32)
    for query in queries.astype(np.float32):
        total = total + query
    return total / np.float32(len(queries))


# --- One decode step ---------------------------------------------------------------------------


@dataclass
class Decoded:
    out: np.ndarray
    lse: np.ndarray
    searched: bool
    coarse: list[np.ndarray]
    candidates: list[np.ndarray]  # positions per kv head, ascending
    estimates: list[np.ndarray]  # logits of the candidates per kv head: (searchers, candidates)
    worth: list[np.ndarray]  # of the candidates per kv head
    positions: list[np.ndarray]  # per kv head, best first
    resident: np.ndarray  # R_h: log-sum-exp of the resident rows, sink bias and all


def searches(config, regions: tuple[int, int, int, int]) -> bool:
    return sum(regions) >= config.dense_below and regions[1] > config.top_k


def decode(config, q, k, v, regions, summaries: Sequence[Summary], logits=Logits()) -> Decoded:
    """Attention after the new token is stored; `summaries` of the zone, one per kv head."""
    sink, zone = regions[0], regions[1]
    if not searches(config, regions):
        out, lse = attention(q, k, v, logits)
        return Decoded(out, lse, False, [], [], [], [], [], lse)

    signs = rotation_signs(rotated_dim(config.head_dim), config.seed)
    group = config.query_heads // config.kv_heads
    vote_ratio = schedule_step(config, zone)[1]
    kept = np.r_[0:sink, sink + zone : len(k)]
    _, resident = attention_over(q, k, v, [kept] * config.kv_heads, logits)
    result = Decoded(np.empty(0), np.empty(0), True, [], [], [], [], [], resident)
    rows = []
    for head, summary in enumerate(summaries):
        members = slice(head * group, (head + 1) * group)
        mean = config.group_rule == "mean_query"
        queries = group_mean(q[members])[None] if mean else q[members]
        if config.scorer == "votes":
            coarse = vote_scores(summary, queries, signs, vote_ratio)
        else:
            coarse = sign_norm_scores(summary, queries, signs)
        chosen = best_scores(coarse, candidate_count(config, zone))
        part = Summary(*(getattr(summary, f)[chosen] for f in Summary.__annotations__))
        e = np.stack([estimate(part, query.astype(np.float64), signs) for query in queries])
        e = logits.of(e, config.head_dim)
        worth = e[0] if mean else attention_mass(e, resident[members])
        best = np.argsort(-worth, kind="stable")[: config.top_k]
        result.coarse.append(coarse)
        result.candidates.append(sink + chosen)
        result.estimates.append(e)
        result.worth.append(worth)
        result.positions.append(sink + chosen[best])
        rows.append(np.r_[kept, sink + chosen[best]])
    result.out, result.lse = attention_over(q, k, v, rows, logits)
    return result
