"""The blocks of vLLM's scheduler, and its manager: what they are called, and which may be found."""

from __future__ import annotations

from typing import Any

from . import allowed, names


class Pool:
    """The blocks that may be found. `manager` is vLLM's KVCacheManager, or has its block_pool.

    cache   whose groups it has; None: one, whose hashes are those of blocks
    blocks  of the engine's own pool, where other layers have vLLM's
    """

    def __init__(
        self, manager: Any, cache: names.CacheGroups | None = None, blocks: int = 0
    ) -> None:
        self._manager = manager
        self._shared = self._pool = manager.block_pool
        self._block = None if cache is None else cache.block
        self.group = 0
        if cache is not None and cache.own is not None:
            allowed.check_prefixes(manager.coordinator)
            self.group = cache.own
            self._pool = manager.coordinator.single_type_managers[cache.own].bind(blocks)
        self._table = self._pool.cached_block_hash_to_block
        self._watermark = getattr(manager, "watermark_blocks", None)

    def was_reset(self) -> bool:
        """Whether all prefixes were forgotten since `seen`: the pool then has a new table."""
        return self._pool.cached_block_hash_to_block is not self._table

    def seen(self) -> None:
        self._table = self._pool.cached_block_hash_to_block

    def forget(self, blocks: set[int]) -> None:
        if blocks:
            self._pool.evict_blocks(blocks)

    def all_blocks(self) -> set[int]:
        return {block.block_id for block in self._pool.blocks}

    def blocks_of(self, request: str) -> list[int]:
        return list(self._manager.get_block_ids(request)[self.group])

    def hashes_of(self, request: Any) -> Any:
        """Of a request's blocks. vLLM's may be finer, where other groups have smaller ones."""
        fine = getattr(self._pool, "hash_block_size", self._block)
        if self._block is None or fine == self._block:
            return request.block_hashes
        return names.resolve_block_hashes(request.block_hashes, fine, self._block)

    def found(self, request: Any, position: int) -> tuple[int, bool, Any] | None:
        """Of a prefix that was just found for a request: the block at a position, whether a
        request uses it, and its hash."""
        content = self.hashes_of(request)[position]
        found = self._pool.get_cached_block(content, [self.group])
        return None if found is None else (found[0].block_id, found[0].ref_cnt > 0, content)

    def close(self) -> bool:
        """Lets no further request come in until `open`: the scheduler finds that blocks do not
        suffice, and does not even look up prefixes of others that wait.

        It keeps a number of blocks free for requests that run already. That number is an option of
        vLLM's, and holds only while a request runs.
        """
        if self._watermark is None:
            return False
        self._manager.watermark_blocks = len(self._shared.blocks)
        return True

    def open(self) -> None:
        if self._watermark is not None:
            self._manager.watermark_blocks = self._watermark
