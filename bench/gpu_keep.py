"""HardKV on a GPU: replayed steps over kept rows, and the choices after every 128 of them.

Heads differ as those of models do: some spread their attention and keep `most` rows, the others
need a few. What a head keeps does not change the cost of a choice, only that of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import gpu
import pariskv_core as pk
import torch

_KV_HEADS = 8
_QUERY_HEADS = 32
_HEAD_DIM = 128
_UPDATE = 128

# Layers, sequences, tokens of a prompt, rows at most, heads of 8 that keep as many.
CASES = ((32, 1, 8_192, 2_048, 4), (1, 32, 20_480, 10_240, 2))


def _rows(count: int, wide: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of some tokens, of which `wide` kv heads have keys next to nothing."""

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(count, heads, _HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    size = torch.full((_KV_HEADS, 1), 16.0, device="cuda", dtype=torch.bfloat16)
    size[:wide] = 0.01
    return normal(_QUERY_HEADS), normal(_KV_HEADS) * size, normal(_KV_HEADS)


def _microseconds(run: Callable[[], object]) -> float:
    """As the stream sees them: what the host needs meanwhile is part of it."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def measure(
    layers: int, batch: int, tokens: int, most: int, wide: int, rounds: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    config = pk.Config(
        layers=layers,
        query_heads=_QUERY_HEADS,
        kv_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        dtype="bfloat16",
        device="cuda",
        policy=pk.HardKV(most=most),
    )
    with pk.Cache(config) as cache:
        sequences = [cache.add() for _ in range(batch)]
        for sequence in sequences:
            for layer in range(layers):
                q, k, v = _rows(tokens, wide)
                cache.prefill(layer, [sequence], k, v, q=q)
        step = [_rows(batch, wide) for _ in range(layers)]
        out = torch.empty(batch, _QUERY_HEADS, _HEAD_DIM, device="cuda", dtype=torch.bfloat16)

        def decode() -> None:
            for layer, (q, k, v) in enumerate(step):
                cache.decode(layer, sequences, q, k, v, out=out)

        graph = gpu.graphed(decode)
        plain, quiet, choosing = [], [], []
        for turn in range(rounds * _UPDATE):
            if turn % 4 == 0:  # queries and keys of a text change
                for mine in step:
                    for x, y in zip(mine, _rows(batch, wide), strict=True):
                        x.copy_(y)
            before = cache.stats().keeps
            took = _microseconds(lambda: cache.advance(sequences))
            (choosing if cache.stats().keeps > before else quiet).append(took)
            plain.append(_microseconds(graph.replay))
        kept = cache.stats().kept_rows / (layers * batch * _KV_HEADS)
    return {
        "layers": layers,
        "batch": batch,
        "tokens": tokens,
        "most": most,
        "kept_rows_per_head": kept,
        "step_microseconds": median(plain) / layers,
        "advance_microseconds": median(quiet) / (layers * batch),
        "choosing_advance_microseconds": median(choosing) / (layers * batch),
    }
