"""The engine's own PRKV as a method, beside its copy in torch (kept_rows.PRKV)."""

from __future__ import annotations

import pariskv_core as pk
import torch
from torch import Tensor

from quality.kept_rows import WINDOW
from quality.methods import Zone, padded


class EnginePRKV(Zone):
    """A cache of one kv head, filled with the zone's keys and a window that has the recent queries.

    The zone ends with a whole page, so of the last page's keys up to page - 1 are left out.
    """

    name = "PRKV by the engine"

    def __init__(self, static: float | str = 0.25, page: int = 32, digest: str = "mean") -> None:
        super().__init__()
        self.static = static
        self.page = page
        self.digest = digest
        self.recent = torch.empty(0)

    def prefill(self, keys: Tensor, recent: Tensor | None) -> None:
        super().prefill(keys, recent)
        if recent is None:
            raise ValueError("PRKV chooses by the prompt's last queries; prefill it with them")
        self.recent = recent[-WINDOW:]

    def select(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        group, dim = queries.shape[1:]
        config = pk.Config(
            layers=1,
            query_heads=group,
            kv_heads=1,
            head_dim=dim,
            dtype="float32",
            sink=0,
            local=len(self.recent),
            threads=1,
            policy=pk.PRKV(
                budget=rows, static_share=self.static, page=self.page, digest=self.digest
            ),
        )
        keys = self.keys[: len(self.keys) // self.page * self.page]
        k = torch.cat([keys, keys.new_zeros(len(self.recent), dim)])[:, None].contiguous()
        q = torch.cat([keys.new_zeros(len(keys), group, dim), self.recent]).contiguous()
        with pk.Cache(config) as cache:
            sequence = cache.add()
            cache.prefill(0, [sequence], k, k, q=q)
            chosen = [self._rows(cache.explain(0, sequence, step), rows) for step in queries]
        return torch.cat(chosen)

    @staticmethod
    def _rows(why: pk.Explanation, rows: int) -> Tensor:
        if why.details is None:
            raise ValueError("the engine attends to all of so small a zone")
        parts = [torch.from_numpy(part.copy()) for part in (why.kept, why.positions) if part.size]
        return padded(torch.cat(parts, dim=1), rows)
