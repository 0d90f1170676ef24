"""What the GPU programs share: timing on a cold cache, what the machine can do, dense attention."""

from __future__ import annotations

import math
import subprocess
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

WARM_UP = 3  # rounds that do not count
# Far more than any level-2 cache, and long enough to go through that the host has enqueued all that
# is timed before the GPU gets there: no launch latency is in the numbers.
_FLUSH_BYTES = 1 << 30

_BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip()


def facts() -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": driver(),
        "cuda": torch.version.cuda,
    }


class Timer:
    """Microseconds by CUDA events, with the level-2 cache full of something else."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._fill = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._seen = torch.empty((), dtype=torch.int32, device="cuda")

    def _flush(self, turn: int) -> None:
        """Leaves the cache full of what was read, as a model's weights are: what was only written
        would have to go to memory while something is timed.
        """
        self._fill.fill_(turn)
        torch.amax(self._fill, dim=0, out=self._seen)

    def cold(
        self, run: Callable[[], object], before: Callable[[], object] | None = None
    ) -> list[float]:
        """`before` comes ahead of every run, untimed."""
        taken = []
        for turn in range(WARM_UP + self.rounds):
            if before is not None:
                before()
            self._flush(turn)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            if turn >= WARM_UP:
                taken.append(1e3 * start.elapsed_time(end))
        return taken


def graphed(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run`, recorded after a few times for real."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _rate(moved: int, run: Callable[[], object], rounds: int = 7) -> float:
    """Bytes per second, the median of some runs."""
    taken = []
    for _ in range(1 + rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        taken.append(1e-3 * start.elapsed_time(end))
    return moved / median(taken[1:])


def bandwidths() -> dict[str, float]:
    """Bytes per second: copying within the GPU counts both ways, across the bus one."""
    count = 1 << 30
    source, target = (torch.empty(4 * count, dtype=torch.uint8, device="cuda") for _ in range(2))
    host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    here = source[:count]
    return {
        "copy": _rate(8 * count, lambda: target.copy_(source)),
        "to_host": _rate(count, lambda: host.copy_(here, non_blocking=True)),
        "from_host": _rate(count, lambda: here.copy_(host, non_blocking=True)),
    }


def empty_graph_microseconds(timer: Timer) -> float:
    """What the events say of a graph with next to nothing in it: part of every number."""
    word = torch.zeros(1, device="cuda")
    return median(timer.cold(graphed(word.zero_).replay))


def free_bytes() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _dense_cases(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[str, Callable[[], object]]]:
    batch, kv_heads, _, head_dim = k.shape
    folded = q.view(batch, kv_heads, -1, head_dim)  # the group as queries of its kv head
    plain = q.view(batch, -1, 1, head_dim)

    def attend(backend: SDPBackend, query: torch.Tensor, **options: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, k, v, **options)

    for name, backend in _BACKENDS.items():
        yield f"{name}, folded", partial(attend, backend, folded)
        yield f"{name}, enable_gqa", partial(attend, backend, plain, enable_gqa=True)


def dense_prompt(
    timer: Timer, queries: int, tokens: int, query_heads: int, kv_heads: int, head_dim: int
) -> dict[str, Any]:
    """The same for the last `queries` tokens of one sequence, without a mask.

    K and V are copied to every query head first, where a backend wants that.
    """
    q = torch.randn((1, query_heads, queries, head_dim), dtype=torch.bfloat16, device="cuda")
    kv = (1, kv_heads, tokens, head_dim)
    k, v = (torch.randn(kv, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    copied = [x.repeat_interleave(query_heads // kv_heads, dim=1) for x in (k, v)]
    taken: dict[str, float] = {}
    for name in ("cuDNN", "flash"):
        for form, rows, options in (
            ("enable_gqa", [k, v], {"enable_gqa": True}),
            ("copied", copied, {}),
        ):
            try:
                with warnings.catch_warnings(), sdpa_kernel(_BACKENDS[name]):
                    warnings.simplefilter("ignore")
                    run = partial(scaled_dot_product_attention, q, *rows, **options)
                    taken[f"{name}, {form}"] = median(timer.cold(run))
            except RuntimeError:
                continue
    best = min(taken, key=lambda name: taken[name], default=None)
    return {} if best is None else {"dense": taken[best], "dense_by": best, "all": taken}


def dense(
    timer: Timer, batch: int, tokens: int, query_heads: int, kv_heads: int, head_dim: int
) -> dict[str, Any]:
    """The fastest of torch's ways to attend to everything, keys and values on the GPU.

    Median microseconds and which way it was; empty where keys and values do not fit.
    """
    shape = (batch, kv_heads, tokens, head_dim)
    if 2 * 2 * math.prod(shape) > 0.9 * free_bytes():
        return {}
    q, k, v = (
        torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_()
        for size in ((batch, query_heads, head_dim), shape, shape)
    )
    taken: dict[str, float] = {}
    for name, run in _dense_cases(q, k, v):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # why a backend does not take this shape
                graph = graphed(run)
        except RuntimeError:
            continue
        taken[name] = median(timer.cold(graph.replay))
        del graph
    best = min(taken, key=lambda name: taken[name], default=None)
    return {} if best is None else {"dense": taken[best], "dense_by": best}
