"""How much of the best 100 rows' attention the engine's rows catch, on captured keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quality.inside import Ceiling, Residency, resident_of
from quality.measures import Quality, measure
from quality.methods import Method, make_method, oracle_rows
from quality.pretrained.capture import LATE, Capture, Layer
from quality.sizes import TOP_K

# By its own schedule the engine reranks at least four keys to a row; a ratio here is just that.
RATIOS = (1.0, 0.25, 0.2, 0.1, 0.05, 0.02)
METHODS: dict[str, Callable[[], Method]] = {
    "estimates of all keys": Ceiling,
    "default": partial(make_method, "engine"),
    **{
        f"{100 * ratio:g} %": partial(
            make_method, "engine", candidates=ratio, min_candidates_per_row=1
        )
        for ratio in RATIOS
    },
    "published, 10 %": partial(make_method, "published", candidates=0.1),
    "published": partial(make_method, "published"),
}
Track = Callable[[Sequence[Any], str], Iterable[Any]]


def summary(heads: list[Quality]) -> dict[str, float]:
    """Of all kv heads of all layers.

    share, worst_kv_head
                of a group's mass, mean over queries; then the mean and the least of the kv heads
    median, worst_head
                of the query heads' shares, each head's mass summed over queries first
    by_mass     all mass that was caught over all that the best rows have: a head with little
                attention in the zone counts little
    """
    by_head = torch.cat([head.head_shares() for head in heads])
    by_group = [head.share().mean().item() for head in heads]
    caught, best = (
        sum(getattr(head, name).sum().item() for head in heads) for name in ("mass", "best_mass")
    )
    return {
        "share": sum(by_group) / len(heads),
        "worst_kv_head": min(by_group),
        "median": by_head.median().item(),
        "worst_head": by_head.min().item(),
        "by_mass": caught / best,
        "recall": sum(head.recall.mean().item() for head in heads) / len(heads),
    }


def of_layer(
    layer: Layer, positions: Tensor, zone: slice, methods: dict[str, Callable[[], Method]]
) -> dict[str, list[Quality]]:
    """Each method's choices for the measured queries, by kv head."""
    found: dict[str, list[Quality]] = {name: [] for name in methods}
    group = layer.queries.shape[1] // layer.keys.shape[1]
    for head in range(layer.keys.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        keys, queries = layer.keys[:, head].float(), layer.queries[:, heads].float()
        # Shares need no values: the keys stand in for them.
        lse = resident_of(queries, positions, keys, keys, zone.start, zone.stop).lse
        best = oracle_rows(queries, keys[zone], TOP_K, lse)
        for name, make in methods.items():
            method = make()
            method.prefill(keys[zone].contiguous(), layer.recent[:, heads].float())
            chosen = method.select(queries, TOP_K, lse)
            found[name].append(measure(queries, keys[zone], chosen, lse, best=best))
    return found


def _spread(name: str, of_heads: Tensor) -> dict[str, float]:
    return {name: of_heads.mean().item(), f"{name}_at_most": of_heads.max().item()}


def of_capture(
    capture: Capture, track: Track, methods: dict[str, Callable[[], Method]] | None = None
) -> dict[str, Any]:
    """Every method's summary, with what there is to say of the keys."""
    methods = METHODS if methods is None else methods
    manifest, residency = capture.manifest, Residency()
    zone = slice(residency.sink, residency.zone_end(manifest.tokens - LATE, -1))
    positions = torch.tensor(manifest.positions)
    found: dict[str, list[Quality]] = {name: [] for name in methods}
    means: list[
        Tensor
    ] = []  # by kv head: the share of the energy of its keys that is in their mean
    loudest: list[
        Tensor
    ] = []  # by kv head: its loudest channel's energy, over that of the mean one
    for index in track(manifest.layers, manifest.model):
        layer = capture.layer(index)
        keys = layer.keys[zone].float()
        energy = keys.square().mean(dim=0)  # (kv_heads, head_dim)
        means.append(keys.mean(dim=0).square().sum(dim=1) / energy.sum(dim=1))
        loudest.append(energy.amax(dim=1) / energy.mean(dim=1))
        for name, heads in of_layer(layer, positions, zone, methods).items():
            found[name] += heads
    best = [head.best_mass.mean().item() for head in next(iter(found.values()))]
    return {
        "model": manifest.model,
        "weights_sha256": manifest.sha256,
        "text": manifest.text,
        "text_sha256": manifest.text_sha256,
        "text_of_python": manifest.python,
        "versions": manifest.versions,
        "tokens": manifest.tokens,
        "zone": zone.stop - zone.start,
        "layers": manifest.layers,
        "queries": len(manifest.positions),
        "mass_of_best_100": sum(best) / len(best),
        **_spread("energy_in_mean", torch.cat(means)),
        **_spread("loudest_channel", torch.cat(loudest)),
        "methods": {name: summary(heads) for name, heads in found.items()},
    }
