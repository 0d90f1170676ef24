"""PRKV in NumPy: the rows that a sequence keeps, digests of pages, and the best pages of a query.

What is kept is decided in whole numbers, as every backend does it (observe.h), so positions are
equal. Digests are 16-bit floats, so they are equal too. Scores of pages are doubles: an engine's
pages may differ from the best ones where scores are as good as equal.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pariskv_core as pk
from oracle_hardkv import (
    NO_LOGIT,
    Head,
    Model,
    Query,
    Rounded,
    logit_steps,
    reference_of,
    rounded_keys,
    shares_of,
    weights_of,
)

RECENT = 64  # queries that are remembered
LEAST_ROWS, PART, LATEST = 8192, 4, 256  # what a refresh looks at: rows of pages, pages, rows
MOST_SCORE = 2.0**100


def split(policy: pk.PRKV, static_pages: int) -> tuple[int, int]:
    """Kept rows and pages that a budget is spent on, with so many pages' worth of kept rows."""
    pages = policy.budget // policy.page - static_pages
    return (policy.budget - pages * policy.page if static_pages else 0), pages


def digest(keys: np.ndarray, box: bool) -> tuple[np.ndarray, np.ndarray]:
    """Middle and distance (head_dim) of keys (count, head_dim) float32, as doubles."""
    keys = keys[np.isfinite(keys).all(axis=1)]
    if not len(keys):
        return np.full((2, keys.shape[1]), np.nan)
    low, high = keys.min(axis=0), keys.max(axis=0)
    largest = float(np.abs(keys).max())
    exponent = max(int(np.frexp(largest)[1]) - 1, -100) if largest else 0
    up, half = np.float32(2.0 ** (14 - exponent)), np.float32(0.5)
    middle = ((low * up) * half + (high * up) * half).astype(np.float16)
    away = np.abs(keys * up - middle.astype(np.float32))
    if box:
        centre = middle.astype(float)
        reach = np.maximum((high * up).astype(float) - centre, centre - (low * up).astype(float))
        near = reach.astype(np.float32).astype(np.float16)
        distance = np.where(near < reach, np.nextafter(near, np.float16(np.inf)), near)
    else:
        total = np.add.accumulate(away, axis=0)[-1]
        distance = (total / np.float32(len(keys))).astype(np.float16)
    unit = 2.0 ** (exponent - 14)
    return middle.astype(np.float64) * unit, distance.astype(np.float64) * unit


@functools.lru_cache(maxsize=1 << 14)
def _digest_of_bytes(keys: bytes, head_dim: int, box: bool) -> tuple[np.ndarray, np.ndarray]:
    return digest(np.frombuffer(keys, dtype=np.float32).reshape(-1, head_dim), box)


