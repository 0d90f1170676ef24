"""Shares while tokens are written: what a zone's first keys have set must not go stale.

The engine reads a part of a capture and decodes the rest, one token after the other. Queries at
the beginning and at the end of what it decodes are measured, in the zone that it has by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pariskv_core as pk
import torch
from pariskv_core.cli.weights import Weights

from quality.engine import MANY, reranked
from quality.experiments import Track
from quality.measures import Quality, measure
from quality.pretrained.capture import LATE, MEASURED, Layer, Stretch, make_all
from quality.pretrained.lengths import FEW_LAYERS, LENGTH
from quality.pretrained.shares import cache_of, summary
from quality.regions import resident_of

WRITTEN = 4096  # tokens that are decoded one by one
_LAYERS = {**FEW_LAYERS, "smollm2": None}  # None: all that are captured
SETTINGS: dict[str, dict[str, Any]] = {
    "block 64": MANY,
    "block 64, 5 %": reranked(0.05),
    "block 64, 2 %": reranked(0.02),
}


def ends(tokens: int, written: int) -> tuple[int, ...]:
    """Positions of queries in the first and in the last tokens that are written, half and half."""
    spans = [(tokens - written, tokens - written + LATE - 1), (tokens - LATE, tokens - 2)]
    found = [np.linspace(first, last, MEASURED // 2).astype(int) for first, last in spans]
    return tuple(np.concatenate(found).tolist())


def decoded(
    layer: Layer, positions: Sequence[int], written: int, settings: dict[str, Any]
) -> list[list[Quality]]:
    """Of the choices at each position, by kv head, while the last `written` tokens are decoded."""
    begin, asked = len(layer.keys) - written, dict(zip(positions, layer.queries, strict=True))
    silent, found = torch.zeros_like(layer.queries[:1]), []
    with cache_of(layer, begin, settings) as (cache, sequence):
        for position in range(begin, max(positions) + 1):
            row = layer.keys[position : position + 1]
            q = asked.get(position)
            cache.decode(0, [sequence], silent if q is None else q[None], row, row)
            if q is not None:
                found.append(_quality(layer, position, cache.explain(0, sequence, q), q))
    return found


def _quality(layer: Layer, position: int, why: pk.Explanation, q: torch.Tensor) -> list[Quality]:
    """By kv head, of what was chosen for one query (query_heads, head_dim)."""
    zone = slice(why.zone_begin, why.zone_begin + why.zone_tokens)
    heads = []
    for keys, queries, rows in zip(
        layer.keys.float().unbind(1),
        q.float().chunk(layer.keys.shape[1]),
        torch.from_numpy(why.positions.copy()).long(),
        strict=True,
    ):
        asked, at = queries[None], torch.tensor([position])
        lse = resident_of(asked, at, keys, keys, zone.start, zone.stop).lse
        chosen = torch.where(rows < 0, -1, rows - zone.start)[None]
        heads.append(measure(asked, keys[zone], chosen, lse))
    return heads


def _joined(steps: list[list[Quality]]) -> dict[str, float]:
    return summary([Quality.joined(list(of_head)) for of_head in zip(*steps, strict=True)])


def while_writing(weights: Weights, track: Track) -> dict[str, Any]:
    """Shares at both ends of WRITTEN tokens of the documentation."""
    positions = ends(LENGTH, WRITTEN)
    stretch = Stretch("documentation", LENGTH, layers=_LAYERS[weights.name], positions=positions)
    (taken,) = make_all(weights, [stretch])
    # By setting, and then by position: the kv heads of all layers.
    found: dict[str, list[list[Quality]]] = {name: [[] for _ in positions] for name in SETTINGS}
    for index in track(taken.manifest.layers, f"{weights.name}, written"):
        layer = taken.layer(index)
        for name, settings in SETTINGS.items():
            steps = decoded(layer, positions, WRITTEN, settings)
            for at, heads in zip(found[name], steps, strict=True):
                at += heads
    half = MEASURED // 2
    return {
        "model": taken.manifest.model,
        "tokens": taken.manifest.tokens,
        "layers": taken.manifest.layers,
        "text_sha256": taken.manifest.text_sha256,
        "written": WRITTEN,
        "methods": {
            name: {"first": _joined(steps[:half]), "last": _joined(steps[half:])}
            for name, steps in found.items()
        },
    }
