"""The search in NumPy: coarse scores, candidates, what they are worth. See oracle.py.

Where the contract fixes integers (the quantised query, the coarse score, the votes) the same
integers come out here, so those are compared exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import oracle
from oracle import SUBSPACE, Logits, Summary

TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)
QUERY_LEVELS = 15
SCORE_STEPS = 16
SCORE_SHIFT = 4
# Resident rows that a head's share is judged by: the first, and the last before the newest token.
FIRST_ROWS, LAST_ROWS = 16, 112
# Steps of their logits to an octave, a factor of two in attention.
OCTAVE_STEPS = 64
MOST_STEPS = 2.0**20
SAMPLED_KEYS = 128
PLAIN = Logits()


def quantised_query(query: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """The rotated query in whole steps of its largest element; fp32 like every backend."""
    rotated = oracle.rotate(query.astype(np.float32), signs)
    with np.errstate(over="ignore", divide="ignore"):
        step = np.float32(QUERY_LEVELS) / np.abs(rotated).max()
    if not np.isfinite(rotated).all() or not np.isfinite(step):
        return np.zeros(len(signs), dtype=np.int64)
    return np.rint(rotated * step).astype(np.int64)


def fused_multiply_add(a: np.ndarray, b: np.float32, c: np.ndarray | np.float32) -> np.ndarray:
    """fp32 a * b + c rounded once: the fp64 sum is rounded to odd, which fp32 rounds right."""
    product, addend = a.astype(np.float64) * np.float64(b), np.asarray(c, dtype=np.float64)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    even = total.view(np.int64) % 2 == 0
    nudged = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, nudged, total).astype(np.float32)


def searching(queries: np.ndarray) -> np.ndarray:
    """Those that search at all: a query that is not finite has no say."""
    return queries[np.isfinite(queries).all(axis=-1)]


def rough_log2(x: np.float32) -> np.float32:
    """A line from power of two to power of two."""
    mantissa, exponent = np.frexp(np.float32(x))
    return np.float32(exponent - 1) + (2 * mantissa - np.float32(1))


def rough_exp2(x: np.float32) -> np.float32:
    """Its inverse, for x up to 0."""
    if not x >= -30:
        return np.float32(0)
    whole = np.floor(x)
    return np.ldexp(np.float32(1) + (x - whole), int(whole))


def window_rows(total: int, zone_begin: int, zone_end: int) -> np.ndarray:
    """The resident rows that are looked at; the newest is never among them."""
    last = range(max(zone_end, total - 1 - LAST_ROWS), total - 1)
    return np.array([*range(min(zone_begin, FIRST_ROWS)), *last], dtype=np.int64)


def window_octaves(
    query: np.ndarray,
    rows: np.ndarray,
    scale: float,
    softcap: float = 0.0,
    bias: float | None = None,
) -> np.float32:
    """R: log2 of the attention, before it is shared out, of rows (count, head_dim) and a bias.

    In whole numbers: queries and keys of 8 bits, logits in 64ths of an octave.
    """
    one = np.float32
    query, rows = query.astype(np.float32), rows.astype(np.float32)
    with np.errstate(all="ignore"):
        largest = np.abs(query).max()
        levels = one(127) / largest
        q8 = np.rint(query * (levels if np.isfinite(levels) else one(0))).astype(np.int64)
        base = one(scale) * (largest / one(127)) * one(92.3324826)
        keys = rows[np.isfinite(rows).all(axis=1)]
        biggest = np.abs(keys).max(axis=1, initial=0)
        exponents = np.maximum((biggest.view(np.int32) >> 23), 16) - 127
        k8 = np.clip(np.rint(np.ldexp(keys, (6 - exponents)[:, None])), -127, 127).astype(np.int64)
        unit = base * np.ldexp(one(1), exponents - 6)
        logits = np.where(np.isfinite(unit), (k8 @ q8).astype(np.float32) * unit, 0)
        steps = np.rint(np.clip(logits, -MOST_STEPS, MOST_STEPS)).astype(np.int64)
        if softcap > 0:
            cap = int(np.rint(min(one(softcap) * one(92.3324826), one(MOST_STEPS))))
            steps = np.clip(steps, -cap, cap)
        if bias is not None and np.isfinite(bias):
            step = np.rint(np.clip(one(bias) * one(92.3324826), -MOST_STEPS, MOST_STEPS))
            steps = np.append(steps, int(step))
    if not len(steps):
        return one(-np.inf)
    less = steps.max() - steps
    less = less[less < 16 * OCTAVE_STEPS]
    total = ((OCTAVE_STEPS + -less % OCTAVE_STEPS << 10) >> (less + OCTAVE_STEPS - 1) // 64).sum()
    return one(steps.max()) / one(OCTAVE_STEPS) + (rough_log2(one(total)) - one(16))


@dataclass
class HeadScale:
    """Where a head's logits lie, in octaves."""

    slope: np.float32  # by dot * norm
    variance_term: np.float32  # by norm squared
    mean: np.float32
    spread: np.float32
    total: np.float32  # log2 of all attention, before it is shared out


