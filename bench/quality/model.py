"""A byte-level language model, small enough to be trained in minutes, shaped like large ones.

Grouped queries, rotary positions, gated MLPs, RMS norms ahead of each half of a layer; the last
layers norm their queries and keys too, as some model families do and others don't.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# q (batch, tokens, query_heads, head_dim), k and v (batch, tokens, kv_heads, head_dim) -> like q.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    layers: int = 6
    width: int = 768
    query_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    hidden: int = 2048
    normed_layers: int = 3  # the last ones: queries and keys are normed per head
    theta: float = 5e5
    vocabulary: int = 256

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full attention by torch's own kernels. The heads are repeated: every kernel takes that."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (
        x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
    )
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (tokens, 1, head_dim / 2) float32."""
    half = head_dim // 2
    rates = theta ** (-torch.arange(half, device=positions.device, dtype=torch.float64) / half)
    angles = positions.double()[:, None] * rates
    return angles.cos().float()[:, None], angles.sin().float()[:, None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float()).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, shape: Shape, normed: bool, dropout: float) -> None:
        super().__init__()
        queries, keys = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.head_dim, self.dropout = shape.head_dim, dropout
        self.before_attention, self.before_mlp = Norm(shape.width), Norm(shape.width)
        self.to_q = nn.Linear(shape.width, queries, bias=False)
        self.to_k = nn.Linear(shape.width, keys, bias=False)
        self.to_v = nn.Linear(shape.width, keys, bias=False)
        self.from_heads = nn.Linear(queries, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)
        self.norm_q: nn.Module = Norm(shape.head_dim) if normed else nn.Identity()
        self.norm_k: nn.Module = Norm(shape.head_dim) if normed else nn.Identity()

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (batch, tokens, width) -> q, k, v (batch, tokens, heads, head_dim); q, k rotated."""
        x = self.before_attention(x)
        q, k, v = (
            to(x).unflatten(-1, (-1, self.head_dim)) for to in (self.to_q, self.to_k, self.to_v)
        )
        return _rotate(self.norm_q(q), cos, sin), _rotate(self.norm_k(k), cos, sin), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer, from what its heads brought: (batch, tokens, heads, head_dim)."""
        x = x + self._drop(self.from_heads(attended.flatten(-2)))
        y = self.before_mlp(x)
        return x + self._drop(self.down(F.silu(self.gate(y)) * self.up(y)))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention = causal_attention
    ) -> Tensor:
        return self.finish(x, attention(*self.project(x, cos, sin)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout > 0 else x


class Model(nn.Module):
    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        first_normed = shape.layers - shape.normed_layers
        self.layers = nn.ModuleList(
            Layer(shape, normed=i >= first_normed, dropout=dropout) for i in range(shape.layers)
        )
        self.norm = Norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=1.0 if "embedding" in name else shape.width**-0.5)
        # Layers begin as nothing: a deep model learns faster from there.
        for layer in self.layers:
            nn.init.zeros_(layer.from_heads.weight)
            nn.init.zeros_(layer.down.weight)
        nn.init.zeros_(self.head.weight)

    def rotary(self, first: int, tokens: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(first, first + tokens, device=self.head.weight.device)
        return rotary(positions, self.shape.head_dim, self.shape.theta)

    def logits(self, x: Tensor) -> Tensor:
        """What follows the last layer: (..., width) -> (..., vocabulary) float32."""
        return self.head(self.norm(x)).float()

    def forward(self, tokens: Tensor, last: int | None = None) -> Tensor:
        """tokens (batch, tokens) int64 -> logits, of the `last` positions alone where given."""
        cos, sin = self.rotary(0, tokens.shape[1])
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.logits(x if last is None else x[:, -last:])

    def save(self, path: Path) -> None:
        weights = {name: value.to(torch.bfloat16) for name, value in self.state_dict().items()}
        torch.save({"shape": asdict(self.shape), "weights": weights}, path)

    @staticmethod
    def load(path: Path, device: str) -> Model:
        """For asking alone. On a GPU the matrices stay in bfloat16; what is added up does not."""
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model = Model(Shape(**saved["shape"]))
        model.load_state_dict(saved["weights"])
        model = model.to(device).eval().requires_grad_(False)
        if device.startswith("cuda"):
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.to(torch.bfloat16)
        return model
