"""ParisKV's codes in torch, with every choice of the paper open: for ablations, not for speed.

A key is normalised, rotated and cut into parts; each part is a radius and a direction. For the
coarse stage a part is one of a codebook's centroids; for the rerank a sign and one of 8 magnitudes
per dimension. With the engine's choices its codes come out here too.
"""

from __future__ import annotations

import functools
import math

import pariskv_core as pk
import torch
from torch import Tensor

from quality.kmeans import kmeans, nearest

MAGNITUDES = 8
_SAMPLES = 1 << 14


def walsh_hadamard(x: Tensor) -> Tensor:
    """Unscaled, over the last axis; in the engine's order of additions."""
    shape, half = x.shape, 1
    while half < shape[-1]:
        pairs = x.reshape(*shape[:-1], -1, 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([a + b, a - b], dim=-2).reshape(shape)
        half *= 2
    return x


def rotated(x: Tensor, seed: int) -> Tensor:
    """H diag(signs) x, padded to a power of two; lengths grow by the root of that."""
    size = 1 << (x.shape[-1] - 1).bit_length()
    signs = torch.tensor(pk.rotation_signs(size, seed), dtype=x.dtype, device=x.device)
    return walsh_hadamard(torch.nn.functional.pad(x, (0, size - x.shape[-1])) * signs)


@functools.cache
def magnitude_levels(part: int) -> tuple[Tensor, Tensor]:
    """Thresholds (7) and centres (8) of the best quantiser for |u_j|, u uniform on the sphere.

    u_j^2 is Beta(1/2, (part - 1) / 2), so |u_j| has the density (1 - t^2)^((part - 3) / 2).
    """
    inside = (torch.arange(512, dtype=torch.float64) + 0.5) / 512
    centres = (torch.arange(MAGNITUDES, dtype=torch.float64) + 0.5) / MAGNITUDES
    for _ in range(2000):
        edges = torch.nn.functional.pad((centres[:-1] + centres[1:]) / 2, (1, 1))
        edges[-1] = 1
        t = edges[:-1, None] + torch.diff(edges)[:, None] * inside  # (levels, 512)
        density = (1 - t * t) ** ((part - 3) / 2)
        centres = (density * t).sum(dim=1) / density.sum(dim=1)
    # As the engine keeps them: centres to the precision of a half.
    return ((centres[:-1] + centres[1:]) / 2).float(), centres.half().float()


def reconstructed(unit: Tensor, norms: Tensor, part: int, alpha: bool) -> Tensor:
    """Rotated unit keys (tokens, rotated_dim) as the rerank sees them.

    The weight of a part is norm x radius over alpha, the product of the true direction with its
    code; without `alpha` that is taken to be the code's length, as if it pointed the right way.
    """
    thresholds, centres = (x.to(unit.device) for x in magnitude_levels(part))
    parts = unit.reshape(len(unit), -1, part)
    radius = parts.norm(dim=-1, keepdim=True)
    direction = parts / radius.clamp(min=1e-30)
    sizes = centres[torch.bucketize(direction.abs(), thresholds, right=True)]
    code = torch.where(parts >= 0, sizes, -sizes)
    scale = (code * direction).sum(-1, keepdim=True) if alpha else torch.ones_like(radius)
    weights = norms[:, None, None] * radius / scale.clamp(min=1e-30)
    return (weights * code).flatten(1)


# --- Codebooks of the coarse stage: a centroid per part ------------------------------------------


class Signs:
    """The sign patterns {±1 / sqrt(part)}^part: no data in them, and the nearest is the signs."""

    def __init__(self, part: int) -> None:
        self.part = part
        patterns = torch.arange(1 << part)[:, None] >> torch.arange(part) & 1
        self.centroids = (patterns * 2.0 - 1)[None]  # (1, 2^part, part)

    def codes(self, rows: Tensor) -> Tensor:
        """The centroid of each part of rows (tokens, dim): (parts, tokens)."""
        bits = (rows.reshape(len(rows), -1, self.part) >= 0).long()
        return (bits << torch.arange(self.part, device=rows.device)).sum(-1).T.contiguous()


class Sphere:
    """Other data-free centroids: directions spread over the sphere, times radii that occur.

    Directions are the centres of uniform samples; the radii of a unit key's parts have squares that
    are Beta(part / 2, (dim - part) / 2), and take equally likely values.
    """

    def __init__(self, part: int, directions: int, radii: int, dim: int, seed: int) -> None:
        self.part = part
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.randn(_SAMPLES, dim, generator=generator)
        uniform = uniform / uniform.norm(dim=1, keepdim=True)
        lengths = uniform[:, :part].norm(dim=1)
        points = uniform[:, :part] / lengths[:, None]
        centres = kmeans(points[None], directions, seed, rounds=20)[0]
        self.directions = centres / centres.norm(dim=1, keepdim=True)
        places = (torch.arange(radii) + 0.5) / radii
        self.radii = torch.quantile(lengths, places)
        self.centroids = (self.radii[:, None, None] * self.directions).flatten(0, 1)[None]

    def codes(self, rows: Tensor) -> Tensor:
        parts = rows.reshape(len(rows), -1, self.part)
        direction = (parts @ self.directions.to(rows.device).T).argmax(-1)
        edges = ((self.radii[:-1] + self.radii[1:]) / 2).to(rows.device)
        radius = torch.bucketize(parts.norm(dim=-1).contiguous(), edges)
        return (radius * len(self.directions) + direction).T.contiguous()


class Learnt:
    """k-means centroids of the rows that it is first shown, the prompt's; they stay as they are."""

    def __init__(self, part: int, count: int, seed: int) -> None:
        self.part = part
        self.count = count
        self.seed = seed
        self.centroids = torch.empty(0)  # (parts, count, part)

    def codes(self, rows: Tensor) -> Tensor:
        parts = rows.reshape(len(rows), -1, self.part).transpose(0, 1).contiguous()
        if not len(self.centroids):
            self.centroids = kmeans(parts, self.count, self.seed)
        return nearest(parts, self.centroids)


def five_bits(norms: Tensor) -> Tensor:
    """To 5 significant bits within the engine's ends: the norm that its coarse score knows."""
    mantissa, exponent = torch.frexp(norms)
    coarse = torch.ldexp(torch.floor(mantissa * 32 + 0.5) / 32, exponent)
    return torch.where(norms > 0, coarse.clamp(17 / 512, 1984.0), 0.0)


def quantised_query(turned: Tensor) -> Tensor:
    """Rotated queries (..., rotated_dim) in whole steps of a fifteenth of their largest element."""
    largest = turned.abs().amax(dim=-1, keepdim=True)
    step = torch.where(largest > 0, 15 / largest, math.nan)
    return torch.round(turned * step).nan_to_num(nan=0.0)
