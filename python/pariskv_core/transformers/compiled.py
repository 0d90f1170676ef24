"""A model's layers as torch.compile makes them, for model steps of one token.

The engine's two calls of a layer, `update` and the attention, stay Python; torch compiles what lies
between them: norms, projections, rotary embeddings, the feed-forward part. One token's work there
is many small kernels, which become a few.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AttentionInterface

from . import versions
from .attention import pariskv_attention
from .cache import PariskvCache
from .masks import unmasked_steps

# Code of a layer is compiled anew for each layer's number, and for each number of rows.
_MOST_VARIANTS = 1 << 14

_compiled: weakref.WeakKeyDictionary[Any, CompiledLayers] = weakref.WeakKeyDictionary()


class CompiledLayers:
    """The decoder's layers of one model. Nothing is compiled before the first model step."""

    def __init__(self, model: Any) -> None:
        _keep_the_engine_python()
        self._layers = _layers(model)
        # Shapes are those of a model step, (rows, 1, ...): static ones make the better kernels.
        self._forwards = [torch.compile(layer.forward, dynamic=False) for layer in self._layers]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """The layers' forward is the compiled one as long as this lasts."""
        before = [layer.__dict__.get("forward") for layer in self._layers]
        try:
            for layer, forward in zip(self._layers, self._forwards, strict=True):
                layer.forward = forward
            with unmasked_steps(), torch._dynamo.config.patch(_limits()):
                yield
        finally:
            for layer, own in zip(self._layers, before, strict=True):
                if own is None:
                    layer.__dict__.pop("forward", None)
                else:
                    layer.forward = own


def compiled_layers(model: Any) -> CompiledLayers:
    """Made once for each model."""
    if model not in _compiled:
        _compiled[model] = CompiledLayers(model)
    return _compiled[model]


def forget_layers(model: Any) -> None:
    _compiled.pop(model, None)


def check_layers(model: Any) -> None:
    """Refuses what `compiled_layers` cannot do."""
    _layers(model)


def _layers(model: Any) -> list[torch.nn.Module]:
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or len(layers) == 0:
        raise NotImplementedError(
            f"[transformers] compiled: {model.config.model_type} is not supported: its decoder has "
            "no list of layers; leave compiled out"
        )
    return list(layers)


def _limits() -> dict[str, int]:
    """How often code may be compiled anew, by the names that this torch has for it."""
    names = ("recompile_limit", "accumulated_recompile_limit")
    older = ("cache_size_limit", "accumulated_cache_size_limit")
    known = names if hasattr(torch._dynamo.config, names[0]) else older
    return dict.fromkeys(known, _MOST_VARIANTS)


@functools.cache
def _keep_the_engine_python() -> None:
    """torch.compile neither looks into these two nor breaks off at what they do."""
    disable: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable
    PariskvCache.update = disable(PariskvCache.update)
    AttentionInterface.register(versions.NAME, disable(pariskv_attention))
