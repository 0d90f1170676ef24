"""Balances that were frozen early, and keys of many stretches of text in one zone.

Captures are all that is needed: the engine knows no positions of its own, so keys of one text may
stand before those of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import configs
import numpy as np
import pariskv_core as pk
import torch
from pariskv_core.cli.weights import Weights

from quality.engine import Choice, explained, quality_of
from quality.inside import Residency
from quality.measures import Quality
from quality.pretrained.capture import LATE, MEASURED, Capture, Layer, Stretch, make_all
from quality.pretrained.shares import MANY, Choose, Track, engine, of_layer, percent, summary

WRITTEN = 4096  # tokens that are decoded one by one
LENGTH = 8192  # of a stretch
COUNTS = (1, 2, 4, 8, 16)  # stretches in one zone
RATIOS = (1.0, 0.2, 0.1, 0.05, 0.02)
_OF_DOCUMENTATION = 12  # of the most stretches; the others are code
# Many stretches of text take long to read: of each model the first few of the captured layers.
FEW_LAYERS = {"smollm2": 3, "qwen-0.5b": 3, "qwen-1.5b": 2, "gemma-270m": 2}
_OF_ONE: dict[str, int | None] = {**FEW_LAYERS, "smollm2": None}  # of a stretch; None: all
SETTINGS: dict[str, dict[str, Any]] = {
    "block 64": MANY,
    **{
        f"block 64, {percent(ratio)}": {"schedule": [(0, ratio, 0.2)], "min_candidates_per_row": 1}
        for ratio in (0.05, 0.02)
    },
}
METHODS: dict[str, Choose] = {name: engine(**changes) for name, changes in SETTINGS.items()}
OF_LENGTHS: dict[str, Choose] = {
    **{f"block 64, {percent(ratio)}": engine(ratio) for ratio in RATIOS},
    "block 0": engine(block=0),
}


def like_default(tokens: int) -> str:
    """Which of OF_LENGTHS reranks what the default does, of a zone of so many tokens."""
    ratio = [ratio for begin, ratio, _ in pk.ParisKV().schedule if begin <= tokens][-1]
    return f"block 64, {percent(ratio)}"


def _shape(layer: Layer) -> dict[str, int]:
    return {
        "kv_heads": layer.keys.shape[1],
        "query_heads": layer.queries.shape[1],
        "head_dim": layer.keys.shape[2],
    }


# --- While tokens are written --------------------------------------------------------------------


def while_writing(tokens: int) -> tuple[int, ...]:
    """Positions of queries in the first and in the last of WRITTEN tokens, half and half."""
    begin = tokens - WRITTEN
    ends = [(begin, begin + LATE), (tokens - LATE, tokens - 1)]
    found = [np.linspace(first, last - 1, MEASURED // 2).astype(int) for first, last in ends]
    return tuple(np.concatenate(found).tolist())


def decoded(
    layer: Layer, positions: Sequence[int], written: int, changes: dict[str, Any]
) -> list[Choice]:
    """What the engine chooses at the positions while it decodes the last `written` tokens."""
    begin = len(layer.keys) - written
    fields = {"layers": 1, "threads": 1, "dense_below": 0, "dtype": "float16"}
    asked = dict(zip(positions, layer.queries, strict=True))
    silent, choices = torch.zeros_like(layer.queries[:1]), []
    with pk.Cache(configs.make(**{**fields, **_shape(layer), **changes})) as cache:
        sequence, early = cache.add(), len(layer.early)
        first, rest = layer.keys[:early], layer.keys[early:begin]
        cache.prefill(0, [sequence], first, first, q=layer.early)
        cache.prefill(0, [sequence], rest, rest)
        for position in range(begin, max(positions) + 1):
            row = layer.keys[position : position + 1]
            q = asked.get(position)
            cache.decode(0, [sequence], silent if q is None else q[None], row, row)
            if q is not None:
                choices.append(explained(cache, 0, sequence, q, position - begin))
    return choices


def _ends(layer: Layer, positions: Sequence[int], changes: dict[str, Any]) -> list[list[Quality]]:
    """The choices' quality in the first half of the positions and in the last, by kv head."""
    begin = len(layer.keys) - WRITTEN
    queries = torch.zeros(WRITTEN, *layer.queries.shape[1:])
    queries[torch.tensor(positions) - begin] = layer.queries.float()
    choices = decoded(layer, positions, WRITTEN, changes)
    half = len(choices) // 2
    return [
        quality_of(some, queries, layer.keys, layer.keys, begin, Residency().sink)
        for some in (choices[:half], choices[half:])
    ]


