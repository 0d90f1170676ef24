"""A model's shape, from a config.json, a model folder or a GGUF file; no weights are read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pariskv_core as pk

from . import _gguf_header as gguf_header
from ._failures import CannotRunError, install
from ._served import refusal

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")  # of the text decoder
_SENSES = ("vision_config", "audio_config", "thinker_config")  # of prompts with more than text
_STATES = ("linear_attention", "conv")  # kinds of layers that keep a state in place of rows
_NOTHING = ("mlp", "moe")  # kinds that keep nothing
_NEEDED = ("num_hidden_layers", "num_attention_heads")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Of GGUF architectures with sliding layers: every so many-th layer is of full attention.
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "cohere2": 4, "gpt-oss": 2}
# Key of a GGUF header, without the architecture's name -> field of a config.
_OF_GGUF = {
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.sliding_window": "sliding_window",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
}


@dataclass(frozen=True)
class ModelShape:
    name: str
    layers: int  # of full attention: the engine's
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    sliding_layers: int = 0
    window: int = 0  # tokens that a sliding layer keeps
    context: int = 0  # the longest text it was made for; 0: not known
    weights: int = 0  # bytes; 0: not known
    hidden: int = 0  # numbers of a token between layers; 0: not known
    intermediate: int = 0  # inside a layer
    vocabulary: int = 0
    sliding_row: int = 0  # bytes of a token in a sliding layer, which may have other heads
    linear_layers: int = 0
    state: int = 0  # bytes that a linear layer keeps of a sequence
    multimodal: bool = False  # prompts may have more than text

    @property
    def other_layers(self) -> int:
        """That a host serves by itself."""
        return self.sliding_layers + self.linear_layers

    @property
    def row_bytes(self) -> int:
        """Of a token's K and V in one layer, in 16 bits."""
        return self.kv_heads * (self.head_dim + self.value_dim) * 2

    def config(self, **settings: Any) -> pk.Config:
        """As the engine would be set up; it says what it does not have."""
        try:
            return pk.Config(
                layers=self.layers,
                query_heads=self.query_heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                value_dim=self.value_dim,
                dtype="float16",  # two bytes, as bfloat16 is, and NumPy knows it
                **settings,
            )
        except ValueError as reason:
            said = str(reason).removeprefix("[config] ")
            raise CannotRunError(f"the engine cannot serve {self.name}: {said}") from None


def read(path: str) -> ModelShape:
    place = Path(path)
    if not place.exists():
        raise CannotRunError(f"there is no file or folder {path}{_of_the_hub(path)}")
    try:
        if place.is_dir():
            return _of_folder(place)
        with place.open("rb") as file:
            is_gguf = file.read(4) == gguf_header.MAGIC
        return _of_gguf(place) if is_gguf else _of_json(place, place.parent)
    except OSError as reason:
        raise CannotRunError(f"cannot read {path}: {reason.strerror}") from reason


def _of_the_hub(path: str) -> str:
    """What to do where a name of the Hugging Face Hub was given."""
    named = re.fullmatch(r"[\w-]+/[\w.-]+", path)
    return f"; to fetch it: hf download {path} --local-dir FOLDER" if named else ""


def _of_folder(folder: Path) -> ModelShape:
    if not (folder / "config.json").exists():
        found = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"; name the file itself: {folder / found[0]}" if found else ""
        raise CannotRunError(f"{folder} has no config.json{hint}")
    return _of_json(folder / "config.json", folder)


def _of_json(file: Path, folder: Path) -> ModelShape:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as reason:
        raise CannotRunError(f"{file} is not JSON: {reason}") from None
    if not isinstance(found, dict):
        raise CannotRunError(f"{file} is no model's config: expected a JSON object")
    fields = next((found[key] for key in _NESTED if isinstance(found.get(key), dict)), found)
    _refuse(fields)
    if _lacks(fields):
        fields = _completed(file, fields)
    weights = 0
    for pattern in _WEIGHTS:
        weights = weights or sum(path.stat().st_size for path in folder.glob(pattern))
    shape = _of_fields(fields, file, weights)
    return replace(shape, multimodal=any(sense in found for sense in _SENSES))


def _lacks(fields: dict[str, Any]) -> list[str]:
    """Fields that a config leaves to its class: their defaults are known to transformers alone."""
    lacking = [name for name in _NEEDED if not fields.get(name)]
    sliding = fields.get("sliding_window") and fields.get("use_sliding_window") is not False
    if sliding and not fields.get("layer_types"):
        lacking.append("layer_types")
    return lacking


def _completed(file: Path, fields: dict[str, Any]) -> dict[str, Any]:
    lacking = ", ".join(_lacks(fields))
    try:
        from transformers import AutoConfig
    except ImportError:
        raise CannotRunError(
            f"{file} does not say {lacking}; transformers knows the defaults; "
            f"{install('transformers')}"
        ) from None
    try:
        config = AutoConfig.from_pretrained(file)
    except (ValueError, KeyError, OSError) as reason:
        raise CannotRunError(
            f"{file} does not say {lacking}, and transformers cannot complete it: "
            f"{str(reason).splitlines()[0]}"
        ) from None
    completed: dict[str, Any] = config.get_text_config(decoder=True).to_dict()
    _refuse(completed)
    return completed


