"""One workload walked from the prompt to its end, with any number of methods asked on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quality import workloads
from quality.measures import Quality, Resident, measure
from quality.methods import Method, make_method, oracle_rows

SINK, LOCAL = 4, 256  # attended to anyway, as in the engine's defaults


@dataclass
class Moment:
    """The queries of one position and what they see."""

    position: int
    queries: Tensor  # (steps, group, head_dim)
    keys: Tensor  # (zone, head_dim)
    values: Tensor
    resident: Resident
    planted: Tensor  # (steps): rows of the zone; empty where none is planted

    def best(self, rows: int) -> Tensor:
        return oracle_rows(self.queries, self.keys, rows, self.resident.lse)

    def chosen(self, method: Method, rows: int) -> Tensor:
        return method.select(self.queries, rows, self.resident.lse)

    def measured(self, chosen: Tensor, best: Tensor | None = None) -> Quality:
        return measure(self.queries, self.keys, chosen, self.resident, self.values, best)

    def quality(self, method: Method, rows: int, best: Tensor | None = None) -> Quality:
        return self.measured(self.chosen(method, rows), best)


class Trial:
    """A workload on a device."""

    def __init__(self, spec: workloads.Spec, device: str = "cpu") -> None:
        self.load = workloads.make(spec)
        self.keys, self.values, self.recent = (
            torch.from_numpy(array).to(device)
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
        queries = torch.from_numpy(ask.queries).to(self.keys.device)
        stays = torch.cat([torch.arange(SINK), torch.arange(end, ask.position)])
        stays = stays.to(self.keys.device)
        return Moment(
            ask.position,
            queries,
            self.keys[SINK:end].contiguous(),
            self.values[SINK:end],
            Resident.of(queries, self.keys[stays], self.values[stays]),
            torch.from_numpy(ask.planted).to(self.keys.device) - SINK,
        )

    def moment(self, methods: Sequence[Method] = ()) -> Moment:
        """The only one."""
        (only,) = self.moments(methods)
        return only


def rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{number:.4g}") for name, number in numbers.items()}


def mean_of(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each number over the samples, whose names are the same."""
    return rounded({n: sum(s[n] for s in samples) / len(samples) for n in samples[0]})


# --- Who takes part ------------------------------------------------------------------------------

OURS = "pariskv_core 5%"  # of whole keys
BLOCKS = "pariskv_core 5%, blocks"  # of 64 keys, the default
PUBLISHED = "published 10%"

CONTENDERS: dict[str, Callable[[], Method]] = {
    "oracle": lambda: make_method("oracle"),
    OURS: lambda: make_method("engine", candidates=0.05),
    BLOCKS: lambda: make_method("engine", candidates=0.05, block=64),
    PUBLISHED: lambda: make_method("published", candidates=0.1),
    "PQCache 2x6": lambda: make_method("pqcache"),
    "PQCache 16x8": lambda: make_method("pqcache", subspaces=16, bits=8),
    "MagicPIG": lambda: make_method("magicpig"),
    "Quest": lambda: make_method("quest"),
    "ArkVale": lambda: make_method("arkvale"),
    "mean pages": lambda: make_method("arkvale_mean"),
    "SnapKV": lambda: make_method("snapkv"),
    "StreamingLLM": lambda: make_method("window"),
}

WHILE_DRIFTING: dict[str, Callable[[], Method]] = {
    "pariskv_core 10%": lambda: make_method("engine", candidates=0.1),
    "pariskv_core 10%, blocks": lambda: make_method("engine", candidates=0.1, block=64),
    PUBLISHED: lambda: make_method("published", candidates=0.1),
    "PQCache 16x8": lambda: make_method("pqcache", subspaces=16, bits=8),
    "PQCache 16x8, refreshed": lambda: make_method("pqcache", subspaces=16, bits=8, refresh=1),
    **{
        name: make
        for name, make in CONTENDERS.items()
        if name not in ("oracle", OURS, BLOCKS, PUBLISHED, "PQCache 16x8", "mean pages")
    },
}
