"""The same on a GPU: steps as a replayed CUDA graph over layers enough to keep its caches cold."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import pariskv_core as pk
from pariskv_core.cli.failures import CannotRunError

if TYPE_CHECKING:
    from pariskv_core.cli.steps import Case

_CHUNK = 16384
_WARM_UP = 3
_COLD_BYTES = 256 << 20  # keys and values that no cache holds


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

        def another() -> None:
            cache.advance(batch)
            q.normal_()

        return _replayed(step, config.layers, rounds, another)


def _replayed(
    step: Callable[[], None],
    layers: int,
    rounds: int,
    before: Callable[[], None] = lambda: None,
) -> list[float]:
    """Seconds of a layer in every round of a graph; `before` comes ahead of each, untimed."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            step()
        seconds = []
        for turn in range(_WARM_UP + rounds):
            before()
            taken = _milliseconds(graph.replay)
            if turn >= _WARM_UP:
                seconds.append(1e-3 * taken / layers)
        torch.cuda.synchronize()
    return seconds


_Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _form(backend: SDPBackend, folded: bool) -> _Form:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            if not folded:
                return scaled_dot_product_attention(q, k, v, enable_gqa=True)
            # The group as queries of its kv head.
            grouped = q.view(*k.shape[:2], -1, k.shape[-1])
            return scaled_dot_product_attention(grouped, k, v)

    return attend


# Which is quickest depends on torch's version, the card and the shape.
_FORMS = [
    _form(backend, folded)
    for backend in (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    )
    for folded in (True, False)
]


def _dense(case: Case, layers: int, rounds: int) -> list[float]:
    """Of torch's quickest form, replayed as ours is; none if it has none for this shape."""
    q = torch.randn(
        (case.batch, case.query_heads, 1, case.head_dim), dtype=torch.bfloat16, device="cuda"
    )
    size = (case.batch, case.kv_heads, case.tokens, case.head_dim)
    distinct = min(layers, -(-_COLD_BYTES // (4 * math.prod(size))))
    rows = [
        tuple(torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in "kv")
        for _ in range(distinct)
    ]
    found: list[list[float]] = []
    for form in _FORMS:

        def step(form: _Form = form) -> None:
            for layer in range(layers):
                form(q, *rows[layer % distinct])

        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a form does not take this shape
            found.append(_replayed(step, layers, rounds))
    return min(found, key=median, default=[])
