"""One layer of Llama-3.1-8B's shape on the GPU, filled and stepped through the public door."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import configs
import gpu
import pariskv_core as pk
import torch
from gpu_source import CHUNK_TOKENS, HEAD_DIM, KV_HEADS, QUERY_HEADS, Source

ROW_BYTES = 2 * HEAD_DIM * 2  # K and V of one token and kv head
# The update buffer is measured half full, as a step finds it on average.
_BUFFERED = 256


def config(**changes: Any) -> pk.Config:
    fields: dict[str, Any] = {
        "layers": 1,
        "query_heads": QUERY_HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "dtype": "bfloat16",
        "device": "cuda",
        "placement": "host",  # rows come over the bus, unless a run says otherwise
    }
    return configs.make(**{**fields, **changes})


def arrive(cache: pk.Cache) -> None:
    """Waits until all rows that left for host memory are fetched from there."""
    for _ in range(2):  # a flush sends all rows on their way; any call takes note of arrivals
        torch.cuda.synchronize()
        cache.flush([])
    torch.cuda.synchronize()


class Batch:
    """Some sequences of one length that decode together from one set of buffers."""

    def __init__(self, cache: pk.Cache, count: int, seed: int) -> None:
        self.cache = cache
        self.sequences = [cache.add() for _ in range(count)]
        self._sources = [Source(seed + i) for i in range(count)]
        q, kv = (count, QUERY_HEADS, HEAD_DIM), (count, KV_HEADS, HEAD_DIM)
        self.q, self.out = (torch.zeros(q, dtype=torch.bfloat16, device="cuda") for _ in "qo")
        self.k, self.v = (torch.zeros(kv, dtype=torch.bfloat16, device="cuda") for _ in "kv")
        self._queries: torch.Tensor | None = None
        self._step = 0

    def length(self) -> int:
        return self.cache.length(self.sequences[0])

    def grow(self, tokens: int | Sequence[int]) -> None:
        """Prefills every sequence up to this many tokens, or each to its own number."""
        lengths = [tokens] * len(self.sequences) if isinstance(tokens, int) else tokens
        for sequence, source, length in zip(self.sequences, self._sources, lengths, strict=True):
            while (first := self.cache.length(sequence)) < length:
                k, v = source.rows(first, min(CHUNK_TOKENS, length - first))
                self.cache.prefill(0, [sequence], k, v)
        arrive(self.cache)

    def ask(self, count: int, steadiness: float = 0.0) -> list[torch.Tensor]:
        """Makes the queries that steps will go through, again and again: (batch, heads, dim)."""
        own = list(zip(self._sources, map(self.cache.length, self.sequences), strict=True))
        made = [source.queries(position, count, steadiness) for source, position in own]
        self._queries = torch.stack(made, dim=1)
        rows = [source.rows(position, 1) for source, position in own]
        self.k.copy_(torch.cat([k for k, _ in rows]))
        self.v.copy_(torch.cat([v for _, v in rows]))
        self._step = 0
        return list(self._queries)

    def queries(self) -> list[torch.Tensor]:
        """Those that were made last."""
        return [] if self._queries is None else list(self._queries)

    def next_query(self) -> None:
        assert self._queries is not None
        self.q.copy_(self._queries[self._step % len(self._queries)])
        self._step += 1

    def decode(self) -> None:
        self.cache.decode(0, self.sequences, self.q, self.k, self.v, out=self.out)

    def advance(self) -> None:
        self.next_query()
        self.cache.advance(self.sequences)

    def captured(self) -> torch.cuda.CUDAGraph:
        """The step as a graph; adds three tokens."""
        return gpu.graphed(self.decode)

    def remove(self) -> None:
        for sequence in self.sequences:
            self.cache.remove(sequence)
        arrive(self.cache)


def _candidates(before: pk.Stats, after: pk.Stats) -> float:
    searched = after.searched_tokens - before.searched_tokens
    return (after.candidates - before.candidates) / max(searched * KV_HEADS, 1)


def _found(before: pk.Stats, after: pk.Stats) -> float:
    """Share of the selected rows that the row cache had."""
    fetched = after.fetched_rows - before.fetched_rows
    return (after.cached_rows - before.cached_rows) / max(fetched, 1)


def step_of(batch: Batch, tokens: int, timer: gpu.Timer, steadiness: float = 0.0) -> dict[str, Any]:
    """A captured step at this length, in cold caches, a new query and a new token each time."""
    batch.grow(tokens - _BUFFERED)
    return {"tokens": tokens, **_step_of(batch, timer, steadiness)}


def mixture_of(
    settings: dict[str, Any], parts: Sequence[tuple[int, int]], timer: gpu.Timer
) -> dict[str, Any]:
    """A step of (sequences, tokens) and others in one batch, and of each of these by itself."""

    def taken(*some: tuple[int, int]) -> float:
        lengths = [tokens - _BUFFERED for count, tokens in some for _ in range(count)]
        with pk.Cache(config(**settings)) as cache:
            batch = Batch(cache, len(lengths), seed=7)
            batch.grow(lengths)
            return float(_step_of(batch, timer)["microseconds"])

    alone = [taken(part) for part in parts]
    return {"parts": list(parts), "alone": alone, "together": taken(*parts)}


def _step_of(batch: Batch, timer: gpu.Timer, steadiness: float = 0.0) -> dict[str, Any]:
    """A captured step, of which the first sequence's buffer is half full."""
    batch.ask(timer.rounds + gpu.WARM_UP, steadiness)
    graph = batch.captured()
    while batch.cache.regions(batch.sequences[0]).buffer < _BUFFERED:
        batch.advance()
        graph.replay()
    arrive(batch.cache)
    before = batch.cache.stats()
    taken = timer.cold(graph.replay, batch.advance)
    after = batch.cache.stats()
    return {
        "batch": len(batch.sequences),
        "microseconds": median(taken),
        "slowest": max(taken),
        "candidates_per_head": _candidates(before, after),
        "found_share": _found(before, after),
    }


