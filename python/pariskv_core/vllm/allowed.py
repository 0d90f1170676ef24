"""What is served, as lists. Whatever is on none of them is refused before a request is, in a
sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pariskv_core._served import refusal

from . import versions
from .names import cache_kind, of_engine
from .options import Options

# vLLM's names of the type of rows: the engine's kv_dtype, None where that is a setting.
KV_DTYPES = {
    "auto": None,
    "float16": None,
    "bfloat16": None,
    "int8_per_token_head": "int8",
    "fp8": "int8",
    "fp8_e4m3": "int8",
}
_LAYERS = ("Attention",)  # classes
_CACHES = ("FullAttentionSpec",)  # kinds of their cache
_OTHERS = ("sliding_attention", "linear_attention")  # kinds of layers that are vLLM's beside them
_RUNNERS = ("generate",)
# The V2 runner cannot go back to compute rows again: requests whose rows are lost have to fail.
_TRANSFER = {"kv_load_failure_policy": "fail"}
_POLICIES = ("fcfs", "priority")
# Optional parts of a configuration that change nothing about rows, or of which rows know nothing.
_PARTS = (
    "kv_transfer_config",
    "kv_events_config",
    "lora_config",
    "quant_config",
    "reasoning_config",
    "watermark_config",
    "weight_transfer_config",
)
_WORDS = {"speculative_config": "speculative decoding"}
_MODEL = "serve this model without the plugin's options"
_ELSE = f"leave it out, or the connector {versions.NAME} (docs/vllm.md#what-is-refused)"


def check(options: Options) -> None:
    """Raises for what is not served."""
    versions.check()
    if not options.v2_runner:
        raise ValueError(
            "[vllm] model runner: expected V2, got V1; set VLLM_USE_V2_MODEL_RUNNER=1, and on a "
            "CPU TRITON_INTERPRET=1 (docs/vllm.md)"
        )
    _one_of("kv_connector", options.connector, (versions.NAME,), "it works beside no other one")
    unserved = refusal_of(options)
    if unserved is not None:
        _refuse(unserved, _MODEL)
    if options.on_gpu:  # a CPU has one backend, whatever is asked for
        _check_backend(options)
    for part in options.parts():
        if part not in _PARTS:
            _refuse(f"{_WORDS.get(part, part)} is not supported")
    for option, count in options.parallel.items():
        _one_of(option, count, (1,))
    _one_of("--enable-sleep-mode", options.sleep_mode, (False,), f"rows are lost; {_ELSE}")
    _one_of("--runner", options.runner, _RUNNERS)
    _one_of("--scheduling-policy", options.policy, _POLICIES)
    transfer = {"kv_role": versions.role(multimodal=options.multimodal), **_TRANSFER}
    for field, value in options.transfer.items():
        served = transfer[field]
        _one_of(field, value, (served,), f'set "{field}": "{served}" in --kv-transfer-config')
    _one_of("--kv-cache-dtype", options.kv_dtype, tuple(KV_DTYPES))
    _one_of("--prefix-match-unit", options.match_unit, (None,))
    _one_of("--kv-cache-dtype-skip-layers", options.other_dtypes, ([],))
    _one_of("VLLM_KV_CACHE_LAYOUT", options.layout, (None,), "unset it: pages are not used")


def refusal_of(options: Options) -> str | None:
    """Why a model's layers are not served; None: they are, or those of full attention are."""
    for kind in options.model_kinds():
        return f"a model with {kind} is not supported"
    text, kinds = options.text, options.other_kinds
    unserved = refusal(
        lambda field: kinds if field == "layer_types" else getattr(text, field, None), _OTHERS
    )
    if unserved is None and kinds and not (options.beside and set(kinds) <= set(_OTHERS)):
        has = {"sliding_attention": "a sliding window", "chunked_attention": "chunks"}
        words = " and ".join(has.get(kind, kind) for kind in kinds)
        unserved = f"{text.model_type} is not supported: it has layers with {words}"
    if unserved is None and options.on_gpu and options.sharing > 0:
        unserved = f"{text.model_type} is not supported on a GPU: it has layers that share rows"
    return None if unserved is None else f"model: {unserved}"


def _check_backend(options: Options) -> None:
    """Of layers of full attention, on a GPU: vLLM knows them by their kind."""
    routed = options.routes.get("full_attention")
    if not options.beside:
        rest = "set --attention-backend CUSTOM beside the connector"
        _one_of("--attention-backend", routed or options.backend, ("CUSTOM",), rest)
        return
    rest = (
        "this model has other layers too: set --attention-config "
        '\'{"backend_per_kind": {"full_attention": "CUSTOM"}}\''
    )
    _one_of("backend_per_kind of full_attention", routed, ("CUSTOM",), rest)
    if options.backend == "CUSTOM":
        _refuse("--attention-backend CUSTOM: its other layers are vLLM's own", rest)


def check_layers(kinds: Iterable[str]) -> None:
    """kinds  classes of the model's layers of attention"""
    for kind in kinds:
        _one_of("model", f"{kind} layers", tuple(f"{one} layers" for one in _LAYERS), _MODEL)


def check_prefixes(coordinator: Any) -> None:
    """coordinator  of vLLM's groups: where their blocks differ, a prefix may end inside one"""
    if getattr(coordinator, "enable_partial_hash_hits", False):
        _refuse(
            "prefixes that end inside a block are not supported",
            "set --no-enable-prefix-caching, or leave the plugin's options out",
        )


def check_caches(specs: list[Any]) -> None:
    """specs  of the caches of all layers, as vLLM has grouped them"""
    ours = [spec for spec in specs if of_engine(spec)] or specs
    if len(ours) != 1:
        raise NotImplementedError(
            f"[vllm] model: expected one group of layers of full attention, got {len(ours)} of "
            f"{len(specs)} groups; {_MODEL}"
        )
    _one_of("model", cache_kind(ours[0]), _CACHES, _MODEL)


def _one_of(option: str, value: Any, served: tuple[Any, ...], rest: str = _ELSE) -> None:
    if value not in served:
        expected = " or ".join("none" if one in (None, []) else str(one) for one in served)
        got = "none" if value is None else value
        raise NotImplementedError(f"[vllm] {option}: expected {expected}, got {got}; {rest}")


def _refuse(what: str, rest: str = _ELSE) -> None:
    raise NotImplementedError(f"[vllm] {what}; {rest}")
