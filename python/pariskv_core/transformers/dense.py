"""Full attention in torch: prompts, and layers that are not ours."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from . import versions
from .masks import PaddingMask


@dataclass(frozen=True)
class Logits:
    """How a model makes attention of q.k."""

    scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # (query heads): a logit with no value

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def options(self) -> dict[str, Any]:
        """The same as keyword arguments of the engine."""
        sinks = self.sinks
        return {
            "scale": self.scale,
            "softcap": self.softcap or 0.0,
            "sink_bias": None if sinks is None else sinks.detach().reshape(-1).float(),
        }


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None
) -> torch.Tensor:
    """(batch, heads, tokens, dim) of whole prompts -> (batch, tokens, heads, dim)."""
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def causal_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float | None
) -> torch.Tensor:
    """The same for packed prompts of these lengths, each alone: (tokens, heads, dim)."""
    split = (torch.split(rows, lengths) for rows in (q, k, v))
    parts = []
    for one in zip(*split, strict=True):
        heads = (rows.transpose(0, 1)[None] for rows in one)
        parts.append(causal_attention(*heads, scale=scale)[0])
    return torch.cat(parts)


def dense_attention(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    logits: Logits,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """A layer whose keys stay in torch: a sliding one, or one without our cache."""
    if _is_full(module, kwargs) and k.shape[-2] > q.shape[-2] > 0:
        warnings.warn(
            '[transformers] cache: attention is "pariskv" and the cache is not, so this model runs '
            f"full attention: pass {versions.CACHE}=PariskvCache(model.config) to the first call. "
            "An attached model makes one itself, in generate() and where its first call runs under "
            "torch.no_grad() and is given none",
            stacklevel=2,
        )
    if isinstance(mask, PaddingMask):
        mask = causal_mask(q.shape[-2], mask.tokens())
    if logits.plain:
        out, _ = versions.sdpa_attention(module, q, k, v, mask, scaling=logits.scale, **kwargs)
        return out, None
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if mask is None and causal:
        mask = causal_mask(q.shape[-2], torch.ones_like(k[:, 0, :, 0], dtype=torch.bool))
    return formula(q, k, v, mask, logits), None


def _is_full(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether a layer attends to all earlier tokens, as far as it says."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if kinds is not None and index is not None and kinds[index] != "full_attention":
        return False
    return kwargs.get("sliding_window") is None


def causal_mask(queries: int, tokens: torch.Tensor) -> torch.Tensor:
    """(batch, 1, queries, keys) of (batch, keys), the last of which are the queries'."""
    keys = tokens.shape[-1]
    place = torch.arange(keys, device=tokens.device)
    own = place[keys - queries :, None]
    seen = (place <= own) & tokens[:, None, None, :]
    return seen | (place == own)  # padding sees itself, so that no row is empty


def formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    logits: Logits,
) -> torch.Tensor:
    """Attention with a soft cap or sinks: (batch, queries, heads, dim)."""
    group = q.shape[1] // k.shape[1]
    k, v = (rows.repeat_interleave(group, dim=1) for rows in (k, v))
    scale = q.shape[-1] ** -0.5 if logits.scale is None else logits.scale
    x = (q @ k.transpose(-1, -2)).float() * scale
    if logits.softcap is not None:
        x = logits.softcap * torch.tanh(x / logits.softcap)
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else x + mask
    if logits.sinks is not None:
        sinks = logits.sinks.reshape(1, -1, 1, 1).float().expand(*x.shape[:-1], 1)
        x = torch.cat([x, sinks], dim=-1)
    weights = x.softmax(dim=-1)[..., : k.shape[-2]]
    return (weights.to(v.dtype) @ v).transpose(1, 2).contiguous()
