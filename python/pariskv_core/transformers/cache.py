"""PariskvCache: transformers' Cache over one engine cache for all full-attention layers."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

import pariskv_core as pk
from pariskv_core._estimates import tells_errors

from . import saved, versions
from .settings import check_names
from .store import Store
from .support import decoder_config, refuse_gradients

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .settings import EngineSettings


class PariskvLayer(versions.CacheLayerMixin):
    """A full-attention layer. Its rows are the engine's: `keys` and `values` stay None.

    Verbs of a batch are done for all layers at once, by PariskvCache; here they do nothing.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, store: Store, index: int) -> None:
        super().__init__()
        self.store = store
        self.index = index  # among the engine's layers

    def lazy_initialization(self, *args: Any) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores nothing yet: the engine appends and attends in one call, which needs the mask."""
        self.lazy_initialization()
        keys = self.store.update(self.index, key_states)
        refuse_gradients("value", value_states)
        return keys, value_states.detach()

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        self.store.refuse_broken()
        return self.get_seq_length() + versions.columns_of(query), 0

    def get_seq_length(self) -> int:
        return self.store.seen[self.index]

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def offload(self) -> None: ...
    def prefetch(self) -> None: ...
    def reset(self) -> None: ...
    def crop(self, count: int) -> None: ...
    def reorder_cache(self, beam_idx: torch.Tensor) -> None: ...
    def batch_repeat_interleave(self, repeats: int) -> None: ...
    def batch_select_indices(self, indices: torch.Tensor) -> None: ...


class PariskvCache(versions.DynamicCache):
    """A cache for `generate(..., cache=cache)`, of a model with attention "pariskv".

    Before transformers 5.24 the argument is `past_key_values`.

    Full-attention layers are the engine's. Sliding layers stay the library's own.

    config    of the model
    top_k     rows per kv head that a step selects; short for policy=pk.ParisKV(top_k=top_k)
    rollback  sliding layers keep all their rows, so that drafts can be taken back past the window:
              for assisted generation and prompt lookup with transformers before 5.23
    settings  fields of pk.Config: policy, sink, local, update, dense_below, placement,
              memory_budget, host_budget, row_cache, threads, segment_tokens,
              kv_dtype

    The model's shape, dtype and device come with its first keys. Padding is never stored.
    `copy.deepcopy(cache)` forks it: stored rows are shared, so that a prefix serves many prompts.
    `cache.save(folder)` writes it to files, and `PariskvCache.load(folder, config)` reads them.
    """

    layers: list[Any]

    def __init__(
        self,
        config: Any,
        *,
        top_k: int | None = None,
        rollback: bool = False,
        **settings: Unpack[EngineSettings],
    ) -> None:
        checked = _checked(top_k, dict(settings))
        text = decoder_config(config)
        super().__init__(config=text)
        if not self.layers:  # none are made where num_kv_shared_layers is 0
            self._make_layers(text)
        own = [i for i, layer in enumerate(self.layers) if type(layer) is versions.DynamicLayer]
        if not own:
            raise NotImplementedError(
                f"[transformers] config: {text.model_type} is not supported: it has no layer of "
                "full attention"
            )
        alone = not any(
            getattr(layer, "is_sliding", False) or versions.keeps_states(layer)
            for layer in self.layers
        )
        if rollback:  # the masks of these layers are of sliding attention as before
            self.layers = [
                versions.DynamicLayer() if getattr(layer, "is_sliding", False) else layer
                for layer in self.layers
            ]
        self._rollback = rollback
        self._described = saved.described(config)
        self._store = Store(len(own), checked, alone=alone)
        for index, layer in enumerate(own):
            self.layers[layer] = PariskvLayer(self._store, index)
        self.layer_class_to_replicate = None

    def _make_layers(self, text: Any) -> None:
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        self.layers = [
            versions.DynamicLayer()
            if kind == "full_attention"
            else versions.SlidingLayer(sliding_window=text.sliding_window)
            for kind in kinds
        ]

    def __repr__(self) -> str:
        engine = self._store.engine
        state = "nothing yet" if engine is None else repr(engine)
        return (
            f"PariskvCache({len(self._store._sequences)} rows of {max(self._store.seen)} columns, "
            f"{len(self.engine_layers)} of {len(self.layers)} layers the engine's: {state})"
        )

    @property
    def engine(self) -> pk.Cache | None:
        """The engine's cache; None before the first forward pass."""
        return self._store.engine

    @property
    def sequences(self) -> list[int]:
        """The engine's sequences, one for each row of the batch."""
        return self._store.sequences

    @property
    def replays(self) -> int:
        """How many model steps were replays of a graph: see `attach(model, graph=True)`."""
        return self._store.replays

    @property
    def engine_layers(self) -> dict[int, int]:
        """The engine's number of each of the model's layers that is the engine's."""
        return {
            i: layer.index for i, layer in enumerate(self.layers) if isinstance(layer, PariskvLayer)
        }

    def report_errors(self) -> None:
        """From here on `engine.stats()` has the error of every step of one token: its mean and its
        worst, as with a budget by it (`ParisKV(error=...)`).

        For ParisKV with a tail. Steps that are replays of a graph captured before do not tell it.
        """
        policy = self._store.settings.get("policy") or pk.ParisKV()
        if not tells_errors(policy):
            raise ValueError(
                f"[transformers] policy: expected ParisKV with a tail and group_rule "
                f'"attention_mass", whose steps tell an error, got {policy!r}'
            )
        self._store.reports_errors = True

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cache to a folder: a file for each row of the batch, and the sliding layers.

        The folder is new, empty, or has a cache that is replaced when all of this one is written.
        """
        saved.save(Path(path), self._described, self._rollback, self._store, self._library_layers)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        config: Any,
        *,
        device: Any = None,
        **settings: Unpack[EngineSettings],
    ) -> PariskvCache:
        """A cache that goes on as the saved one: `generate` needs the tokens that it has seen.

        config    of the model, which has to be the one that the cache is of
        device    for its rows; left out, where they were
        settings  to be other ones than were saved, as far as the rows do not depend on them
        """
        found = saved.Saved(Path(path), config)
        cache = cls(config, rollback=found.rollback, **{**found.settings, **settings})
        found.fill(cache._store, cache._library_layers, device)
        return cache

    @property
    def _library_layers(self) -> dict[int, Any]:
        return {i: layer for i, layer in enumerate(self.layers) if i not in self.engine_layers}

    # What the library calls.

    def crop(self, count: int) -> None:
        """-n takes the last n columns of the batch away; n, before 5.23, all but the first n."""
        count = int(count)  # prompt lookup on a GPU counts there
        seen = self._store.seen[0]
        drop = min(-count, seen) if count <= 0 else max(seen - count, 0)
        back = all(map(versions.takes_back, filter(versions.keeps_states, self.layers)))
        if drop > 0 and not back:
            raise NotImplementedError(
                "[transformers] cache: expected layers whose last tokens can be taken away, got "
                "ones that keep a state; copy.deepcopy(cache) forks it before it goes on"
            )
        if back and (count < 0 or versions.RECORDS_PAST or drop > 0):
            super().crop(-drop)
        self._store.crop(drop)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._store.take(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._store.take([row for row in range(self._rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._store.take(torch.arange(self._rows)[indices.cpu()].tolist())

    def reset(self) -> None:
        super().reset()
        self._store.reset()

    @property
    def _rows(self) -> int:
        return len(self._store.sequences)

    def __deepcopy__(self, memo: dict[int, Any]) -> PariskvCache:
        twin: PariskvCache = type(self).__new__(type(self))
        memo[id(self)] = twin
        store = self._store.copy()
        for name, value in self.__dict__.items():
            # shared_layers: keys of the last forward pass, which the next one replaces
            if name not in ("layers", "_store", "shared_layers"):
                twin.__dict__[name] = copy.deepcopy(value, memo)
        twin._store = store
        twin.layers = [
            PariskvLayer(store, layer.index)
            if isinstance(layer, PariskvLayer)
            else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "[transformers] cache: a PariskvCache cannot be pickled; copy.deepcopy forks it, and "
            "cache.save(folder) writes it to files"
        )


def _checked(top_k: int | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings for the engine's config, refused now if that would refuse them later."""
    check_names(settings)
    if top_k is not None:
        if settings.get("policy") is not None:
            raise ValueError("[transformers] top_k: expected it in the policy that is given")
        settings = {**settings, "policy": pk.ParisKV(top_k=top_k)}
    pk.Config(layers=1, query_heads=1, kv_heads=1, head_dim=64, **settings)
    return settings
