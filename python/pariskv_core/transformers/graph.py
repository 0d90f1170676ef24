"""Model steps of one token as replays of a CUDA graph, with layers that torch has compiled.

While `generate` runs, the model's forward is a Stepper. Steps of one token are done by compiled
layers, by a graph, captured for each batch size, or by both. Other passes are the model's own, so
every way to generate works. A graph holds the model's work and the decode of every layer. It reads
token ids and positions. Which sequences it decodes, `Cache.advance` says before each replay, so
beams may be reordered, and the next call of `generate` goes on with the same graph.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import versions
from .cache import PariskvCache
from .compiled import CompiledLayers
from .store import Store

# What a graph reads anew in each replay, (batch, 1) and (1).
_IDS, _PLACES, _COLUMN = "input_ids", "position_ids", "cache_position"
# Growing by a column of ones a model step, it says nothing that the cache does not know.
_MASK = "attention_mask"
# Outputs that a caller holds beyond the next model step, of which a graph has one copy only.
_KEPT = ("output_attentions", "output_hidden_states", "output_router_logits")
# Rotary embeddings that look at the positions on the host.
_ROTARY_ON_HOST = ("dynamic", "longrope")


@dataclass
class Captured:
    """One batch size: the graph, what it reads, and what it leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, torch.Tensor]
    made: type  # the model's output
    logits: torch.Tensor

    def run(self, store: Store, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        assert store.engine is not None
        store.engine.advance(store.sequences)
        for name, own in self.inputs.items():
            own.copy_(inputs[name])
        self.graph.replay()
        store.stepped()
        return self.logits.clone()


class Stepper:
    """The forward of an attached model while it generates.

    columns   of the prompt: passes up to there may be chunks of one token, with padding
    captures  steps are replays of graphs
    compiled  the layers that do steps; None: the model's own
    """

    def __init__(
        self,
        model: Any,
        forward: Callable[..., Any],
        *,
        columns: int,
        captures: bool,
        compiled: CompiledLayers | None,
    ) -> None:
        self._model = model
        self._forward = forward
        self._columns = columns
        self._captures = captures
        self._compiled = compiled is not None
        self._step = forward if compiled is None else compiled.used()(forward)
        self._begun = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache: Any = kwargs.get(versions.CACHE)
        # The first pass of a call may bring any mask, a later one what generate has made of it.
        mine = self._begun and not args and isinstance(cache, PariskvCache)
        self._begun = True
        if not mine or not self._fits(cache, kwargs):
            return self._forward(*args, **kwargs)
        store, inputs = cache._store, _inputs(kwargs)
        others = {name: kwargs[name] for name in kwargs if name not in (*inputs, _MASK)}
        captured = self._captured(store, inputs, others) if self._captures else None
        if captured is None:
            return self._step(**inputs, **others) if self._compiled else self._forward(**kwargs)
        logits = captured.run(store, inputs)
        return captured.made(logits=logits, **{versions.CACHE: cache})

    def _fits(self, cache: PariskvCache, kwargs: dict[str, Any]) -> bool:
        store, ids = cache._store, kwargs.get(_IDS)
        return (
            ids is not None
            and ids.shape[-1] == 1
            and store.stands(ids.shape[0])
            and store.seen[0] >= self._columns
            and kwargs.get(_PLACES) is not None
            and kwargs.get("use_cache") is not False
            and kwargs.get("return_dict") is not False
            and not any(kwargs.get(name) for name in _KEPT)
        )

    def _captured(
        self, store: Store, inputs: dict[str, torch.Tensor], others: dict[str, Any]
    ) -> Captured | None:
        """None for a model step to run by itself: the first one of its kind, or each one."""
        plain = {
            name: value
            for name, value in others.items()
            if name != versions.CACHE and value is not None
        }
        graphs = store.graphs
        if graphs.refused or any(
            isinstance(value, (torch.Tensor, list, dict)) for value in plain.values()
        ):
            return None
        shapes = tuple((name, value.shape) for name, value in inputs.items())
        key = (self._kind(), shapes, tuple(sorted(plain.items(), key=lambda item: item[0])))
        found: Captured | None = graphs.of.get(key)
        if found is None and key in graphs.warm:
            try:
                found = graphs.of[key] = self._capture(store, inputs, others)
            except RuntimeError as reason:  # the model does what cannot be captured
                graphs.refused = True
                warnings.warn(
                    "[transformers] graph: this model's step cannot be captured, so steps run "
                    f"one by one ({str(reason).splitlines()[0]})",
                    stacklevel=3,
                )
        graphs.warm.add(key)
        return found

    def _kind(self) -> tuple[Any, ...]:
        """What a graph is of, besides its inputs."""
        model = self._model
        inference = torch.is_inference_mode_enabled()  # its tensors are not to be written elsewhere
        return id(model), model.device, model.dtype, self._compiled, inference

    def _capture(
        self, store: Store, inputs: dict[str, torch.Tensor], others: dict[str, Any]
    ) -> Captured:
        own = {name: value.clone() for name, value in inputs.items()}
        graphs = store.graphs
        if graphs.pool is None:
            graphs.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        device = next(iter(own.values())).device
        with (
            torch.cuda.device(device),
            store.recorded(),
            torch.cuda.graph(graph, pool=graphs.pool, capture_error_mode="thread_local"),
        ):
            out = self._step(**own, **others)
        return Captured(graph, own, type(out), out.logits)


def _inputs(kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: kwargs[name] for name in (_IDS, _PLACES, _COLUMN) if kwargs.get(name) is not None}


def can_replay(model: Any) -> bool:
    """A model on one GPU, whose rotary embedding never asks the host."""
    devices = {parameter.device for parameter in model.parameters()}
    scaling = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None)
    scaling = scaling or getattr(model.config, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    return len(devices) == 1 and next(iter(devices)).type == "cuda" and kind not in _ROTARY_ON_HOST


_turns: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def stepping(
    model: Any, *, columns: int, graph: bool, compiled: CompiledLayers | None
) -> Iterator[None]:
    """Model steps of one token are done by a Stepper as long as this lasts.

    One thread at a time, since the model's own forward is another one meanwhile.
    """
    captures = graph and can_replay(model)
    if not captures and compiled is None:
        yield
        return
    with _turns.setdefault(model, threading.RLock()):
        before = model.__dict__.get("forward")
        forward = model.forward
        step = Stepper(model, forward, columns=columns, captures=captures, compiled=compiled)
        model.forward = functools.wraps(forward)(lambda *args, **kwargs: step(*args, **kwargs))
        try:
            yield
        finally:
            if before is None:
                del model.forward
            else:
                model.forward = before
