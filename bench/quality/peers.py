"""Other methods, for measurement only: each from its paper, at the budget that everybody has.

Where a paper chooses per query head, the heads of a group share their rows here, since they share
what is fetched; how the group decides stands at each class.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quality.kmeans import kmeans, nearest
from quality.methods import Zone, best_rows, logits_of, padded


class SnapKV(Zone):
    """SnapKV (Li et al., 2024): what the prompt's last queries look at is kept, and never changes.

    Their attention, summed over them and the heads of the group, is smoothed along the tokens
    before the best rows are taken. The softmax is over the zone: what is resident is attended to
    anyway. Tokens that enter the zone while decoding are lost, as a budget must have an end.
    """

    name = "SnapKV"

    def __init__(self, window: int = 32, smoothing: int = 5) -> None:
        super().__init__()
        self.window = window
        self.smoothing = smoothing
        self.votes = torch.empty(0)

    def prefill(self, keys: Tensor, recent: Tensor | None) -> None:
        super().prefill(keys, recent)
        if recent is None:
            raise ValueError("SnapKV chooses by the prompt's last queries; prefill it with them")
        attention = torch.softmax(logits_of(recent[-self.window :], keys), dim=-1)
        self.votes = torch.nn.functional.avg_pool1d(
            attention.sum(dim=(0, 1))[None],
            self.smoothing,
            stride=1,
            padding=self.smoothing // 2,
            count_include_pad=False,
        )

    def select(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        return best_rows(self.votes, rows).expand(len(queries), -1)


class Pages(Zone):
    """Pages of neighbouring tokens, each with a digest; whole pages are fetched.

    A digest is a box, centre and half widths per channel, and a page's score for a query the
    largest dot product within it: q.centre + |q|.halves. A group takes the mean of its heads'
    scores. The budget is spent on as many whole pages as it holds.
    """

    name = "pages"

    def __init__(self, page: int) -> None:
        super().__init__()
        self.page = page
        self.centres = self.halves = torch.empty(0, 0)

    def digest(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Centre and half widths (pages, head_dim) of keys (pages, page, head_dim), or NaN."""
        raise NotImplementedError

    def prefill(self, keys: Tensor, recent: Tensor | None) -> None:
        super().prefill(keys, recent)
        self.centres = self.halves = keys.new_empty(0, keys.shape[1])
        self._digest_from(0)

    def append(self, keys: Tensor) -> None:
        full = len(self.keys) // self.page
        super().append(keys)
        self._digest_from(full)

    def _digest_from(self, first: int) -> None:
        """Digests of the pages from this one on; the last may not be full yet."""
        keys = self.keys[first * self.page :]
        missing = -len(keys) % self.page
        whole = torch.nn.functional.pad(keys, (0, 0, 0, missing), value=math.nan)
        centres, halves = self.digest(whole.reshape(-1, self.page, keys.shape[1]))
        self.centres = torch.cat([self.centres[:first], centres])
        self.halves = torch.cat([self.halves[:first], halves])

    def page_scores(self, queries: Tensor) -> Tensor:
        """(steps, group, pages)."""
        return queries @ self.centres.T + queries.abs() @ self.halves.T

    def pick(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        best = best_rows(self.page_scores(queries).mean(dim=1), max(1, rows // self.page))
        inside = torch.arange(self.page, device=best.device)
        chosen = (best[..., None] * self.page + inside).flatten(1)
        there = (best >= 0).repeat_interleave(self.page, dim=1) & (chosen < len(self.keys))
        chosen = torch.where(there, chosen, -1)[:, :rows]
        return padded(chosen, rows)


def _ends(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest of each channel of pages (pages, page, head_dim), past what is NaN."""
    return keys.nan_to_num(nan=math.inf).amin(dim=1), keys.nan_to_num(nan=-math.inf).amax(dim=1)


class Quest(Pages):
    """Quest (Tang et al., 2024): least and greatest per channel, a bound on every key's product."""

    name = "Quest"

    def __init__(self, page: int = 16) -> None:
        super().__init__(page)

    def digest(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        low, high = _ends(keys)
        return (low + high) / 2, (high - low) / 2


class ArkVale(Pages):
    """ArkVale (Chen et al., 2024): as Quest, the box less wide: the mean distance from its centre.

    No bound any more, and by that paper the best of the digests it compares (cuboid-mean).
    """

    name = "ArkVale"

    def __init__(self, page: int = 32) -> None:
        super().__init__(page)

    def digest(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        low, high = _ends(keys)
        centre = (low + high) / 2
        return centre, (keys - centre[:, None]).abs().nanmean(dim=1)


class PQCache(Zone):
    """PQCache (Zhang et al., 2025): product quantisation, centroids learnt from the prompt.

    A key is cut into `subspaces` parts, each the nearest of 2^bits centroids; a query's products
    with all centroids are a table, and the sum of a key's entries its estimated logit. As in that
    work's code, the group adds up its heads' softmax over the zone. 2 x 6 bits are its setting for
    prompts of this length.

    refresh  learns anew once this many tokens have come since; None never does, as published
    """

    name = "PQCache"

    def __init__(
        self, subspaces: int = 2, bits: int = 6, refresh: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.subspaces = subspaces
        self.bits = bits
        self.refresh = refresh
        self.seed = seed
        self.codes = torch.empty(0)  # (subspaces, tokens)
        self.centroids = torch.empty(0)  # (subspaces, 2^bits, part)
        self._since = 0
        if refresh is not None:
            self.name = "PQCache, refreshed"

    def prefill(self, keys: Tensor, recent: Tensor | None) -> None:
        super().prefill(keys, recent)
        self._learn()

    def append(self, keys: Tensor) -> None:
        super().append(keys)
        self._since += len(keys)
        if self.refresh is not None and self._since >= self.refresh:
            self._learn()
        else:
            new = nearest(self._parts(keys), self.centroids)
            self.codes = torch.cat([self.codes, new], dim=1)

    def _parts(self, rows: Tensor) -> Tensor:
        """(rows, head_dim) to (subspaces, rows, part)."""
        return rows.reshape(len(rows), self.subspaces, -1).transpose(0, 1)

    def _learn(self) -> None:
        parts = self._parts(self.keys)
        self.centroids = kmeans(parts, 2**self.bits, self.seed)
        self.codes = nearest(parts, self.centroids)
        self._since = 0

    def reconstructed(self) -> Tensor:
        """The keys that the codes stand for: (tokens, head_dim)."""
        parts = [centres[codes] for centres, codes in zip(self.centroids, self.codes, strict=True)]
        return torch.cat(parts, dim=1)

    def estimates(self, queries: Tensor) -> Tensor:
        """Estimated logits (steps, group, tokens), by tables."""
        steps, group, dim = queries.shape
        parts = self._parts(queries.reshape(steps * group, dim))
        tables = parts @ self.centroids.mT  # (subspaces, steps x group, 2^bits)
        total = sum(t[:, codes] for t, codes in zip(tables, self.codes, strict=True))
        return (total / math.sqrt(dim)).reshape(steps, group, -1)

    def pick(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        return best_rows(torch.softmax(self.estimates(queries), dim=-1).sum(dim=1), rows)


class MagicPIG(Zone):
    """MagicPIG (Chen et al., 2024): keys in a query's bucket in at least two hash tables.

    `tables` tables of `bits` random hyperplanes each (SimHash); keys are hashed less the mean of
    the prompt's. There every head attends to whatever collides, with weights that undo the chance
    of it. Here the rows of a budget are those that collide in most tables, summed over the heads
    that sampled them; when fewer collide, fewer are fetched.
    """

    name = "MagicPIG"

    def __init__(self, bits: int = 10, tables: int = 150, seed: int = 0) -> None:
        super().__init__()
        self.bits = bits
        self.tables = tables
        self.seed = seed
        self.mean = self.planes = torch.empty(0)
        self.codes = torch.empty(0)  # (tables, tokens)

    def prefill(self, keys: Tensor, recent: Tensor | None) -> None:
        super().prefill(keys, recent)
        generator = torch.Generator().manual_seed(self.seed)
        self.planes = torch.randn(keys.shape[1], self.tables * self.bits, generator=generator)
        self.mean = keys.mean(dim=0)
        self.codes = self.hashed(keys - self.mean)

    def append(self, keys: Tensor) -> None:
        super().append(keys)
        self.codes = torch.cat([self.codes, self.hashed(keys - self.mean)], dim=1)

    def hashed(self, rows: Tensor) -> Tensor:
        """The bucket in each table: (tables, rows) int32."""
        weights = 2.0 ** torch.arange(self.bits)
        bits = (rows @ self.planes > 0).reshape(len(rows), self.tables, self.bits)
        return (bits.float() @ weights).int().T.contiguous()

    def collisions(self, queries: Tensor) -> Tensor:
        """In how many tables a key is in the query's bucket: (steps, group, tokens) int16."""
        codes = self.hashed(queries.flatten(0, 1))
        counts = torch.zeros(codes.shape[1], self.codes.shape[1], dtype=torch.int16)
        for mine, theirs in zip(codes, self.codes, strict=True):
            counts += mine[:, None] == theirs
        return counts.reshape(*queries.shape[:2], -1)

    def pick(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        counts = self.collisions(queries)
        sampled = torch.where(counts >= 2, counts, 0).sum(dim=1)
        chosen = best_rows(sampled, rows)
        return chosen.masked_fill(sampled.gather(1, chosen.clamp(min=0)) == 0, -1)
