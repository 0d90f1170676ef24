"""Keys and queries of a prefill, layer by layer, as files small enough to travel to a GPU.

Keys are as the model's own cache holds them, after its norms and RoPE. Queries are scaled so that
the logit of a key is q.k / sqrt(head_dim) in every model.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pariskv_core.cli.weights import Unusable, Weights, cache_folder, fetch
from torch import Tensor

from quality.pretrained.texts import TEXTS

ATTENTION = "pariskv_capture"  # its name among transformers' attention functions
LATE = 512  # the last tokens of the text: their queries are measured, their keys are not searched
MEASURED = 48
RECENT = 64  # queries just before the late tokens, for methods that look at some
EARLY = 1024  # the first tokens: their queries set a sequence's balance of channels
MOST_BYTES = 72 << 20
_MANIFEST = "manifest.json"


@dataclass
class Layer:
    keys: Tensor  # (tokens, kv_heads, head_dim) float16
    queries: Tensor  # (measured, query_heads, head_dim) float16
    recent: Tensor  # (recent, query_heads, head_dim) float16
    early: Tensor  # (EARLY, query_heads, head_dim) float16


@dataclass(frozen=True)
class Manifest:
    """Where a capture comes from. Two with the same manifest hold the same."""

    model: str
    packages: list[str]
    sha256: str  # of the weights
    text: str
    text_sha256: str  # of the text that was read, as UTF-8
    python: str  # whose text it is
    tokens: int
    layers: list[int]
    positions: list[int]  # of the measured queries
    recent: list[int]  # of the recent queries
    early: int = 0  # first tokens whose queries are kept
    skip: int = 0  # tokens of the text before the first that was read
    versions: dict[str, str] = field(default_factory=dict)  # of torch and transformers


class Capture:
    """A folder with a manifest and one .npz for each layer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest(**json.loads((folder / _MANIFEST).read_text(encoding="utf-8")))

    def layer(self, index: int) -> Layer:
        with np.load(self.folder / f"layer{index:02}.npz") as arrays:
            return Layer(**{name: torch.from_numpy(arrays[name]) for name in arrays.files})

    def layers(self) -> Iterator[tuple[int, Layer]]:
        for index in self.manifest.layers:
            yield index, self.layer(index)


def late_positions(tokens: int) -> list[int]:
    """Of the measured queries: evenly spaced over the last tokens, before a flush is due."""
    return np.linspace(tokens - LATE, tokens - 2, MEASURED).astype(int).tolist()


@dataclass(frozen=True)
class Stretch:
    """What of a text is captured, and which of a model's layers."""

    text: str
    tokens: int
    skip: int = 0  # tokens of the text before these
    layers: int | None = None  # the first so many of the layers that fit; None: all of them
    positions: tuple[int, ...] = ()  # of the measured queries; empty: `late_positions`

    @property
    def measured(self) -> list[int]:
        return list(self.positions) or late_positions(self.tokens)

    def folder(self, name: str) -> str:
        words = [name, self.text, str(self.tokens)]
        words += [f"from{self.skip}"] if self.skip else []
        words += [f"at{min(self.positions)}"] if self.positions else []
        return "-".join(words + ([f"{self.layers}layers"] if self.layers else []))


# --- From a model --------------------------------------------------------------------------------


class _Enough(Exception):
    """The last layer that is kept has been seen."""


class Recorder:
    """An attention function of transformers that keeps what it is given, and attends by SDPA."""

    def __init__(self, layers: Sequence[int], positions: Sequence[int], recent: Sequence[int]):
        self.layers = layers
        self.positions, self.recent = list(positions), list(recent)
        self.found: dict[int, Layer] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if module.layer_idx in self.layers:
            # Theirs are (batch, heads, tokens, head_dim).
            keys, queries = key[0].transpose(0, 1), query[0].transpose(0, 1)
            if scaling is not None:
                queries = queries * (scaling * math.sqrt(key.shape[-1]))
            early = queries[:EARLY]
            kept = (keys, queries[self.positions], queries[self.recent], early)
            self.found[int(module.layer_idx)] = Layer(*(half(rows) for rows in kept))
            if len(self.found) == len(self.layers):
                raise _Enough
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )


def half(rows: Tensor) -> Tensor:
    halves = rows.to(torch.float16)
    if not halves.isfinite().all():
        raise Unusable("A key or query of this model does not fit into float16.")
    return halves.contiguous()


