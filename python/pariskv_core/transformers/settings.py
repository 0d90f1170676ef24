"""What a PariskvCache can be told: names and types."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal, TypedDict

import pariskv_core as pk


class EngineSettings(TypedDict, total=False):
    """Fields of pk.Config. The model's shape, dtype and device are the model's own."""

    policy: pk.ParisKV | pk.HardKV | pk.PRKV | None
    sink: int
    local: int
    update: int
    dense_below: int | Literal["batch"]
    threads: int
    segment_tokens: int
    memory_budget: int | str
    placement: Literal["auto", "host", "device"]
    row_cache: int
    host_budget: int | str
    kv_dtype: Literal["auto", "int8"]


class CacheSettings(EngineSettings, total=False):
    """The same, and what is the cache's own."""

    top_k: int | None
    rollback: bool


_MODELS = ("layers", "query_heads", "kv_heads", "head_dim", "value_dim", "dtype", "device")


def check_names(given: Iterable[str]) -> None:
    """Refuses names that are none, with the nearest one that is."""
    known = list(CacheSettings.__annotations__)
    for name in given:
        if name in _MODELS:
            raise TypeError(f"[transformers] {name}: it is the model's, expected no setting of it")
        if name in known:
            continue
        bare = {each.replace("_", ""): each for each in known}
        near = difflib.get_close_matches(name.replace("_", "").lower(), bare, n=1)
        meant = f"; did you mean {bare[near[0]]}? The" if near else "; the"
        raise TypeError(
            f"[transformers] {name}: there is no such setting{meant} settings are "
            f"{', '.join(known)}"
        )
