"""How long does a decode step take on a GPU, and how near is every verb to what the memory allows?

One layer of Llama-3.1-8B's shape: 32 query heads, 8 kv heads, head_dim 128, bfloat16, default
settings, keys and values of the retrieval zone in pinned host memory. A step is a captured CUDA
graph that is replayed in cold caches, with a new query and a new token each time. torch's dense
attention, in every way it has, is measured beside it with keys and values on the GPU.

Verbs are measured one by one by the program `pariskv_cuda_steps` (CMake: PARISKV_BENCH=ON).
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import gpu
import gpu_engine as engine
import gpu_table as table
import harness
import pariskv_core as pk
import torch
from gpu_source import HEAD_DIM, KV_HEADS, QUERY_HEADS

_ROOT = Path(__file__).resolve().parents[1]
_SECTIONS = ("decode", "auto", "mixtures", "rows", "prefill", "attend", "flushes", "verbs")
_SIZES = {
    1: [32_768, 131_072, 524_288, 1_048_576],
    8: [32_768, 131_072, 524_288],
}
# Where rows lie is left to the cache.
_AUTO_SIZES = {
    1: [4096, 8192, 16_384, 32_768, 131_072],
    8: [8192, 32_768, 131_072],
    16: [32_768],
    64: [2048, 4096, 8192, 16_384],
    256: [2048],
}
# Sequences and tokens, in one batch.
_MIXTURES = (
    ((1, 131_072), (63, 2048)),
    ((4, 65_536), (28, 8192)),
    ((8, 32_768), (56, 4096)),
)
# Sequences, and rows per kv head: what the row cache gives.
_ROWS = ((1, 100), (8, 100), (1, 2048))
_ROWS_TOKENS = 131_072


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of the config, where they differ from the defaults."""
    changes: dict[str, Any] = {}
    for change in arguments.set:
        name, _, value = change.partition("=")
        try:
            changes[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            changes[name] = value
    return changes


def _shape(text: str) -> tuple[int, int]:
    count, tokens = text.split("x")
    return int(count), int(tokens)


def _decode(arguments: argparse.Namespace, timer: gpu.Timer) -> list[dict[str, Any]]:
    results = []
    # Every row comes over the bus: what the row cache gives depends on the text.
    cache = pk.Cache(engine.config(**{"row_cache": 0, **_settings(arguments)}))
    for count, sizes in _SIZES.items():
        batch = engine.Batch(cache, count, seed=10 * count)
        for tokens in sizes:
            if arguments.tokens and tokens not in arguments.tokens:
                continue
            try:
                result = engine.step_of(batch, tokens, timer)
            except pk.OutOfMemory as error:
                print(f"batch {count} at {tokens:,} tokens is left out: {error}")
                continue
            dense = gpu.dense(timer, count, tokens, QUERY_HEADS, KV_HEADS, HEAD_DIM)
            results.append({**result, **dense})
        batch.remove()
    cache.close()
    return results


def _auto(arguments: argparse.Namespace, timer: gpu.Timer) -> list[dict[str, Any]]:
    """Steps of short and long sequences with placement="auto", and the memory that they take."""
    results = []
    shapes = [(count, tokens) for count, sizes in _AUTO_SIZES.items() for tokens in sizes]
    for count, tokens in arguments.shapes or shapes:
        settings = {"placement": "auto", **_settings(arguments)}
        with pk.Cache(engine.config(**settings)) as cache:
            batch = engine.Batch(cache, count, seed=10 * count)
            result = engine.step_of(batch, tokens, timer)
            stats = cache.stats()
            rows = count * batch.length() * KV_HEADS * engine.ROW_BYTES
            result |= {"live_share": stats.memory.live / rows}
            result |= {"reserved_share": stats.memory.reserved / rows}
        dense = gpu.dense(timer, count, tokens, QUERY_HEADS, KV_HEADS, HEAD_DIM)
        results.append({**result, **dense})
    return results


def _mixtures(arguments: argparse.Namespace, timer: gpu.Timer) -> list[dict[str, Any]]:
    """One batch of long and short sequences: it takes no longer than its parts one by one."""
    settings = {"placement": "auto", **_settings(arguments)}
    return [engine.mixture_of(settings, parts, timer) for parts in _MIXTURES]


def _rows(arguments: argparse.Namespace, timer: gpu.Timer) -> list[dict[str, Any]]:
    """Steps that select new rows, or 4 of 5 of the one before; without a row cache and with one."""
    results = []
    for count, top_k in _ROWS:
        for row_cache in (0, -1):
            settings = {**_settings(arguments), "top_k": top_k, "row_cache": row_cache}
            with pk.Cache(engine.config(**settings)) as cache:
                batch = engine.Batch(cache, count, seed=5)
                batch.grow(_ROWS_TOKENS - 1024)
                steady = engine.steadiness_for(batch, 0.8)
                for turn, steadiness in enumerate((0.0, steady)):
                    # Longer each time by more than the steps before have added.
                    tokens = _ROWS_TOKENS + 1024 * turn
                    result = engine.step_of(batch, tokens, timer, steadiness)
                    shared = engine.overlap(batch, batch.queries()[:8])
                    results.append(
                        {**result, "top_k": top_k, "row_cache": row_cache, "overlap": shared}
                        | {"queries": "steady" if steadiness > 0 else "new"}
                    )
    return results


def _prefill(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rounds = 2 if arguments.quick else 5
    return [engine.prefill_of(131_072, place, rounds) for place in ("host", "device")]


def _attend(timer: gpu.Timer) -> list[dict[str, Any]]:
    return [engine.attend_of(tokens, 2048, timer) for tokens in (32_768, 131_072)]


def _flushes(arguments: argparse.Namespace) -> dict[str, Any]:
    return engine.flushes_of(32_768, 1100 if arguments.quick else 4096)


def _steps_program(given: str | None) -> Path | None:
    if given:
        return Path(given)
    built = list(_ROOT.glob("build/**/pariskv_cuda_steps"))
    return max(built, key=lambda path: path.stat().st_mtime, default=None)


def _verbs(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    program = _steps_program(arguments.steps)
    if program is None:
        print("No pariskv_cuda_steps under build/: the verbs are left out (PARISKV_BENCH=ON).")
        return []
    command = [str(program), "12" if arguments.quick else "40"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        print(f"{program.name} ended with {done.returncode}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def summary(seconds: list[float]) -> dict[str, float]:
    cuts = quantiles(seconds, n=1000, method="inclusive")
    return {
        "median": median(seconds),
        "p99": cuts[989],
        "p99.9": cuts[998],
        "slowest": max(seconds),
    }


# Rows that a flush has freed leave the device within so many steps after it.
_AFTER_FLUSH = 64


def _by_flushes(walked: dict[str, list[float]]) -> dict[str, Any]:
    """All steps, those far from a flush, and the ones that flush, by both clocks."""
    since = walked["steps_since_flush"]
    summed: dict[str, Any] = {"flushes": since.count(0)}
    for clock in ("wall", "device"):
        seconds = walked[f"{clock}_seconds"]
        pairs = list(zip(seconds, since, strict=True))
        summed[clock] = {
            "all": summary(seconds),
            "far": summary([one for one, steps in pairs if steps > _AFTER_FLUSH]),
            "flushing": summary([one for one, steps in pairs if steps == 0]),
        }
    return summed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(_SECTIONS), help="sections, by commas")
    parser.add_argument("--tokens", type=int, nargs="+", help="of the decode rows, only these")
    parser.add_argument(
        "--shapes",
        type=_shape,
        nargs="+",
        metavar="BATCHxTOKENS",
        help="in place of the auto rows, these: a step of 4x9728 has 32 kv heads",
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of the config, as scorer=votes or 'schedule=[(0, .02, .2)]'",
    )
    parser.add_argument("--steps", help="path of pariskv_cuda_steps")
    parser.add_argument("--name", default="cuda", help="of the results file")
    arguments = parser.parse_args()
    sections = arguments.only.split(",")
    if unknown := set(sections) - set(_SECTIONS):
        parser.error(f"--only: expected some of {', '.join(_SECTIONS)}, got {', '.join(unknown)}")

    if not pk.is_available("cuda"):
        sys.exit("This needs a GPU and a build with the CUDA backend; see `pariskv doctor`.")

    torch.cuda.set_device(0)
    timer = gpu.Timer(12 if arguments.quick else arguments.rounds)
    results: dict[str, Any] = {
        "settings": _settings(arguments),
        "bandwidths": gpu.bandwidths(),
        "empty_graph_microseconds": gpu.empty_graph_microseconds(timer),
    }
    measure: dict[str, Callable[[], Any]] = {
        "decode": lambda: _decode(arguments, timer),
        "auto": lambda: _auto(arguments, timer),
        "mixtures": lambda: _mixtures(arguments, timer),
        "rows": lambda: _rows(arguments, timer),
        "prefill": lambda: _prefill(arguments),
        "attend": lambda: _attend(timer),
        "flushes": lambda: _flushes(arguments),
        "verbs": lambda: _verbs(arguments),
    }
    facts = gpu.facts()
    for section in _SECTIONS:
        if section not in sections:
            continue
        results[section] = measure[section]()
        if section == "flushes":
            for name in ("eager", "graph"):
                results[section][name] = _by_flushes(results[section][name])
        # After every section: a device that fails later takes nothing with it.
        harness.save(arguments.name, results, on=facts["gpu"], facts=facts)
    table.show(results)


if __name__ == "__main__":
    main()
