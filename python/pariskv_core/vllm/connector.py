"""The connector: tells the workers' engines of every decision of vLLM's scheduler.

It moves no data. On the scheduler's side it keeps the books and sends orders; on a worker's side it
carries them out before the forward pass, or before the replay of a captured one.
"""

from __future__ import annotations

from typing import Any

import torch

from pariskv_core.serving import Books, ErrorSum, Orders, add_up

from . import allowed, names, ranks, startup
from .backend import replayed
from .metrics import EngineStats, PromMetrics, scheduler_stats
from .names import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from .options import Options
from .pool import Pool
from .scheduling import Scheduling
from .worker import Worker


class Metadata(KVConnectorMetadata):
    def __init__(self, orders: Orders) -> None:
        self.orders = orders


class Errors(KVConnectorWorkerMetadata):
    """Of searches, by request: what a rank tells the scheduler."""

    def __init__(self, of_requests: dict[str, ErrorSum]) -> None:
        self.of_requests = of_requests

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Errors:
        """Ranks have other kv heads of the same steps."""
        assert isinstance(other, Errors)
        add_up(self.of_requests, other.of_requests)
        return self


class PariskvConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = Options(vllm_config)
        cache = names.CacheGroups(kv_cache_config)
        wish = startup.asked(options, cache)
        allowed.check_caches(cache.specs)
        if cache.block != wish.block:
            raise RuntimeError(
                f"[vllm] blocks: expected {wish.block} tokens, got {cache.block}; set --block-size "
                f"{wish.block}"
            )
        self._worker: Worker | None = None
        self._scheduling: Scheduling | None = None
        if role == KVConnectorRole.WORKER:
            blocks = cache.blocks if cache.own is None else None
            self._worker = Worker(vllm_config, wish, cache.layers, blocks)
            return
        plan = startup.plan_of(options, wish)
        if cache.own is None:
            startup.check_blocks(cache.blocks, plan)
        self._cache, self._blocks = cache, plan.blocks
        books = Books(wish.block, plan.make_room(), prefixes=options.prefixes)
        self._scheduling = Scheduling(books, wish.block, options.longest)

    # What vLLM asks of the class.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Any layout. The engine core asks before it counts blocks, so it is told how many."""
        startup.override_blocks(Options(vllm_config))
        return None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> EngineStats | None:
        return EngineStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The scheduler's side.

    @property
    def scheduling(self) -> Scheduling:
        assert self._scheduling is not None, "this is a worker's side"
        return self._scheduling

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduling.bind(Pool(kv_cache_manager, self._cache, self._blocks))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Nothing comes from elsewhere; None lets a request wait, and vLLM ask for the next."""
        admitted = self.scheduling.admits(request, num_computed_tokens)
        return (None if admitted is None else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduling.entered(request)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        names.load_before_pass(scheduler_output)
        return Metadata(self.scheduling.decide(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        told = names.told_by_workers(connector_output)
        if isinstance(told, Errors):
            self.scheduling.errors_of.add(told.of_requests)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Nothing has to be kept. What is returned is in the answer, as `kv_transfer_params`."""
        error = self.scheduling.errors_of.answer(request.request_id)
        if error is None:
            return False, None
        told = {"mean_error": error.mean, "worst_error": error.worst}
        return False, {"pariskv": {**told, "searched_tokens": error.steps}}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        """Parked sequences go in the next step, which `has_pending_push_work` asks for."""
        self.scheduling.reset()
        return True

    def has_pending_push_work(self) -> bool:
        """Whether a step without requests has something to tell the workers."""
        return self.scheduling.pending

    # A worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Pages of vLLM's that nobody writes: the engine is made now that the model is there."""
        assert self._worker is not None
        self._worker.start()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        requests, of_layers = names.pass_of(kwargs)
        graph = None if of_layers is None else replayed(of_layers)
        self._worker.begin(metadata.orders, requests, None if graph is None else graph.width)
        if graph is not None:
            graph.schedule()

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

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.lost()

    def build_connector_worker_meta(self) -> Errors | None:
        assert self._worker is not None
        errors = self._worker.errors()
        return Errors(errors) if errors else None

    def get_kv_connector_stats(self) -> EngineStats | None:
        if self._worker is not None:
            return self._worker.stats()
        return scheduler_stats(self.scheduling.errors())

    def shutdown(self) -> None:
        if self._worker is not None:
            ranks.close(self._vllm_config)
