"""Times torch's dense attention over one layer of a given length, in a process of its own.

It is asked for steps one turn at a time, so that something else can be timed in between. Its
arguments are TOKENS QUERY_HEADS KV_HEADS HEAD_DIM THREADS BATCH; for each number that it reads it
takes as many steps and prints the seconds of one per line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType

from pariskv_core.cli.workload import Shape

STEPS = 12
_WARM_UP = 3


class Dense:
    """The process; its keys and values are gone when it ends."""

    def __init__(self, shape: Shape, threads: int, batch: int = 1) -> None:
        self._numbers = [
            shape.tokens, shape.query_heads, shape.kv_heads, shape.head_dim, threads, batch
        ]  # fmt: skip
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Dense:
        if importlib.util.find_spec("torch") is not None:
            self._child = subprocess.Popen(
                [sys.executable, "-m", __name__, *map(str, self._numbers)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is ours to answer
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._child is None:
            return
        if kind is not None:
            self._child.kill()
        self._end()

    def _end(self) -> None:
        child, self._child = self._child, None
        assert child is not None and child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        child.stdout.close()
        child.wait()

    def steps(self, count: int) -> list[float]:
        """Seconds of each; none where torch is not installed or fails, and then it says why."""
        if self._child is None:
            return []
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(f"{count}\n")
            self._child.stdin.flush()
            lines = [self._child.stdout.readline() for _ in range(count)]
        except BrokenPipeError:
            lines = [""]
        if "" in lines:  # it has ended
            self._end()
            return []
        return [float(line) for line in lines]


def measure(shape: Shape, threads: int, advance: Callable[[int], None]) -> list[float]:
    """Seconds of each step, all in one go."""
    seconds = []
    with Dense(shape, threads) as dense:
        for _ in range(STEPS):
            seconds += dense.steps(1)
            advance(1)
    return seconds if len(seconds) == STEPS else []


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
    for _ in range(_WARM_UP):
        scaled_dot_product_attention(q, k, v)
    for line in sys.stdin:
        for _ in range(int(line)):
            begin = time.perf_counter()
            scaled_dot_product_attention(q, k, v)
            print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    try:
        _main(*map(int, sys.argv[1:]))
    except BrokenPipeError:  # the process that asked was stopped
        os._exit(1)  # without another try to write
