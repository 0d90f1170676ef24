"""Explanation.plot: where a step looked, as a picture. Matplotlib is loaded by it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ._core import Explanation

_SELECTED, _KEPT, _ZONE = "#0f766e", "#9ca3af", "#e5f2f0"
_LARGEST, _ALIKE, _LEAST = 60.0, 12.0, 4.0  # marks, in square points


def plot(why: Explanation, axes: Any = None) -> Any:
    """A line for each kv head, a mark for each row: the larger, the more it is worth."""
    heads = max(len(why.positions), len(why.kept))
    if axes is None:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise ImportError("[plot] needs matplotlib: pip install matplotlib") from None
        axes = pyplot.figure(figsize=(9, 1.5 + 0.25 * heads), layout="constrained").gca()
    axes.axvspan(why.zone_begin, why.zone_begin + why.zone_tokens, color=_ZONE, zorder=0)
    kept, selected = why.kept, why.positions
    head, at = np.nonzero(kept >= 0)
    axes.scatter(kept[head, at], head, s=_ALIKE, marker="|", color=_KEPT)
    head, at = np.nonzero(selected >= 0)
    sizes = _sizes(why.worth[head, at])
    axes.scatter(selected[head, at], head, s=sizes, marker="o", color=_SELECTED, alpha=0.6)
    limits = (-0.5, max(heads, 1) - 0.5)
    axes.set(xlabel="position", ylabel="kv head", yticks=range(heads), ylim=limits)
    said = f"{why.zone_tokens:,} tokens of the retrieval zone"
    axes.set_title(said if why.searched else f"{said}: nothing was searched", fontsize=10)
    return axes


def _sizes(worth: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Areas by shares of the attention. Logits, by which `mean_query` ranks, become shares."""
    known = worth[np.isfinite(worth)]
    if len(known) == 0:  # the policy ranks nothing
        return np.full(len(worth), _ALIKE)
    shares = np.exp(worth - known.max()) if known.min() < 0 else worth / max(known.max(), 1e-30)
    areas: np.ndarray[Any, Any] = np.maximum(_LARGEST * np.nan_to_num(shares), _LEAST)
    return areas
