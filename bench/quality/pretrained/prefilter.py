"""May a choice of PRKV's kept rows look at the best pages alone?

Pages are ranked by their digests for the last 64 queries, and rows are chosen from the best part
of them. Measured is the attention that the chosen rows lose against a choice from all of the zone:
that of the queries which choose, and that of the queries after them. Shares are of the zone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from pariskv_core.cli.weights import Weights
from torch import Tensor

from quality.inside import Residency
from quality.kept_rows import WINDOW, observed
from quality.methods import logits_of
from quality.peers import ArkVale, Quest
from quality.pretrained.capture import LATE, Stretch, make_all
from quality.pretrained.claims_prkv import PAGE, overlap
from quality.pretrained.shares import Asked, Track, asked_of

BUDGET = 1024
STATIC = (0.25, 0.5)  # and "auto"
PARTS = (16, 8, 4, 2)  # of the pages, one in so many is looked at
LAYERS = 3
TOKENS = 8192
IN_FULL = "mean, softmax"  # of which shares later and worst kv heads are written down, too


DIGESTS = {"mean": ArkVale, "max": Quest}


def digest_scores(queries: Tensor, keys: Tensor, digest: str) -> Tensor:
    """(queries, group, pages) of whole pages of keys, as logits."""
    pages = DIGESTS[digest](PAGE)
    pages.prefill(keys[: len(keys) // PAGE * PAGE], None)
    return pages.page_scores(queries) / math.sqrt(keys.shape[1])


RANKS = {
    "largest": lambda scores: scores.amax(dim=(0, 1)),
    "mean": lambda scores: scores.mean(dim=(0, 1)),
    "softmax": lambda scores: scores.softmax(dim=-1).mean(dim=(0, 1)),
}


def rows_of(votes: Tensor, pages: Tensor, rows: int) -> Tensor:
    """The best rows of these pages; a last page that is cut short is always looked at."""
    seen = torch.zeros(len(votes), dtype=torch.bool)
    seen[(pages[:, None] * PAGE + torch.arange(PAGE)).flatten()] = True
    seen[len(votes) // PAGE * PAGE :] = True
    best = votes.masked_fill(~seen, -1).topk(min(rows, len(votes))).indices
    return best[seen[best]]


def of_layer(asked: Asked, found: dict[str, list[float]]) -> float:
    """Adds to what is found of every kv head. Returns the part that "auto" keeps."""
    heads = []
    for head in range(asked.layer.keys.shape[1]):
        queries, keys, _ = asked.head(head)
        group = slice(head * asked.group, (head + 1) * asked.group)
        heads.append((queries, keys, asked.layer.recent[:, group].float()[-WINDOW:]))
    agreed = sum(overlap(recent, keys, BUDGET) for _, keys, recent in heads) / len(heads)
    counts = {f"{s:g}": int(BUDGET * s) for s in STATIC}
    counts["auto"] = int(BUDGET * agreed) // PAGE * PAGE
    for queries, keys, recent in heads:
        votes = observed(keys, recent)
        later = logits_of(queries, keys).softmax(dim=-1).mean(dim=(0, 1))
        exact = {s: votes.topk(min(count, len(votes))).indices for s, count in counts.items()}
        for s, rows in exact.items():
            found[f"exact, {s}, now"].append(votes[rows].sum().item())
            found[f"exact, {s}, later"].append(later[rows].sum().item())
        for digest in DIGESTS:
            scores = digest_scores(recent, keys, digest)
            for rank, reduce in RANKS.items():
                order = reduce(scores).argsort(descending=True, stable=True)
                for part in PARTS:
                    seen = order[: max(len(order) // part, 1)]
                    for s, count in counts.items():
                        rows = rows_of(votes, seen, count)
                        name = f"{digest}, {rank}, {part}, {s}"
                        for when, share in (("now", votes), ("later", later)):
                            lost = share[exact[s]].sum() - share[rows].sum()
                            found[f"{name}, {when}"].append(lost.item())
    return agreed


def prefilter(weights: Weights, track: Track) -> dict[str, Any]:
    """Attention that choices lose which look at a part of the pages: means over kv heads."""
    tokens = min(weights.tokens, TOKENS)
    (taken,) = make_all(weights, [Stretch("documentation", tokens, layers=LAYERS)])
    manifest, residency = taken.manifest, Residency()
    zone = slice(residency.sink, residency.zone_end(manifest.tokens - LATE, -1))
    positions = torch.tensor(manifest.positions)
    found: dict[str, list[float]] = defaultdict(list)
    automatic = [
        of_layer(asked_of(taken.layer(index), positions, zone), found)
        for index in track(manifest.layers, f"{manifest.model}, prefilter")
    ]
    return {
        "model": manifest.model,
        "tokens": manifest.tokens,
        "zone": zone.stop - zone.start,
        "layers": manifest.layers,
        "automatic": [round(s, 4) for s in automatic],
        "shares": {name: round(sum(of) / len(of), 4) for name, of in found.items() if shown(name)},
        "worst": {
            name: round(max(of), 4)
            for name, of in found.items()
            if name.startswith(IN_FULL) and name.endswith("now")
        },
    }


def shown(name: str) -> bool:
    return name.endswith("now") or name.startswith(("exact", IN_FULL))
