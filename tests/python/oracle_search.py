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
import oracle_tail
from oracle import SUBSPACE, Logits, Summary
from oracle_blocks import Blocks, block_scale, block_sums
from oracle_error import HeadError, mean_squares, spreads, squares_left
from oracle_scale import (
    fused_multiply_add,
    head_scale,
    joined,
    quantised_query,
    score_lines,
    window_octaves,
    window_rows,
)

TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)
SAMPLED_KEYS = 128
LEAST_WORTH = 2.0**-100
PLAIN = Logits()


def searching(queries: np.ndarray) -> np.ndarray:
    """Those that search at all: a query that is not finite has no say."""
    return queries[np.isfinite(queries).all(axis=-1)]


def sign_norm_scores(
    summary: Summary,
    queries: np.ndarray,
    signs: np.ndarray,
    scale: float,
    windows: Sequence[np.float32],
    blocks: Blocks | None = None,
) -> np.ndarray:
    """Scores 0 to 255 of one kv head's keys: those of the group's heads joined, each as the share
    of its attention that a key may get. `windows`: window_octaves of each query, or -inf."""
    key_signs, norms = oracle.sign_matrix(summary.signs), summary.norms.astype(np.float64)
    usable = norms > 0
    if not usable.any():
        return np.zeros(len(norms), dtype=np.uint8)
    heads, quantised, means, places = [], [], [], []
    for place, (asked, window) in enumerate(zip(queries, windows, strict=True)):
        query = asked if blocks is None else blocks.stretched(asked)
        rotated = oracle.rotate(query.astype(np.float32), signs)
        if not np.isfinite(rotated).all():
            continue
        q4 = quantised_query(query, signs)
        largest = np.abs(rotated).max()
        if blocks is None:
            heads.append(head_scale(key_signs[usable], norms[usable], q4, largest, scale, window))
            means.append(np.float32(0))
        else:
            steps = blocks.logits(query, scale)
            sums = block_sums(steps, blocks.zone_begin // blocks.size)
            heads.append(block_scale(norms[usable], sums, q4, largest, scale, window))
            means.append(steps[blocks.of(np.arange(len(norms)))].astype(np.float32))
        quantised.append(q4)
        places.append(place)
    of_heads = [np.zeros(len(norms), dtype=np.int64) for _ in queries]
    lines, octave = score_lines(heads, len(queries))
    for place, line, q4, steps in zip(places, lines, quantised, means, strict=True):
        product = ((key_signs @ q4) * norms).astype(np.float32)  # 12 + 5 bits: exact
        square = (norms * norms).astype(np.float32)
        base = (
            line.offset if blocks is None else fused_multiply_add(steps, line.per_step, line.offset)
        )
        raised = fused_multiply_add(square, line.variance_term, base)
        score = fused_multiply_add(product, line.slope, raised)
        of_heads[place] = np.floor(np.clip(score, 0, 255)).astype(np.int64)
    return np.where(usable, joined(of_heads, octave), 0).astype(np.uint8)


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


def totals(
    estimates: np.ndarray, others: np.ndarray, weight: float, resident: np.ndarray
) -> np.ndarray:
    """L_h (group): over the resident rows, the candidates, and the other keys, which few stand
    for. R_h is of (group), the others are of (group, keys)."""
    seen = np.concatenate([estimates, others + np.log(weight)], axis=1)
    return np.logaddexp(resident, oracle.log_sum_exp(seen))


def attention_mass(
    estimates: np.ndarray, others: np.ndarray, weight: float, resident: np.ndarray
) -> np.ndarray:
    """Mean over the group of exp(e_h(i) - L_h). What is worth next to nothing goes by the logit
    that is nearest to its head's L_h."""
    everything = totals(estimates, others, weight, resident)[:, None]
    below = np.where(np.isfinite(everything), estimates - everything, -np.inf)
    worth = np.exp(below).mean(axis=0)
    return np.where(worth < LEAST_WORTH, LEAST_WORTH / (1 - below.max(axis=0)), worth)


def lengths(queries: np.ndarray, logits: Logits, blocks: Blocks | None) -> np.ndarray:
    """(queries), as keys are encoded, times the scale of a logit."""
    asked = queries if blocks is None else np.stack([blocks.stretched(q) for q in queries])
    return np.linalg.norm(asked.astype(np.float64), axis=1) * logits.factor(queries.shape[1])


@dataclass
class Found:
    """What a search knows of a kv head before a budget: queries first."""

    chosen: np.ndarray  # candidates, from the zone's begin
    estimates: np.ndarray  # (group, candidates)
    off: np.ndarray  # (group, candidates): their spread
    others: np.ndarray  # (group, keys) logits of keys that are no candidates
    keys_of_one: float  # of how many each of these is one
    resident: np.ndarray  # R_h
    everything: np.ndarray  # L_h
    worth: np.ndarray  # of the candidates
    best: np.ndarray  # of them, best first


def head_error(
    config,
    q: np.ndarray,
    k: np.ndarray,
    regions,
    found: Found,
    logits: Logits,
    tail_keys: np.ndarray,
) -> HeadError | None:
    """None without a tail. q (group, head_dim), k (tokens, head_dim), and keys of the tail as they
    are read."""
    begin, end = regions[0], regions[0] + regions[1]
    if config.policy.tail != "sample":
        return None
    tail = oracle_tail.sampled(begin, end, config.policy.tail_rows, config.policy.seed)
    heard = np.isfinite(found.everything)
    rest = np.exp(2 * (found.others[heard] - found.everything[heard, None])).sum(axis=1).mean()
    positions = begin + found.chosen[found.best]
    drawn = logits.of(q @ tail_keys[tail].T, q.shape[-1])
    return HeadError(
        weight=(end - begin) / len(tail),
        squares=squares_left(
            mean_squares(found.estimates, found.off, found.everything), found.best
        ),
        rest=found.keys_of_one * rest,
        logits=np.where(np.isfinite(drawn), drawn, -np.inf),
        tail=tail,
        best=positions,
        worth=found.worth[found.best],
        exact=logits.of(q @ k[positions].T, q.shape[-1]),
        resident=found.resident,
    )


def tail_weight(config, begin: int, end: int) -> float | None:
    """Keys of a zone that a row of its tail stands for; None without a tail."""
    if config.policy.tail != "sample":
        return None
    rows = oracle_tail.sampled(begin, end, config.policy.tail_rows, config.policy.seed)
    return (end - begin) / len(rows)


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
    mass: list[float]  # per kv head: the share of all rows attended to
    errors: list[HeadError]  # per kv head

    @property
    def error(self) -> list[float]:
        return [e.told(rows) for e, rows in zip(self.errors, self.positions, strict=True)]


def searches(config, regions: tuple[int, int, int, int]) -> bool:
    return sum(regions) >= config.dense_below and regions[1] > config.policy.top_k


def coarse_scores(
    config,
    q,
    k,
    regions,
    summaries: Sequence[Summary],
    logits: Logits = PLAIN,
    blocks: Sequence[Blocks | None] | None = None,
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
        mine = None if blocks is None else blocks[head]
        found.append(sign_norm_scores(summary, queries, signs, scale, windows, mine))
    return found


def estimates_of(
    summary: Summary,
    chosen: np.ndarray,
    queries: np.ndarray,
    signs: np.ndarray,
    logits: Logits,
    blocks: Blocks | None,
) -> np.ndarray:
    """Logits (queries, chosen) of some keys, with what their block's mean adds."""
    part = Summary(*(getattr(summary, f)[chosen] for f in Summary.__annotations__))
    head_dim = queries.shape[-1]
    if blocks is None:
        e = [oracle.estimate(part, query.astype(np.float64), signs) for query in queries]
        return logits.of(np.stack(e), head_dim)
    found = []
    for query in queries:
        stretched, scale = blocks.stretched(query), logits.factor(head_dim)
        mean = blocks.logits(stretched, scale)[blocks.of(chosen)] * (np.log(2) / 64)
        product = oracle.estimate(part, stretched.astype(np.float64), signs)
        found.append(product + mean / scale)
    return logits.of(np.stack(found), head_dim)


def decode(
    config,
    q,
    k,
    v,
    regions,
    summaries: Sequence[Summary],
    logits: Logits = PLAIN,
    blocks: Sequence[Blocks | None] | None = None,
    tail_keys: np.ndarray | None = None,
) -> Decoded:
    """Attention after the new token is stored; `summaries` of the zone, one per kv head, and what
    is known of its blocks. `tail_keys`: keys as they are read from the tail's copies; None: as
    they are."""
    sink, zone = regions[0], regions[1]
    if not searches(config, regions):
        out, lse = oracle.attention(q, k, v, logits)
        return Decoded(out, lse, False, [], [], [], [], [], lse, [], [])

    signs = oracle.rotation_signs(oracle.rotated_dim(config.head_dim), config.policy.seed)
    group = config.query_heads // config.kv_heads
    kept = np.r_[0:sink, sink + zone : len(k)]
    _, resident = oracle.attention_over(q, k, v, [kept] * config.kv_heads, logits)
    coarse = coarse_scores(config, q, k, regions, summaries, logits, blocks)
    result = Decoded(np.empty(0), np.empty(0), True, coarse, [], [], [], [], resident, [], [])
    rows = []
    for head, summary in enumerate(summaries):
        members = slice(head * group, (head + 1) * group)
        mean = config.policy.group_rule == "mean_query"
        queries = group_mean(q[members])[None] if mean else q[members]
        chosen = best_scores(coarse[head], candidate_count(config, zone))
        mine = None if blocks is None else blocks[head]
        e = estimates_of(summary, chosen, queries, signs, logits, mine)
        others, keys_of_one = sampled_offsets(coarse[head], chosen)
        rest = estimates_of(summary, others, queries, signs, logits, mine)
        worth = e[0] if mean else attention_mass(e, rest, keys_of_one, resident[members])
        best = np.argsort(-worth, kind="stable")[: config.policy.top_k]
        if not mean:
            everything = totals(e, rest, keys_of_one, resident[members])
            share = np.exp(resident[members] - everything).mean()
            off = np.zeros_like(e)
            if config.policy.error is not None:
                off = spreads(summary, chosen, lengths(queries, logits, mine))
            found = Found(
                chosen, e, off, rest, keys_of_one, resident[members], everything, worth, best
            )
            copies = (k if tail_keys is None else tail_keys)[:, head]
            errors = head_error(config, queries, k[:, head], regions, found, logits, copies)
            if errors is not None:
                best = best[: errors.rows(config.policy.error)]
                result.errors.append(errors)
            result.mass.append(share + worth[best].sum())
        result.candidates.append(sink + chosen)
        result.estimates.append(e)
        result.worth.append(worth)
        result.positions.append(sink + chosen[best])
        rows.append(np.r_[kept, sink + chosen[best]])
    result.out, result.lse = oracle.attention_over(q, k, v, rows, logits)
    return result
