"""A pretrained model that has read a text once: what every method then goes on from.

Keys, values and the first queries of all layers are kept, in float16. Text that follows is computed
by transformers, all its positions at once, with an attention function that is given them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pariskv_core.cli.weights import Weights, cache_folder, fetch
from torch import Tensor

from quality.methods import logits_of
from quality.pretrained.capture import EARLY, half, load_transformers

_READING, _GOING_ON = "pariskv_reading", "pariskv_going_on"  # among transformers' functions


@dataclass
class Pretrained:
    weights: Weights
    tokenizer: Any
    model: Any

    def ids(self, text: str) -> Tensor:
        found: Tensor = self.tokenizer(text, return_tensors="pt").input_ids[0]
        return found.long()

    def pieces(self, text: str) -> Tensor:
        """Tokens of a text that goes on another one: nothing is put before them."""
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        return ids.long()


def load(weights: Weights, cache: Path | None = None) -> Pretrained:
    path = fetch(weights, cache)
    transformers = load_transformers()
    found = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **found)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, **found, dtype=torch.float32
    )
    return Pretrained(weights, tokenizer, model.eval())


@dataclass
class Prefix:
    """Per layer of the model."""

    ids: Tensor  # (tokens)
    keys: list[Tensor]  # (tokens, kv_heads, head_dim) float16
    values: list[Tensor]
    early: list[Tensor]  # (EARLY, query_heads, head_dim) float16
    recent: list[Tensor]  # (RECENT, query_heads, head_dim) float16: the last queries

    @property
    def tokens(self) -> int:
        return len(self.ids)


def _scaled(query: Tensor, scaling: float | None) -> Tensor:
    """(tokens, heads, head_dim), so that a logit is q.k / sqrt(head_dim)."""
    rows = query[0].transpose(0, 1)
    return rows if scaling is None else rows * (scaling * math.sqrt(query.shape[-1]))


@torch.no_grad()
def read(model: Any, ids: Tensor, recent: int = 64) -> Prefix:
    """Reads ids (tokens) with full attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    found = Prefix(ids, [], [], [], [])

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        rows = _scaled(query, options.get("scaling"))
        found.keys.append(half(key[0].transpose(0, 1)))
        found.values.append(half(value[0].transpose(0, 1)))
        found.early.append(half(rows[:EARLY]))
        found.recent.append(half(rows[-recent:]))
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register(_READING, attention)
    AttentionMaskInterface.register(_READING, sdpa_mask)
    model.set_attn_implementation(_READING)
    model.base_model(ids[None], use_cache=False)
    return found


def kept(pretrained: Pretrained, ids: Tensor, cache: Path | None = None) -> Prefix:
    """`read`, from the cache if it was read before."""
    said = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16]
    folder = (cache or cache_folder()) / "prefixes"
    path = folder / f"{pretrained.weights.name}-{pretrained.weights.sha256[:8]}-{said}.pt"
    if path.exists():
        return Prefix(**torch.load(path, weights_only=True))
    found = read(pretrained.model, ids)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(vars(found), path)
    return found


@dataclass
class Step:
    """One global layer's part of the text that follows."""

    layer: int
    prefix: Prefix
    queries: Tensor  # (steps, query_heads, head_dim) float32
    new_keys: Tensor  # (steps, kv_heads, head_dim) float32
    new_values: Tensor

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.new_keys.shape[1]

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.prefix.tokens, self.prefix.tokens + len(self.queries))

    def rows(self, head: int) -> tuple[Tensor, Tensor]:
        """Keys and values (tokens, head_dim) of a kv head, the new ones last."""
        keys = torch.cat([self.prefix.keys[self.layer][:, head].float(), self.new_keys[:, head]])
        old = self.prefix.values[self.layer][:, head].float()
        return keys, torch.cat([old, self.new_values[:, head]])

    def heads(self, head: int) -> slice:
        """The query heads of a kv head."""
        return slice(head * self.group, (head + 1) * self.group)


Attention = Callable[[Step], Tensor]
"""(steps, query_heads, head_dim): what a layer's queries get."""


def full(step: Step, window: int | None = None) -> Tensor:
    """Attention to everything, or to the last `window` tokens."""
    out = torch.empty_like(step.queries)
    at = step.positions[:, None, None]
    first = 0 if window is None else max(step.prefix.tokens + 1 - window, 0)
    for head in range(step.new_keys.shape[1]):
        keys, values = (rows[first:] for rows in step.rows(head))
        places = torch.arange(first, first + len(keys))
        logits = logits_of(step.queries[:, step.heads(head)], keys)
        hidden = places > at if window is None else (places > at) | (places <= at - window)
        attention = logits.masked_fill_(hidden, -math.inf).softmax(dim=-1)
        out[:, step.heads(head)] = attention @ values
    return out


@torch.no_grad()
def go_on(model: Any, prefix: Prefix, ids: Tensor, attention: Attention) -> Tensor:
    """Logits (steps, vocabulary) after each of the ids that follow a prefix.

    Layers with a sliding window attend to all of it, whatever the method.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def function(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        new = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        queries = _scaled(query, options.get("scaling"))
        step = Step(int(module.layer_idx), prefix, queries, *new)
        window = getattr(module, "sliding_window", None)
        out = attention(step) if window is None else full(step, window)
        return out[None], None

    AttentionInterface.register(_GOING_ON, function)
    AttentionMaskInterface.register(_GOING_ON, sdpa_mask)
    model.set_attn_implementation(_GOING_ON)
    places = torch.arange(prefix.tokens, prefix.tokens + len(ids))
    logits: Tensor = model(ids[None], position_ids=places[None], use_cache=False).logits
    return logits[0].float()
