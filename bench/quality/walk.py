"""One workload walked from the prompt to its end, with any number of methods asked on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quality import workloads
from quality.measures import Quality, Resident, measure
from quality.methods import TOP_K, Method, oracle_rows
from quality.regions import Residency

SINK, LOCAL = Residency().sink, Residency().local


@dataclass
class Moment:
    """The queries of one position and what they see."""

    position: int
    queries: Tensor  # (steps, group, head_dim)
    keys: Tensor  # (zone, head_dim)
    values: Tensor
    resident: Resident
    planted: Tensor  # (steps): rows of the zone; empty where none is planted

    def best(self, rows: int = TOP_K) -> Tensor:
        return oracle_rows(self.queries, self.keys, rows, self.resident.lse)

    def quality(self, method: Method, best: Tensor) -> Quality:
        """Of as many rows as there are best ones."""
        chosen = method.select(self.queries, best.shape[1], self.resident.lse)
        return measure(self.queries, self.keys, chosen, self.resident, self.values, best)


class Walk:
    def __init__(self, spec: workloads.Spec) -> None:
        self.load = workloads.make(spec)
        self.keys, self.values, self.recent = (
            torch.from_numpy(array)
            for array in (self.load.keys, self.load.values, self.load.recent)
        )

    def moments(self, methods: Sequence[Method] = ()) -> Iterator[Moment]:
        """The asks in order; before each, the methods are shown what has entered the zone."""
        seen = self.load.spec.tokens - LOCAL
        for method in methods:
            method.prefill(self.keys[SINK:seen].contiguous(), self.recent)
        for ask in self.load.asks:
            end = ask.position - LOCAL
            if end > seen:
                for method in methods:
                    method.append(self.keys[seen:end].contiguous())
            seen = end
            yield self._moment(ask, end)

    def _moment(self, ask: workloads.Ask, end: int) -> Moment:
        queries = torch.from_numpy(ask.queries)
        stays = torch.cat([torch.arange(SINK), torch.arange(end, ask.position)])
        return Moment(
            ask.position,
            queries,
            self.keys[SINK:end].contiguous(),
            self.values[SINK:end],
            Resident.of(queries, self.keys[stays], self.values[stays]),
            torch.from_numpy(ask.planted) - SINK,
        )
