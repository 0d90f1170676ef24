"""A PariskvCache in a folder: a file for each row of the batch, and what the cache has besides.

cache.json names the other files and is replaced last, all at once: a folder has the old cache or
the new one. It has a checksum of itself and of the file of the library's layers; the engine's files
have theirs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch
import torch

import pariskv_core as pk

from . import versions
from .files import Access, write_new
from .store import Store
from .support import decoder_config

MANIFEST = "cache.json"
VERSION = 1

# Of a model's config: what K and V of a token depend on, as far as a config says it.
_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "per_layer_config",
    "layer_types",
    "sliding_window",
    "vocab_size",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
# Of the library's layers, besides keys and values.
_NUMBERS = ("cumulative_length", "record_past")
_SHAPE = ("layers", "query_heads", "kv_heads", "head_dim", "value_dim", "dtype", "device")


def save(folder: Path, config: dict[str, Any], rollback: bool, store: Store, layers: Any) -> None:
    """`layers`: the library's own, by their number in the model."""
    store.refuse_broken(len(set(store.seen)) > 1)
    engine, sequences = store.engine, store.sequences
    if engine is None or not sequences:
        raise ValueError("[transformers] cache: expected tokens to save, got a cache without any")
    if folder.is_symlink():
        folder = Path(os.path.realpath(folder))  # it may lead to a folder that is not there yet
    made = _open_folder(folder)
    before = _access(folder)
    token = secrets.token_hex(4)
    rows = [f"row-{token}-{i}.pkv" for i in range(len(sequences))]
    others = f"layers-{token}.safetensors"
    try:
        for name, sequence in zip(rows, sequences, strict=True):
            if before is not None:  # the engine keeps who may read a file that it replaces
                write_new(folder / name, b"", before)
            engine.save(sequence, folder / name)
        tensors = {"stored": store.columns.stored.contiguous(), **_tensors_of(layers)}
        data = safetensors.torch.save(tensors)
        write_new(folder / others, data, before)
        _write_manifest(
            folder,
            before,
            {
                "version": VERSION,
                "written_by": f"pariskv_core {pk.__version__}",
                "model": config,
                "shape": {field: getattr(engine.config, field) for field in _SHAPE},
                "settings": _packed(store.settings),
                "rollback": rollback,
                "seen": store.seen,
                "rows": rows,
                "layers": others,
                "layers_sha256": hashlib.sha256(data).hexdigest(),
                "numbers": {str(i): _numbers_of(layer) for i, layer in layers.items()},
            },
        )
    except BaseException:
        _remove(folder, [*rows, others])
        if made:
            folder.rmdir()
        raise
    _remove(folder, [name for name in _own_files(folder) if name not in (*rows, others)])


class Saved:
    """What a folder says, checked against a model's config."""

    def __init__(self, folder: Path, config: Any) -> None:
        self._folder = folder
        self._manifest = _read_manifest(folder)
        _check_model(self._manifest["model"], described(config), folder)
        data = (folder / self._manifest["layers"]).read_bytes()
        if hashlib.sha256(data).hexdigest() != self._manifest["layers_sha256"]:
            _refuse_damaged(folder, self._manifest["layers"])
        self._tensors = safetensors.torch.load(data)
        self.rollback: bool = self._manifest["rollback"]
        self.settings = _unpacked(self._manifest["settings"])

    def fill(self, store: Store, layers: dict[int, Any], device: Any) -> None:
        """Puts the saved batch into the store and the library's layers of a new cache."""
        shape = {**self._manifest["shape"], "device": device or self._manifest["shape"]["device"]}
        files = [self._folder / name for name in self._manifest["rows"]]
        stored, seen = self._tensors["stored"], self._manifest["seen"]
        store.restore(pk.Config(**shape, **store.settings), files, stored, seen)
        place = torch.device(shape["device"])
        for i, layer in layers.items():
            numbers = self._manifest["numbers"][str(i)]
            if "record_past" in numbers:  # before its rows come: else it drops those that it keeps
                layer.record_past = numbers["record_past"]
            self._fill_states(i, layer, place)
            if f"{i}.keys" not in self._tensors:
                continue
            layer.update(*(self._tensors[f"{i}.{kind}"].to(place) for kind in ("keys", "values")))
            for name, number in numbers.items():
                setattr(layer, name, number)

    def _fill_states(self, i: int, layer: Any, place: torch.device) -> None:
        for name, tensor in self._tensors.items():
            if name.startswith((f"{i}.conv.", f"{i}.recurrent.")):
                _, kind, number = name.split(".")
                update = layer.update_conv_state if kind == "conv" else layer.update_recurrent_state
                update(tensor.to(place), state_idx=int(number))


