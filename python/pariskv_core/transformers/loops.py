"""A loop of one's own over an attached model: its first call makes the cache of all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from . import versions

Hook = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def bringing(make: Callable[[Any], Any]) -> Hook:
    """A hook ahead of a model's forward that passes `make(model)` where the library would make a
    cache of its own: none is given and one is wanted.

    Not with gradients, which the engine has none of; not where attention weights are asked for, or
    with a mask that is not of padding alone, which full attention has and the engine has not.
    """

    def bring(
        model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if torch.is_grad_enabled():
            return None
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        mask = given.get("attention_mask")
        if (
            versions.cache_given(given)
            or not _wanted(model, given, "use_cache", default=True)
            or _wanted(model, given, "output_attentions", default=False)
            or not (mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2))
        ):
            return None
        return args, {**kwargs, versions.CACHE: make(model)}

    return bring


def _wanted(model: Any, given: dict[str, Any], name: str, *, default: bool) -> bool:
    asked = given.get(name)
    if asked is None:
        asked = getattr(model.config.get_text_config(decoder=True), name, default)
    return bool(asked)
