"""What dense attention would have done, worked out from the cache's own rows after the decode loop.

All sampled steps go through the stored tokens together, a chunk at a time, twice: first for the
log-sum-exps and the exact outputs, then, knowing those, for every row's share of the attention.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pariskv_core import Cache
from pariskv_core.cli.workload import Floats, Halves, Shape

Positions = NDArray[np.int64]

_READ_TOKENS = 2048


@dataclass(frozen=True)
class Sample:
    """One decode step of one layer as the engine did it."""

    step: int
    query: Halves  # (query_heads, head_dim)
    output: Floats  # (query_heads, head_dim)
    chosen: Positions  # (kv_heads, top_k), best first, -1 where there is none
    zone_begin: int
    zone_end: int


@dataclass(frozen=True)
class Verdict:
    """Sample by sample and head by head, the engine against exact attention."""

    recall: Floats  # (samples, kv_heads): of the exactly best rows
    caught: Floats  # (samples, kv_heads): attention mass of the chosen rows
    best: Floats  # (samples, kv_heads): that of the best possible rows
    error: Floats  # (samples, query_heads): ‖output − exact‖ / ‖exact‖
    watched: Floats  # (samples, kv_heads): attention mass of the position asked about, or 0


@dataclass
class _Softmax:
    """A softmax over rows that come in chunks: for one kv head, all samples and the whole group."""

    highest: Floats  # (queries)
    total: NDArray[np.float64]
    output: Floats  # (queries, head_dim), weighted by exp(logit − highest)

    def add(self, logits: Floats, values: Floats) -> None:
        highest = np.maximum(self.highest, logits.max(axis=1))
        shrink = np.exp(self.highest - highest)
        weights = np.exp(logits - highest[:, None])
        self.total = self.total * shrink + weights.sum(axis=1)
        self.output = self.output * shrink[:, None] + weights @ values
        self.highest = highest

    def log_sum_exp(self) -> Floats:
        return (self.highest + np.log(self.total)).astype(np.float32)


class _Best:
    """The rows of most mass so far: (samples, k) masses and positions."""

    def __init__(self, samples: int, k: int) -> None:
        self.mass = np.full((samples, k), -1, np.float32)
        self.position = np.full((samples, k), -1, np.int64)

    def add(self, mass: Floats, begin: int) -> None:
        samples, tokens = mass.shape
        k = self.mass.shape[1]
        masses = np.concatenate([self.mass, mass], axis=1)
        new = np.broadcast_to(np.arange(begin, begin + tokens), (samples, tokens))
        positions = np.concatenate([self.position, new], axis=1)
        keep = np.argpartition(masses, tokens, axis=1)[:, tokens:]
        assert keep.shape[1] == k
        self.mass = np.take_along_axis(masses, keep, axis=1)
        self.position = np.take_along_axis(positions, keep, axis=1)


class _Judge:
    """One layer: queries and results regrouped by kv head."""

    def __init__(self, shape: Shape, samples: list[Sample], watched: Positions) -> None:
        self._shape = shape
        self._samples = samples
        count, heads, group, dim = len(samples), shape.kv_heads, shape.group, shape.head_dim
        stacked = np.stack([sample.query for sample in samples]).astype(np.float32)
        grouped = stacked.reshape(count, heads, group, dim) * np.float32(shape.scale)
        # (kv_heads, samples · group, head_dim)
        self._queries = np.ascontiguousarray(grouped.swapaxes(0, 1)).reshape(heads, -1, dim)
        self._chosen = np.stack([sample.chosen for sample in samples], axis=1)
        self._visible = np.array([shape.tokens + sample.step + 1 for sample in samples])
        self._zone = np.array([(sample.zone_begin, sample.zone_end) for sample in samples])
        self._watched = watched
        rows = count * group
        self._softmax = [
            _Softmax(
                np.full(rows, -np.inf, np.float32),
                np.zeros(rows),
                np.zeros((rows, dim), np.float32),
            )
            for _ in range(heads)
        ]
        top_k = self._chosen.shape[-1]
        self._best = [_Best(count, top_k) for _ in range(heads)]
        self._caught = np.zeros((heads, count), np.float32)
        self._of_watched = np.zeros((heads, count), np.float32)

    def _logits(self, head: int, keys: Floats, begin: int) -> Floats:
        """(samples · group, tokens); nothing of the future."""
        logits: Floats = self._queries[head] @ keys.T
        if begin + len(keys) > self._visible.min():
            tokens = np.arange(begin, begin + len(keys))
            hidden = np.repeat(tokens >= self._visible[:, None], self._shape.group, axis=0)
            logits[hidden] = -np.inf
        return logits

    def first_look(self, k: Halves, v: Halves, begin: int, head: int) -> None:
        """k, v: (tokens, kv_heads, head_dim), those from token `begin` on."""
        logits = self._logits(head, k[:, head].astype(np.float32), begin)
        self._softmax[head].add(logits, v[:, head].astype(np.float32))

    def second_look(self, k: Halves, begin: int, head: int) -> None:
        logits = self._logits(head, k[:, head].astype(np.float32), begin)
        logits -= self._softmax[head].log_sum_exp()[:, None]
        np.exp(logits, out=logits)
        tokens = np.arange(begin, begin + len(k))
        # (samples, tokens): the mean over the group, as the engine weighs a row
        mass = logits.reshape(len(self._samples), self._shape.group, -1).mean(axis=1)
        self._caught[head] += self._mass_at(mass, self._chosen[head], begin).sum(axis=1)
        self._of_watched[head] += self._mass_at(mass, self._watched[:, None], begin)[:, 0]
        mass[(tokens < self._zone[:, :1]) | (tokens >= self._zone[:, 1:])] = -1
        self._best[head].add(mass, begin)

    @staticmethod
    def _mass_at(mass: Floats, positions: Positions, begin: int) -> Floats:
        """The mass at positions, 0 for those of other chunks."""
        there = (positions >= begin) & (positions < begin + mass.shape[1])
        found = np.take_along_axis(mass, np.where(there, positions - begin, 0), axis=1)
        return np.where(there, found, np.float32(0))

    def verdict(self) -> Verdict:
        count, group = len(self._samples), self._shape.group
        exact = np.stack([s.output / s.total[:, None].astype(np.float32) for s in self._softmax])
        exact = (
            exact.reshape(len(exact), count, group, -1)
            .swapaxes(0, 1)
            .reshape(count, -1, exact.shape[-1])
        )
        given = np.stack([sample.output for sample in self._samples])
        error = np.linalg.norm(given - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
        recall = np.array(
            [
                [
                    self._overlap(best.position[i], chosen[i])
                    for best, chosen in zip(self._best, self._chosen, strict=True)
                ]
                for i in range(count)
            ],
            np.float32,
        )
        best = np.stack([np.maximum(b.mass, 0).sum(axis=1) for b in self._best], axis=1)
        return Verdict(recall, self._caught.T, best, error, self._of_watched.T)

    @staticmethod
    def _overlap(best: Positions, chosen: Positions) -> float:
        wanted = best[best >= 0]
        return float(np.isin(wanted, chosen).mean()) if len(wanted) else 1.0


def judge(
    cache: Cache,
    sequence: int,
    layer: int,
    shape: Shape,
    samples: list[Sample],
    watched: Positions,
    pool: Executor,
    advance: Callable[[int], None],
) -> Verdict:
    """watched: (samples) the position that each step asked about, -1 for none."""
    judged = _Judge(shape, samples, watched)
    total = cache.length(sequence, layer)
    for look in (1, 2):
        for begin in range(0, total, _READ_TOKENS):
            end = min(begin + _READ_TOKENS, total)
            k, v = cache.read(layer, sequence, begin, end)
            if look == 1:
                work = partial(judged.first_look, k, v, begin)
            else:
                work = partial(judged.second_look, k, begin)
            list(pool.map(work, range(shape.kv_heads)))
            advance(end - begin)
    return judged.verdict()