def described(config: Any) -> dict[str, Any]:
    """The fields of a model's config that a saved cache has to agree with."""
    fields = decoder_config(config).to_dict()  # where layers differ, attributes raise
    chosen = {name: fields.get(name) for name in _FIELDS}
    described: dict[str, Any] = json.loads(json.dumps(chosen, default=str))
    return described


def _check_model(saved: dict[str, Any], given: dict[str, Any], folder: Path) -> None:
    for name in _FIELDS:
        one, other = saved.get(name), given.get(name)
        # Versions of the library keep rotary settings in fields of their own.
        if one != other and not (name.startswith("rope_") and None in (one, other)):
            raise ValueError(
                f"[transformers] config: expected {name} {one}, as the model of the cache in "
                f"{folder} has, got {other}"
            )


def _numbers_of(layer: Any) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in _NUMBERS if hasattr(layer, name)}


def _tensors_of(layers: dict[int, Any]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for i, layer in layers.items():
        if versions.keeps_states(layer):
            tensors |= _states_of(i, layer)
        elif layer.is_initialized and layer.keys is not None and layer.keys.numel() > 0:
            tensors[f"{i}.keys"] = layer.keys.detach().cpu().clone().contiguous()
            tensors[f"{i}.values"] = layer.values.detach().cpu().clone().contiguous()
    return tensors


def _states_of(i: int, layer: Any) -> dict[str, torch.Tensor]:
    kept = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
    return {
        f"{i}.{kind}.{number}": state.detach().cpu().clone().contiguous()
        for kind, states in kept.items()
        for number, state in states.items()
        if state is not None
    }


def _packed(settings: dict[str, Any]) -> dict[str, Any]:
    policy = settings.get("policy")
    return {**settings, "policy": None if policy is None else policy.__getstate__()}


def _unpacked(settings: dict[str, Any]) -> dict[str, Any]:
    settings = dict(settings)
    policy = settings.pop("policy")
    if policy is not None:
        if policy["schedule"] is not None:
            policy["schedule"] = [tuple(step) for step in policy["schedule"]]
        settings["policy"] = pk.ParisKV(**policy)
    return settings


# Files.


def _access(folder: Path) -> Access | None:
    """Who may read the cache that is there: what each of its files allows. None without one."""
    if not (folder / MANIFEST).exists():
        return None
    access = Access.of(folder / MANIFEST)
    for name in _own_files(folder):
        access = access._replace(mode=access.mode & (folder / name).stat().st_mode)
    return access


def _own_files(folder: Path) -> list[str]:
    return [
        p.name for pattern in ("row-*.pkv", "layers-*.safetensors") for p in folder.glob(pattern)
    ]


def _remove(folder: Path, names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _open_folder(folder: Path) -> bool:
    """Whether it has just been made. A folder of other things is left alone."""
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(
                f"[transformers] path: expected a folder or nothing, got a file, {folder}"
            ) from None
        if any(folder.iterdir()) and not (folder / MANIFEST).exists():
            raise FileExistsError(
                "[transformers] path: expected a new or empty folder, or one with a saved cache, "
                f"got one with other files, {folder}"
            ) from None
        return False
    return True


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write_manifest(folder: Path, access: Access | None, manifest: dict[str, Any]) -> None:
    manifest = {**manifest, "sha256": _checksum(manifest)}
    path = Path(os.path.realpath(folder / MANIFEST))  # a link stays one
    aside = path.with_name(f"{MANIFEST}-{secrets.token_hex(4)}")
    try:
        write_new(aside, json.dumps(manifest, indent=1, sort_keys=True).encode(), access)
        aside.replace(path)
    except BaseException:
        _remove(path.parent, [aside.name])
        raise


def _refuse_damaged(folder: Path, name: str) -> NoReturn:
    raise ValueError(
        f"[transformers] path: expected a saved cache as it was written, got {folder}, where "
        f"{name} is damaged"
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
    text = (folder / MANIFEST).read_bytes()
    try:
        manifest: dict[str, Any] = json.loads(text)
        version, checksum = manifest["version"], manifest.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError):
        _refuse_damaged(folder, MANIFEST)
    if version != VERSION:
        raise ValueError(
            f"[transformers] path: expected version {VERSION} of saved caches, got {version} in "
            f"{folder}"
        )
    if checksum != _checksum(manifest):
        _refuse_damaged(folder, MANIFEST)
    return manifest
