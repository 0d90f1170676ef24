"""Which models the engine can be the cache of, by the fields of their configs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

# Fields of a config that name a kind of attention, and what it is.
_UNSERVED = {
    "kv_lora_rank": "multi-head latent attention, whose cache is small as it is",
    "is_encoder_decoder": "an encoder and a decoder",
}
_SERVED_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


def refusal(field: Callable[[str], Any], others: Collection[str] = ()) -> str | None:
    """Why a model is refused, by its name; None: it is not.

    field   returns a field of the config of its text decoder, None where there is none
    others  kinds of layers that a host serves by itself, beside those that any does
    """
    name = field("model_type")
    for unserved, kind in _UNSERVED.items():
        if field(unserved):
            return f"{name} is not supported: it has {kind} ({unserved})"
    for kind in field("layer_types") or _blocks(field):
        if kind not in _SERVED_TYPES.union(others):
            expected = ", ".join(sorted(_SERVED_TYPES.union(others)))
            return f'{name} is not supported: it has layers of type "{kind}", expected {expected}'
    return None


def _blocks(field: Callable[[str], Any]) -> list[str]:
    """Kinds of layers, as configs of Jamba and its like say them to older hosts."""
    kinds = field("layers_block_type") or []
    return ["full_attention" if kind == "attention" else kind for kind in kinds]
