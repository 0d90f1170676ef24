"""Times the decode step of one layer here, and torch's dense attention in turns with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

import pariskv_core as pk
from pariskv_core import _machine as machine
from pariskv_core._array import DeviceName
from pariskv_core.cli.dense_baseline import Dense
from pariskv_core.cli.failures import CannotRunError, need
from pariskv_core.cli.workload import CHUNK_TOKENS, Shape, Workload

ROUNDS = 20
_WARM_UP = 3
# On a CPU ours and torch's take turns: other programs then slow both down. Not after each step:
# threads of the one that just ended may still spin.
_TURNS = 4
_PAUSE = 0.01  # seconds
# A step must not find its key summaries in the processor's cache because it was the last to read
# them: in a model the other layers come in between.
_LAYERS = 2
_LAYERS_ON_GPU = 4  # whose summaries do not fit its cache together, from 32K tokens on


@dataclass(frozen=True)
class Case:
    tokens: int
    batch: int = 1
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    top_k: int = 100
    threads: int = 1  # of the CPU
    device: DeviceName = "cpu"


@dataclass(frozen=True)
class Timed:
    """Median seconds of a step of one layer."""

    ours: float
    slowest: float
    dense: float | None  # None: torch is missing or failed
    by: str  # the array types
    busy: float = 0.0  # cores that other programs kept busy before it, and after


def shape_of(case: Case) -> Shape:
    steps = ROUNDS + _WARM_UP
    return Shape(case.tokens, steps, _LAYERS, case.query_heads, case.kv_heads, case.head_dim)


def config_of(case: Case) -> pk.Config:
    gpu = case.device == "cuda"
    try:
        return pk.Config(
            layers=_LAYERS_ON_GPU if gpu else _LAYERS,
            query_heads=case.query_heads,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            # NumPy has no bfloat16; a row is as long and the work is the same.
            dtype="bfloat16" if gpu else "float16",
            policy=pk.ParisKV(top_k=case.top_k),
            device=case.device,
            threads=case.threads,
        )
    except ValueError as reason:
        raise CannotRunError(str(reason).removeprefix("[config] ")) from None


def check(case: Case) -> None:
    """Raises unless it can be timed here."""
    if case.device == "cuda" and not pk.is_available("cuda"):
        raise CannotRunError("there is no GPU that pariskv_core can use; see: pariskv doctor")
    config_of(case)
    if case.device == "cpu":
        _check_memory(case)


def _check_memory(case: Case) -> None:
    row = 2 * 2 * case.head_dim * case.kv_heads
    needed = int((1.3 * _LAYERS + 1) * case.batch * case.tokens * row)  # and torch's layer
    available = machine.available_memory()
    if available and needed > available:
        raise CannotRunError(
            f"timing this takes about {needed / 1e9:.1f} GB of memory and {available / 1e9:.1f} GB "
            "are available: ask for fewer tokens"
        )


def measure(case: Case, advance: Callable[[int], None] = lambda done: None) -> Timed:
    """`advance` is told of tokens that were read, `tokens * batch * 2` in all."""
    check(case)
    if case.device == "cuda":
        need("torch")
        from pariskv_core.cli import steps_gpu

        ours, dense = steps_gpu.measure(case, config_of(case), ROUNDS)
        return Timed(median(ours), max(ours), median(dense), "bfloat16, a CUDA graph, cold caches")
    busy = machine.busy_cores()
    ours, dense = _on_cpu(case, advance)
    busy = max(busy, machine.busy_cores())
    return Timed(median(ours), max(ours), median(dense) if dense else None, "float16", busy)


def _on_cpu(case: Case, advance: Callable[[int], None]) -> tuple[list[float], list[float]]:
    """Seconds of our steps, and of torch's."""
    shape, config = shape_of(case), config_of(case)
    work = Workload(shape, facts=0, update=config.update, local=config.local, seed=1)
    seconds: list[float] = []
    dense: list[float] = []
    with Dense(shape, case.threads, case.batch) as torch, pk.Cache(config) as cache:
        batch = [cache.add() for _ in range(case.batch)]
        for layer in range(_LAYERS):
            for begin in range(0, case.tokens, CHUNK_TOKENS):
                k, v = (rows[: case.tokens - begin] for rows in work.chunk(layer, begin))
                for sequence in batch:
                    cache.prefill(layer, [sequence], k, v)
                advance(case.batch * len(k))
        queries = [work.queries(layer) for layer in range(_LAYERS)]
        rows = [work.decode_rows(layer) for layer in range(_LAYERS)]
        for step in range(shape.steps):
            for layer in range(_LAYERS):
                q, k, v = (
                    np.repeat(each[step][None], case.batch, axis=0)
                    for each in (queries[layer], *rows[layer])
                )
                begun = time.perf_counter()
                cache.decode(layer, batch, q, k, v)
                if step >= _WARM_UP:
                    seconds.append(time.perf_counter() - begun)
            timed = step + 1 - _WARM_UP
            if timed > 0 and timed % (ROUNDS // _TURNS) == 0:
                time.sleep(_PAUSE)
                dense += torch.steps(ROUNDS // _TURNS)
                time.sleep(_PAUSE)
    return seconds, dense if len(dense) == ROUNDS else []
