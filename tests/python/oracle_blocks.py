"""Blocks that share a mean, in NumPy: the balance of channels, means, what is left of keys.

<q, k> = <S q, k / S> = <S q, c + m> + <S q, k / S - c - m>, with a factor S per channel, the mean
c of the zone's first k / S, rounded to 15 bits, and the mean m of a block's k / S - c, rounded to
8 bits. Sums are of doubles, in the order of positions, so means and
balances come out as the engine's, bit for bit. See oracle.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from oracle_scale import (
    MOST_STEPS,
    OCTAVE_STEPS,
    QUERY_LEVELS,
    HeadScale,
    fused_multiply_add,
    rough_exp2,
    rough_log2,
)

# A zone opens where it has this many keys or more, at a multiple of the grain.
LEAST_KEYS, GRAIN = 960, 256
# Queries of so many positions before each of so many multiples of the grain, of which that is the
# last, set its balance, together with these keys.
OBSERVED, WINDOWS = 16, 4
QUIETEST = 2.0**-20
LEAST_STRETCH, MOST_STRETCH = 2.0**-3, 2.0**6
MEAN_LEVELS, FINE_LEVELS = 127, 16383
LARGEST_STEP, LARGEST_CENTRE_STEP = 2.0**121, 2.0**114
SIGN_GAIN = 0.875
SIGN_REACH = 2.0
BLOCK_REACH = 4.0
HEAD_START = 0.6
CHUNK = 64


def opening(sink: int) -> int:
    """Where a zone ends when it begins to be one."""
    return -(-(sink + LEAST_KEYS) // GRAIN) * GRAIN


def observed(sink: int, windows: int = WINDOWS) -> list[slice]:
    """The positions of each of the first so many windows of queries."""
    ends = (opening(sink) - GRAIN * i for i in reversed(range(WINDOWS)))
    return [slice(end - OBSERVED, end) for end in ends][:windows]


def blocks_between(begin: int, end: int, size: int) -> Iterable[tuple[int, int]]:
    """(begin, end) of each block, or of what is left of the first one."""
    while begin < end:
        stop = min((begin // size + 1) * size, end)
        yield begin, stop
        begin = stop


def in_order(rows: np.ndarray) -> np.ndarray:
    """The sum of rows (count, ...), one after the other."""
    total = np.zeros(rows.shape[1:], rows.dtype)
    for row in rows:
        total = total + row
    return total


def finite_rows(keys: np.ndarray) -> np.ndarray:
    return keys[np.isfinite(keys).all(axis=1)]


def mean_of(keys: np.ndarray) -> np.ndarray:
    """Of the rows (count, head_dim) that are finite; zeros without any."""
    usable = finite_rows(keys)
    return in_order(usable) / max(len(usable), 1)


# --- The balance of channels ---------------------------------------------------------------------


def lifted(squares: np.ndarray) -> np.ndarray | None:
    """With a floor under the quiet channels; None where they say nothing."""
    if not np.isfinite(squares).all() or not squares.max() > 0:
        return None
    return np.maximum(squares, squares.max() * QUIETEST)


def stretch_of(keys: np.ndarray, queries: np.ndarray | None) -> np.ndarray:
    """S, fp32, of mean squares of channels (head_dim): of keys, and of queries in any unit."""
    loud = lifted(keys)
    if loud is None:
        return np.ones(len(keys), dtype=np.float32)
    heard = None if queries is None else lifted(queries)
    if heard is not None:
        raw = np.sqrt(np.sqrt(loud / heard))
    else:
        raw = np.sqrt(np.sqrt(loud))
        raw = raw * np.sqrt(raw)
    median = np.sort(raw)[len(raw) // 2]
    return np.clip(raw / median, LEAST_STRETCH, MOST_STRETCH).astype(np.float32)


def balance(keys: np.ndarray, sink: int, size: int, queries: np.ndarray | None) -> np.ndarray:
    """S of one kv head.

    keys     (tokens, head_dim) from position 0 on, as many as a zone opens with
    queries  (windows, OBSERVED, group, head_dim) of those that were seen, from the first one on
             without a gap; None: of none
    """
    total, count = np.zeros(keys.shape[1]), 0
    for begin, end in blocks_between(sink, opening(sink), size):
        mean = mean_of(keys[begin:end])
        own = np.zeros(keys.shape[1])
        for key in finite_rows(keys[begin:end]):
            left = np.longdouble(key - mean)  # fused: the square is not rounded
            own = (own + left * left).astype(np.float64)
            count += 1
        total = total + own
    squares = total / max(count, 1)
    half = len(squares) // 2  # channels that positions may turn into one another
    squares = squares + np.roll(squares, -half)
    if queries is not None:
        fine = queries.astype(np.float32)  # as are the sums of a window
        of_windows = [in_order((q * q).reshape(-1, keys.shape[1])) for q in fine]
        heard = in_order(np.array(of_windows, dtype=np.float64))
        queries = heard + np.roll(heard, -half)
    return stretch_of(squares, queries)


# --- Means, and what is left ---------------------------------------------------------------------

Rounded = tuple[np.ndarray, np.float32]  # levels (head_dim) and their step


def rounded(mean: np.ndarray, most: int, largest_step: float) -> Rounded:
    """With levels of -most to most."""
    step = np.float32(min(np.abs(mean).max() / most, largest_step))
    if step == 0:
        return np.zeros(len(mean), dtype=np.int64), step
    return np.clip(np.rint(mean / np.float64(step)), -most, most).astype(np.int64), step


def balanced_mean(keys: np.ndarray, stretch: np.ndarray) -> np.ndarray:
    return mean_of(keys) * (np.float32(1) / stretch).astype(np.float64)


def centre_of(keys: np.ndarray, sink: int, size: int, stretch: np.ndarray) -> Rounded:
    """Of a kv head's keys (tokens, head_dim) / S, from position 0 to where a zone opens or on."""
    parts = [finite_rows(keys[b:e]) for b, e in blocks_between(sink, opening(sink), size)]
    total = in_order(np.stack([in_order(part) for part in parts]))
    mean = total / max(sum(map(len, parts)), 1)
    mean = mean * (np.float32(1) / stretch).astype(np.float64)
    return rounded(mean, FINE_LEVELS, LARGEST_CENTRE_STEP)