def global_layers(config: Any) -> list[int]:
    """Layers that attend to everything, not to a sliding window alone."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [index for index, kind in enumerate(kinds) if kind == "full_attention"]


def chosen_layers(config: Any, tokens: int) -> list[int]:
    """As many global layers as fit, evenly spaced."""
    every = global_layers(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * head_dim * config.num_key_value_heads
    queries = 2 * head_dim * config.num_attention_heads * (MEASURED + RECENT + EARLY)
    fit = MOST_BYTES // (per_token * tokens + queries)
    step = max(3 if len(every) > 6 else 1, math.ceil(len(every) / max(fit, 1)))
    return every[::step]


def load_transformers() -> Any:
    # An extra that nothing else needs, and slow to import. It must not ask the network for files;
    # its progress bars would tear those of the lab.
    for name in ("HF_HUB_OFFLINE", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        import transformers
    except ImportError as error:
        raise Unusable(
            f"{error.name} is missing; pip install '.[models]' has all that is needed."
        ) from None
    return transformers


@torch.no_grad()
def record(model: Any, ids: Tensor, recorder: Recorder) -> dict[int, Layer]:
    """What the recorder keeps of a prefill of these ids (tokens) by a model of transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, recorder)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)
    # The body alone: logits of all tokens would take more memory than the model.
    with contextlib.suppress(_Enough):
        model.base_model(ids[None], use_cache=False)
    return recorder.found


def save(folder: Path, manifest: Manifest, layers: dict[int, Layer]) -> None:
    """The manifest comes last, so a folder that has one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MANIFEST).unlink(missing_ok=True)
    for index, layer in layers.items():
        rows = {name: tensor.numpy() for name, tensor in vars(layer).items()}
        np.savez(folder / f"layer{index:02}.npz", **rows)
    text = json.dumps(asdict(manifest), indent=1)
    (folder / _MANIFEST).write_text(text + "\n", encoding="utf-8")


class _Reader:
    """A model that is loaded when it is first needed, and texts as its tokens."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids: dict[str, Tensor] = {}

    def ids(self, stretch: Stretch) -> Tensor:
        if stretch.text not in self._ids:
            tokenizer = load_transformers().AutoTokenizer.from_pretrained(
                self._path.parent, gguf_file=self._path.name
            )
            written = TEXTS[stretch.text]()
            self._ids[stretch.text] = tokenizer(written, return_tensors="pt").input_ids[0]
        ids = self._ids[stretch.text]
        end = stretch.skip + stretch.tokens
        if len(ids) < end:
            raise Unusable(
                f"The text {stretch.text} has {len(ids):,} tokens for this model, not {end:,}."
            )
        return ids[stretch.skip : end]

    @functools.cached_property
    def model(self) -> Any:
        return (
            load_transformers()
            .AutoModelForCausalLM.from_pretrained(
                self._path.parent, gguf_file=self._path.name, dtype=torch.float32
            )
            .eval()
        )


def make(
    weights: Weights, text: str, tokens: int, cache: Path | None = None, layers: int | None = None
) -> Capture:
    """The capture of a text's first tokens; from the cache if it is there."""
    (made,) = make_all(weights, [Stretch(text, tokens, layers=layers)], cache)
    return made


def make_all(
    weights: Weights, stretches: Sequence[Stretch], cache: Path | None = None
) -> list[Capture]:
    """A capture of each; from the cache if it is there. The model is loaded once, if at all."""
    cache = cache or cache_folder()
    for stretch in stretches:
        if stretch.tokens < 2 * (LATE + RECENT):
            raise Unusable(
                f"{stretch.tokens} tokens are too few; {2 * (LATE + RECENT)} are the fewest."
            )
    path = fetch(weights, cache)
    reader, made = _Reader(path), []
    for stretch in stretches:
        folder = cache / "captures" / stretch.folder(weights.name)
        text_sha256 = hashlib.sha256(TEXTS[stretch.text]().encode()).hexdigest()
        if (folder / _MANIFEST).exists():
            known = Capture(folder)
            there = known.manifest
            pins = (there.sha256, there.text_sha256, there.positions, there.early, there.skip)
            if pins == (weights.sha256, text_sha256, stretch.measured, EARLY, stretch.skip):
                made.append(known)
                continue
        ids = reader.ids(stretch)
        layers = chosen_layers(reader.model.config, stretch.tokens)[: stretch.layers]
        recent = list(range(stretch.tokens - LATE - RECENT, stretch.tokens - LATE))
        found = record(reader.model, ids, Recorder(layers, stretch.measured, recent))
        save(folder, _manifest(weights, stretch, text_sha256, layers, recent), found)
        made.append(Capture(folder))
    return made


def _manifest(
    weights: Weights, stretch: Stretch, text_sha256: str, layers: list[int], recent: list[int]
) -> Manifest:
    import transformers

    return Manifest(
        model=weights.model,
        packages=[f"{piece.package}=={piece.version}" for piece in weights.parts],
        sha256=weights.sha256,
        text=stretch.text,
        text_sha256=text_sha256,
        python=platform.python_version(),
        tokens=stretch.tokens,
        layers=layers,
        positions=stretch.measured,
        recent=recent,
        early=EARLY,
        skip=stretch.skip,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )
