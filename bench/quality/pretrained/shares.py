"""How much of the best 100 rows' attention the engine's rows catch, on captured keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import configs
import pariskv_core as pk
import torch
from torch import Tensor

from quality.engine import MANY, PUBLISHED, reranked
from quality.experiments import Track
from quality.measures import Quality, measure
from quality.methods import TOP_K, Method, logits_of, make_method, oracle_rows
from quality.pretrained.capture import LATE, Capture, Layer
from quality.regions import Residency, resident_of


@dataclass
class Asked:
    """The measured queries of a layer, and what is resident for them."""

    layer: Layer
    positions: Tensor  # (measured)
    zone: slice
    resident: Tensor  # (measured, query_heads): log-sum-exp of the resident rows' logits

    @property
    def group(self) -> int:
        return self.layer.queries.shape[1] // self.layer.keys.shape[1]

    def head(self, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of a kv head: queries (measured, group, head_dim), the zone's keys, resident."""
        heads = slice(head * self.group, (head + 1) * self.group)
        keys = self.layer.keys[self.zone, head].float().contiguous()
        return self.layer.queries[:, heads].float(), keys, self.resident[:, heads]


Choose = Callable[[Asked], Tensor]
"""A method's rows for a layer's queries: (measured, kv_heads, TOP_K), indices into the zone."""


def by_head(make: Callable[[], Method], asked: Asked) -> Tensor:
    """A method that serves one kv head, in every kv head."""
    chosen = []
    for head in range(asked.layer.keys.shape[1]):
        queries, keys, resident = asked.head(head)
        heads = slice(head * asked.group, (head + 1) * asked.group)
        method = make()
        method.prefill(keys, asked.layer.recent[:, heads].float())
        chosen.append(method.select(queries, TOP_K, resident))
    return torch.stack(chosen, dim=1)


@contextmanager
def cache_of(layer: Layer, end: int, changes: dict[str, Any]) -> Iterator[tuple[pk.Cache, int]]:
    """A cache with the layer's first tokens, up to `end`, and their sequence."""
    shape = {
        "kv_heads": layer.keys.shape[1],
        "query_heads": layer.queries.shape[1],
        "head_dim": layer.keys.shape[2],
    }
    fields = {"layers": 1, "threads": 1, "dense_below": 0, "dtype": "float16"}
    with pk.Cache(configs.make(**{**fields, **shape, **changes})) as cache:
        sequence, early = cache.add(), len(layer.early)
        # Values do not decide; any will do.
        first, rest = layer.keys[:early], layer.keys[early:end]
        cache.prefill(0, [sequence], first, first, q=layer.early)
        cache.prefill(0, [sequence], rest, rest)
        yield cache, sequence


def by_engine(changes: dict[str, Any], asked: Asked) -> Tensor:
    """The engine itself: a cache that was filled up to the late tokens says what it would choose.

    The late tokens before a query come in as the logit without a value row that sink_bias is.
    """
    layer = asked.layer
    end, group = len(layer.keys) - LATE, asked.group
    chosen = []
    with cache_of(layer, end, {"top_k": TOP_K, **changes}) as (cache, sequence):
        for position, q in zip(asked.positions.tolist(), layer.queries, strict=True):
            late = layer.keys[end : position + 1].float().repeat_interleave(group, dim=1)
            logits = [logits_of(q[h].float(), late[:, h]) for h in range(len(q))]
            bias = torch.stack([torch.logsumexp(x, -1) for x in logits])
            why = cache.explain(0, sequence, q, sink_bias=bias)
            if (why.zone_begin, why.zone_tokens) != (asked.zone.start, _length(asked.zone)):
                raise RuntimeError("The cache has another zone than the one that is measured.")
            rows = torch.from_numpy(why.positions.copy()).long()
            chosen.append(torch.where(rows < 0, -1, rows - why.zone_begin))
    return torch.stack(chosen)


def _length(zone: slice) -> int:
    return int(zone.stop - zone.start)


def engine(ratio: float | None = None, **changes: Any) -> Choose:
    """By a schedule of its own, at least four keys to a row are reranked; a ratio is just that."""
    return partial(by_engine, changes if ratio is None else {**reranked(ratio), **changes})


def peer(name: str, **options: Any) -> Choose:
    return partial(by_head, partial(make_method, name, **options))


# Names are those of results files and of tables, and tables have their order. A new format or
# peer is a line here.
ENGINE: dict[str, Choose] = {
    "whole keys": engine(block=0),
    "whole keys, 5 %": engine(0.05, block=0),
    "published, 10 %": engine(**{**PUBLISHED, "schedule": [(0, 0.1, 0.2)]}),
    "published": engine(**PUBLISHED),
    "block 64, all keys": engine(1.0),
    "block 64": engine(**MANY),
    "block 64, 5 %": engine(0.05),
    "block 64, 2 %": engine(0.02),
    "block 256, 5 %": engine(0.05, block=256),
    "block 256, 2 %": engine(0.02, block=256),
}
PEERS: dict[str, Choose] = {
    "PQCache 16×8": peer("pqcache", subspaces=16, bits=8),
    "PQCache 2×6": peer("pqcache"),
    "FAISS 1 bit": peer("fastscan", bits=1),
    "FAISS 2 bits": peer("fastscan", bits=2),
    "FAISS 4 bits": peer("fastscan", bits=4),
    "FAISS 1 bit, 5 % by 4 bits": peer("fastscan", bits=1, finer=4),
    "MagicPIG": peer("magicpig"),
    "ArkVale": peer("arkvale"),
    "Quest": peer("quest"),
}
METHODS = ENGINE | PEERS


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


def asked_of(layer: Layer, positions: Tensor, zone: slice) -> Asked:
    """The measured queries of a layer, those at the positions."""
    group = layer.queries.shape[1] // layer.keys.shape[1]
    resident = []
    for head in range(layer.queries.shape[1]):
        # Shares need no values: the keys stand in for them.
        keys = layer.keys[:, head // group].float()
        queries = layer.queries[:, head, None].float()
        resident.append(resident_of(queries, positions, keys, keys, zone.start, zone.stop).lse)
    return Asked(layer, positions, zone, torch.cat(resident, dim=1))


def of_layer(
    layer: Layer, positions: Tensor, zone: slice, methods: dict[str, Choose]
) -> dict[str, list[Quality]]:
    """Each method's choices for the measured queries, by kv head."""
    asked = asked_of(layer, positions, zone)
    heads = [asked.head(head) for head in range(layer.keys.shape[1])]
    best = [oracle_rows(queries, keys, TOP_K, lse) for queries, keys, lse in heads]
    found: dict[str, list[Quality]] = {}
    for name, choose in methods.items():
        rows = choose(asked)
        found[name] = [
            measure(queries, keys, rows[:, head], lse, best=best[head])
            for head, (queries, keys, lse) in enumerate(heads)
        ]
    return found


def _spread(name: str, of_heads: Tensor) -> dict[str, float]:
    return {name: of_heads.mean().item(), f"{name}_at_most": of_heads.max().item()}


def of_capture(
    capture: Capture, track: Track, methods: dict[str, Choose] | None = None
) -> dict[str, Any]:
    """Every method's summary, with what there is to say of the keys."""
    methods = METHODS if methods is None else methods
    manifest = capture.manifest
    zone = Residency().zone(manifest.tokens - LATE)
    positions = torch.tensor(manifest.positions)
    found: dict[str, list[Quality]] = {name: [] for name in methods}
    # By kv head: the share of its keys' energy that is in their mean, and the energy of its loudest
    # channel over that of the mean one.
    means: list[Tensor] = []
    loudest: list[Tensor] = []
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
