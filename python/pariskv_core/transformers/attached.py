"""attach(model): generate() with the engine, without a cache to pass."""

from __future__ import annotations

import copy
import inspect
import types
from typing import Any, NoReturn, TypeVar

from . import versions
from .cache import PariskvCache
from .support import check_model

Model = TypeVar("Model")

_ATTACHED = "_pariskv_attached"  # attribute of a model: its settings, and its attention before
# cache_implementation: hybrid is a default of old configs, dynamic_full is asked of assistants.
_SERVED = (None, "dynamic", "hybrid", "dynamic_full")
_DRAFTS = ("assistant_model", "prompt_lookup_num_tokens")


def attach(model: Model, **settings: Any) -> Model:
    """From here on `model.generate(...)` makes a PariskvCache, unless it is given a cache.

    model     one of transformers, whose attention becomes "pariskv"
    settings  of PariskvCache: top_k, policy, sink, local, update, dense_below, ...

    Returns the model. `detach(model)` takes it back.
    """
    owner: Any = model
    check_model(owner)
    PariskvCache(owner.config, **settings)  # refuses what it would refuse later
    before = getattr(owner, _ATTACHED, None)
    attention = before[1] if before else owner.config._attn_implementation
    owner.set_attn_implementation(versions.NAME)
    setattr(owner, _ATTACHED, (settings, attention))
    owner.generate = types.MethodType(_generate, owner)
    if hasattr(owner, "generate_batch"):
        owner.generate_batch = types.MethodType(_refuse_batch, owner)
    return model


def detach(model: Model) -> Model:
    """The model as it was before `attach`."""
    owner: Any = model
    attached = getattr(owner, _ATTACHED, None)
    if attached is None:
        raise ValueError("[transformers] model: expected one that was attached")
    delattr(owner, _ATTACHED)
    for name in ("generate", "generate_batch"):
        owner.__dict__.pop(name, None)
    owner.set_attn_implementation(attached[1])
    return model


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    settings, _ = getattr(self, _ATTACHED)
    names = list(inspect.signature(type(self).generate).parameters)[1:]
    kwargs.update(zip(names, args, strict=False))
    given = kwargs.get("generation_config")
    config = given or self.generation_config
    kind = kwargs.pop("cache_implementation", None) or config.cache_implementation
    if kind not in _SERVED:
        raise NotImplementedError(
            f'[transformers] cache_implementation: "{kind}" is not supported by an attached '
            "model; leave it out, or detach(model)"
        )
    use_cache = kwargs.get("use_cache")
    if use_cache is None:
        use_cache = config.use_cache
    if kwargs.get("past_key_values") is None and use_cache is not False:
        drafts = kind == "dynamic_full" or any(kwargs.get(name) for name in _DRAFTS)
        rollback = drafts and not versions.RECORDS_PAST
        kwargs["past_key_values"] = PariskvCache(self.config, **{"rollback": rollback, **settings})
        if given is not None and given.cache_implementation is not None:
            kwargs["generation_config"] = copy.deepcopy(given)  # it names another cache
            kwargs["generation_config"].cache_implementation = None
    return type(self).generate(self, **kwargs)


def _refuse_batch(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "[transformers] generate_batch: continuous batching is not supported; generate() takes "
        "ragged batches, or detach(model)"
    )
