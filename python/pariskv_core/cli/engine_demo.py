"""The demo's engine part: plants facts in a long context, decodes over it, says what was found."""

from __future__ import annotations

import importlib.util
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import pariskv_core as pk
from pariskv_core import _machine as machine
from pariskv_core.cli import dense_baseline, reference, report
from pariskv_core.cli.failures import CannotRunError
from pariskv_core.cli.progress import Stages
from pariskv_core.cli.reference import Sample, Verdict
from pariskv_core.cli.screen import Screen
from pariskv_core.cli.workload import CHUNK_TOKENS, Floats, Shape, Workload

_FACTS = 40
_ORDINARY_STEPS = 24  # looked into besides those that ask for a fact
_HELPERS = 2  # threads that make keys and judge; each holds some 20 MB


@dataclass(frozen=True)
class Options:
    tokens: int
    steps: int
    layers: int
    threads: int
    top_k: int
    seed: int


@dataclass(frozen=True)
class _Decoded:
    samples: list[list[Sample]]  # by layer
    seconds: Floats  # (layers, steps)
    finite: bool


def _config(options: Options, shape: Shape) -> pk.Config:
    # float16 because NumPy has no bfloat16; a row is as long and the work is the same.
    return pk.Config(
        layers=shape.layers,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype="float16",
        policy=pk.ParisKV(top_k=options.top_k),
        threads=options.threads,
    )


def _check(options: Options, shape: Shape) -> None:
    if options.top_k > options.tokens // 8:
        raise CannotRunError(f"--top-k is at most an eighth of --tokens, got {options.top_k}")
    row = 2 * 2 * shape.head_dim
    needed = 1.25 * shape.layers * shape.kv_heads * (shape.tokens + shape.steps) * row
    available = machine.available_memory()
    if available and needed > available:
        raise CannotRunError(
            f"about {needed / 1e9:.1f} GB of memory are needed and {available / 1e9:.1f} GB are "
            "available: ask for fewer --tokens or --layers"
        )


def _prefill(
    cache: pk.Cache, sequence: int, work: Workload, pool: Executor, stages: Stages
) -> float:
    """Returns the seconds that the engine took, without the making of keys."""
    shape, seconds = work.shape, 0.0
    stride = CHUNK_TOKENS * _HELPERS
    with stages.stage("Reading the context", shape.layers * shape.tokens) as advance:
        for layer in range(shape.layers):
            for first in range(0, shape.tokens, stride):
                begins = range(first, min(first + stride, shape.tokens), CHUNK_TOKENS)
                # All made before the first goes in: the engine has the cores to itself.
                chunks = list(pool.map(partial(work.chunk, layer), begins))
                for begin, (k, v) in zip(begins, chunks, strict=True):
                    k, v = k[: shape.tokens - begin], v[: shape.tokens - begin]
                    started = time.perf_counter()
                    cache.prefill(layer, [sequence], k, v)
                    seconds += time.perf_counter() - started
                    advance(len(k))
    return seconds


def _decode(cache: pk.Cache, sequence: int, work: Workload, stages: Stages) -> _Decoded:
    shape = work.shape
    queries = [work.queries(layer) for layer in range(shape.layers)]
    rows = [work.decode_rows(layer) for layer in range(shape.layers)]
    looked_into = {fact.asked_at for fact in work.facts}
    looked_into.update(map(int, np.linspace(1, shape.steps - 2, _ORDINARY_STEPS)))
    samples: list[list[Sample]] = [[] for _ in range(shape.layers)]
    seconds = np.zeros((shape.layers, shape.steps), np.float32)
    finite = True
    with stages.stage("Decoding", shape.steps) as advance:
        for step in range(shape.steps):
            for layer in range(shape.layers):
                q = queries[layer][step]
                k, v = rows[layer]
                started = time.perf_counter()
                out = cache.decode(
                    layer, [sequence], q[None], k[step : step + 1], v[step : step + 1]
                )
                seconds[layer, step] = time.perf_counter() - started
                finite = finite and bool(np.isfinite(out).all())
                if step in looked_into:
                    # The new token is stored by now: this is the state that decode attended to.
                    why = cache.explain(layer, sequence, q)
                    samples[layer].append(
                        Sample(
                            step,
                            q,
                            out[0].astype(np.float32),
                            np.array(why.positions),
                            why.zone_begin,
                            why.zone_begin + why.zone_tokens,
                        )
                    )
            advance(1)
    return _Decoded(samples, seconds, finite)


def _judge(
    cache: pk.Cache,
    sequence: int,
    work: Workload,
    decoded: _Decoded,
    pool: Executor,
    stages: Stages,
) -> list[Verdict]:
    shape = work.shape
    about = {fact.asked_at: fact.position for fact in work.facts}
    total = 2 * shape.layers * (shape.tokens + shape.steps)
    with stages.stage("Comparing with exact attention", total) as advance:
        return [
            reference.judge(
                cache,
                sequence,
                layer,
                shape,
                decoded.samples[layer],
                np.array([about.get(sample.step, -1) for sample in decoded.samples[layer]]),
                pool,
                advance,
            )
            for layer in range(shape.layers)
        ]


def run(options: Options, screen: Screen) -> tuple[dict[str, Any], list[str]]:
    """What was found, and what should not be, a sentence each."""
    started = time.perf_counter()
    shape = Shape(options.tokens, options.steps, options.layers)
    _check(options, shape)
    report.introduce(screen, shape, options.threads)

    with screen.stages() as stages:
        dense_seconds: list[float] = []
        if importlib.util.find_spec("torch") is not None:
            title = "Timing torch's dense attention"
            with stages.stage(title, dense_baseline.STEPS) as advance:
                dense_seconds = dense_baseline.measure(shape, options.threads, advance)
        config = _config(options, shape)
        work = Workload(
            shape, facts=_FACTS, update=config.update, local=config.local, seed=options.seed
        )
        with pk.Cache(config) as cache, ThreadPoolExecutor(_HELPERS) as pool:
            sequence = cache.add()
            prefill_seconds = _prefill(cache, sequence, work, pool, stages)
            decoded = _decode(cache, sequence, work, stages)
            stats = cache.stats()
            verdicts = _judge(cache, sequence, work, decoded, pool, stages)

    results = report.Results(
        shape=shape,
        threads=options.threads,
        top_k=options.top_k,
        facts=report.look_up(work.facts, decoded.samples, verdicts),
        verdicts=verdicts,
        step_seconds=decoded.seconds.ravel(),
        dense_seconds=dense_seconds,
        prefill_seconds=prefill_seconds,
        flushes=stats.flushes,
        candidates=stats.candidates / max(stats.searched_tokens * shape.kv_heads, 1),
        row_bytes=stats.row_bytes,
        summary_bytes=stats.summary_bytes,
        held_bytes=stats.memory.live,
        peak_bytes=machine.peak_memory(),
        finite=decoded.finite,
        seconds=time.perf_counter() - started,
    )
    problems = report.problems(results)
    report.show(screen, results, problems)
    return report.as_dict(results, problems), problems
