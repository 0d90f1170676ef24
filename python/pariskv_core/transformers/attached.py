"""attach(model): generate(), and a loop of one's own, with the engine and no cache to pass."""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from . import versions
from .cache import PariskvCache
from .compiled import check_layers, compiled_layers, forget_layers
from .graph import stepping
from .loops import bringing
from .store import Store
from .support import check_model

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .settings import CacheSettings

Model = TypeVar("Model")


class _Attached(NamedTuple):
    settings: dict[str, Any]
    attention: str  # the model's own
    graph: bool
    compiled: bool
    hook: Any  # ahead of the model's forward


_ATTACHED = "_pariskv_attached"  # attribute of a model
# Where model steps are captured: the store of a model's last call, whose engine and graphs the
# next one takes over, and what they were made for.
_last: weakref.WeakKeyDictionary[Any, tuple[Any, Store]] = weakref.WeakKeyDictionary()
# cache_implementation: hybrid is a default of old configs, dynamic_full is asked of assistants.
_SERVED = (None, "dynamic", "hybrid", "dynamic_full")
_DRAFTS = ("assistant_model", "prompt_lookup_num_tokens")


def attach(
    model: Model,
    *,
    graph: bool = False,
    compiled: bool = False,
    **settings: Unpack[CacheSettings],
) -> Model:
    """From here on `model.generate(...)` makes a PariskvCache, unless it is given a cache.

    So does a call of the model itself, `out = model(ids)`, under torch.no_grad(): a loop of one's
    own goes on with the cache that `out` has.

    model     one of transformers, whose attention becomes "pariskv"
    graph     on one GPU: steps of one token are replays of a CUDA graph, captured once for each
              batch size; all caches of the model share one engine then, and its budgets. Where
              that cannot be (a CPU, sliding layers, experts that are chosen on the host, outputs
              of every layer), steps run as without.
    compiled  in steps of one token, what a layer does between the engine's calls is compiled by
              torch.compile: fewer kernels, whose sums may be rounded elsewhere. The first steps of
              each batch size take seconds. Where layers keep rows elsewhere (sliding layers),
              steps run as without.
    settings  of PariskvCache: top_k, policy, sink, local, update, dense_below, ...

    Returns the model. `detach(model)` takes it back.
    """
    owner: Any = model
    check_model(owner)
    PariskvCache(owner.config, **settings)  # refuses what it would refuse later
    if compiled:
        check_layers(owner)
    before = getattr(owner, _ATTACHED, None)
    attention = before.attention if before else owner.config._attn_implementation
    if before:
        before.hook.remove()
    owner.set_attn_implementation(versions.NAME)
    hook = owner.register_forward_pre_hook(bringing(_cache_of), with_kwargs=True)
    setattr(owner, _ATTACHED, _Attached(dict(settings), attention, graph, compiled, hook))
    _last.pop(owner, None)
    forget_layers(owner)
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
    attached.hook.remove()
    for name in ("generate", "generate_batch"):
        owner.__dict__.pop(name, None)
    _last.pop(owner, None)
    forget_layers(owner)
    owner.set_attn_implementation(attached.attention)
    return model


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    attached: _Attached = getattr(self, _ATTACHED)
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
    made = not versions.cache_given(kwargs) and use_cache is not False
    if made:
        drafts = kind == "dynamic_full" or any(kwargs.get(name) for name in _DRAFTS)
        if drafts:
            _refuse_drafts(attached.settings.get("policy"))
        rollback = drafts and not versions.RECORDS_PAST
        options = {"rollback": rollback, **attached.settings}
        cache = kwargs[versions.CACHE] = PariskvCache(self.config, **options)
        if attached.graph:
            _go_on(self, cache)
        if given is not None and given.cache_implementation is not None:
            kwargs["generation_config"] = copy.deepcopy(given)  # it names another cache
            kwargs["generation_config"].cache_implementation = None
    layers = compiled_layers(self) if attached.compiled else None
    columns = _columns_of(kwargs)
    with stepping(self, columns=columns, graph=attached.graph, compiled=layers):
        tokens = type(self).generate(self, **kwargs)
    if attached.graph and made:  # a cache that was passed may have other settings
        _keep(self, cache)
    return tokens


def _cache_of(model: Any) -> PariskvCache:
    """For a loop of a caller's own."""
    attached: _Attached = getattr(model, _ATTACHED)
    return PariskvCache(model.config, **attached.settings)


def _columns_of(kwargs: dict[str, Any]) -> int:
    """Of the prompt that `generate` is given."""
    for name in ("inputs", "input_ids", "inputs_embeds"):
        if kwargs.get(name) is not None:
            return int(kwargs[name].shape[1])
    return 0


def _refuse_drafts(policy: Any) -> None:
    if getattr(policy, "placement", "host") == "dropped":
        raise NotImplementedError(
            "[transformers] drafts (assistant_model, prompt_lookup_num_tokens): tokens that are "
            'not verified are taken back, and HardKV(placement="dropped") may lack the rows for '
            'that; choose placement="host"'
        )


def _go_on(model: Any, cache: PariskvCache) -> None:
    """The engine and the graphs of the call before, as long as the model is where it was."""
    place, store = _last.get(model, (None, cache._store))
    if place == (model.device, model.dtype):
        cache._store.share(store)


def _keep(model: Any, cache: PariskvCache) -> None:
    """For the next call. Sequences go with the cache of this one."""
    empty = Store(0, {}, alone=True)
    empty.share(cache._store)
    _last[model] = ((model.device, model.dtype), empty)


def _refuse_batch(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "[transformers] generate_batch: continuous batching is not supported; generate() takes "
        "ragged batches, or detach(model)"
    )
