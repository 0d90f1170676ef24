"""The connector: tells the workers' engines of every decision of vLLM's scheduler.

It moves no data. On the scheduler's side it keeps the books and sends orders; on a worker's side it
carries them out before the forward pass, or before the replay of a captured one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from . import ranks, startup
from .books import Books
from .metrics import EngineStats, PromMetrics
from .orders import Orders
from .reading import step_of
from .worker import Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class Metadata(KVConnectorMetadata):
    def __init__(self, orders: Orders) -> None:
        self.orders = orders


class PariskvConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        wish = startup.asked(vllm_config)
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise NotImplementedError(
                f"[vllm] model: expected layers of one kind of attention, got {len(groups)} kinds; "
                "serve this model without the plugin's options"
            )
        block = groups[0].kv_cache_spec.block_size
        if block != wish.block:
            raise RuntimeError(
                f"[vllm] blocks: expected {wish.block} tokens, got {block}; set --block-size "
                f"{wish.block}"
            )
        self._worker: Worker | None = None
        self._books: Books | None = None
        if role == KVConnectorRole.WORKER:
            self._worker = Worker(
                vllm_config, wish, groups[0].layer_names, kv_cache_config.num_blocks
            )
            return
        plan = startup.plan_of(vllm_config, wish)
        startup.check_blocks(kv_cache_config.num_blocks, plan)
        prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
        self._books = Books(wish.block, plan.make_room(), prefixes=prefixes)
        self._block = wish.block
        self._longest = int(vllm_config.model_config.max_model_len)
        self._most: dict[str, int] = {}  # tokens that a waiting request may grow to
        self._pool: BlockPool | None = None
        self._hashes: Any = None  # the pool's own table, which a reset replaces
        self._reset = False

    # What vLLM asks of the class.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Any layout. The engine core asks before it counts blocks, so it is told how many."""
        startup.override_blocks(vllm_config)
        return None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return EngineStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The scheduler's side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool
        self._hashes = self._hash_table()

    def _hash_table(self) -> Any:
        return getattr(self._pool, "cached_block_hash_to_block", None)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Nothing comes from elsewhere; None lets a request wait for room beside its blocks."""
        assert self._books is not None
        most = min(request.num_prompt_tokens + (request.max_tokens or 0), self._longest)
        if not self._books.admits(request.request_id, request.num_tokens, most):
            return None, False
        # One token alone may be a row of a captured step, whose replay brings no other rows: what
        # the request has found has to be stored before, so it may wait for a step.
        alone = request.num_tokens - num_computed_tokens == 1
        if alone and not self._stored(request, num_computed_tokens):
            return None, False
        self._most[request.request_id] = most
        return 0, False

    def _stored(self, request: Request, tokens: int) -> bool:
        """Whether rows of a prefix that was just found are all there."""
        assert self._books is not None
        if tokens == 0 or self._pool is None:
            return True
        last = request.block_hashes[tokens // self._block - 1]
        found = self._pool.get_cached_block(last, [0])
        return found is not None and self._books.stores(found[0].block_id)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Blocks are in the scheduler's output."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._books is not None
        # Workers then call start_load_kv before the forward pass or its replay, with the requests
        # in the order of the batch.
        scheduler_output.has_sync_kv_loads = True
        table = self._hash_table()
        reset = self._reset or table is not self._hashes
        self._hashes, self._reset = table, False
        step = step_of(
            scheduler_output, lambda name: self._most.pop(name, self._longest), reset=reset
        )
        for request in step.ended:
            self._most.pop(request, None)
        orders, forgotten = self._books.step(step)
        if forgotten and self._pool is not None:
            self._pool.evict_blocks(forgotten)
        return Metadata(orders)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def reset_cache(self) -> bool:
        """Parked sequences go in the next step, which `has_pending_push_work` asks for."""
        self._reset = True
        return True

    def has_pending_push_work(self) -> bool:
        """Whether a step without requests has something to tell the workers."""
        return self._reset or self._hash_table() is not self._hashes

    # A worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Pages of vLLM's that nobody writes: the engine is made now that the model is there."""
        assert self._worker is not None
        self._worker.start()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        requests: Sequence[str] = kwargs.get("request_ids", ())
        # Only a replay is told the attention's metadata here: else it is in the context.
        self._worker.begin(metadata.orders, requests, replay="attn_metadata" in kwargs)

    def finish_forward(self) -> None:
        assert self._worker is not None
        self._worker.end()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def reset_capture_state(self) -> None:
        assert self._worker is not None
        self._worker.captured()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._worker is not None:
            return self._worker.stats()
        return None

    def shutdown(self) -> None:
        if self._worker is not None:
            ranks.close(self._vllm_config)
