"""FAISS's product quantiser with fast scan (André et al., 2015): other codes of as many bytes.

4 bits for each part of a key, 16 centroids learnt from the prompt; a query's tables are rounded to
8 bits and looked up in registers. FAISS itself trains, encodes and scans.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quality.methods import Zone, among_best, best_rows, group_worth


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise ImportError("faiss is missing; pip install '.[models]' has it.") from None
    return faiss


class FastScan(Zone):
    """Ranks by the estimates of one code, or reranks its best rows by those of a longer one.

    bits      of a key's code for each dimension: 1 is as much as our signs
    finer     bits of a second code, which ranks the first one's candidates; 0: there is none
    reranked  share of the zone that are candidates then
    """

    name = "FAISS fast scan"

    def __init__(self, bits: int = 1, finer: int = 0, reranked: float = 0.05) -> None:
        super().__init__()
        self.bits = bits
        self.finer = finer
        self.reranked = reranked
        self._scan = self._rerank = None

    def prefill(self, keys: Tensor, recent: Tensor | None) -> None:
        super().prefill(keys, recent)
        self._scan = self._trained(self.bits)
        self._rerank = self._trained(self.finer) if self.finer else None

    def append(self, keys: Tensor) -> None:
        super().append(keys)
        for index in (self._scan, self._rerank):
            if index is not None:
                index.add(keys.numpy())

    def _trained(self, bits: int) -> Any:
        faiss, dim = _faiss(), self.keys.shape[1]
        faiss.omp_set_num_threads(torch.get_num_threads())
        index = faiss.IndexPQFastScan(dim, dim * bits // 4, 4, faiss.METRIC_INNER_PRODUCT)
        index.train(self.keys.numpy())
        index.add(self.keys.numpy())
        return index

    def estimates(self, index: Any, queries: Tensor) -> Tensor:
        """Logits (steps, group, tokens) as a scan of all keys gives them."""
        steps, group, dim = queries.shape
        asked = queries.reshape(-1, dim).numpy()
        products, rows = index.search(asked, len(self.keys))
        found = np.empty_like(products)
        np.put_along_axis(found, rows, products, axis=1)
        return torch.from_numpy(found).reshape(steps, group, -1) / math.sqrt(dim)

    def pick(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        worth = group_worth(self.estimates(self._scan, queries), resident)
        if self._rerank is None:
            return best_rows(worth, rows)
        there = among_best(worth, max(rows, math.ceil(self.reranked * len(self.keys))))
        finer = self.estimates(self._rerank, queries).masked_fill(~there[:, None], -math.inf)
        return best_rows(group_worth(finer, resident).masked_fill(~there, -math.inf), rows)
