"""ParisKV: the real engine as a method, and a copy in torch that can be taken apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import configs
import pariskv_core as pk
import torch
from torch import Tensor

from quality import codec
from quality.methods import (
    Candidates,
    Zone,
    among_best,
    best_rows,
    candidate_count,
    group_worth,
    padded,
    step_chunks,
)

TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)
SCORE_STEPS, SCORE_SHIFT = 16, 4
_SEED = 42
_SAMPLED = 128  # keys that stand for those that are no candidates, in the engine too

PUBLISHED_SCHEDULE = [(0, 0.5, 0.5), (5_000, 0.25, 0.3), (10_000, 0.2, 0.25), (30_000, 0.1, 0.2)]
"""Of the published code: from so many tokens on, the candidate ratio and the vote ratio."""


class Engine:
    """pariskv_core itself, through Cache.explain.

    Its cache holds the zone and nothing else; the resident rows come in as the logit without a
    value row that sink_bias is. Without `candidates` it goes by its own schedule.
    """

    def __init__(
        self,
        candidates: float | None = None,
        vote_ratio: float = 0.2,
        name: str = "pariskv_core",
        **changes: Any,
    ) -> None:
        self.name = name
        if candidates is not None:
            changes["schedule"] = [(0, candidates, vote_ratio)]
        self._changes = changes
        self._keys = torch.empty(0, 0)
        self._cache: pk.Cache | None = None
        self._sequence = 0

    def prefill(self, keys: Tensor, recent: Tensor | None) -> None:
        self.close()
        self._keys = keys

    def append(self, keys: Tensor) -> None:
        self._keys = torch.cat([self._keys, keys])
        if self._cache is not None:
            self._store(keys)

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
        self._cache = None

    def _store(self, keys: Tensor) -> None:
        assert self._cache is not None
        rows = keys[:, None].to(getattr(torch, self._cache.config.dtype))
        # Values do not decide; any will do.
        self._cache.prefill(0, [self._sequence], rows, rows)

    def cache(self, group: int, rows: int) -> pk.Cache:
        """The cache that answers for groups of this size and this budget."""
        config = self._cache.config if self._cache is not None else None
        if config is None or (config.query_heads, config.policy.top_k) != (group, rows):
            self.close()
            fields = {"layers": 1, "kv_heads": 1, "dtype": "float32", "threads": 1}
            regions = {"sink": 0, "local": 0, "dense_below": 0}
            device = str(self._keys.device) if self._keys.is_cuda else "cpu"
            shape = {"query_heads": group, "head_dim": self._keys.shape[1], "device": device}
            options = {**fields, **regions, **shape, **configs.WHOLE_KEYS, "top_k": rows}
            options |= self._changes
            self._cache = pk.Cache(configs.make(**options))
            self._sequence = self._cache.add()
            self._store(self._keys)
        assert self._cache is not None
        return self._cache

    def explained(self, query: Tensor, rows: int, resident: Tensor) -> pk.Explanation:
        """For one step: query (group, head_dim), resident (group)."""
        cache = self.cache(len(query), rows)
        q = query.to(getattr(torch, cache.config.dtype)).contiguous()
        bias = resident.float().contiguous()
        return cache.explain(0, self._sequence, q, sink_bias=bias)

    def select(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        device = self._keys.device
        if len(self._keys) <= rows:  # it would not search
            every = torch.arange(len(self._keys), device=device).expand(len(queries), -1)
            return padded(every, rows)
        chosen = [
            padded(torch.from_numpy(self.explained(query, rows, lse).positions.copy()), rows)
            for query, lse in zip(queries, resident, strict=True)
        ]
        return torch.cat(chosen).to(device)


def published(candidates: float | None = None, name: str = "ParisKV as published") -> Engine:
    """The engine set as the paper has it: votes, and the mean query of a group."""
    options: dict[str, Any] = {"scorer": "votes", "group_rule": "mean_query", "name": name}
    if candidates is None:
        options["schedule"] = PUBLISHED_SCHEDULE
    return Engine(candidates, **options)


def others(logits: Tensor, coarse: Tensor, there: Tensor) -> Tensor:
    """Log-sum-exp (steps, heads) of the keys that are no candidates, from a few of them.

    logits (steps, heads, tokens), coarse scores and who is a candidate (steps, tokens)
    """
    tokens = logits.shape[-1]
    keys = min(tokens, _SAMPLED)
    step = tokens // keys
    some = step // 2 + step * torch.arange(keys, device=logits.device)
    least = coarse.masked_fill(~there, 255).amin(dim=1, keepdim=True)
    counted = (coarse[:, some] > 0) & (coarse[:, some] < least)
    seen = logits[:, :, some].masked_fill(~counted[:, None], -math.inf)
    return torch.logsumexp(seen, dim=-1) + math.log(tokens / keys)


class Paris(Zone):
    """The same search in torch, each of its ideas a switch.

    scorer       "votes" of the centroids; "standardised": signs against the query times the norm,
                 less their mean over their spread for each head, the engine's first `sign_norm`;
                 "sign": that without the norm; "engine": the engine's `sign_norm` as it is now
    group_rule   "attention_mass", or "mean_query": search with the mean of the group's queries
    candidates   share of the zone reranked; vote_ratio: share of the keys with a vote in a part
    tiers        1 to 6: votes that a centroid can give; the widest tiers come first
    normalise, rotate, analytic
                 the paper's N, R and T; not analytic: k-means centroids of the prompt, frozen
    part         dimensions of a subspace
    directions, radii
                 size of an analytic codebook; left out, the sign patterns
    alpha        weights of the rerank undo the code's misalignment
    rerank       by "codes", by "exact" logits, or "none": the coarse score decides
    """

    def __init__(
        self,
        scorer: str = "standardised",
        group_rule: str = "attention_mass",
        candidates: Candidates = 0.05,
        vote_ratio: float = 0.2,
        tiers: int = 6,
        normalise: bool = True,
        rotate: bool = True,
        analytic: bool = True,
        part: int = 8,
        directions: int | None = None,
        radii: int = 1,
        alpha: bool = True,
        rerank: str = "codes",
        name: str = "ParisKV",
    ) -> None:
        super().__init__()
        self.name = name
        self.scorer = scorer
        self.group_rule = group_rule
        self.candidates = candidates
        self.vote_ratio = vote_ratio
        self.tiers: Sequence[float] = TIERS[len(TIERS) - tiers :]
        self.normalise = normalise
        self.rotate = rotate
        self.analytic = analytic
        self.part = part
        self.directions = directions
        self.radii = radii
        self.alpha = alpha
        self.rerank = rerank

    # --- Summaries of keys ---

    def prefill(self, keys: Tensor, recent: Tensor | None) -> None:
        super().prefill(keys, recent)
        self.codebook = self._make_codebook()
        self.codes, self.signs, self.norms, self.vectors = self._encoded(keys)
        if self.scorer == "engine":
            self._engine = Engine(candidates=0.01, group_rule=self.group_rule)
            self._engine.prefill(keys, None)

    def append(self, keys: Tensor) -> None:
        super().append(keys)
        codes, signs, norms, vectors = self._encoded(keys)
        self.codes = torch.cat([self.codes, codes], dim=1)
        self.signs = torch.cat([self.signs, signs])
        self.norms = torch.cat([self.norms, norms])
        self.vectors = torch.cat([self.vectors, vectors])
        if self.scorer == "engine":
            self._engine.append(keys)

    def _make_codebook(self) -> codec.Signs | codec.Sphere | codec.Learnt:
        count = self.directions or 1 << self.part
        if not self.analytic:
            return codec.Learnt(self.part, count, _SEED)
        if self.directions is None and self.radii == 1:
            return codec.Signs(self.part)
        return codec.Sphere(self.part, count, self.radii, self.keys.shape[1], _SEED)

    def _turned(self, rows: Tensor) -> Tensor:
        return codec.rotated(rows, _SEED) if self.rotate else rows

    def _encoded(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        norms = keys.norm(dim=1)
        unit = keys / norms.clamp(min=1e-30)[:, None]
        turned = self._turned(unit if self.normalise else keys)
        length = math.sqrt(turned.shape[1]) if self.rotate else 1.0
        votes = self.codebook.codes(turned / length) if self.scorer == "votes" else norms[None]
        vectors = self._turned(unit) / length if self.rerank == "codes" else norms[:, None]
        if self.rerank == "codes":
            vectors = codec.reconstructed(vectors, norms, self.part, self.alpha)
        return votes, torch.where(turned >= 0, 1.0, -1.0), norms, vectors

    # --- Search ---

    def coarse(self, queries: Tensor, resident: Tensor) -> Tensor:
        """Whole-number scores (steps, tokens): the best of queries (steps, heads, dim).

        resident  (steps, heads) log-sum-exps; the engine alone looks at them
        """
        if self.scorer == "votes":
            return self._votes(queries)
        if self.scorer == "engine":
            asked = zip(queries, resident, strict=True)
            found = [
                self._engine.explained(query, 1, lse).details.coarse[0].copy()
                for query, lse in asked
            ]
            return torch.stack([torch.from_numpy(scores) for scores in found]).to(
                queries.device, torch.int64
            )
        turned = self._turned(queries)
        q = codec.quantised_query(turned)
        norms = codec.five_bits(self.norms)
        if self.scorer == "sign":
            norms = (norms > 0).float()
        spread = q.square().sum(-1) * norms.double().square().mean()
        gain = torch.where(spread > 0, SCORE_STEPS / spread.sqrt(), 0.0).float().double()
        mean = q.double() @ (self.signs * norms[:, None]).double().mean(dim=0)
        offset = (SCORE_SHIFT * SCORE_STEPS - mean * gain).float().double()
        best = torch.ones(len(queries), len(norms), device=queries.device, dtype=torch.float64)
        for head in range(queries.shape[1]):
            products = ((q[:, head] @ self.signs.T) * norms).double()
            best = torch.maximum(best, products * gain[:, head, None] + offset[:, head, None])
        return torch.where(norms > 0, best.clamp(max=255).floor().long(), 0)

    def _votes(self, queries: Tensor) -> Tensor:
        steps, heads = queries.shape[:2]
        tables = self.vote_tables(self._turned(queries).flatten(0, 1))
        total = torch.zeros(steps * heads, len(self.keys), dtype=torch.int16, device=queries.device)
        for table, codes in zip(tables, self.codes, strict=True):
            total += table[:, codes]
        return torch.where(self.norms > 0, 1 + total.reshape(steps, heads, -1).amax(dim=1), 0)

    def vote_tables(self, turned: Tensor) -> Tensor:
        """Votes of every centroid for rotated queries (rows, dim): (parts, rows, centroids) int16.

        From the nearest centroid down; one that fewer keys than a tier's share lie before has its
        vote.
        """
        parts = turned.reshape(len(turned), -1, self.part).transpose(0, 1)
        nearness = parts @ self.codebook.centroids.to(turned.device).mT
        order = nearness.argsort(dim=-1, descending=True, stable=True)
        held = torch.zeros(len(parts), nearness.shape[-1], device=turned.device)
        held.scatter_add_(1, self.codes, (self.norms > 0).float().expand(len(parts), -1))
        sizes = held[:, None].expand_as(order).gather(2, order)
        before = sizes.cumsum(dim=-1) - sizes
        keys = int((self.norms > 0).sum())
        votes = sum((before < math.ceil(keys * self.vote_ratio * t)).short() for t in self.tiers)
        return torch.empty_like(votes).scatter_(2, order, votes)

    def estimates(self, queries: Tensor) -> Tensor:
        """Logits (steps, heads, tokens) from the codes, or exact ones."""
        if self.rerank != "codes":
            return queries @ self.keys.T / math.sqrt(queries.shape[-1])
        turned = self._turned(queries)
        if self.rotate:
            turned = turned / math.sqrt(turned.shape[-1])
        return turned @ self.vectors.T / math.sqrt(queries.shape[-1])

    def pick(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        mean = self.group_rule == "mean_query"
        searching = queries.mean(dim=1, keepdim=True) if mean else queries
        coarse = self.coarse(searching, resident[:, : searching.shape[1]])
        if self.rerank == "none":
            return best_rows(coarse, rows)
        there = among_best(coarse, candidate_count(self.candidates, len(self.keys), rows))
        every = self.estimates(searching)
        logits = every.masked_fill(~there[:, None], -math.inf)
        worth = logits[:, 0]
        if not mean:
            worth = group_worth(logits, torch.logaddexp(resident, others(every, coarse, there)))
        return best_rows(worth.masked_fill(~there, -math.inf), rows)

    def select(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        # Votes keep a table per centroid and part besides a score per token.
        width = queries.shape[1] * len(self.keys)
        if self.scorer == "votes":
            width = max(width, queries.shape[1] * self.codes.shape[0] << self.part)
        chunks = step_chunks(len(queries), width, queries.device)
        return torch.cat([self.pick(queries[c], rows, resident[c]) for c in chunks])
