"""What a method of choosing rows is, what all of them share, and the two that need no search.

A method serves one kv head and the group of query heads that share it. It is shown the keys of the
zone, the part of the context that may be left out, and says for each step which of its rows to
fetch. Keys are (tokens, head_dim) after RoPE, queries (steps, group, head_dim), all float32. The
logit of a row is q.k / sqrt(head_dim).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

TOP_K = 100  # rows per kv head, where nothing else is said
_CHUNK = 1 << 23  # so many floats of scores are worked on at a time


class Method(Protocol):
    """Chooses rows for one kv head and its group of query heads."""

    name: str

    def prefill(self, keys: Tensor, recent: Tensor | None) -> None:
        """Starts anew with these keys (tokens, head_dim).

        recent  (window, group, head_dim): the queries of the prompt's last tokens, or None
        """

    def append(self, keys: Tensor) -> None:
        """Keys (tokens, head_dim) that enter the zone while the model writes."""

    def select(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        """Which rows of the zone each step attends to: (steps, rows) int64, -1 where fewer.

        queries   (steps, group, head_dim)
        resident  (steps, group): log-sum-exp of the logits that are attended to anyway
        """


# --- Shared arithmetic -------------------------------------------------------------------------


def logits_of(queries: Tensor, keys: Tensor) -> Tensor:
    """(steps, group, tokens)."""
    return queries @ keys.T / math.sqrt(keys.shape[-1])


def group_worth(logits: Tensor, resident: Tensor) -> Tensor:
    """What a row is worth to a group: the mean over its heads of the attention it would get.

    logits (steps, group, tokens), exact or estimated; resident (steps, group) -> (steps, tokens).
    """
    everything = torch.logaddexp(resident, torch.logsumexp(logits, dim=-1))
    return (logits - everything[..., None]).exp_().mean(dim=1)


def step_chunks(steps: int, width: int) -> Iterator[slice]:
    """Cuts steps so that a chunk of them times width stays small."""
    size = max(1, _CHUNK // max(width, 1))
    for begin in range(0, steps, size):
        yield slice(begin, min(begin + size, steps))


def padded(rows: Tensor, width: int) -> Tensor:
    """(steps, fewer) to (steps, width), filled up with -1."""
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=-1)


def best_rows(scores: Tensor, rows: int) -> Tensor:
    """The rows with the best scores (steps, tokens), best first: (steps, rows) int64.

    Rows whose score is -inf are not taken. Ties between whole numbers go to the earlier row.
    """
    tokens = scores.shape[1]
    count = min(rows, tokens)
    if scores.is_floating_point():
        values, index = scores.topk(count, dim=1)
        index = index.masked_fill(values == -math.inf, -1)
    else:
        later = torch.arange(tokens, device=scores.device)
        index = (scores.long() * tokens - later).topk(count, dim=1).indices
    return padded(index, rows)


def among_best(scores: Tensor, count: int) -> Tensor:
    """Which rows are among the `count` best by their scores (steps, tokens): bool."""
    chosen = best_rows(scores, min(count, scores.shape[1]))
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)


class Zone:
    """A method that keeps the keys as they are; the others build on it."""

    name = "zone"

    def __init__(self) -> None:
        self.keys = torch.empty(0, 0)

    def prefill(self, keys: Tensor, recent: Tensor | None) -> None:
        self.keys = keys

    def append(self, keys: Tensor) -> None:
        self.keys = torch.cat([self.keys, keys])

    def select(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        width = queries.shape[1] * len(self.keys)
        chunks = step_chunks(len(queries), width)
        return torch.cat([self.pick(queries[c], rows, resident[c]) for c in chunks])

    def pick(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        """`select` of a few steps."""
        raise NotImplementedError


class Oracle(Zone):
    """The rows that are worth most to the group by exact logits: nothing catches more."""

    name = "oracle"

    def pick(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        return best_rows(group_worth(logits_of(queries, self.keys), resident), rows)


def oracle_rows(queries: Tensor, keys: Tensor, rows: int, resident: Tensor) -> Tensor:
    """The oracle's choice among these keys."""
    oracle = Oracle()
    oracle.prefill(keys, None)
    return oracle.select(queries, rows, resident)


class Everything(Zone):
    """Full attention: all rows, whatever the budget. What a budget costs is measured against it."""

    name = "full attention"

    def pick(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        everything = torch.arange(len(self.keys))
        return everything.expand(len(queries), -1)


class Window(Zone):
    """StreamingLLM: sinks and a sliding window, which here is the resident part and `rows` more.

    The budget that others spend on what they searched for makes the window longer.
    """

    name = "StreamingLLM"

    def pick(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        last = torch.arange(len(self.keys)).flip(0)[:rows]
        return padded(last.expand(len(queries), -1), rows)


# --- By name -----------------------------------------------------------------------------------


def _registry() -> dict[str, Callable[..., Any]]:
    # Here, since these build on this module.
    from quality import engine, fastscan, kept_rows, peers

    return {
        "oracle": Oracle,
        "full": Everything,
        "window": Window,
        "snapkv": peers.SnapKV,
        "quest": peers.Quest,
        "arkvale": peers.ArkVale,
        "pqcache": peers.PQCache,
        "magicpig": peers.MagicPIG,
        "fastscan": fastscan.FastScan,
        "prkv": kept_rows.PRKV,
        "engine": engine.Engine,
        "published": engine.published,
    }


def make_method(name: str, **options: Any) -> Method:
    """A method by its short name: `make_method("engine", candidates=0.05)`."""
    registry = _registry()
    if name not in registry:
        raise ValueError(f"there is no method {name!r}; there are {', '.join(sorted(registry))}")
    return registry[name](**options)
