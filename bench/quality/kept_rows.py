"""Two systems that keep rows which a prompt's last queries chose: PRKV and HARD-KV, in torch.

Observed attention: what the last queries of a prompt look at, mean over them and the group's heads.
The softmax is over the zone, as in both systems.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quality.methods import Zone, best_rows, logits_of, padded

WINDOW = 64  # queries that choose
POOLED = 7  # neighbours that share the largest logit, in HARD-KV's metric after SnapKV


def observed(keys: Tensor, recent: Tensor) -> Tensor:
    """(tokens): the attention of recent queries (window, group, head_dim), mean of all of them."""
    return logits_of(recent, keys).softmax(dim=-1).mean(dim=(0, 1))


class PRKV(Zone):
    """PRKV: a static part that recent queries choose, and pages of what is left for each query.

    A page's score is that of ArkVale's digest, box centre and mean distance from it; the group
    takes the mean of its heads. Only as much of the last page is taken as the budget has room for.

    static   share of the budget; 0 is ArkVale, 1 is SnapKV without pooling
    rebuilt  pages are cut anew from what is not static, as published; else pages stay where they
             are, with holes where rows are static
    """

    name = "PRKV"

    def __init__(self, static: float = 0.25, page: int = 32, rebuilt: bool = True) -> None:
        super().__init__()
        self.static = static
        self.page = page
        self.rebuilt = rebuilt
        self.votes = torch.empty(0)

    def prefill(self, keys: Tensor, recent: Tensor | None) -> None:
        super().prefill(keys, recent)
        if recent is None:
            raise ValueError("PRKV chooses by the prompt's last queries; prefill it with them")
        self.look(recent)

    def look(self, recent: Tensor) -> None:
        """Chooses the static part anew, by these queries (window, group, head_dim)."""
        self.votes = observed(self.keys, recent[-WINDOW:])

    def append(self, keys: Tensor) -> None:
        super().append(keys)
        self.votes = torch.nn.functional.pad(self.votes, (0, len(keys)))

    def is_static(self, rows: int) -> Tensor:
        """(tokens) bool: the static part of a budget, whole pages of it."""
        count = int(rows * self.static) // self.page * self.page
        found = torch.zeros(len(self.keys), dtype=torch.bool)
        found[self.votes.topk(min(count, len(found))).indices] = True
        return found

    def page_of(self, static: Tensor) -> Tensor:
        """(tokens): the number of each token's page, whatever it says of static ones."""
        if self.rebuilt:
            return ((~static).cumsum(0) - 1).clamp(min=0) // self.page
        return torch.arange(len(static)) // self.page

    def page_scores(self, queries: Tensor, pages: Tensor, static: Tensor) -> Tensor:
        """(steps, pages), -inf for a page that has static rows alone."""
        live, count = ~static, int(pages.max()) + 1
        keys, owner = self.keys[live], pages[live][:, None].expand(-1, self.keys.shape[1])
        empty = keys.new_zeros(count, keys.shape[1])
        low = empty.scatter_reduce(0, owner, keys, "amin", include_self=False)
        high = empty.scatter_reduce(0, owner, keys, "amax", include_self=False)
        centre = (low + high) / 2
        away = (keys - centre[pages[live]]).abs()
        reach = empty.scatter_reduce(0, owner, away, "mean", include_self=False)
        scores = (queries @ centre.T + queries.abs() @ reach.T).mean(dim=1)
        some = torch.zeros(count, dtype=torch.bool).scatter(0, pages[live], True)
        return scores.masked_fill(~some, -math.inf)

    def pick(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        static = self.is_static(rows)
        kept = static.nonzero()[:, 0].expand(len(queries), -1)
        if kept.shape[1] >= min(rows, len(self.keys)):
            return padded(kept, rows)
        pages = self.page_of(static)
        scores = self.page_scores(queries, pages, static)[:, pages]
        found = best_rows(scores.masked_fill(static, -math.inf), rows - kept.shape[1])
        return torch.cat([kept, found], dim=1)


# --- HARD-KV -------------------------------------------------------------------------------------


def pooled(keys: Tensor, recent: Tensor) -> Tensor:
    """HARD-KV's metric after SnapKV: (tokens), more is better.

    A group's largest logit counts; neighbours share the largest of theirs; then a softmax for each
    query, and the mean of them.
    """
    logits = logits_of(recent, keys).amax(dim=1)
    wide = torch.nn.functional.max_pool1d(logits[None], POOLED, stride=1, padding=POOLED // 2)[0]
    return wide.softmax(dim=-1).mean(dim=0)


def mass_of_most(attention: Tensor) -> Tensor:
    """(tokens): the sum of the largest one, two, ... entries of an attention, over that of all."""
    return (attention.sort(descending=True).values.double().cumsum(0) / attention.sum()).clamp(
        max=1
    )


def counts_by_mass(masses: list[Tensor], mean: int, most: int | None = None) -> list[int]:
    """For each kv head as many rows as hold one and the same part p of its attention.

    masses  of each head: `mass_of_most`
    mean    of all counts; p follows from it
    most    that a head may have
    """
    most = max(map(len, masses)) if most is None else most

    def counts(p: float) -> list[int]:
        at = torch.tensor([p], dtype=torch.float64)
        return [min(int(torch.searchsorted(of, at)) + 1, most, len(of)) for of in masses]

    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        if sum(counts(p)) > mean * len(masses):
            high = p
        else:
            low = p
    return counts(low)
