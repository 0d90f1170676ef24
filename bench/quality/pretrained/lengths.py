"""Long zones: keys of many stretches of text, one after the other.

Captures are all that is needed: the engine knows no positions of its own, so keys of one text may
stand before those of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pariskv_core as pk
import torch
from pariskv_core.cli.weights import Weights

from quality.experiments import Track
from quality.measures import Quality
from quality.pretrained.capture import LATE, Layer, Stretch, make_all
from quality.pretrained.shares import Choose, engine, of_layer, summary
from quality.regions import Residency

LENGTH = 8192  # of a stretch
COUNTS = (1, 2, 4, 8, 16)  # stretches in one zone
_OF_DOCUMENTATION = 12  # of the most stretches; the others are code
# Many stretches of text take long to read: of each model the first few of the captured layers.
FEW_LAYERS = {"smollm2": 3, "qwen-0.5b": 3, "qwen-1.5b": 2, "gemma-270m": 2}
METHODS: dict[str, Choose] = {
    "all keys": engine(1.0),
    **{f"{100 * ratio:g} %": engine(ratio) for ratio in (0.2, 0.1, 0.05, 0.02)},
    "whole keys": engine(block=0),
}


def like_default(tokens: int) -> str:
    """Which of METHODS reranks what the default does, of a zone of so many tokens."""
    ratio = [ratio for begin, ratio, _ in pk.ParisKV().schedule if begin <= tokens][-1]
    return f"{100 * ratio:g} %"


def stretches(layers: int | None) -> list[Stretch]:
    """The oldest first: code, then documentation, whose last stretch asks."""
    counts = {"code": max(COUNTS) - _OF_DOCUMENTATION, "documentation": _OF_DOCUMENTATION}
    return [
        Stretch(text, LENGTH, i * LENGTH, layers=layers)
        for text, count in counts.items()
        for i in range(count)
    ]


def joined(layers: Sequence[Layer]) -> Layer:
    """Keys of one stretch after the other; the first one's opening, the last one's queries."""
    keys = torch.cat([layer.keys for layer in layers])
    return replace(layers[-1], keys=keys, early=layers[0].early)


def lengths(weights: Weights, track: Track) -> dict[str, Any]:
    """Shares in zones of so many stretches' keys."""
    taken = make_all(weights, stretches(FEW_LAYERS[weights.name]))
    last = taken[-1].manifest
    found: dict[str, dict[str, list[Quality]]] = {}
    for index in track(last.layers, f"{weights.name}, lengths"):
        layers = [one.layer(index) for one in taken]
        for count in COUNTS:
            zone = joined(layers[-count:])
            tokens = count * LENGTH
            positions = torch.tensor(last.positions) + tokens - LENGTH
            heads = of_layer(zone, positions, Residency().zone(tokens - LATE), METHODS)
            of = found.setdefault(str(tokens), {name: [] for name in METHODS})
            for name, some in heads.items():
                of[name] += some
    return {
        "model": last.model,
        "tokens": last.tokens,
        "layers": last.layers,
        "text_sha256": last.text_sha256,
        "lengths": {
            tokens: {name: summary(heads) for name, heads in of.items()}
            for tokens, of in found.items()
        },
    }
