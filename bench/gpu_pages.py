"""PRKV on a GPU: replayed steps that find other pages each time, or 4 of 5 of the step before.

Beside them ParisKV with as many rows, from the same keys, and torch's dense attention. Rows lie in
host memory, caches are cold (gpu.Timer).
"""

from __future__ import annotations

from statistics import median
from typing import Any

import gpu
import gpu_engine as engine
import pariskv_core as pk
import torch
from gpu_source import CHUNK_TOKENS, HEAD_DIM, KV_HEADS, QUERY_HEADS

BUDGET = 1024
SIZES = {1: (32_768, 131_072, 524_288, 1_048_576), 8: (32_768, 131_072)}
POLICIES: dict[str, pk.PRKV | pk.ParisKV] = {
    "PRKV": pk.PRKV(budget=BUDGET),
    "PRKV, no kept rows": pk.PRKV(budget=BUDGET, static_share=0),
    "PRKV, no pages": pk.PRKV(budget=BUDGET, static_share=1),
    "ParisKV": pk.ParisKV(top_k=BUDGET),
}
_AGAIN = 0.8  # of the rows, those that the step before selected too
_ASKING = 64  # queries of a prompt that choose
_BUFFERED = 40  # steps are measured between two flushes


class _Batch(engine.Batch):
    """Prompts bring the queries that choose rows."""

    def grow(self, tokens: int) -> None:
        for sequence, source in zip(self.sequences, self._sources, strict=True):
            while (first := self.cache.length(sequence)) < tokens:
                count = min(CHUNK_TOKENS, tokens - first)
                k, v = source.rows(first, count)
                q = torch.zeros(count, QUERY_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
                asking = min(_ASKING, count)
                q[-asking:] = source.queries(first + count, asking, steadiness=0.9)
                self.cache.prefill(0, [sequence], k, v, q=q)
        engine.arrive(self.cache)


def _config(policy: pk.PRKV | pk.ParisKV) -> pk.Config:
    return pk.Config(
        layers=1,
        query_heads=QUERY_HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="bfloat16",
        device="cuda",
        policy=policy,
    )


def _steps(batch: _Batch, timer: gpu.Timer, steadiness: float) -> list[float]:
    batch.ask(timer.rounds + gpu.WARM_UP, steadiness)
    graph = batch.captured()
    while batch.cache.regions(batch.sequences[0]).buffer != _BUFFERED:
        batch.advance()
        graph.replay()
    engine.arrive(batch.cache)
    return timer.cold(graph.replay, batch.advance)


def measure(name: str, count: int, tokens: int, timer: gpu.Timer) -> dict[str, Any]:
    """A step with new rows, and one with rows that are selected again."""
    with pk.Cache(_config(POLICIES[name])) as cache:
        batch = _Batch(cache, count, seed=10 * count)
        batch.grow(tokens)
        new = _steps(batch, timer, 0.0)
        searches = batch.cache.explain(0, batch.sequences[0], batch.q[0]).searched
        again: list[float] = []
        if searches:
            again = _steps(batch, timer, engine.steadiness_for(batch, _AGAIN))
        return {
            "policy": name,
            "batch": count,
            "tokens": tokens,
            "microseconds": median(new),
            "slowest": max(new),
            "again_microseconds": median(again) if again else None,
            "kept_rows_per_head": cache.stats().kept_rows / (count * KV_HEADS),
        }


def measure_all(timer: gpu.Timer) -> list[dict[str, Any]]:
    results = []
    for count, sizes in SIZES.items():
        for tokens in sizes:
            dense = gpu.dense(timer, count, tokens, QUERY_HEADS, KV_HEADS, HEAD_DIM)
            for name in POLICIES:
                try:
                    results.append({**measure(name, count, tokens, timer), **dense})
                except pk.OutOfMemory as error:
                    print(f"{name}, batch {count} at {tokens:,} tokens is left out: {error}")
    return results
