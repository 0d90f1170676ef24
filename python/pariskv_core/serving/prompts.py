"""Attention of prompts whose rows all came in one step: torch's own."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def causal_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float | None
) -> torch.Tensor:
    """Of packed prompts of these lengths, each alone: (tokens, heads, dim)."""
    grouped = q.shape[1] != k.shape[1]
    parts = []
    for one in zip(*(torch.split(rows, lengths) for rows in (q, k, v)), strict=True):
        queries, keys, values = (rows.transpose(0, 1)[None] for rows in one)
        out = scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)
