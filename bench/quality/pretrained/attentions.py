"""What a layer's queries attend to after a prefix: ways to choose rows, and what stands for others.

All attend to the sinks and the window, which move as the engine's do. A method chooses rows of the
zone. The tail, where there is one, is a sample of the zone's rows, each with the weight of the
rows it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import configs
import pariskv_core as pk
import torch
from torch import Tensor

from quality.inside import Residency, resident_of
from quality.methods import Method, step_chunks
from quality.pretrained.prefix import Prefix, Step

ENGINES = Residency()  # the engine's defaults
_PLAIN = {"tail": "none"}  # unless a method asks for more
_COUNTED = 32  # steps from one count of rows to the next

Choose = Callable[[Step], Tensor]
"""Rows for every step: (steps, kv_heads, rows) int64, positions, -1 for none."""


def _pieces(step: Step, residency: Residency) -> Any:
    return residency.blocks(step.prefix.tokens, len(step.queries))


# --- Rows ----------------------------------------------------------------------------------------


@dataclass
class ByHead:
    """A method that serves one kv head, in every layer and kv head.

    interval  tokens after which the method is shown the last queries again; None: never
    """

    make: Callable[[], Method]
    rows: int
    residency: Residency = ENGINES
    interval: int | None = None

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
            for zone_end, block in _pieces(step, self.residency):
                if zone_end > at:
                    method.append(keys[at:zone_end])
                    at = zone_end
                for part in self._parts(block):
                    queries = step.queries[part, step.heads(head)]
                    if part.start > 0 and self.interval is not None:
                        asked = step.queries[: part.start, step.heads(head)]
                        method.look(torch.cat([recent, asked])[-len(recent) :])  # type: ignore
                    where = step.positions[part]
                    lse = resident_of(queries, where, keys, values, sink, zone_end).lse
                    chosen = method.select(queries, self.rows, lse)
                    found.append(torch.where(chosen < 0, -1, chosen + sink))
            every.append(torch.cat(found))
        return torch.stack(every, dim=1)

    def _parts(self, block: slice) -> Iterator[slice]:
        """The steps of a block, cut where the method is shown queries."""
        begin = block.start
        while begin < block.stop:
            end = block.stop
            if self.interval is not None:
                end = min(end, (begin // self.interval + 1) * self.interval)
            yield slice(begin, end)
            begin = end


def nothing(step: Step) -> Tensor:
    """No row of the zone."""
    return torch.empty(len(step.queries), step.new_keys.shape[1], 0, dtype=torch.int64)


@dataclass
class Engine:
    """The engine: a cache for each layer that has read the prefix, forked for what follows."""

    policy: dict[str, Any] = field(default_factory=dict)
    residency: Residency = ENGINES
    _read: dict[int, tuple[Prefix, pk.Cache, int]] = field(
        default_factory=dict, init=False, repr=False
    )

    def close(self) -> None:
        for _, cache, _ in self._read.values():
            cache.close()
        self._read.clear()

    def _fields(self, step: Step) -> dict[str, Any]:
        """Of a Config, but for its policy."""
        shape = {
            "kv_heads": step.new_keys.shape[1],
            "query_heads": step.queries.shape[1],
            "head_dim": step.new_keys.shape[2],
        }
        fields = {"layers": 1, "threads": 1, "dense_below": 0, "dtype": "float32"}
        return {**fields, **vars(self.residency), **shape}

    def _cache(self, step: Step) -> pk.Cache:
        return pk.Cache(configs.make(**self._fields(step), **_PLAIN | self.policy))

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
        """Rows that were fetched per kv head and step, and their mass: over all layers."""
        every = [(cache.stats(), cache.config.kv_heads) for _, cache, _ in self._read.values()]
        searches = sum(stats.searched_tokens * heads for stats, heads in every)
        if searches == 0:
            return {}
        return {
            "rows": sum(stats.fetched_rows for stats, _ in every) / searches,
            "mass": sum(stats.mean_mass for stats, _ in every) / len(every),
            "least_mass": min(stats.least_mass for stats, _ in every),
        }

    def decoded(self, step: Step) -> Tensor:
        """What decode gives: as an attention."""
        out = torch.empty(step.queries.shape)
        for _ in self._each(step, out):
            pass
        return out

    def __call__(self, step: Step) -> Tensor:
        """The rows that each decode attends to."""
        found = []
        for t, cache, sequence in self._each(step, torch.empty(step.queries.shape)):
            why = cache.explain(0, sequence, step.queries[t].contiguous())
            if why.zone_begin + why.zone_tokens != self.residency.zone_end(step.prefix.tokens, t):
                raise RuntimeError("The engine's zone ends elsewhere.")
            found.append(torch.from_numpy(why.positions.copy()))
        return torch.stack(found).long()


@dataclass
class KeepingEngine(Engine):
    """The engine with PRKV or HARD-KV, whose first choice the prefix's last queries make."""

    keeping: pk.PRKV | pk.HardKV = field(default_factory=pk.PRKV)
    _rows: dict[int, list[float]] = field(default_factory=dict, init=False, repr=False)

    def _cache(self, step: Step) -> pk.Cache:
        return pk.Cache(pk.Config(**self._fields(step), policy=self.keeping))

    def _prefill(self, cache: pk.Cache, sequence: int, step: Step) -> None:
        every = (step.prefix.keys, step.prefix.values, step.prefix.recent)
        keys, values, recent = (rows[step.layer].float() for rows in every)
        first = len(keys) - len(recent)
        cache.prefill(0, [sequence], keys[:first], values[:first])
        cache.prefill(0, [sequence], keys[first:], values[first:], q=recent)

    def decoded(self, step: Step) -> Tensor:
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