def _refuse(fields: dict[str, Any]) -> None:
    refused = refusal(fields.get, (*_STATES, *_NOTHING))
    if refused is not None:
        raise CannotRunError(refused)


def _of_gguf(file: Path) -> ModelShape:
    header = gguf_header.fields(file)
    kind = header.get("general.architecture", "")
    fields: dict[str, Any] = {"model_type": kind}
    for key, field in _OF_GGUF.items():
        value = header.get(f"{kind}.{key}")
        if isinstance(value, list):  # one for each layer
            value = max(value)
        fields[field] = value
    _refuse(fields)
    fields["vocab_size"] = fields["vocab_size"] or len(header.get("tokenizer.ggml.tokens", ()))
    fields["layer_types"] = full_every(
        _FULL_EVERY.get(kind, 1), "sliding_attention", fields["num_hidden_layers"] or 0
    )
    return _of_fields(fields, file, file.stat().st_size)


def _of_fields(fields: dict[str, Any], file: Path, weights: int) -> ModelShape:
    name = str(fields.get("model_type") or "the model")
    lacking = [field for field in _NEEDED if not isinstance(fields.get(field), int)]
    if lacking:
        raise CannotRunError(f"{file} is no config of a model with attention: no {lacking[0]}")
    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    kv_heads = fields.get("num_key_value_heads") or heads
    head_dim = fields.get("head_dim") or (fields.get("hidden_size") or 0) // heads
    layers -= fields.get("num_kv_shared_layers") or 0  # the last ones, which store no rows
    every = fields.get("full_attention_interval") or 1
    kinds = (fields.get("layer_types") or full_every(every, _STATES[0], layers))[:layers]
    full, linear = kinds.count("full_attention"), sum(map(kinds.count, _STATES))
    sliding = len(kinds) - full - linear - sum(map(kinds.count, _NOTHING))
    sliding_row = 4 * kv_heads * head_dim if sliding else 0  # K and V in 16 bits
    if full == 0:
        raise CannotRunError(f"{name} is not supported: it has no layer of full attention")
    if layers > full:
        first = kinds.index("full_attention")
        kv_heads, head_dim = _of_full_layers(fields, first, kv_heads, head_dim)
    window = fields.get("sliding_window") or fields.get("attention_chunk_size") or 0
    return ModelShape(
        name,
        full,
        heads,
        kv_heads,
        head_dim,
        fields.get("v_head_dim") or head_dim,
        sliding_layers=sliding,
        window=window if sliding else 0,
        sliding_row=sliding_row,
        linear_layers=linear,
        state=_state(fields) if linear else 0,
        context=fields.get("max_position_embeddings") or 0,
        weights=weights,
        hidden=fields.get("hidden_size") or 0,
        intermediate=fields.get("intermediate_size") or 0,
        vocabulary=fields.get("vocab_size") or 0,
    )


def _of_full_layers(fields: dict[str, Any], layer: int, kv_heads: int, dim: int) -> tuple[int, int]:
    """kv heads and head_dim, where layers of full attention have other ones than sliding ones."""
    own = (fields.get("per_layer_config") or {}).get(str(layer)) or {}
    dim = own.get("head_dim") or fields.get("global_head_dim") or dim
    if fields.get("attention_k_eq_v"):
        kv_heads = fields.get("num_global_key_value_heads") or kv_heads
    return own.get("num_key_value_heads") or kv_heads, dim


def full_every(count: int, other: str, layers: int) -> list[str]:
    """Kinds of layers where each count-th one is of full attention."""
    return [other if (i + 1) % count else "full_attention" for i in range(layers)]


def _state(fields: dict[str, Any]) -> int:
    """Of a gated delta rule or of Mamba a matrix for each head; of these and of convolutions the
    last inputs."""

    def number(*names: str) -> int:
        found = next((fields[name] for name in names if fields.get(name)), 0)
        return found if isinstance(found, int) else 0

    item = 4 if fields.get("mamba_ssm_dtype") == "float32" else 2
    heads, dim = number("linear_num_value_heads"), number("linear_value_head_dim")
    size, groups = number("linear_key_head_dim"), number("linear_num_key_heads")
    if not heads:
        hidden = number("hidden_size")
        inner = number("mamba_expand", "expand") * hidden
        heads = number("mamba_n_heads", "mamba_num_heads") or 1
        dim = number("mamba_d_head", "mamba_head_dim") or inner // heads
        size = number("mamba_d_state", "ssm_state_size")
        groups = number("mamba_n_groups", "n_groups")
        if not size:
            return hidden * max(number("conv_L_cache") - 1, 0) * 2
    kept = max(number("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel") - 1, 0)
    return heads * dim * size * item + (heads * dim + 2 * groups * size) * kept * 2
