"""The engine as a method for one kv head, and the settings of it that are measured."""

from __future__ import annotations

from typing import Any

import configs
import pariskv_core as pk
import torch
from torch import Tensor

from quality.methods import padded

# Of the published code: from so many tokens on, the candidate ratio and the vote ratio.
PUBLISHED_SCHEDULE = [(0, 0.5, 0.5), (5_000, 0.25, 0.3), (10_000, 0.2, 0.25), (30_000, 0.1, 0.2)]
PUBLISHED: dict[str, Any] = {
    "scorer": "votes",
    "group_rule": "mean_query",
    "schedule": PUBLISHED_SCHEDULE,
    "block": 0,
}
# 25 and 20 % of zones up to 30,000 tokens, where the default for blocks is 5 %.
MANY: dict[str, Any] = {"schedule": pk.ParisKV(block=0).schedule}
_VOTES = 0.2  # share of the keys that may get a vote, where a ratio stands alone


def reranked(ratio: float) -> dict[str, Any]:
    """Just this share of the zone is reranked, however few keys that are for a row."""
    return {"schedule": [(0, ratio, _VOTES)], "min_candidates_per_row": 1}


class Engine:
    """pariskv_core itself, through Cache.explain.

    Its cache holds the zone and nothing else; the resident rows come in as the logit without a
    value row that sink_bias is. Without `candidates` it goes by its own schedule.
    """

    def __init__(
        self,
        candidates: float | None = None,
        name: str = "ParisKV",
        **changes: Any,
    ) -> None:
        self.name = name
        if candidates is not None:
            changes["schedule"] = [(0, candidates, _VOTES)]
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
            shape = {"query_heads": group, "head_dim": self._keys.shape[1]}
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
        if len(self._keys) <= rows:  # it would not search
            every = torch.arange(len(self._keys)).expand(len(queries), -1)
            return padded(every, rows)
        chosen = [
            padded(torch.from_numpy(self.explained(query, rows, lse).positions.copy()), rows)
            for query, lse in zip(queries, resident, strict=True)
        ]
        return torch.cat(chosen)


def published(candidates: float | None = None) -> Engine:
    """The engine set as the paper has it: votes, and the mean query of a group."""
    return Engine(candidates, name="ParisKV as published", **PUBLISHED)
