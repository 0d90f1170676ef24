"""Where versions of transformers differ. The rest of the package knows one of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.cache_utils import DynamicSlidingWindowLayer as SlidingLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = [
    "CacheLayerMixin",
    "DynamicCache",
    "DynamicLayer",
    "SlidingLayer",
    "causal_mask_function",
]

NAME = "pariskv"  # of our attention, for set_attn_implementation
OLDEST = (4, 57)

_version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
if _version < OLDEST:
    raise ImportError(
        f"[transformers] expected version {OLDEST[0]}.{OLDEST[1]} or newer, "
        f"got {transformers.__version__}"
    )

# From 5.23 on a sliding layer can keep what it drops, until a crop says what is needed.
RECORDS_PAST = hasattr(Cache, "activate_past_recording")


# Kinds of layers without rows of each token. Newer versions have one cache for all of them, older
# ones none, or another one for each model.
_KINDS = getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", {})
STATE = _KINDS.get("linear_attention")
WITHOUT_ROWS = () if STATE is None else ("linear_attention", "conv", "moe", "mlp")


def keeps_states(layer: Any) -> bool:
    """Whether a layer of a cache has a state in place of rows."""
    return STATE is not None and isinstance(layer, STATE)


def takes_back(layer: Any) -> bool:
    """Whether a layer with states has kept what it needs for a `crop`."""
    return bool(getattr(layer, "is_croppable", False) and getattr(layer, "record_past", False))


# By which name `generate` and a model's forward take a cache, and by which outputs have it: "cache"
# from 5.24 on. There the older name is taken as well, with a warning of the library's.
_OLDER = "past_key_values"
_inputs = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _inputs else _OLDER


def cache_given(kwargs: dict[str, Any]) -> bool:
    """Whether a caller of `generate` passes a cache, by either name."""
    return any(kwargs.get(name) is not None for name in (CACHE, _OLDER))


def register(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def sdpa_attention(*args: Any, **kwargs: Any) -> Any:
    """The library's own attention, for layers that are not ours."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


def sdpa_mask(**kwargs: Any) -> torch.Tensor | None:
    """The library's own 4-D mask."""
    mask: torch.Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**kwargs)
    return mask


def columns_of(query: int | torch.Tensor) -> int:
    """How many tokens a forward pass brings: a number, or their positions before 5.12."""
    return query if isinstance(query, int) else query.shape[0]


def keys_end_with_queries(kwargs: dict[str, Any]) -> bool:
    """Whether keys are of the tokens seen and the new ones, and of nothing more.

    A static cache's keys are as many as it has room for.
    """
    keys = int(kwargs["kv_length"]) + int(kwargs["kv_offset"])
    offset = kwargs.get("q_offset")
    if offset is not None:
        return not isinstance(offset, torch.Tensor) and offset + kwargs["q_length"] == keys
    mask = kwargs.get("attention_mask")  # before 5.12
    if mask is not None:
        return bool(mask.shape[-1] == keys)
    return int(kwargs["cache_position"][-1]) + 1 == keys
