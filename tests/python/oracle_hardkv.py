"""HARD-KV in NumPy: which rows a sequence keeps, from the rows and queries that it was given.

Choices are whole numbers, made as every backend makes them (observe.h), so positions are equal.
What is attended to then is left to oracle.attention_over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pariskv_core as pk
from oracle_scale import MOST_STEPS
from regions_model import RegionsModel

RECENT = 32  # queries that are remembered
WEIGHTS = np.rint(2.0**24 * 2.0 ** (-np.arange(64) / 64)).astype(np.uint64)
NO_LOGIT = -(2**30)


@dataclass(frozen=True)
class Query:
    """The queries of one position, (query_heads, head_dim) float32, and how logits are made."""

    q: np.ndarray
    scale: float | None = None
    softcap: float = 0.0


def eight_bits(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows (count, dim) as whole numbers to 127 of a power of two each, which is returned too.

    Whole numbers are doubles here: their sums of products are exact, and come from BLAS.
    """
    biggest = np.abs(x).max(axis=1, initial=0)
    exponents = np.maximum((biggest.view(np.int32) >> 23), 16) - 127
    with np.errstate(over="ignore"):
        whole = np.clip(np.rint(np.ldexp(x, (6 - exponents)[:, None])), -127, 127)
    return whole.astype(np.float64), np.ldexp(np.float32(1), exponents - 6)


