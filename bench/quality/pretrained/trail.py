"""Every query, key and value of a text after a prefix, in some layers: what changes over time.

A capture has a few queries alone. Here are all of them, so that rows can be chosen anew at any
token. Regions are the policies': sinks, a window, and a zone that grows when a buffer is full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quality.methods import logits_of
from quality.pretrained.capture import load_transformers
from quality.pretrained.prefix import Prefix, Pretrained, Step, full, go_on

SINK, LOCAL, UPDATE = 4, 64, 128  # PRKV's regions
EVERY_LAYER = 3  # that is watched, where there are many
_FEW = 6


@dataclass
class Head:
    """A kv head: what was read, and what came after it."""

    prompt: int  # tokens that were read
    queries: Tensor  # (recent + steps, group, head_dim): those before the prompt's end, too
    keys: Tensor  # (prompt + steps, head_dim)
    values: Tensor

    @property
    def steps(self) -> int:
        return len(self.keys) - self.prompt

    @property
    def recent(self) -> int:
        return len(self.queries) - self.steps

    def asking(self, step: int, window: int) -> Tensor:
        """The last queries (window, group, head_dim) before this step."""
        end = self.recent + step
        return self.queries[end - window : end]

    def at(self, steps: Tensor) -> Tensor:
        """The queries of these steps (steps, group, head_dim)."""
        return self.queries[self.recent + steps]

    def zone_end(self, step: int, update: int = UPDATE) -> int:
        return self.prompt - LOCAL + step // update * update

    def zone(self, step: int, update: int = UPDATE) -> Tensor:
        """The zone's keys."""
        return self.keys[SINK : self.zone_end(step, update)]

    def attention(self, steps: Tensor) -> Tensor:
        """(steps, group, tokens): over everything up to each step's own token."""
        logits = logits_of(self.at(steps), self.keys)
        later = torch.arange(len(self.keys)) > self.prompt + steps[:, None, None]
        return logits.masked_fill(later, float("-inf")).softmax(dim=-1)


def blocks(steps: int, interval: int, stride: int) -> Iterator[tuple[int, Tensor]]:
    """Where rows are chosen, and the steps that are measured until the next choice."""
    for begin in range(0, steps, interval):
        yield begin, torch.arange(begin, min(begin + interval, steps), stride)


@dataclass
class _Watched:
    """Full attention that keeps what it was given."""

    found: dict[int, list[Head]]

    def __call__(self, step: Step) -> Tensor:
        recent = step.prefix.recent[step.layer].float()
        queries = torch.cat([recent, step.queries])
        self.found[step.layer] = [
            Head(step.prefix.tokens, queries[:, step.heads(head)], *step.rows(head))
            for head in range(step.new_keys.shape[1])
        ]
        return full(step)


def trail(pretrained: Pretrained, prefix: Prefix, ids: Tensor) -> dict[int, list[Head]]:
    """By layer: its kv heads, over the ids that follow the prefix. Of many layers a third."""
    load_transformers()
    watched = _Watched({})
    go_on(pretrained.model, prefix, ids, watched)
    every = list(watched.found.items())  # those without a sliding window
    return dict(every[:: EVERY_LAYER if len(every) > _FEW else 1])
