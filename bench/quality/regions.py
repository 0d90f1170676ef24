"""The engine's regions: rows that are attended to anyway, and the zone that is searched."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quality.measures import Resident
from quality.methods import logits_of


@dataclass(frozen=True)
class Residency:
    """What is attended to anyway; the defaults are the engine's."""

    sink: int = 4
    local: int = 256
    update: int = 512

    def zone(self, prompt: int) -> slice:
        """The zone after a prompt of this length."""
        return slice(self.sink, self.zone_end(prompt, -1))

    def zone_end(self, prompt: int, step: int) -> int:
        """Where the zone ends when token `step` after a prompt of this length attends."""
        return prompt - self.local + (step + 1) // self.update * self.update

    def blocks(self, prompt: int, steps: int) -> Iterator[tuple[int, slice]]:
        """Steps with one and the same zone, and where that ends."""
        begin = 0
        while begin < steps:
            zone_end = self.zone_end(prompt, begin)
            end = begin
            while end < steps and self.zone_end(prompt, end) == zone_end:
                end += 1
            yield zone_end, slice(begin, end)
            begin = end


def resident_of(
    queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, sink: int, zone_end: int
) -> Resident:
    """Attention over sinks and all from the zone's end on: queries (steps, group, head_dim).

    positions  (steps): where the queries are; keys and values (tokens, head_dim) from position 0 on
    """
    last = int(positions.max()) + 1
    places = torch.cat([torch.arange(sink), torch.arange(zone_end, last)])
    logits = logits_of(queries, keys[places])
    logits = logits.masked_fill(places > positions[:, None, None], -math.inf)
    return Resident(torch.logsumexp(logits, -1), torch.softmax(logits, -1) @ values[places])
