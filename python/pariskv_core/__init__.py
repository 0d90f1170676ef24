"""ParisKV: the KV cache that answers "attend, but only to what matters".

>>> import pariskv_core as pk
>>> config = pk.Config(layers=32, query_heads=32, kv_heads=8, head_dim=128)
>>> cache = pk.Cache(config)
>>> sequence = cache.add()
>>> cache.prefill(layer, [sequence], k, v)         # once per layer
>>> out = cache.decode(layer, [sequence], q, k, v)  # every new token
"""

from __future__ import annotations

from pathlib import Path

from ._array import Array
from ._core import (
    HEAD_DIMS,
    IDLE,
    PRKV,
    Batch,
    Bytes,
    Cache,
    Config,
    Entry,
    Explanation,
    Footprint,
    HardKV,
    HardKVExplanation,
    MemoryUse,
    OutOfMemory,
    Pages,
    PageTable,
    ParisKV,
    ParisKVExplanation,
    PRKVExplanation,
    Regions,
    Stats,
    Summaries,
    __version__,
    cpu_level,
    is_available,
    is_built,
    magnitude_levels,
    rotation_signs,
)

__all__ = [
    "HEAD_DIMS",
    "IDLE",
    "PRKV",
    "Array",
    "Batch",
    "Bytes",
    "Cache",
    "Config",
    "Entry",
    "Explanation",
    "Footprint",
    "HardKV",
    "HardKVExplanation",
    "MemoryUse",
    "OutOfMemory",
    "PRKVExplanation",
    "PageTable",
    "Pages",
    "ParisKV",
    "ParisKVExplanation",
    "Regions",
    "Stats",
    "Summaries",
    "__version__",
    "cmake_dir",
    "cpu_level",
    "get_include",
    "is_available",
    "is_built",
    "magnitude_levels",
    "rotation_signs",
]


def _installed(*parts: str) -> str:
    place = Path(__file__).parent.joinpath(*parts)
    if not place.is_dir():
        raise FileNotFoundError(
            "this wheel has no headers and no archive for C++; build from source for them, in a "
            "checkout of the repository: pip install ."
        )
    return str(place)


def get_include() -> str:
    """The folder with the C++ headers, for a compiler's -I. Not in the wheels of PyPI."""
    return _installed("include")


def cmake_dir() -> str:
    """The folder with pariskvConfig.cmake, for CMAKE_PREFIX_PATH or pariskv_DIR. Likewise."""
    return _installed("lib", "cmake", "pariskv")
