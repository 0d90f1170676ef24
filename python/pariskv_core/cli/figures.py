"""Documented times of a decode step of one layer: the README's, for `plan` to scale.

32 query heads, 8 kv heads of 128, 16 bits; tests compare them with the README.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_KV_NUMBERS = 8 * 128  # of a token's keys in the shape that was measured


@dataclass(frozen=True)
class Table:
    where: str
    # batch -> tokens, seconds of ours, seconds of torch's dense attention
    steps: dict[int, tuple[tuple[int, float, float], ...]]


CPU = Table(
    "two cores of an AMD EPYC",
    {1: ((8192, 1.1e-3, 3.1e-3), (32768, 1.7e-3, 11.3e-3), (131072, 3.7e-3, 45e-3))},
)
GPU = Table(
    "one NVIDIA H100",
    {
        1: (
            (32768, 53e-6, 53e-6),
            (131072, 55e-6, 182e-6),
            (524288, 88e-6, 696e-6),
            (1048576, 134e-6, 1381e-6),
        ),
        8: (
            (32768, 158e-6, 354e-6),
            (131072, 214e-6, 1384e-6),
            (524288, 459e-6, 5501e-6),
        ),
    },
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one layer."""

    ours: float
    dense: float


def _at(rows: tuple[tuple[int, float, float], ...], tokens: int) -> np.ndarray:
    """On a line between the two nearest lengths, and on in proportion past the longest."""
    lengths = [row[0] for row in rows]
    found = np.array([np.interp(tokens, lengths, [row[i] for row in rows]) for i in (1, 2)])
    if tokens > lengths[-1] and len(rows) > 1:
        (a, *first), (b, *last) = rows[-2:]
        slope = (np.array(last) - first) / (b - a)
        found = found + slope * (tokens - b)
    return found


def step(table: Table, tokens: int, batch: int, kv_heads: int, head_dim: int) -> StepTime:
    """An estimate: a batch of other heads counts as so many sequences of the measured shape."""
    like = batch * kv_heads * head_dim / _KV_NUMBERS
    batches = sorted(table.steps)
    times = {b: _at(table.steps[b], tokens) for b in batches}
    if len(batches) == 1:
        found = times[1] * like
    elif like <= batches[0]:
        found = times[batches[0]]
    else:
        (a, b) = batches
        found = times[a] + (times[b] - times[a]) / (b - a) * (like - a)
    return StepTime(float(found[0]), float(found[1]))
