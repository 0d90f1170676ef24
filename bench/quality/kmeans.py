"""k-means in torch, many small problems at once: how peers learn from the prompt."""

from __future__ import annotations

import torch
from torch import Tensor

# More than these say nothing new about 256 centres, and every round reads them all.
_POINTS = 8192
_ROWS = 2048  # at a time: so they stay in the cache


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """The index of the nearest centre: points (parts, tokens, dim), centres (parts, count, dim)."""
    found = [_nearest(rows, some) for rows, some in zip(points, centres, strict=True)]
    return torch.stack(found)


def _nearest(points: Tensor, centres: Tensor) -> Tensor:
    # |p - c|^2 less |p|^2, which does not decide.
    lengths = centres.square().sum(-1)
    chunks = points.split(_ROWS)
    return torch.cat([torch.addmm(lengths, c, centres.T, alpha=-2).min(-1).indices for c in chunks])


def kmeans(points: Tensor, count: int, seed: int, rounds: int = 12) -> Tensor:
    """Lloyd's centres (parts, count, dim) of a seeded sample of points (parts, tokens, dim).

    They start at points; a centre that nobody is nearest to stays where it is.
    """
    order = torch.randperm(points.shape[1], generator=torch.Generator().manual_seed(seed))
    points = points[:, order[:_POINTS]]
    parts, tokens, dim = points.shape
    # Fewer points than centres: some start twice.
    centres = points[:, torch.arange(count) % tokens].clone()
    ones = torch.ones(parts, tokens)
    for _ in range(rounds):
        owner = nearest(points, centres)
        total = torch.zeros_like(centres)
        total.scatter_add_(1, owner[..., None].expand(-1, -1, dim), points)
        held = torch.zeros(parts, count).scatter_add_(1, owner, ones)
        centres = torch.where(held[..., None] > 0, total / held[..., None].clamp(min=1), centres)
    return centres
