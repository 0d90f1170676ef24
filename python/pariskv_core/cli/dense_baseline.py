"""Times torch's dense attention over one layer of a given length, in a process of its own.

Its keys and values are gone when it ends, so they never lie beside those of the cache that it
is compared with. Its arguments are TOKENS QUERY_HEADS KV_HEADS HEAD_DIM THREADS BATCH; it prints
the seconds of one step per line.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable

from pariskv_core.cli.workload import Shape

STEPS = 12
_WARM_UP = 3


def measure(
    shape: Shape, threads: int, advance: Callable[[int], None], batch: int = 1
) -> list[float]:
    """Seconds of each step; none where torch is not installed or fails, and then it says why."""
    if importlib.util.find_spec("torch") is None:
        return []
    numbers = [shape.tokens, shape.query_heads, shape.kv_heads, shape.head_dim, threads, batch]
    child = subprocess.Popen(
        [sys.executable, "-m", __name__, *map(str, numbers)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is ours to answer
    )
    seconds = []
    with child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                seconds.append(float(line))
                advance(1)
        except BaseException:
            child.kill()
            raise
    return seconds if child.returncode == 0 else []


def _main(
    tokens: int, query_heads: int, kv_heads: int, head_dim: int, threads: int, batch: int
) -> None:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(threads)
    # The group folded into the query's length: the form in which torch reads each key only once.
    q = torch.randn(batch, kv_heads, query_heads // kv_heads, head_dim).bfloat16()
    k, v = (
        torch.empty(batch, kv_heads, tokens, head_dim, dtype=torch.bfloat16).normal_() for _ in "kv"
    )
    for step in range(-_WARM_UP, STEPS):
        begin = time.perf_counter()
        scaled_dot_product_attention(q, k, v)
        if step >= 0:
            print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    try:
        _main(*map(int, sys.argv[1:]))
    except BrokenPipeError:  # the process that asked was stopped
        os._exit(1)  # without another try to write
