"""The engine's rows as a host's own attention reads them."""

from __future__ import annotations

from torch.utils.dlpack import from_dlpack

import pariskv_core as pk


class Pages:
    """
    rows     (pages, kv_heads, tokens, 2 head_dim): a row is K, then V
    keys     (pages, tokens, kv_heads, head_dim), a view of them, as are values
    table    (requests, width) int32: numbers of pages
    lengths  (requests) int32: tokens; 0: pages do not serve the request
    """

    def __init__(self, cache: pk.Cache, sequences: int, tokens: int) -> None:
        pages, table = cache.pages(), cache.page_table(sequences, tokens)
        self.rows = from_dlpack(pages.rows)
        self.keys, self.values = from_dlpack(pages.keys), from_dlpack(pages.values)
        self.table = from_dlpack(table.pages)
        self.lengths = from_dlpack(table.lengths)
