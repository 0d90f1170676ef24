"""The same on a GPU: steps as a replayed CUDA graph over layers enough to keep its caches cold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

import pariskv_core as pk
from pariskv_core.cli.failures import CannotRunError

if TYPE_CHECKING:
    from pariskv_core.cli.steps import Case

_CHUNK = 16384
_WARM_UP = 3


def _milliseconds(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def measure(case: Case, config: pk.Config, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a layer's step in every round: ours, and torch's dense attention."""
    try:
        return _ours(case, config, rounds), _dense(case, config.layers, rounds)
    except (torch.OutOfMemoryError, pk.OutOfMemory):
        raise CannotRunError("timing this does not fit on the GPU: ask for fewer tokens") from None


def _rows(case: Case, tokens: int) -> torch.Tensor:
    shape = (tokens, case.kv_heads, case.head_dim)
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _ours(case: Case, config: pk.Config, rounds: int) -> list[float]:
    with pk.Cache(config) as cache:
        batch = [cache.add() for _ in range(case.batch)]
        for layer in range(config.layers):
            for sequence in batch:
                for begin in range(0, case.tokens, _CHUNK):
                    count = min(_CHUNK, case.tokens - begin)
                    cache.prefill(layer, [sequence], _rows(case, count), _rows(case, count))
        for _ in range(2):  # rows are on their way to host memory; any call takes note of arrivals
            torch.cuda.synchronize()
            cache.flush([])
        heads = (case.batch, case.query_heads, case.head_dim)
        q = torch.randn(heads, dtype=torch.bfloat16, device="cuda")
        k, v, out = _rows(case, case.batch), _rows(case, case.batch), torch.empty_like(q)

        def step() -> None:
            for layer in range(config.layers):
                cache.decode(layer, batch, q, k, v, out=out)

        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                step()
            seconds = []
            for turn in range(_WARM_UP + rounds):
                cache.advance(batch)
                q.normal_()
                taken = _milliseconds(graph.replay)
                if turn >= _WARM_UP:
                    seconds.append(1e-3 * taken / config.layers)
            torch.cuda.synchronize()
    return seconds


def _dense(case: Case, layers: int, rounds: int) -> list[float]:
    heads = (case.batch, case.kv_heads, case.query_heads // case.kv_heads, case.head_dim)
    q = torch.randn(heads, dtype=torch.bfloat16, device="cuda")
    size = (case.batch, case.kv_heads, case.tokens, case.head_dim)
    k, v = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    for _ in range(_WARM_UP):
        scaled_dot_product_attention(q, k, v)

    def step() -> None:
        for _ in range(layers):
            scaled_dot_product_attention(q, k, v)

    return [1e-3 * _milliseconds(step) / layers for _ in range(rounds)]