def scores(group: np.ndarray, middles: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """The mean over a group's queries (heads, head_dim) of the scores of pages."""
    each = group @ middles.T + np.abs(group) @ distances.T
    return np.clip(each, -MOST_SCORE, MOST_SCORE).mean(axis=0)


Asked = list[tuple[int, np.ndarray, Query]]


def group_shares(
    rounded: Rounded,
    positions: np.ndarray,
    asked: Asked,
    distances: np.ndarray | None = None,
) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """Shares of keys, summed over queries and the group's heads, each with a softmax of its own;
    and the logits of each (heads, queries, count)."""
    shares = np.zeros(len(positions), dtype=np.uint64)
    logits: list[list[np.ndarray]] = [[] for _ in asked[0][1]]
    for position, group, query in asked:
        finite = np.flatnonzero(np.isfinite(group).all(axis=1))
        found = logit_steps(query, group[finite], rounded, distances)
        found[:, positions > position] = NO_LOGIT
        for head, own in zip(finite, found, strict=True):
            shares += shares_of(weights_of(own))
            logits[head].append(own)
    return shares, logits


def best_ranked(ranks: np.ndarray, usable: np.ndarray, heard: bool, count: int) -> np.ndarray:
    """The usable numbers of the largest ranks, the lower first; the last ones if none is heard."""
    numbers = np.flatnonzero(usable)
    if not heard:
        return numbers[max(len(numbers) - count, 0) :]
    order = np.lexsort((numbers, np.iinfo(np.uint64).max - ranks[numbers]))
    return np.sort(numbers[order[:count]])


def best(logits: np.ndarray, count: int) -> set[int]:
    seen = np.flatnonzero(logits > NO_LOGIT)
    return set(seen[np.argsort(-logits[seen], kind="stable")][:count].tolist())


@dataclass(frozen=True)
class Found:
    """What a step finds for one kv head."""

    scores: np.ndarray  # (pages of the zone) -inf: none of its rows can be selected
    live: list[list[int]]  # (pages of the zone) positions
    pages: int  # that are to be found


class PRKVModel(Model):
    """One layer of one sequence."""

    def __init__(self, config: pk.Config):
        recent = 0 if config.policy.static_share == 0 else RECENT
        super().__init__(config, recent, config.policy.page)
        share, policy = config.policy.static_share, config.policy
        self.auto = share == "auto"
        self.static = 0 if self.auto else int(policy.budget * share + 1e-6) // policy.page

    def copy(self) -> PRKVModel:
        twin = super().copy()
        twin.static = self.static
        return twin

    @property
    def searches(self) -> bool:
        begin, end = self.zone
        return len(self.k) >= self.config.dense_below and end - begin > self.config.policy.budget

    @property
    def first_page(self) -> int:
        return self.zone[0] // self.config.policy.page

    def _chooses(self) -> bool:
        return self.searches and (self.auto or split(self.config.policy, self.static)[0] > 0)

    def _chosen(
        self, recent: list[tuple[int, Query]], entered: int, fresh: bool, cut: bool = False
    ) -> list[Head]:
        (begin, end), group = self.zone, self.config.query_heads // self.config.kv_heads
        policy, told, agreed = self.config.policy, [], []
        for h in range(self.config.kv_heads):
            asked = [(p, q.q[h * group : (h + 1) * group], q) for p, q in recent]
            reference = reference_of(self.k[begin:end, h])
            wanted = 0 if fresh else self.looked_at()
            positions = np.arange(begin, end)
            if wanted:
                positions = self._rows_of_pages(h, asked, reference, wanted)
            rounded = rounded_keys(self.k[positions, h], reference)
            shares, logits = group_shares(rounded, positions, asked)
            told.append((positions, shares, rounded.usable, any(logits)))
            for own in filter(None, logits):
                both = best(own[0], policy.budget) & best(own[-1], policy.budget)
                agreed.append(len(both))
        if self.auto and fresh and not cut:
            self.static = sum(agreed) // (len(agreed) * policy.page) if agreed else 0
        rows = split(policy, self.static)[0]
        return [
            Head(positions[best_ranked(shares // np.uint64(group), usable, heard, rows)].tolist())
            for positions, shares, usable, heard in told
        ]

    def looked_at(self) -> int:
        """The best pages that a refresh looks at; 0: at all rows."""
        page = self.config.policy.page
        pages = (self.zone[1] - 1) // page + 1 - self.first_page
        wanted = max(-(-pages // PART), -(-LEAST_ROWS // page))
        digests = self.auto or split(self.config.policy, self.static)[1] > 0
        return wanted if digests and wanted < pages else 0

    def _rows_of_pages(
        self, head: int, asked: Asked, reference: np.ndarray, wanted: int
    ) -> np.ndarray:
        """Positions: of the best pages, those that are kept, and the latest ones."""
        (begin, end), page = self.zone, self.config.policy.page
        digests, _ = self.digests(head)
        middles, distances = np.swapaxes(digests, 0, 1).astype(np.float32)
        middles[~np.isfinite(distances).all(axis=1)] = np.nan
        rounded = rounded_keys(middles, reference)
        first = (self.first_page + np.arange(len(middles))) * page
        ranks, logits = group_shares(rounded, first, asked, distances[rounded.usable])
        ranks //= np.uint64(asked[0][1].shape[0])
        chosen = best_ranked(ranks, rounded.usable, any(logits), wanted)
        seen = np.zeros(len(middles) * page, dtype=bool)
        seen.reshape(-1, page)[chosen] = True
        seen[np.array(self.heads[head].kept, dtype=int) - first[0]] = True
        seen[max(end - LATEST, begin) - first[0] : end - first[0]] = True
        seen[: begin - first[0]] = False
        return first[0] + np.flatnonzero(seen)

    def kept(self, head: int) -> list[int]:
        return [] if self.heads is None else self.heads[head].kept

    def digests(self, head: int, without: list[int] = ()) -> tuple[list, list[list[int]]]:
        """Of each page of the zone, and the positions it is of: those that are not kept."""
        (begin, end), page = self.zone, self.config.policy.page
        usable = np.zeros(end, dtype=bool)
        usable[begin:] = np.isfinite(self.k[begin:end, head]).all(axis=1)
        usable[list(without)] = False
        digests, live = [], []
        for first in range(self.first_page * page, end, page):
            rows = first + np.flatnonzero(usable[first : first + page])
            live.append(rows.tolist())
            keys, box = self.k[rows, head], self.config.policy.digest == "max"
            digests.append(_digest_of_bytes(keys.tobytes(), keys.shape[1], box))
        return digests, live

    def find(self, q: np.ndarray) -> list[Found] | None:
        """For a query (query_heads, head_dim); None: all of the zone is attended to."""
        policy, group = self.config.policy, self.config.query_heads // self.config.kv_heads
        pages = split(policy, 0 if self.heads is None else self.static)[1]
        alone = not self.auto and split(policy, self.static)[1] == 0  # pages are never looked for
        if not self.searches or (alone and self.heads is None):
            return None
        found = []
        for h in range(self.config.kv_heads):
            if pages == 0 or alone:
                found.append(Found(np.zeros(0), [], 0))
                continue
            own = q[h * group : (h + 1) * group].astype(np.float64)
            own = own[np.isfinite(own).all(axis=1)]
            digests, live = self.digests(h, self.kept(h))
            found_scores = np.full(len(digests), -np.inf)
            some = [bool(rows) for rows in live]
            if any(some) and len(own):
                middles, distances = np.swapaxes(digests, 0, 1)[:, some]
                found_scores[some] = scores(own, middles, distances)
            found.append(Found(found_scores, live, pages if len(own) else 0))
        return found
