"""What makes scores comparable, in NumPy: rounded queries, and where a head's logits lie.

Whole numbers, or fp32 that is rounded where a backend rounds it, so that scores are equal.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import oracle

QUERY_LEVELS = 15
SCORE_STEPS = 16
SCORE_SHIFT = 4
# Resident rows that a head's share is judged by: the first, and the last before the newest token.
FIRST_ROWS, LAST_ROWS = 16, 112
# Steps of their logits to an octave, a factor of two in attention.
OCTAVE_STEPS = 64
MOST_STEPS = 2.0**22


def quantised_query(query: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """The rotated query in whole steps of its largest element; fp32 like every backend."""
    rotated = oracle.rotate(query.astype(np.float32), signs)
    with np.errstate(over="ignore", divide="ignore"):
        step = np.float32(QUERY_LEVELS) / np.abs(rotated).max()
    if not np.isfinite(rotated).all() or not np.isfinite(step):
        return np.zeros(len(signs), dtype=np.int64)
    return np.rint(rotated * step).astype(np.int64)


def fused_multiply_add(a: np.ndarray, b, c) -> np.ndarray:
    """fp32 a * b + c rounded once: the fp64 sum is rounded to odd, which fp32 rounds right."""
    product = a.astype(np.float64) * np.asarray(b, dtype=np.float64)
    addend = np.asarray(c, dtype=np.float64)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    even = total.view(np.int64) % 2 == 0
    nudged = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, nudged, total).astype(np.float32)


def rough_log2(x: np.float32) -> np.float32:
    """A line from power of two to power of two."""
    mantissa, exponent = np.frexp(np.float32(x))
    return np.float32(exponent - 1) + (2 * mantissa - np.float32(1))


def rough_exp2(x: np.float32) -> np.float32:
    """Its inverse, for x up to 0."""
    if not x >= -30:
        return np.float32(0)
    whole = np.floor(x)
    return np.ldexp(np.float32(1) + (x - whole), int(whole))


def window_rows(total: int, zone_begin: int, zone_end: int) -> np.ndarray:
    """The resident rows that are looked at; the newest is never among them."""
    last = range(max(zone_end, total - 1 - LAST_ROWS), total - 1)
    return np.array([*range(min(zone_begin, FIRST_ROWS)), *last], dtype=np.int64)


def window_octaves(
    query: np.ndarray,
    rows: np.ndarray,
    scale: float,
    softcap: float = 0.0,
    bias: float | None = None,
) -> np.float32:
    """R: log2 of the attention, before it is shared out, of rows (count, head_dim) and a bias.

    In whole numbers: queries and keys of 8 bits, logits in 64ths of an octave.
    """
    one = np.float32
    query, rows = query.astype(np.float32), rows.astype(np.float32)
    with np.errstate(all="ignore"):
        largest = np.abs(query).max()
        levels = one(127) / largest
        q8 = np.rint(query * (levels if np.isfinite(levels) else one(0))).astype(np.int64)
        base = one(scale) * (largest / one(127)) * one(92.3324826)
        keys = rows[np.isfinite(rows).all(axis=1)]
        biggest = np.abs(keys).max(axis=1, initial=0)
        exponents = np.maximum((biggest.view(np.int32) >> 23), 16) - 127
        k8 = np.clip(np.rint(np.ldexp(keys, (6 - exponents)[:, None])), -127, 127).astype(np.int64)
        unit = base * np.ldexp(one(1), exponents - 6)
        logits = np.where(np.isfinite(unit), (k8 @ q8).astype(np.float32) * unit, 0)
        steps = np.rint(np.clip(logits, -MOST_STEPS, MOST_STEPS)).astype(np.int64)
        if softcap > 0:
            cap = int(np.rint(min(one(softcap) * one(92.3324826), one(MOST_STEPS))))
            steps = np.clip(steps, -cap, cap)
        if bias is not None and np.isfinite(bias):
            step = np.rint(np.clip(one(bias) * one(92.3324826), -MOST_STEPS, MOST_STEPS))
            steps = np.append(steps, int(step))
    if not len(steps):
        return one(-np.inf)
    less = steps.max() - steps
    less = less[less < 16 * OCTAVE_STEPS]
    total = ((OCTAVE_STEPS + -less % OCTAVE_STEPS << 10) >> (less + OCTAVE_STEPS - 1) // 64).sum()
    return one(steps.max()) / one(OCTAVE_STEPS) + (rough_log2(one(total)) - one(16))


@dataclass
class HeadScale:
    """Where a head's logits lie, in octaves."""

    slope: np.float32  # by dot * norm
    variance_term: np.float32  # by norm squared
    mean: np.float32
    spread: np.float32
    total: np.float32  # log2 of all attention, before it is shared out
    top: np.float32  # of the best block's keys; -inf without blocks