def rounded_mean(keys: np.ndarray, stretch: np.ndarray, centre: Rounded) -> Rounded:
    """Of what is left of a block's keys / S without the centre; nothing of no keys."""
    if not len(finite_rows(keys)):
        return np.zeros(keys.shape[1], dtype=np.int64), np.float32(0)
    left = balanced_mean(keys, stretch) - centre[0] * np.float64(centre[1])
    return rounded(left, MEAN_LEVELS, LARGEST_STEP)


def steps_of(logits: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(logits, -MOST_STEPS, MOST_STEPS))


@dataclass
class Blocks:
    """What is known of the blocks of one kv head's zone."""

    size: int
    zone_begin: int
    levels: np.ndarray  # (blocks, head_dim)
    steps: np.ndarray  # (blocks) fp32
    stretch: np.ndarray  # (head_dim) fp32
    centre: Rounded

    def of(self, offsets: np.ndarray) -> np.ndarray:
        """The blocks that keys are in, by their offsets from the zone's begin."""
        return (self.zone_begin + offsets) // self.size - self.zone_begin // self.size

    def means(self) -> np.ndarray:
        centre = self.centre[0].astype(np.float32) * self.centre[1]
        return self.levels.astype(np.float32) * self.steps[:, None] + centre

    def residuals(self, keys: np.ndarray) -> np.ndarray:
        """What is left of the zone's keys (tokens, head_dim), fp32; a bad one stays what it is."""
        shift = -self.means()[self.of(np.arange(len(keys)))]
        with np.errstate(all="ignore"):
            left = fused_multiply_add(keys.astype(np.float32), np.float32(1) / self.stretch, shift)
        most = np.finfo(np.float32).max
        return np.where(np.isfinite(keys), np.clip(left, -most, most), keys)

    def stretched(self, query: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return query.astype(np.float32) * self.stretch

    def logits(self, stretched: np.ndarray, scale: float) -> np.ndarray:
        """Of each block's mean, in whole steps of 1/64 octave; of a query times S."""
        one = np.float32
        with np.errstate(all="ignore"):
            largest = np.abs(stretched).max()
            levels = one(FINE_LEVELS) / largest
            fine = np.rint(stretched * (levels if np.isfinite(levels) else one(0)))
            base = one(scale) * (largest / one(FINE_LEVELS)) * one(92.3324826)
            unit = base * self.steps
            dots = (self.levels @ fine.astype(np.int64)).astype(np.float32)
            own = np.where(np.isfinite(unit), steps_of(dots * unit), 0)
            unit = base * self.centre[1]
            dot = np.float32(self.centre[0] @ fine.astype(np.int64))
            centre = steps_of(dot * unit) if np.isfinite(unit) else 0
        return np.clip(own + centre, -MOST_STEPS, MOST_STEPS).astype(np.int64)


def blocks_of(keys: np.ndarray, zone: tuple[int, int], size: int, stretch: np.ndarray) -> Blocks:
    """From all keys (tokens, head_dim) of a kv head, the zone's begin and end, and its balance."""
    centre = centre_of(keys, zone[0], size, stretch)
    found = [rounded_mean(keys[b:e], stretch, centre) for b, e in blocks_between(*zone, size)]
    levels, steps = zip(*found, strict=True)
    steps = np.array(steps, dtype=np.float32)
    return Blocks(size, zone[0], np.stack(levels), steps, stretch, centre)


# --- Where a head's logits lie -------------------------------------------------------------------


@dataclass
class BlockSums:
    blocks: int
    sum: int
    squares: int
    most: int
    weight: int  # sum of 2^(steps / 64), in units of 2^-16 of that of the largest


def lowered(number: int, less: int) -> int:
    """How much less a number with so many steps less is: a line from power to power."""
    shift = (less + OCTAVE_STEPS - 1) // OCTAVE_STEPS
    return 0 if shift > 40 else number * (OCTAVE_STEPS + -less % OCTAVE_STEPS) >> (6 + shift)


def block_sums(steps: np.ndarray, first_block: int) -> BlockSums:
    """Over chunks of blocks, cut at multiples of CHUNK blocks of the sequence, then over these."""
    values, most, weight = [int(s) for s in steps], int(steps.max()), 0
    for begin, end in blocks_between(first_block, first_block + len(values), CHUNK):
        chunk = values[begin - first_block : end - first_block]
        weight += lowered(sum(lowered(1 << 16, max(chunk) - s) for s in chunk), most - max(chunk))
    return BlockSums(len(values), sum(values), sum(s * s for s in values), most, weight)


def reached_variance(variance_term: np.float32, mean_square: np.float32) -> np.float32:
    """Of a spread of logits that signs do not tell, what a reach of two spreads gives."""
    one = np.float32
    variance = variance_term * mean_square * one(1.386294)
    if not variance > SIGN_REACH * SIGN_REACH:
        return variance_term
    part = one(SIGN_REACH) / np.sqrt(variance)
    return variance_term * (part * (one(2) - part))


def block_scale(
    norms: np.ndarray, sums: BlockSums, q4: np.ndarray, largest: np.float32, scale, window
) -> HeadScale:
    """From the norms of usable residuals, at least one; fp32 where a backend has fp32."""
    one, square = np.float32, int((q4 * q4).sum())
    units = np.rint(norms * 512).astype(np.int64)
    inverse = 1 / len(norms)
    with np.errstate(all="ignore"):
        mean_square = one(float((units * units).sum()) * inverse / 512**2)
        slope = one(scale) * (largest / one(QUERY_LEVELS)) * (one(1.44269504) / one(len(q4)))
        variance_term = slope * slope * one(square) * one(0.125939)
        variance_term = reached_variance(variance_term, mean_square)
        mean = sums.sum * (1 / sums.blocks)
        variance = max(sums.squares * (1 / sums.blocks) - mean * mean, 0.0)
        within = slope * slope * one(square) * mean_square
        inner = np.sqrt(within)
        mu = one(mean / 64) + variance_term * mean_square
        spread = np.sqrt(within + one(variance / 64**2))

        best = one(sums.most) / one(64)
        count = rough_log2(one(len(norms)))
        reach = np.minimum(inner * one(0.693147), np.sqrt(count * one(1.386294)))
        average = best + (rough_log2(one(sums.weight)) - one(16)) - rough_log2(one(sums.blocks))
        zone = average + reach * inner - reach * reach * one(0.721348) + count
        more, less = (window, zone) if window > zone else (zone, window)
        total = more + rough_exp2(less - more) - one(HEAD_START) * inner
        top = best + one(BLOCK_REACH) * inner
    return HeadScale(slope * one(SIGN_GAIN), variance_term, mu, spread, total, top)