def overlap(batch: Batch, queries: list[torch.Tensor]) -> float:
    """Share of the rows that the step before had selected too, over steps and kv heads."""
    found = []
    for query in queries:
        positions = batch.cache.explain(0, batch.sequences[0], query[0]).positions
        found.append([set(row[row >= 0].tolist()) for row in positions])
    shares = [
        len(now & then) / len(now)
        for before, after in itertools.pairwise(found)
        for then, now in zip(before, after, strict=True)
    ]
    return sum(shares) / len(shares)


def steadiness_for(batch: Batch, wanted: float) -> float:
    """How much of a query the next one must keep for this overlap."""
    low, high = 0.5, 1.0
    for _ in range(7):
        middle = (low + high) / 2
        if overlap(batch, batch.ask(4, middle)) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def prefill_of(tokens: int, placement: str, rounds: int) -> dict[str, Any]:
    """Prefill of one layer at once; seconds until the call's own work and the offload are done."""
    source = Source(0)
    parts = [source.rows(first, CHUNK_TOKENS) for first in range(0, tokens, CHUNK_TOKENS)]
    k, v = (torch.cat(rows)[:tokens] for rows in zip(*parts, strict=True))
    taken: dict[str, list[float]] = {"call": [], "own_work": [], "whole": []}
    with pk.Cache(config(placement=placement)) as cache:
        for turn in range(1 + rounds):  # the first takes memory from the system
            sequence = cache.add()
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin = time.perf_counter()
            start.record()
            cache.prefill(0, [sequence], k, v)
            called = time.perf_counter()
            end.record()
            end.synchronize()
            torch.cuda.synchronize()
            whole = time.perf_counter()
            if turn > 0:
                taken["call"].append(called - begin)
                taken["own_work"].append(1e-3 * start.elapsed_time(end))
                taken["whole"].append(whole - begin)
            arrive(cache)
            moved = cache.stats().offloaded_bytes
            cache.remove(sequence)
            arrive(cache)  # freed memory is zeroed by now
    medians = {f"{name}_seconds": median(seconds) for name, seconds in taken.items()}
    return {"tokens": tokens, "placement": placement, "offloaded_bytes": moved, **medians}


def attend_of(tokens: int, queries: int, timer: gpu.Timer) -> dict[str, Any]:
    """The last tokens of one sequence at once, rows on the GPU: median microseconds."""
    with pk.Cache(config(placement="device")) as cache:
        batch = Batch(cache, 1, seed=3)
        batch.grow(tokens)
        shape = (queries, QUERY_HEADS, HEAD_DIM)
        q, out = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in "qo")

        def attend(precision: str) -> None:
            cache.attend(0, batch.sequences, q, precision=precision, out=out)

        taken = {
            precision: median(timer.cold(partial(attend, precision)))
            for precision in ("exact", "fast")
        }
    dense = gpu.dense_prompt(timer, queries, tokens, QUERY_HEADS, KV_HEADS, HEAD_DIM)
    return {"tokens": tokens, "queries": queries, **taken, **dense}


def _walk(cache: pk.Cache, step: Callable[[], object], steps: int) -> dict[str, Any]:
    """
    Every step on its own: seconds until it is done, what events on its stream say, and how many
    steps before it one has flushed.
    """
    wall, device, since = [], [], []
    flushes, flushed = cache.stats().flushes, -steps
    gc.collect()
    gc.disable()
    try:
        for i in range(steps):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin = time.perf_counter()
            start.record()
            step()
            end.record()
            end.synchronize()
            wall.append(time.perf_counter() - begin)
            device.append(1e-3 * start.elapsed_time(end))
            before, flushes = flushes, cache.stats().flushes
            flushed = i if flushes > before else flushed
            since.append(i - flushed)
    finally:
        gc.enable()
    return {"wall_seconds": wall, "device_seconds": device, "steps_since_flush": since}


def flushes_of(tokens: int, steps: int) -> dict[str, Any]:
    """Decode steps across flushes, call by call and as a replayed graph."""
    results: dict[str, Any] = {"tokens": tokens, "steps": steps}
    with pk.Cache(config(update=512)) as cache:
        batch = Batch(cache, 1, seed=3)
        batch.grow(tokens)
        batch.ask(64)

        def eager() -> None:
            batch.next_query()
            batch.decode()

        graph = batch.captured()

        def replayed() -> None:
            batch.advance()
            graph.replay()

        for name, step in {"eager": eager, "graph": replayed}.items():
            _walk(cache, step, 600)  # past a flush: memory has been taken
            results[name] = _walk(cache, step, steps)
    return results
