"""What a layer's queries attend to after a prefix: ways to choose rows, and the engine itself.

All attend to the sinks and the window, which move as the engine's do. A method chooses rows of the
zone; the engine is asked for its own output, the tail included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pariskv_core as pk
import torch
from torch import Tensor

from quality.methods import Method, step_chunks
from quality.pretrained.prefix import Prefix, Step
from quality.regions import Residency, resident_of

ENGINES = Residency()  # the engine's defaults
_COUNTED = 32  # steps from one count of rows to the next

Choose = Callable[[Step], Tensor]
"""Rows for every step: (steps, kv_heads, rows) int64, positions, -1 for none."""


# --- Rows ----------------------------------------------------------------------------------------


@dataclass
class ByHead:
    """A method that serves one kv head, in every layer and kv head."""

    make: Callable[[], Method]
    rows: int
    residency: Residency = ENGINES

    def __call__(self, step: Step) -> Tensor:
        sink, tokens = self.residency.sink, step.prefix.tokens
        every = []
        for head in range(step.new_keys.shape[1]):
            keys, values = step.rows(head)
            method = self.make()
            at = self.residency.zone_end(tokens, -1)
            recent = step.prefix.recent[step.layer][:, step.heads(head)].float()
            method.prefill(keys[sink:at].contiguous(), recent)
            found = []
            for zone_end, block in self.residency.blocks(tokens, len(step.queries)):
                if zone_end > at:
                    method.append(keys[at:zone_end])
                    at = zone_end
                queries, where = step.queries[block, step.heads(head)], step.positions[block]
                lse = resident_of(queries, where, keys, values, sink, zone_end).lse
                chosen = method.select(queries, self.rows, lse)
                found.append(torch.where(chosen < 0, -1, chosen + sink))
            every.append(torch.cat(found))
        return torch.stack(every, dim=1)


def nothing(step: Step) -> Tensor:
    """No row of the zone."""
    return torch.empty(len(step.queries), step.new_keys.shape[1], 0, dtype=torch.int64)


@dataclass
class Rows:
    """Attention to what is resident and to the rows that are chosen."""

    choose: Choose
    residency: Residency = ENGINES

    def __call__(self, step: Step) -> Tensor:
        sink, out = self.residency.sink, torch.empty_like(step.queries)
        chosen = self.choose(step)
        for head in range(step.new_keys.shape[1]):
            keys, values = step.rows(head)
            heads = step.heads(head)
            for zone_end, block in self.residency.blocks(step.prefix.tokens, len(step.queries)):
                queries, rows = step.queries[block, heads], chosen[block, head]
                resident = resident_of(queries, step.positions[block], keys, values, sink, zone_end)
                part = _over(queries, keys, values, rows)
                out[block, heads] = _joined([(resident.lse, resident.output), part])
        return out


Part = tuple[Tensor, Tensor]  # log-sum-exp (steps, group), output (steps, group, head_dim)


def _joined(parts: list[Part]) -> Tensor:
    """One softmax over several sets of rows."""
    weights = torch.stack([lse for lse, _ in parts]).softmax(dim=0)
    return sum(w[..., None] * out for w, (_, out) in zip(weights, parts, strict=True))  # type: ignore


def _over(queries: Tensor, keys: Tensor, values: Tensor, rows: Tensor) -> Part:
    """Attention to rows (steps, rows), -1 for none."""
    found = []
    for chunk in step_chunks(len(queries), rows.shape[1] * keys.shape[1]):
        index = rows[chunk].clamp(min=0)
        logits = queries[chunk] @ keys[index].mT / math.sqrt(keys.shape[1])
        logits = logits.masked_fill((rows[chunk] < 0)[:, None], -math.inf)
        output = logits.softmax(dim=-1).nan_to_num_(0) @ values[index]
        found.append((torch.logsumexp(logits, -1), output))
    return torch.cat([lse for lse, _ in found]), torch.cat([out for _, out in found])


# --- The engine ----------------------------------------------------------------------------------


@dataclass
class Engine:
    """The engine's own output: a cache of each layer has read the prefix, and is forked."""

    policy: pk.ParisKV | pk.PRKV | pk.HardKV
    residency: Residency = ENGINES
    kv_dtype: str = "auto"
    _read: dict[int, tuple[Prefix, pk.Cache, int]] = field(
        default_factory=dict, init=False, repr=False
    )

    def close(self) -> None:
        for _, cache, _ in self._read.values():
            cache.close()
        self._read.clear()

    def _cache(self, step: Step) -> pk.Cache:
        config = pk.Config(
            layers=1,
            kv_heads=step.new_keys.shape[1],
            query_heads=step.queries.shape[1],
            head_dim=step.new_keys.shape[2],
            dtype="float32",
            kv_dtype=self.kv_dtype,
            dense_below=0,
            threads=1,
            policy=self.policy,
            **vars(self.residency),
        )
        return pk.Cache(config)

    def _prefill(self, cache: pk.Cache, sequence: int, step: Step) -> None:
        """Reads the prefix, with the queries of its beginning."""
        every = (step.prefix.keys, step.prefix.values, step.prefix.early)
        keys, values, early = (rows[step.layer].float() for rows in every)
        first = len(early)
        cache.prefill(0, [sequence], keys[:first], values[:first], q=early)
        if len(keys) > first:
            cache.prefill(0, [sequence], keys[first:], values[first:])

    def _started(self, step: Step) -> tuple[pk.Cache, int]:
        """The layer's cache, and its sequence that has read the prefix."""
        known = self._read.get(step.layer)
        if known is not None and known[0] is step.prefix:
            return known[1], known[2]
        if known is not None:
            known[1].close()
        cache = self._cache(step)
        sequence = cache.add()
        self._prefill(cache, sequence, step)
        self._read[step.layer] = (step.prefix, cache, sequence)
        return cache, sequence

    def _each(self, step: Step, out: Tensor) -> Iterator[tuple[int, pk.Cache, int]]:
        """Decodes step after step into `out`: the step's number, the cache, its sequence."""
        cache, base = self._started(step)
        sequence = cache.fork(base)
        rows = [part.contiguous() for part in (step.queries, step.new_keys, step.new_values)]
        for t in range(len(step.queries)):
            q, k, v = (part[t : t + 1] for part in rows)
            cache.decode(0, [sequence], q, k, v, out=out[t : t + 1])
            yield t, cache, sequence
        cache.remove(sequence)

    def counted(self) -> dict[str, float]:
        """Rows that were fetched per kv head and step, errors, masses: over all layers."""
        every = [(cache.stats(), cache.config.kv_heads) for _, cache, _ in self._read.values()]
        searches = sum(stats.searched_tokens * heads for stats, heads in every)
        if searches == 0:
            return {}
        return {
            "rows": sum(stats.fetched_rows for stats, _ in every) / searches,
            "error": sum(stats.mean_error for stats, _ in every) / len(every),
            "worst_error": max(stats.worst_error for stats, _ in every),
            "mass": sum(stats.mean_mass for stats, _ in every) / len(every),
            "least_mass": min(stats.least_mass for stats, _ in every),
        }

    def __call__(self, step: Step) -> Tensor:
        out = torch.empty(step.queries.shape)
        for _ in self._each(step, out):
            pass
        return out