# --- Attention -----------------------------------------------------------------------------------


def sampled(zone_begin: int, zone_end: int, least: int) -> Tensor:
    """The zone's positions that are multiples of a power of two: `least` to twice as many."""
    stride = 1
    while _multiples(zone_begin, zone_end, 2 * stride) >= least:
        stride *= 2
    return torch.arange(-(-zone_begin // stride) * stride, zone_end, stride)


def _multiples(begin: int, end: int, stride: int) -> int:
    return (end - 1) // stride - (begin - 1) // stride


@dataclass
class Rows:
    """Attention to what is resident, to the rows that are chosen and, by `tail`, to a sample."""

    choose: Choose
    tail: int = 0  # rows of the sample at least; 0: none
    residency: Residency = ENGINES

    def __call__(self, step: Step) -> Tensor:
        sink, out = self.residency.sink, torch.empty_like(step.queries)
        chosen = self.choose(step)
        for head in range(step.new_keys.shape[1]):
            keys, values = step.rows(head)
            heads = step.heads(head)
            for zone_end, block in _pieces(step, self.residency):
                queries, rows = step.queries[block, heads], chosen[block, head]
                resident = resident_of(queries, step.positions[block], keys, values, sink, zone_end)
                parts = [(resident.lse, resident.output)]
                if rows.shape[1] > 0:
                    parts.append(_over(queries, keys, values, rows))
                if self.tail > 0:
                    sample = sampled(sink, zone_end, self.tail)
                    parts.append(_of_tail(queries, keys, values, rows, sample, zone_end - sink))
                out[block, heads] = _joined(parts)
        return out


Part = tuple[Tensor, Tensor]  # log-sum-exp (steps, group), output (steps, group, head_dim)


def _joined(parts: list[Part]) -> Tensor:
    """One softmax over several sets of rows."""
    lses = torch.stack([lse for lse, _ in parts])
    weights = lses.softmax(dim=0)
    return sum(w[..., None] * out for w, (_, out) in zip(weights, parts, strict=True))  # type: ignore


def _over(queries: Tensor, keys: Tensor, values: Tensor, rows: Tensor) -> Part:
    """Attention to rows (steps, rows), -1 for none."""
    found = []
    for chunk in step_chunks(len(queries), rows.shape[1] * keys.shape[1], queries.device):
        index = rows[chunk].clamp(min=0)
        logits = queries[chunk] @ keys[index].mT / math.sqrt(keys.shape[1])
        logits = logits.masked_fill((rows[chunk] < 0)[:, None], -math.inf)
        found.append((torch.logsumexp(logits, -1), _safe_softmax(logits) @ values[index]))
    return torch.cat([lse for lse, _ in found]), torch.cat([out for _, out in found])


def _safe_softmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1).nan_to_num_(0)


def _of_tail(
    queries: Tensor, keys: Tensor, values: Tensor, rows: Tensor, sample: Tensor, zone: int
) -> Part:
    """Attention to the sampled rows that are not chosen, for all rows that are not."""
    is_chosen = torch.zeros(len(queries), len(keys) + 1, dtype=torch.bool)
    is_chosen.scatter_(1, torch.where(rows < 0, len(keys), rows), True)
    is_chosen[:, -1] = False
    taken = is_chosen[:, sample]  # (steps, sample)
    left = zone - (rows >= 0).sum(dim=1)
    weight = left / (len(sample) - taken.sum(dim=1)).clamp(min=1)
    logits = queries @ keys[sample].T / math.sqrt(keys.shape[1]) + weight.log()[:, None, None]
    logits = logits.masked_fill(taken[:, None], -math.inf)
    return torch.logsumexp(logits, -1), _safe_softmax(logits) @ values[sample]
