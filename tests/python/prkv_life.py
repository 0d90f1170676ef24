"""A sequence under PRKV, everything that is done to it, and the oracle's model of it."""

from __future__ import annotations

import hardkv_life
import numpy as np
import oracle
import pariskv_core as pk
import torch
from hardkv_life import f32, kept_of
from oracle_hardkv import Query
from oracle_prkv import Found, PRKVModel
from support import f64, randn_q, regions_of, rows_of


def make_config(policy: pk.PRKV | None = None, **changes) -> pk.Config:
    policy = policy or pk.PRKV(budget=32, static_share=0.5, page=8)
    return hardkv_life.make_config(policy, **changes)


class Life(hardkv_life.Life):
    """As HardKV's, but a step's pages depend on its query."""

    model: PRKVModel

    def make_model(self) -> PRKVModel:
        return PRKVModel(self.cache.config)

    def decode(self, q: torch.Tensor | None = None, **options) -> list[list[int]]:
        """Returns the positions that were selected for each kv head."""
        q, (k, v) = randn_q(self.rng, 1, self.config) if q is None else q, self.keys(1)
        out, lse = self.cache.decode(0, [self.s], q, k, v, return_lse=True, **options)
        self.model.decode(f32(k), Query(f32(q)[0], **options))
        selected = self.selected(q[0])
        logits = oracle.Logits(options.get("scale"), options.get("softcap", 0.0))
        rows = [
            np.sort(np.r_[resident, found].astype(int))
            for resident, found in zip(self.resident(), selected, strict=True)
        ]
        assert all(len(set(head.tolist())) == len(head) for head in rows)
        expected, totals = oracle.attention_over(f64(q)[0], *self.rows(), rows, logits)
        self.close(out[0], expected)
        atol = 1e-3 if self.config.device.startswith("cuda") else 1e-4
        np.testing.assert_allclose(f64(lse)[0], totals, rtol=1e-5, atol=atol)
        return selected

    def resident(self) -> list[np.ndarray]:
        """The positions that any query sees: with the zone where nothing is searched for."""
        begin, end = self.model.zone
        total = len(self.model.k)
        if self.model.find(np.zeros((self.config.query_heads, self.config.head_dim))) is None:
            return [np.arange(total)] * self.config.kv_heads
        return [
            np.r_[:begin, self.model.kept(h), end:total].astype(int)
            for h in range(self.config.kv_heads)
        ]

    def selected(self, q: torch.Tensor) -> list[list[int]]:
        """What an explanation says is selected, once it is found to be as good as the best."""
        explanation = self.cache.explain(0, self.s, q)
        expected = self.model.find(f32(q))
        heads = range(self.config.kv_heads)
        if expected is None:
            assert explanation.details is None
            assert not explanation.searched
            assert explanation.kept.size == explanation.positions.size == 0
            return [[] for _ in heads]
        assert isinstance(explanation.details, pk.PRKVExplanation)
        kept = [self.model.kept(h) for h in heads]
        assert kept_of(explanation.kept) == kept
        assert explanation.searched == (len(expected[0].scores) > 0)
        if not explanation.searched:
            assert explanation.positions.size == 0
            return [[] for _ in heads]
        positions = kept_of(explanation.positions)
        for h in heads:
            self._check_head(explanation, h, expected[h], positions[h], f64(q))
        return positions

    def _check_head(
        self, explanation: pk.Explanation, h: int, found: Found, positions: list[int], q: np.ndarray
    ) -> None:
        details, first = explanation.details, self.model.first_page
        assert details.first_page == first
        scores = details.page_scores[h]
        finite = np.isfinite(found.scores)
        if finite.any():
            assert np.array_equal(np.isfinite(scores), finite)
            group = len(q) // self.config.kv_heads
            own = q[h * group : (h + 1) * group]
            size = np.abs(own[np.isfinite(own).all(axis=1)]).sum(axis=1).mean()
            largest = np.abs(self.model.k[np.isfinite(self.model.k)]).max(initial=0)
            near = min(1e-5 * float(size) * float(largest), 2.0**80)
            assert (np.abs(scores[finite] - found.scores[finite]) <= near).all()
        else:
            near = 0.0
        pages = [int(p) - first for p in details.pages[h] if p >= 0]
        assert len(set(pages)) == len(pages) == min(found.pages, int(finite.sum()))
        if pages:
            last = np.sort(found.scores)[-len(pages)]
            assert (found.scores[pages] >= last - 2 * near).all()
            assert (np.diff(found.scores[pages]) <= 2 * near).all()
        assert positions == [p for page in pages for p in found.live[page]]
        worth = explanation.worth[h]
        expected = [scores[page] for page in pages for _ in found.live[page]]
        assert worth[: len(expected)].tolist() == expected
        assert np.isnan(worth[len(expected) :]).all()

    def kept(self) -> list[list[int]]:
        return kept_of(self.cache.explain(0, self.s, randn_q(self.rng, 1, self.config)[0]).kept)

    def check(self) -> None:
        assert regions_of(self.cache, self.s) == self.model.regions.counts()
        for stored, given in zip(rows_of(self.cache, self.s), self.rows(), strict=True):
            assert np.array_equal(f32(stored), given, equal_nan=True)
        self.selected(randn_q(self.rng, 1, self.config)[0])

    def check_digests(self) -> None:
        """All of them, as they are stored: bit for bit."""
        summaries = self.cache.summaries(0, self.s)
        assert summaries.page == self.config.policy.page
        for h in range(self.config.kv_heads):
            digests, _ = self.model.digests(h)
            for p, (middle, distance) in enumerate(digests):
                assert np.array_equal(summaries.middles[h, p], middle, equal_nan=True)
                assert np.array_equal(summaries.distances[h, p], distance, equal_nan=True)