def rounded_queries(queries: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Queries (heads, dim) as whole numbers to 127 of the largest element of each, and what turns
    them to steps."""
    one = np.float32
    with np.errstate(all="ignore"):
        largest = np.abs(queries).max(axis=1, keepdims=True)
        levels = one(127) / largest
        numbers = np.rint(queries * np.where(np.isfinite(levels), levels, one(0)))
        return numbers.astype(np.float64), one(scale) * (largest / one(127)) * one(92.3324826)


def steps_of(dots: np.ndarray, units: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        logits = np.where(np.isfinite(units), dots.astype(np.float32) * units, np.float32(0))
        return np.rint(np.clip(logits, -MOST_STEPS, MOST_STEPS)).astype(np.int64)


@dataclass(frozen=True)
class Rounded:
    """Keys as whole numbers and their steps: of what they have in common, in two parts, and of
    what is left of each. `usable` (count) tells which keys these are."""

    common: list[tuple[np.ndarray, np.ndarray]]
    left: tuple[np.ndarray, np.ndarray]
    usable: np.ndarray


def reference_of(keys: np.ndarray) -> np.ndarray:
    """The median, channel by channel, of 15 evenly spaced keys (count, head_dim)."""
    some = keys[[s * len(keys) // 15 for s in range(15)]]
    some = np.sort(some[np.isfinite(some).all(axis=1)], axis=0)
    return some[len(some) // 2] if len(some) else np.zeros(keys.shape[1], dtype=np.float32)


def rounded_keys(keys: np.ndarray, reference: np.ndarray | None = None) -> Rounded:
    """Of keys (count, head_dim): less their reference, if no other is given."""
    reference = reference_of(keys) if reference is None else reference
    common, rest = [], reference[None]
    with np.errstate(all="ignore"):
        left = keys - reference
        usable = np.isfinite(left).all(axis=1)
        for _ in range(2):
            whole, step = eight_bits(rest)
            common.append((whole, step))
            rest = rest - whole.astype(np.float32) * step[:, None]
        return Rounded(common, eight_bits(left[usable]), usable)


def logit_steps(
    query: Query, group: np.ndarray, keys: Rounded, distances: np.ndarray | None = None
) -> np.ndarray:
    """Logits (heads, count) in 64ths of an octave: NO_LOGIT where a key is not usable.

    group: finite queries (heads, head_dim)
    distances: (usable keys, head_dim) whose products with |q| are added
    """
    scale = query.scale if query.scale is not None else 1 / np.sqrt(group.shape[1])
    numbers, units = rounded_queries(group, scale)
    parts = [*keys.common, keys.left]
    signed = [numbers] * 3
    if distances is not None:
        parts.append(eight_bits(distances))
        signed.append(np.abs(numbers))
    with np.errstate(all="ignore"):
        steps = sum(
            steps_of(own @ w.T, units * step) for own, (w, step) in zip(signed, parts, strict=True)
        )
    if query.softcap > 0:
        most = np.float32(query.softcap) * np.float32(92.3324826)
        cap = int(np.rint(min(most, np.float32(MOST_STEPS))))
        if cap < MOST_STEPS:
            steps = np.clip(steps, -cap, cap)
    logits = np.full((len(group), len(keys.usable)), NO_LOGIT, dtype=np.int64)
    logits[:, keys.usable] = steps
    return logits


def weights_of(logits: np.ndarray) -> np.ndarray:
    """2^(steps / 64) in units of 2^-24 of the largest."""
    below = logits.max() - logits
    seen = (logits > NO_LOGIT) & (below < 64 * 25)
    below = np.where(seen, below, 0)
    return np.where(seen, WEIGHTS[below % 64] >> (below // 64).astype(np.uint64), np.uint64(0))


def shares_of(weights: np.ndarray) -> np.ndarray:
    total = int(weights.sum())
    reciprocal = np.uint64(2**63 // total if total else 0)
    return weights * reciprocal >> np.uint64(29)


def pooled(weights: np.ndarray, pool: int) -> np.ndarray:
    """The largest of each row's neighbours among the rows to choose from."""
    reach = pool // 2
    padded = np.pad(weights, reach)
    return np.max([padded[i : i + len(weights)] for i in range(2 * reach + 1)], axis=0)


@dataclass
class Head:
    """What a kv head keeps: positions, ascending; and those it holds, with choices lost."""

    kept: list[int]
    held: dict[int, int] = field(default_factory=dict)


def choose(
    policy: pk.HardKV,
    before: Head,
    positions: list[int],
    keys: np.ndarray,
    queries: list[tuple[int, np.ndarray, Query]],
) -> Head:
    """A kv head's choice among `positions`, ascending, with keys (count, head_dim) float32.

    queries: position, the group's (heads, head_dim), and how its logits are made
    """
    rounded = rounded_keys(keys)
    usable = rounded.usable
    place = np.array(positions)
    shares = np.zeros(len(place), dtype=np.uint64)
    ranks = np.zeros(len(place), dtype=np.uint64)
    heard = False
    for position, group, query in queries:
        finite = group[np.isfinite(group).all(axis=1)]
        if not len(finite):
            continue
        heard = True
        logits = logit_steps(query, finite, rounded).max(axis=0)
        logits[place > position] = NO_LOGIT
        weights = weights_of(logits)
        shares += shares_of(weights)
        ranks += shares_of(pooled(weights, policy.pool if policy.metric == "snapkv" else 1))
    count = policy.most
    if heard and policy.p < 1:
        p = max(int(np.rint(policy.p * 2**20)), 1)
        wanted = (int(shares.sum()) * p + 2**20 - 1) >> 20
        largest = np.concatenate([[0], np.cumsum(np.sort(shares)[::-1])])
        count = int(np.searchsorted(largest, wanted))
    count = min(max(count, policy.least), policy.most, int(usable.sum()))
    numbers = np.flatnonzero(usable)
    order = sorted(numbers, key=(lambda j: (-int(ranks[j]), j)) if heard else lambda j: -j)
    kept = sorted(int(place[j]) for j in order[:count])
    lost = dict.fromkeys(before.kept, 1) | {p: age + 1 for p, age in before.held.items()}
    held = {p: age for p, age in lost.items() if p not in kept and age <= policy.patience}
    return Head(kept, held)


class Model:
    """One layer of one sequence: its rows, its recent queries, and what it keeps.

    recent  queries that are remembered
    grain   a zone ends at multiples of it
    """

    def __init__(self, config: pk.Config, recent: int = RECENT, grain: int = 1):
        self.config, self.recent = config, recent
        self.regions = RegionsModel(config.sink, config.local, config.update, grain)
        self.k = np.zeros((0, config.kv_heads, config.head_dim), dtype=np.float32)
        self.queries: dict[int, Query] = {}
        self.heads: list[Head] | None = None  # None: the zone is attended to in full
        self.keeps = 0

    def copy(self) -> Model:
        twin = type(self)(self.config)
        for tokens in ("sink", "retrieval", "local", "buffer"):
            setattr(twin.regions, tokens, list(getattr(self.regions, tokens)))
        twin.k, twin.queries, twin.heads = self.k, dict(self.queries), self.heads
        return twin

    @property
    def zone(self) -> tuple[int, int]:
        sink, retrieval, _, _ = self.regions.counts()
        return sink, sink + retrieval

    def prefill(self, k: np.ndarray, queries: list[Query] | None) -> None:
        begin, end = self._append(k), self.zone[1]
        self.regions.prefill(range(begin, len(self.k)))
        self._remember(begin, len(k), queries)
        self._flushed(end, len(k) >= self.recent)

    def attend(self, k: np.ndarray, queries: list[Query]) -> None:
        begin, end = self._append(k), self.zone[1]
        for token in range(begin, len(self.k)):
            self.regions.decode(token)
        self._remember(begin, len(k), queries)
        self._flushed(end, len(k) >= self.recent)

    def decode(self, k: np.ndarray, query: Query) -> None:
        begin, end = self._append(k), self.zone[1]
        self.regions.decode(begin)
        self._flushed(end, False)
        self._remember(begin, 1, [query])

    def flush(self) -> None:
        end = self.zone[1]
        self.regions.flush()
        self._flushed(end, False)

    def truncate(self, count: int) -> None:
        begin, end = self.zone
        self.regions.truncate(count)
        self.k = self.k[: len(self.k) - count]
        self.queries = {p: q for p, q in self.queries.items() if p < len(self.k)}
        if self.zone[1] == end or self.heads is None or end == begin:
            return
        if not self.queries or not self._chooses():
            self.heads = None
            return
        self.keeps += 1
        self.heads = self._chosen(sorted(self.queries.items()), self.zone[0], True, cut=True)

    def attended(self) -> list[np.ndarray]:
        """The positions that a query of the last token sees, per kv head."""
        begin, end = self.zone
        total = len(self.k)
        if self.heads is None or total < self.config.dense_below:
            return [np.arange(total)] * self.config.kv_heads
        return [np.r_[:begin, head.kept, end:total].astype(int) for head in self.heads]

    def _append(self, k: np.ndarray) -> int:
        begin = len(self.k)
        self.k = np.concatenate([self.k, k])
        return begin

    def _remember(self, begin: int, count: int, queries: list[Query] | None) -> None:
        if count and queries is None:
            self.queries = {}
        for i, query in enumerate(queries or []):
            self.queries.pop(begin + i - self.recent, None)
            self.queries[begin + i] = query

    def _chooses(self) -> bool:
        policy, (begin, end) = self.config.policy, self.zone
        sure = policy.most if policy.p == 1 else policy.least
        return len(self.k) >= self.config.dense_below and end - begin > sure

    def _flushed(self, end_before: int, whole: bool) -> None:
        begin, end = self.zone
        if end in (end_before, begin):
            return
        since = len(self.k) - self.recent - 1
        recent = [(p, q) for p, q in sorted(self.queries.items()) if p >= since]
        if not recent or not self._chooses():
            self.heads = None
            return
        self.keeps += 1
        self.heads = self._chosen(recent, max(end_before, begin), whole or self.heads is None)

    def _chosen(
        self, recent: list[tuple[int, Query]], entered: int, fresh: bool, cut: bool = False
    ) -> list[Head]:
        """entered: the first position that was not in the zone before."""
        (begin, end), group = self.zone, self.config.query_heads // self.config.kv_heads
        heads = []
        for h in range(self.config.kv_heads):
            before = Head([]) if fresh else self.heads[h]
            since = begin if fresh else entered
            positions = sorted([*before.kept, *before.held]) + list(range(since, end))
            own = [(p, q.q[h * group : (h + 1) * group], q) for p, q in recent]
            heads.append(choose(self.config.policy, before, positions, self.k[positions, h], own))
        return heads
