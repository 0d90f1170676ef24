"""Two other systems on captured keys: PRKV's static part, HARD-KV's counts by Top-p.

What they keep was chosen by the RECENT queries before the late tokens, whose queries are measured:
those of the first 128 of them, as soon as both systems choose again, and of all 512.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from pariskv_core.cli.weights import Weights
from torch import Tensor

from quality.experiments import Track
from quality.kept_rows import PRKV, counts_by_mass, mass_of_most, observed, pooled
from quality.measures import Quality, measure
from quality.methods import Method, best_rows, make_method, oracle_rows
from quality.pretrained.capture import LATE, Capture, Stretch, make_all
from quality.pretrained.shares import Asked, asked_of, engine, summary
from quality.regions import Residency

BUDGETS = (128, 256, 1024)  # rows a kv head, mean of all
STATIC = (0.0, 0.25, 0.5, 0.75, 1.0)
SOON = 128  # tokens: both systems' interval
TOP_P = "counts by Top-p"
AT_MOST = 2  # times the mean, where counts are limited
Found = dict[str, dict[int, list[Quality]]]


@dataclass
class Head:
    """A kv head, and what its recent queries look at."""

    queries: Tensor  # (measured, group, head_dim)
    keys: Tensor  # (zone, head_dim)
    resident: Tensor  # (measured, group)
    recent: Tensor  # (recent, group, head_dim)
    best: dict[int, Tensor]

    @staticmethod
    def of(asked: Asked, head: int) -> Head:
        queries, keys, resident = asked.head(head)
        heads = slice(head * asked.group, (head + 1) * asked.group)
        best = {rows: oracle_rows(queries, keys, rows, resident) for rows in BUDGETS}
        return Head(queries, keys, resident, asked.layer.recent[:, heads].float(), best)

    def quality(self, chosen: Tensor, rows: int) -> Quality:
        """Of rows (measured, any number), against the best `rows`."""
        chosen = chosen.expand(len(self.queries), -1)
        return measure(self.queries, self.keys, chosen, self.resident, best=self.best[rows])


def _methods() -> dict[str, Method]:
    """That serve one kv head: PRKV by its static part, and Quest."""
    found: dict[str, Method] = {"Quest": make_method("quest")}
    for static in STATIC:
        found[f"PRKV, S = {static:g}"] = PRKV(static)
        if 0 < static < 1:
            found[f"PRKV, S = {static:g}, holes"] = PRKV(static, rebuilt=False)
    return found


def _by_head(head: Head, found: Found) -> None:
    for name, method in _methods().items():
        method.prefill(head.keys, head.recent)
        for rows in BUDGETS:
            chosen = method.select(head.queries, rows, head.resident)
            found.setdefault(name, {}).setdefault(rows, []).append(head.quality(chosen, rows))


def _engine(asked: Asked, heads: list[Head], found: Found) -> None:
    for rows in BUDGETS:
        chosen = engine(top_k=rows)(asked)
        for i, head in enumerate(heads):
            quality = head.quality(chosen[:, i], rows)
            found.setdefault("block 64", {}).setdefault(rows, []).append(quality)


def _hardkv(heads: list[Head], found: Found) -> dict[str, dict[int, list[int]]]:
    """All heads of the model at once, for they share what there is. Returns the counts."""
    attention = [observed(head.keys, head.recent) for head in heads]
    by = {"attention": attention, "SnapKV": [pooled(head.keys, head.recent) for head in heads]}
    masses, used = [mass_of_most(of) for of in attention], {}
    for rows in BUDGETS:
        counts = {
            "one count": [rows] * len(heads),
            TOP_P: counts_by_mass(masses, rows),
            f"{TOP_P}, at most twice the mean": counts_by_mass(masses, rows, AT_MOST * rows),
        }
        for kind, of in counts.items():
            used.setdefault(kind, {})[rows] = of
            for metric, scores in by.items():
                name = f"HARD-KV, {metric}, {kind}"
                for head, score, count in zip(heads, scores, of, strict=True):
                    quality = head.quality(best_rows(score[None], count), rows)
                    found.setdefault(name, {}).setdefault(rows, []).append(quality)
    return used


def policies(weights: Weights, track: Track) -> dict[str, Any]:
    """Shares at equal mean rows: the engine's search, PRKV by its static part, HARD-KV."""
    (taken,) = make_all(weights, [Stretch("documentation", weights.tokens)])
    return {**of_capture(taken, track), "model": taken.manifest.model}


def of_capture(taken: Capture, track: Track) -> dict[str, Any]:
    manifest = taken.manifest
    zone = Residency().zone(manifest.tokens - LATE)
    positions = torch.tensor(manifest.positions)
    every: list[Head] = []
    found: Found = {}
    for index in track(manifest.layers, f"{manifest.model}, policies"):
        asked = asked_of(taken.layer(index), positions, zone)
        heads = [Head.of(asked, head) for head in range(asked.layer.keys.shape[1])]
        _engine(asked, heads, found)
        for head in heads:
            _by_head(head, found)
        every += heads
    used = _hardkv(every, found)
    soon = int((positions < positions[0] + SOON).sum())
    return {
        "tokens": manifest.tokens,
        "layers": manifest.layers,
        "soon": {name: _by_rows(of, soon) for name, of in found.items()},
        "all": {name: _by_rows(of, len(positions)) for name, of in found.items()},
        "counts": {
            kind: {str(rows): [min(of), max(of), sum(of) / len(of)] for rows, of in by.items()}
            for kind, by in used.items()
        },
    }


def _by_rows(of: dict[int, list[Quality]], first: int) -> dict[str, dict[str, float]]:
    return {str(rows): summary([_first(q, first) for q in heads]) for rows, heads in of.items()}


def _first(quality: Quality, count: int) -> Quality:
    """Of the first steps alone."""
    parts = {f.name: getattr(quality, f.name) for f in fields(Quality)}
    return Quality(**{n: None if part is None else part[:count] for n, part in parts.items()})
