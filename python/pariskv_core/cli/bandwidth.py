"""How fast memory is read here, measured in a second: host memory, and the bus to a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_HOST_BYTES = 256 << 20  # more than any cache
_BUS_BYTES = 256 << 20
_ROUNDS = 4


@dataclass(frozen=True)
class Bus:
    """Bytes a second."""

    to_device: float
    from_device: float


def _best(work: Callable[[], object], size: int) -> float:
    """Of a few rounds: what others on the machine take is not the memory's."""
    seconds = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return size / min(seconds)


def host(threads: int) -> float:
    """Bytes a second that so many threads read from RAM."""
    import numpy as np

    arrays = [np.ones(_HOST_BYTES // 4 // threads, np.float32) for _ in range(threads)]
    size = sum(array.nbytes for array in arrays)
    with ThreadPoolExecutor(threads) as pool:
        # A dot product reads as fast as the memory gives, and lets go of the interpreter.
        return _best(lambda: list(pool.map(lambda array: np.dot(array, array), arrays)), size)


def bus() -> Bus | None:
    """Between pinned host memory and the GPU; None where torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    here = torch.empty(_BUS_BYTES, dtype=torch.uint8).pin_memory()
    there = torch.empty(_BUS_BYTES, dtype=torch.uint8, device="cuda")

    def copied(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        return copy

    copied(there, here)()
    return Bus(_best(copied(there, here), _BUS_BYTES), _best(copied(here, there), _BUS_BYTES))
