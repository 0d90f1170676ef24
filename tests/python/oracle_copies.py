"""How rows in 8 bits are rounded, of a zone and copies of a tail's: docs/search.md, in NumPy."""

from __future__ import annotations

import numpy as np
from oracle_blocks import Blocks


def eight_bits(x: np.ndarray) -> np.ndarray:
    """Rows (..., dim) as the store has them: levels of the largest number over 127."""
    x = np.asarray(x, np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
        scale = np.where(np.isfinite(scale), scale, np.float32(np.nan))
        levels = np.where(scale > 0, np.rint(x / scale), np.float32(0)).astype(np.float32)
        return (np.clip(levels, -127, 127) + np.float32(0)) * scale  # no -0


def common_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(centre, unit) of each channel, from rows (count, dim) of K or V of a head."""
    rows = np.asarray(rows, np.float32)
    loud = np.abs(rows).max(axis=1).view(np.int32) >> 23  # exponents
    rows = rows[loud <= np.sort(loud)[len(loud) // 2] + 3].astype(np.float64)
    centre = rows.mean(axis=0).astype(np.float32)
    variance = np.maximum((rows**2).mean(axis=0) - rows.mean(axis=0) ** 2, 0)
    octaves = np.frexp(variance)[1] - 1  # 2^octaves is the greatest power of two not above
    roots = np.where(variance > 0, np.ceil(octaves / 2), -np.inf)
    loudest, median = roots.max(), np.sort(roots)[len(roots) // 2]
    if loudest == -np.inf:
        return centre, np.ones(rows.shape[1], np.float32)
    least = (loudest if median == -np.inf else median) - 4
    unit = 2.0 ** np.maximum(np.maximum(roots, least) - loudest, -64)
    return centre, unit.astype(np.float32)


def rounded(rows: np.ndarray, common: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Rows of V or of copies, in fp32: 8 bits of what their common part leaves."""
    centre, unit = common
    rows = np.asarray(rows, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        left = np.where(np.isfinite(rows), held(held(rows - centre) * (1 / unit)), rows)
        return held(eight_bits(left) * unit + centre)


def copied(rows: np.ndarray, tail_rows: int) -> np.ndarray:
    """K or V of all rows of a head's tail (count, dim) as their copies have them."""
    common = common_of(rows[: tail_rows - tail_rows // 16])
    return rounded(rows, common).astype(np.float64)


def held(x: np.ndarray) -> np.ndarray:
    """Nothing finite becomes infinite."""
    most = np.finfo(np.float32).max
    return np.clip(x, -most, most)


def narrow_keys(keys: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Keys of a head's zone (tokens, head_dim), in fp32: 8 bits of what centre and means leave,
    or of the whole where that is larger."""
    keys, base = np.asarray(keys, np.float32), blocks.means()[blocks.of(np.arange(len(keys)))]
    with np.errstate(over="ignore", invalid="ignore"):
        balanced = keys * (np.float32(1) / blocks.stretch)
        whole, left = held(balanced), held(balanced - base)
        bare = np.abs(whole).max(axis=1) < np.abs(left).max(axis=1)
        base[bare] = 0
        kept = np.where(np.isfinite(keys), np.where(bare[:, None], whole, left), np.float32(np.nan))
        return held(eight_bits(kept) * blocks.stretch + base * blocks.stretch)


def narrow_values(values: np.ndarray, opening: int) -> np.ndarray:
    """V of a head's zone, which opened with so many rows."""
    return rounded(values, common_of(values[: min(opening, 1024)]))