@dataclass
class KeepingEngine(Engine):
    """The engine with PRKV or HARD-KV, whose first choice the prefix's last queries make."""

    _rows: dict[int, list[float]] = field(default_factory=dict, init=False, repr=False)

    def _prefill(self, cache: pk.Cache, sequence: int, step: Step) -> None:
        every = (step.prefix.keys, step.prefix.values, step.prefix.recent)
        keys, values, recent = (rows[step.layer].float() for rows in every)
        first = len(keys) - len(recent)
        cache.prefill(0, [sequence], keys[:first], values[:first])
        cache.prefill(0, [sequence], keys[first:], values[first:], q=recent)

    def __call__(self, step: Step) -> Tensor:
        out = torch.empty(step.queries.shape)
        for t, cache, sequence in self._each(step, out):
            if t % _COUNTED == 0:
                why = cache.explain(0, sequence, step.queries[t].contiguous())
                rows = sum(int((part >= 0).sum()) for part in (why.kept, why.positions))
                dense = why.details is None  # then the zone is attended to in full
                heads = step.new_keys.shape[1]
                of_step = self._rows.setdefault(t, [])
                of_step.append(why.zone_tokens if dense else rows / heads)
        return out

    def counted(self) -> dict[str, float]:
        """Rows of the zone that are attended to per kv head: mean, of the first and a last step."""
        if not self._rows:
            return {}
        means = [sum(of) / len(of) for _, of in sorted(self._rows.items())]
        return {
            "rows": sum(means) / len(means),
            "rows_first": means[0],
            "rows_last": means[-1],
        }
