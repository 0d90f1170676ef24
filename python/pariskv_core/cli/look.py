"""Where a step looked: the rows that the engine selected, and full attention's view of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from pariskv_core.cli.errors import Errors, Watched

if TYPE_CHECKING:
    from pariskv_core.cli.sparse_run import Query, Run

_CHUNK = 8192  # tokens read at a time
_NEAR = 12  # tokens: hot positions so near to each other are one passage
_AROUND = 14  # tokens shown to either side


@dataclass
class Layer:
    layer: int  # the model's
    searched: bool
    zone: tuple[int, int]
    selected: NDArray[np.int64]  # (kv_heads, rows), -1 where there is none
    mass: NDArray[np.float32]  # (kv_heads, tokens): full attention, mean over a group's heads


@dataclass(frozen=True)
class Passage:
    begin: int
    end: int
    hottest: int
    selected: int  # layers and kv heads that selected a row of it
    mass: float  # full attention's, mean over layers and heads


@dataclass
class Look:
    tokens: int
    layers: list[Layer]
    errors: Errors | None = None  # of all layers' outputs; None: nothing was estimated

    @property
    def searched(self) -> bool:
        return any(layer.searched for layer in self.layers)

    @property
    def zone(self) -> tuple[int, int]:
        zones = [layer.zone for layer in self.layers if layer.searched]
        return zones[0] if zones else (0, 0)

    @property
    def searches(self) -> int:
        """Layers times kv heads."""
        return sum(len(layer.selected) for layer in self.layers if layer.searched)

    def selections(self, layer: Layer) -> NDArray[np.int64]:
        """(tokens): kv heads that selected each position."""
        places = layer.selected[layer.selected >= 0]
        return np.bincount(places, minlength=self.tokens)[: self.tokens]

    @property
    def selected(self) -> NDArray[np.int64]:
        """(tokens): layers and kv heads that selected each position."""
        total = np.zeros(self.tokens, np.int64)
        for layer in self.layers:
            total += self.selections(layer)
        return total

    @property
    def mass(self) -> NDArray[np.float32]:
        """(tokens): full attention's share of each position, mean over layers and heads."""
        means = [layer.mass.mean(axis=0) for layer in self.layers]
        return np.asarray(np.mean(means, axis=0), np.float32)

    def shares(self) -> dict[str, float]:
        """Of full attention's mass, by where the step finds it; the mean over layers and heads.

        A model's own sinks, logits without a row, are left out of it.
        """
        resident, chosen = [], []
        for layer in self.layers:
            begin, end = layer.zone
            total = layer.mass.sum(axis=1)
            of_zone = layer.mass[:, begin:end].sum(axis=1)
            resident.append(float((1 - of_zone / total).mean()))
            there = layer.selected >= 0
            mass = np.take_along_axis(layer.mass, np.where(there, layer.selected, 0), axis=1)
            chosen.append(float((np.where(there, mass, 0).sum(axis=1) / total).mean()))
        first, second = float(np.mean(resident)), float(np.mean(chosen))
        return {"resident": first, "selected": second, "elsewhere": max(1 - first - second, 0.0)}

    def bins(self, values: NDArray[Any], width: int) -> NDArray[np.float64]:
        """Sums over `width` equal parts of the context."""
        edges = np.linspace(0, self.tokens, min(width, self.tokens) + 1).astype(int)[:-1]
        return np.add.reduceat(np.asarray(values, np.float64), edges)

    def passages(self, most: int) -> list[Passage]:
        """Of the zone, by the attention that full attention gives to their selected rows."""
        heat = self.heat
        found: list[Passage] = []
        taken = np.zeros(self.tokens, bool)
        for place in np.argsort(-heat)[: 50 * most]:
            if heat[place] <= 0 or len(found) == most:
                break
            if taken[max(place - _NEAR, 0) : place + _NEAR + 1].any():
                continue
            begin, end = max(int(place) - _AROUND, 0), min(int(place) + _AROUND, self.tokens)
            taken[begin:end] = True
            heads = sum(
                int(((layer.selected >= begin) & (layer.selected < end)).any(axis=1).sum())
                for layer in self.layers
            )
            mass = float(self.mass[begin:end].sum())
            found.append(Passage(begin, end, int(place), heads, mass))
        return found

    @property
    def heat(self) -> NDArray[np.float64]:
        """(tokens): full attention's mass of selected rows, summed over layers and kv heads."""
        heat = np.zeros(self.tokens)
        for layer in self.layers:
            for head, rows in enumerate(layer.selected):
                rows = rows[rows >= 0]
                heat[rows] += layer.mass[head, rows]
        return heat


def look(run: Run) -> Look:
    """At the last model step of a watched run."""
    tokens, watched = run.engine.length(run.sequence), Watched()
    layers = [_of_layer(run, run.queries[key], watched) for key in sorted(run.queries)]
    return Look(tokens, layers, watched.tally.together())


def _of_layer(run: Run, query: Query, watched: Watched) -> Layer:
    options = query.logits.options()
    why = run.engine.explain(query.engine_layer, run.sequence, query.rows, **options)
    watched.add_layer(run, query, why)
    kv_heads = run.engine.config.kv_heads
    selected = np.array(why.positions, np.int64)
    if not why.searched:
        selected = np.full((kv_heads, 0), -1, np.int64)
    return Layer(
        query.layer,
        why.searched,
        (why.zone_begin, why.zone_begin + why.zone_tokens) if why.searched else (0, 0),
        selected,
        _mass(run, query, kv_heads),
    )


def _mass(run: Run, query: Query, kv_heads: int) -> NDArray[np.float32]:
    """(kv_heads, tokens): what full attention would give each row."""
    engine, rows, logits = run.engine, query.rows, query.logits
    config, length = engine.config, engine.length(run.sequence, query.engine_layer)
    scale = rows.shape[-1] ** -0.5 if logits.scale is None else logits.scale
    grouped = rows.float().view(kv_heads, -1, rows.shape[-1]) * scale
    parts = []
    for begin in range(0, length, _CHUNK):
        end = min(begin + _CHUNK, length)
        k, v = (
            torch.empty((end - begin, kv_heads, dim), dtype=rows.dtype, device=rows.device)
            for dim in (config.head_dim, config.value_dim)
        )
        engine.read(query.engine_layer, run.sequence, begin, end, out=(k, v))
        parts.append(grouped @ k.float().permute(1, 2, 0))
    x = torch.cat(parts, dim=-1)  # (kv_heads, group, tokens)
    if logits.softcap is not None:
        x = logits.softcap * torch.tanh(x / logits.softcap)
    if logits.sinks is not None:
        sinks = logits.sinks.detach().reshape(kv_heads, -1, 1).float()
        x = torch.cat([x, sinks], dim=-1)
    found: NDArray[np.float32] = x.softmax(-1)[..., :length].mean(dim=1).cpu().numpy()
    return found