def written(weights: Weights, track: Track) -> dict[str, Any]:
    """Shares while WRITTEN tokens of the documentation are given one by one: at the two ends."""
    positions, layers = while_writing(LENGTH), _OF_ONE[weights.name]
    stretch = Stretch("documentation", LENGTH, positions=positions, layers=layers)
    (taken,) = make_all(weights, [stretch])
    found: dict[str, list[list[Quality]]] = {name: [[], []] for name in SETTINGS}
    for index in track(taken.manifest.layers, f"{weights.name}, written"):
        layer = taken.layer(index)
        for name, changes in SETTINGS.items():
            for end, heads in zip(found[name], _ends(layer, positions, changes), strict=True):
                end += heads
    methods = {}
    for name, (first, last) in found.items():
        at = [summary(heads) for heads in (first, last)]
        methods[name] = {
            "share_first": at[0]["share"],
            "share_last": at[1]["share"],
            "lost": at[0]["share"] - at[1]["share"],
            "worst_kv_head_first": at[0]["worst_kv_head"],
            "worst_kv_head_last": at[1]["worst_kv_head"],
        }
    return {**_facts(taken), "written": WRITTEN, "methods": methods}


# --- Another text's balance ----------------------------------------------------------------------


def with_opening_of(layer: Layer, other: Layer) -> Layer:
    """The layer with the first keys and queries, which set the balance, of another text's."""
    keys = torch.cat([other.keys[: len(other.early)], layer.keys[len(other.early) :]])
    return replace(layer, keys=keys, early=other.early)


def balance(weights: Weights, track: Track) -> dict[str, Any]:
    """Shares on two texts, with a balance from each text's own opening and from the other's."""
    texts = ("documentation", "code")
    layers = _OF_ONE[weights.name]
    taken = make_all(weights, [Stretch(text, LENGTH, layers=layers) for text in texts])
    found: dict[str, dict[str, list[Quality]]] = {}
    for index in track(taken[0].manifest.layers, f"{weights.name}, balance"):
        layers = [one.layer(index) for one in taken]
        for text, own, other in zip(texts, layers, reversed(layers), strict=True):
            cases = {
                f"{text}, its own": own,
                f"{text}, the other's": with_opening_of(own, other),
            }
            for case, layer in cases.items():
                heads = _measured(layer, taken[0].manifest.positions, METHODS)
                _gather(found.setdefault(case, {}), heads)
    cases = {
        case: {name: summary(heads) for name, heads in of.items()} for case, of in found.items()
    }
    return {**_facts(taken[0]), "cases": cases}


# --- Many stretches ------------------------------------------------------------------------------


def stretches(layers: int | None) -> list[Stretch]:
    """The oldest first: code, then documentation, whose last stretch asks."""
    code = [
        Stretch("code", LENGTH, i * LENGTH, layers=layers)
        for i in range(max(COUNTS) - _OF_DOCUMENTATION)
    ]
    prose = [
        Stretch("documentation", LENGTH, i * LENGTH, layers=layers)
        for i in range(_OF_DOCUMENTATION)
    ]
    return code + prose


def joined(layers: Sequence[Layer]) -> Layer:
    """Keys of one stretch after the other; the first one's opening, the last one's queries."""
    keys = torch.cat([layer.keys for layer in layers])
    return replace(layers[-1], keys=keys, early=layers[0].early)


def lengths(weights: Weights, track: Track) -> dict[str, Any]:
    """Shares in zones of so many stretches' keys."""
    taken = make_all(weights, stretches(FEW_LAYERS[weights.name]))
    last = taken[-1].manifest
    found: dict[int, dict[str, list[Quality]]] = {count: {} for count in COUNTS}
    for index in track(last.layers, f"{weights.name}, lengths"):
        layers = [one.layer(index) for one in taken]
        for count in COUNTS:
            positions = [p + (count - 1) * LENGTH for p in last.positions]
            heads = _measured(joined(layers[-count:]), positions, OF_LENGTHS)
            _gather(found[count], heads)
    by_length = {
        str(count * LENGTH): {name: summary(heads) for name, heads in of.items()}
        for count, of in found.items()
    }
    return {**_facts(taken[-1]), "stretch": LENGTH, "lengths": by_length}


# --- Shared --------------------------------------------------------------------------------------


def _measured(
    layer: Layer, positions: Sequence[int], methods: dict[str, Choose]
) -> dict[str, list[Quality]]:
    residency = Residency()
    zone = slice(residency.sink, residency.zone_end(len(layer.keys) - LATE, -1))
    return of_layer(layer, torch.tensor(positions), zone, methods)


def _gather(found: dict[str, list[Quality]], heads: dict[str, list[Quality]]) -> None:
    for name, some in heads.items():
        found.setdefault(name, []).extend(some)


def _facts(taken: Capture) -> dict[str, Any]:
    names = ("model", "tokens", "layers", "text_sha256")
    return {name: getattr(taken.manifest, name) for name in names}


PARTS: dict[str, Callable[[Weights, Track], dict[str, Any]]] = {
    "written": written,
    "balance": balance,
    "lengths": lengths,
}
