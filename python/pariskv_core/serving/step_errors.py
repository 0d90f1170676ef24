"""What searches report of their own error, for each request.

Layers write theirs into one array. Behind a step it is summed up over layers and kv heads, and
comes to host memory while the next step runs: no step waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pariskv_core import Config

from .errors import ErrorSum, add_up


@dataclass
class _Coming:
    requests: list[str]
    sums: torch.Tensor  # (2, requests) on the host: means and largest ones
    done: Any  # an event; None: it is there

    @property
    def here(self) -> bool:
        return self.done is None or bool(self.done.query())


class StepErrors:
    """
    widest  rows that decode in one step at most, with the padding of a graph
    """

    def __init__(self, config: Config, widest: int) -> None:
        device = torch.device(config.device)
        self._of_layers = torch.zeros(config.layers, widest, config.kv_heads, device=device)
        self._requests: list[str] = []
        self._coming: deque[_Coming] = deque()
        self._found: dict[str, ErrorSum] = {}

    def of(self, layer: int, rows: int) -> torch.Tensor:
        """(rows, kv_heads) that a decode of this layer writes."""
        return self._of_layers[layer, :rows]

    def begin(self, requests: Sequence[str]) -> None:
        """Before a step that decodes a token of each, in this order."""
        self._requests = list(requests)
        if requests:  # what is attended to in full by a kernel of the host writes none
            self._of_layers[:, : len(requests)].zero_()

    def end(self) -> None:
        requests, self._requests = self._requests, []
        if not requests:
            return
        # An error is no number where no query is finite: of no use, and no reason to lose others.
        told = torch.nan_to_num(self._of_layers[:, : len(requests)])
        sums = torch.stack((told.mean((0, 2)), told.amax((0, 2))))
        done = None
        if sums.is_cuda:
            host = torch.empty(sums.shape, device="cpu", pin_memory=True)
            sums = host.copy_(sums, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        self._coming.append(_Coming(requests, sums, done))

    def take(self) -> dict[str, ErrorSum]:
        """By request, of all steps since the last call that are here."""
        while self._coming and self._coming[0].here:
            step = self._coming.popleft()
            means, largest = step.sums.tolist()
            each = zip(step.requests, means, largest, strict=True)
            add_up(
                self._found, {name: ErrorSum(mean, most, 1) for name, mean, most in each if most}
            )
        found, self._found = self._found, {}
        return found
