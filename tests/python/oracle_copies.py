"""How copies of a tail's rows are rounded: docs/search.md, in NumPy."""

import numpy as np


def eight_bits(x: np.ndarray) -> np.ndarray:
    """Rows (..., dim) as the store has them: levels of the largest number over 127."""
    x = np.asarray(x, np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
        scale = np.where(np.isfinite(scale), scale, np.float32(np.nan))
        levels = np.where(scale > 0, np.rint(x / scale), np.float32(0)).astype(np.float32)
        return (np.clip(levels, -127, 127) + np.float32(0)) * scale  # no -0


def copied(rows: np.ndarray, tail_rows: int) -> np.ndarray:
    """K or V of all rows of a head's tail (count, dim) as their copies have them."""
    rows = np.asarray(rows, np.float32)
    first = rows[: tail_rows - tail_rows // 16]
    loud = np.abs(first).max(axis=1).view(np.int32) >> 23  # exponents
    first = first[loud <= np.sort(loud)[len(loud) // 2] + 3].astype(np.float64)
    centre = first.mean(axis=0).astype(np.float32)
    variance = np.maximum((first**2).mean(axis=0) - first.mean(axis=0) ** 2, 0)
    octaves = np.frexp(variance)[1] - 1  # 2^octaves is the greatest power of two not above
    roots = np.where(variance > 0, np.ceil(octaves / 2), -np.inf)
    loudest, median = roots.max(), np.sort(roots)[len(roots) // 2]
    if loudest == -np.inf:
        unit = np.ones(rows.shape[1], np.float32)
    else:
        least = (loudest if median == -np.inf else median) - 4
        unit = np.float32(2) ** np.maximum(np.maximum(roots, least) - loudest, -64)
    return eight_bits((rows - centre) / np.float32(unit)).astype(np.float64) * unit + centre