def head_scale(
    key_signs: np.ndarray, norms: np.ndarray, q4: np.ndarray, largest: np.float32, scale, window
) -> HeadScale:
    """From usable keys (tokens, rotated_dim), at least one; fp32 where a backend has fp32."""
    one, dim, square = np.float32, len(q4), int((q4 * q4).sum())
    units = np.rint(norms * 512).astype(np.int64)
    sums = (key_signs.astype(np.int64) * units[:, None]).sum(axis=0)
    inverse = 1 / len(norms)
    means = np.rint(sums * inverse).astype(np.int64)
    mean_square = float((units * units).sum()) * inverse
    mean = float(int(sums @ q4)) * inverse / 512
    common = float(int((q4 * q4 * means * means).sum()))
    variance = max(float(square) * mean_square - common, 0.0)
    with np.errstate(all="ignore"):
        slope = one(scale) * (largest / one(QUERY_LEVELS)) * (one(1.44269504) / one(dim))
        variance_term = slope * slope * one(square) * one(0.125939)
        mu = slope * one(mean) + variance_term * one(mean_square / 512**2)
        spread = np.sqrt(slope * slope * one(variance / 512**2))
        count = rough_log2(one(len(norms)))
        reach = np.minimum(spread * one(0.693147), np.sqrt(count * one(1.386294)))
        zone = mu + reach * spread - reach * reach * one(0.721348) + count
        more, less = (window, zone) if window > zone else (zone, window)
        return HeadScale(slope, variance_term, mu, spread, more + rough_exp2(less - more))


def score_lines(heads: Sequence[HeadScale]) -> list[tuple[np.float32, np.float32, np.float32]]:
    """Per head: slope, variance term and offset of scores; the best head's mean key scores 64."""
    one = np.float32
    anchor, spread = one(-np.inf), one(2.0**-6)
    lines = []
    with np.errstate(all="ignore"):
        for head in heads:
            if head.mean - head.total > anchor:
                anchor = head.mean - head.total
                spread = np.maximum(head.spread, one(2.0**-6))
        steps, middle = one(SCORE_STEPS) / spread, one(SCORE_SHIFT * SCORE_STEPS)
        for head in heads:
            offset = middle - (head.total + anchor) * steps
            line = (head.slope * steps, head.variance_term * steps, offset)
            lines.append(line if np.isfinite(line).all() else (one(0), one(0), middle))
    return lines


def sign_norm_scores(
    summary: Summary,
    queries: np.ndarray,
    signs: np.ndarray,
    scale: float,
    windows: Sequence[np.float32],
) -> np.ndarray:
    """Scores 0 to 255 of one kv head's keys: the best of the group's heads, each as the share of
    its attention that a key may get. `windows`: window_octaves of each query, or -inf."""
    key_signs, norms = oracle.sign_matrix(summary.signs), summary.norms.astype(np.float64)
    usable = norms > 0
    best = np.ones(len(norms), dtype=np.float32)
    if not usable.any():
        return np.zeros(len(norms), dtype=np.uint8)
    heads, quantised = [], []
    for query, window in zip(queries, windows, strict=True):
        rotated = oracle.rotate(query.astype(np.float32), signs)
        if not np.isfinite(rotated).all():
            continue
        q4 = quantised_query(query, signs)
        largest = np.abs(rotated).max()
        heads.append(head_scale(key_signs[usable], norms[usable], q4, largest, scale, window))
        quantised.append(q4)
    for (slope, variance_term, offset), q4 in zip(score_lines(heads), quantised, strict=True):
        product = ((key_signs @ q4) * norms).astype(np.float32)  # 12 + 5 bits: exact
        raised = fused_multiply_add((norms * norms).astype(np.float32), variance_term, offset)
        best = np.maximum(best, fused_multiply_add(product, slope, raised))
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
        rotated = oracle.rotate(query.astype(np.float32), signs)
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
    steps = [step for step in config.policy.schedule if step[0] <= zone_tokens]
    return tuple((steps or config.policy.schedule[:1])[-1][1:])


def candidate_count(config, zone_tokens: int) -> int:
    share = math.ceil(schedule_step(config, zone_tokens)[0] * zone_tokens)
    return min(zone_tokens, max(share, config.policy.min_candidates_per_row * config.policy.top_k))