def head_scale(
    key_signs: np.ndarray, norms: np.ndarray, q4: np.ndarray, largest: np.float32, scale, window
) -> HeadScale:
    """From usable keys (tokens, rotated_dim), at least one; fp32 where a backend has fp32."""
    one, dim, square = np.float32, len(q4), int((q4 * q4).sum())
    units = np.rint(norms * 512).astype(np.int64)
    sums = (key_signs.astype(np.int64) * units[:, None]).sum(axis=0)
    inverse = 1 / len(norms)
    means = np.rint(sums * inverse).astype(np.int64)
    mean_square = float((units * units).sum()) * inverse
    mean = float(int(sums @ q4)) * inverse / 512
    common = float(int((q4 * q4 * means * means).sum()))
    variance = max(float(square) * mean_square - common, 0.0)
    with np.errstate(all="ignore"):
        slope = one(scale) * (largest / one(QUERY_LEVELS)) * (one(1.44269504) / one(dim))
        variance_term = slope * slope * one(square) * one(0.125939)
        mu = slope * one(mean) + variance_term * one(mean_square / 512**2)
        spread = np.sqrt(slope * slope * one(variance / 512**2))
        count = rough_log2(one(len(norms)))
        reach = np.minimum(spread * one(0.693147), np.sqrt(count * one(1.386294)))
        zone = mu + reach * spread - reach * reach * one(0.721348) + count
        more, less = (window, zone) if window > zone else (zone, window)
        total = more + rough_exp2(less - more)
    return HeadScale(slope, variance_term, mu, spread, total, one(-np.inf))


@dataclass
class ScoreLine:
    """A head's scores: slope * dot * norm + variance_term * norm^2 + offset + per_step * steps."""

    slope: np.float32
    variance_term: np.float32
    offset: np.float32
    per_step: np.float32


def joined(scores: Sequence[np.ndarray], octave: int) -> np.ndarray:
    """The scores of all heads: by fours, two fours to an eight, then eights in turn."""

    def join(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        mean = (a + b + 1) // 2
        return np.minimum(np.maximum(np.maximum(a, b), mean + octave), 255)

    whole = [*scores, *[np.zeros_like(scores[0])] * (-len(scores) % 4)]
    twos = [join(*whole[i : i + 2]) for i in range(0, len(whole), 2)]
    fours = [join(*twos[i : i + 2]) for i in range(0, len(twos), 2)]
    eights = [functools.reduce(join, fours[i : i + 2]) for i in range(0, len(fours), 2)]
    return functools.reduce(join, [np.maximum(eight, 1) for eight in eights])


def score_lines(heads: Sequence[HeadScale], searchers: int) -> tuple[list[ScoreLine], int]:
    """The best head's mean key scores 64, less what the best blocks' keys would pass 255 by. Some
    searchers may have no scale. Beside the lines: the steps of an octave."""
    one = np.float32
    anchor, spread, top = one(-np.inf), one(2.0**-6), one(-np.inf)
    lines = []
    with np.errstate(all="ignore"):
        for head in heads:
            if head.mean - head.total > anchor:
                anchor = head.mean - head.total
                spread = np.maximum(head.spread, one(2.0**-6))
            if head.top - head.total > top:
                top = head.top - head.total
        steps, middle = one(SCORE_STEPS) / spread, one(SCORE_SHIFT * SCORE_STEPS)
        octave = np.rint(np.minimum(steps, one(32))) if searchers > 1 else one(0)
        in_turn = 0 if searchers == 1 else 2 if searchers <= 4 else 3 + (searchers - 1) // 8
        most = one(255) - middle - octave * one(in_turn)
        excess = (top - anchor) * steps - most
        lowered = middle - excess if excess > 0 and np.isfinite(excess) else middle
        for head in heads:
            offset = lowered - (head.total + anchor) * steps
            line = (head.slope * steps, head.variance_term * steps, offset)
            if np.isfinite(line).all():
                lines.append(ScoreLine(*line, steps / one(OCTAVE_STEPS)))
            else:
                lines.append(ScoreLine(one(0), one(0), middle, one(0)))
    return lines, int(octave)
