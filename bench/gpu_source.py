"""Keys, values and queries of one layer, made on the GPU: as hard to search as a model's.

What `pariskv_core.cli.workload` makes in NumPy, less its facts: a few strong directions, outlier
channels, topics that come back, RoPE, attention sinks, heads that agree more or less.
"""

from __future__ import annotations

import torch
from pariskv_core.cli.workload import (
    HEAD_AGREEMENT,
    KEY_SPECTRUM,
    OUTLIER_PAIRS,
    OUTLIER_SIZE,
    QUERY_OUTLIER,
    QUERY_SPECTRUM,
    ROPE_BASE,
    SEGMENT_TOKENS,
    TOPIC_SHARE,
    TOPICS,
)

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
GROUP = QUERY_HEADS // KV_HEADS
CHUNK_TOKENS = 32_768


class Source:
    def __init__(self, seed: int) -> None:
        self._random = torch.Generator("cuda").manual_seed(seed)
        basis = torch.linalg.qr(self._normal(KV_HEADS, HEAD_DIM, HEAD_DIM))[0]
        order = torch.arange(1, HEAD_DIM + 1, device="cuda")[:, None]
        mixers = [size * order**power * basis for size, power in (KEY_SPECTRUM, QUERY_SPECTRUM)]
        self._key_mixer, self._query_mixer = mixers
        half = HEAD_DIM // 2
        slow = torch.arange(half - OUTLIER_PAIRS, half, device="cuda")
        outliers = torch.cat([slow, slow + half])
        self._key_mean = 0.25 * self._normal(KV_HEADS, 1, HEAD_DIM)
        signs = self._normal(KV_HEADS, 1, len(outliers)).sign()
        self._key_mean[..., outliers] = OUTLIER_SIZE * signs
        self._query_mixer[..., outliers] = 0
        self._topics = self._normal(KV_HEADS, TOPICS, HEAD_DIM)
        self._frequencies = ROPE_BASE ** (
            -torch.arange(half, device="cuda", dtype=torch.float64) / half
        )

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=self._random)

    def _rotated(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        """RoPE on (heads, tokens, head_dim), as (tokens, heads, head_dim) bfloat16."""
        positions = torch.arange(first, first + rows.shape[1], device="cuda")
        angles = positions[:, None] * self._frequencies
        cos, sin = angles.cos().float(), angles.sin().float()
        a, b = rows.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        return turned.transpose(0, 1).to(torch.bfloat16).contiguous()

    def _contents(self, tokens: int) -> torch.Tensor:
        count = -(-tokens // SEGMENT_TOKENS)
        topic = torch.randint(TOPICS, (count,), device="cuda", generator=self._random)
        topic = topic.repeat_interleave(SEGMENT_TOKENS)[:tokens]
        own = (1 - TOPIC_SHARE**2) ** 0.5 * self._normal(KV_HEADS, tokens, HEAD_DIM)
        return own + TOPIC_SHARE * self._topics[:, topic]

    def rows(self, first: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions `first` on, (tokens, kv_heads, head_dim) each."""
        keys = self._rotated(self._contents(tokens) @ self._key_mixer + self._key_mean, first)
        values = self._normal(tokens, KV_HEADS, HEAD_DIM).to(torch.bfloat16)
        return keys, values

    def queries(self, position: int, count: int, steadiness: float = 0.0) -> torch.Tensor:
        """(count, query_heads, head_dim); each keeps `steadiness` of what the one before asked."""
        agreement = torch.linspace(*HEAD_AGREEMENT, GROUP, device="cuda")[:, None]
        rows = []
        asked = None
        for _ in range(count):
            shared = self._contents(1)  # (kv_heads, 1, head_dim)
            own = self._normal(KV_HEADS, GROUP, HEAD_DIM)
            fresh = agreement * shared + (1 - agreement**2).sqrt() * own
            kept = 0.0 if asked is None else steadiness
            asked = fresh if asked is None else kept * asked + (1 - kept**2) ** 0.5 * fresh
            content = asked @ self._query_mixer + QUERY_OUTLIER * self._key_mean
            rows.append(content.reshape(QUERY_HEADS, 1, HEAD_DIM))
        # All of a query's heads stand at one position, which hardly moves from step to step.
        stacked = torch.stack([self._rotated(row, position)[0] for row in rows])
        return stacked.contiguous()