# --- Attention ---------------------------------------------------------------------------------


def sampled_offsets(scores: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, float]:
    """Keys that stand for those that are no candidates, and for how many each of them stands."""
    keys = min(len(scores), SAMPLED_KEYS)
    step = len(scores) // keys
    offsets = step // 2 + step * np.arange(keys)
    least = scores[chosen].min(initial=255)
    return offsets[(scores[offsets] > 0) & (scores[offsets] < least)], len(scores) / keys


def attention_mass(
    estimates: np.ndarray, others: np.ndarray, weight: float, resident: np.ndarray
) -> np.ndarray:
    """Mean over the group of exp(e_h(i) - L_h); R_h (group), the others are of (group, keys).

    L_h is over the resident rows, the candidates, and the other keys, which few stand for.
    """
    rest = others + np.log(weight)
    seen = np.concatenate([estimates, rest], axis=1)
    everything = np.logaddexp(resident, oracle.log_sum_exp(seen))[:, None]
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
    return sum(regions) >= config.dense_below and regions[1] > config.policy.top_k


def coarse_scores(
    config, q, k, regions, summaries: Sequence[Summary], logits: Logits = PLAIN
) -> list[np.ndarray]:
    """Scores (zone) of each kv head's keys."""
    signs = oracle.rotation_signs(oracle.rotated_dim(config.head_dim), config.policy.seed)
    group = config.query_heads // config.kv_heads
    sink, zone = regions[0], regions[1]
    scale = logits.factor(config.head_dim)
    near = window_rows(len(k), sink, sink + zone)
    found = []
    for head, summary in enumerate(summaries):
        members = range(head * group, (head + 1) * group)
        mean = config.policy.group_rule == "mean_query"
        queries = group_mean(q[members])[None] if mean else q[members]
        if config.policy.scorer == "votes":
            found.append(vote_scores(summary, queries, signs, schedule_step(config, zone)[1]))
            continue
        windows = [np.float32(-np.inf)]  # with one searcher there is nothing to compare
        if len(queries) > 1:
            bias = [None if logits.sink_bias is None else logits.sink_bias[h] for h in members]
            windows = [
                window_octaves(query, k[near, head], scale, logits.softcap, b)
                for query, b in zip(queries, bias, strict=True)
            ]
        found.append(sign_norm_scores(summary, queries, signs, scale, windows))
    return found


def estimates_of(
    summary: Summary, chosen: np.ndarray, queries: np.ndarray, signs, logits, head_dim: int
) -> np.ndarray:
    """Logits (queries, chosen) of some keys."""
    part = Summary(*(getattr(summary, f)[chosen] for f in Summary.__annotations__))
    e = [oracle.estimate(part, query.astype(np.float64), signs) for query in queries]
    return logits.of(np.stack(e), head_dim)


def decode(
    config, q, k, v, regions, summaries: Sequence[Summary], logits: Logits = PLAIN
) -> Decoded:
    """Attention after the new token is stored; `summaries` of the zone, one per kv head."""
    sink, zone = regions[0], regions[1]
    if not searches(config, regions):
        out, lse = oracle.attention(q, k, v, logits)
        return Decoded(out, lse, False, [], [], [], [], [], lse)

    signs = oracle.rotation_signs(oracle.rotated_dim(config.head_dim), config.policy.seed)
    group = config.query_heads // config.kv_heads
    kept = np.r_[0:sink, sink + zone : len(k)]
    _, resident = oracle.attention_over(q, k, v, [kept] * config.kv_heads, logits)
    coarse = coarse_scores(config, q, k, regions, summaries, logits)
    result = Decoded(np.empty(0), np.empty(0), True, coarse, [], [], [], [], resident)
    rows = []
    for head, summary in enumerate(summaries):
        members = slice(head * group, (head + 1) * group)
        mean = config.policy.group_rule == "mean_query"
        queries = group_mean(q[members])[None] if mean else q[members]
        chosen = best_scores(coarse[head], candidate_count(config, zone))
        e = estimates_of(summary, chosen, queries, signs, logits, config.head_dim)
        others, weight = sampled_offsets(coarse[head], chosen)
        rest = estimates_of(summary, others, queries, signs, logits, config.head_dim)
        worth = e[0] if mean else attention_mass(e, rest, weight, resident[members])
        best = np.argsort(-worth, kind="stable")[: config.policy.top_k]
        result.candidates.append(sink + chosen)
        result.estimates.append(e)
        result.worth.append(worth)
        result.positions.append(sink + chosen[best])
        rows.append(np.r_[kept, sink + chosen[best]])
    result.out, result.lse = oracle.attention_over(q, k, v, rows, logits)
    return result
