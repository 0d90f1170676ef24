"""A worker's side of the connector: makes the rank's engine, and runs it beside the model."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import pariskv_core as pk
from pariskv_core.serving import Engine, ErrorSum, HostShare, Orders, sizes

from . import allowed, flash, ranks, startup
from .metrics import EngineStats, Reporter
from .names import init_logger
from .options import Options

logger = init_logger("vllm.pariskv")

_READY = 15 / 16  # of the budget: the rest are blocks too large for a piece of it
_STATS_SECONDS = 1.0  # between two reports


class Worker:
    def __init__(
        self, config: Any, wish: startup.Asked, layer_names: Sequence[str], blocks: int | None
    ) -> None:
        """blocks  of vLLM's pool; None: the engine's are of its own, and follow from what is left
        once vLLM has the memory of other layers"""
        self._config = config
        self._options = Options(config)
        allowed.check_layers(self._options.layer_kinds(layer_names))
        self._wish = wish
        self._blocks = blocks
        shared = self._options.shared_layers()
        own = [name for name in layer_names if name not in shared]
        self._layers = {name: index for index, name in enumerate(own)}
        if len(self._layers) != wish.config.layers:
            raise NotImplementedError(
                f"[vllm] model: expected {wish.config.layers} layers of attention, got "
                f"{len(self._layers)}; serve this model without the plugin's options"
            )
        for name, target in shared.items():
            if target in self._layers:
                self._layers[name] = self._layers[target]
        self._rank: Engine | None = None
        self._reporter = Reporter(self._options.rank)
        part = f"{self._options.engine}-{self._options.rank}"
        self._host_share = HostShare(self._options.server, part)
        self._reported = 0.0
        self._pins = False  # host memory, in the background
        self._lost: set[int] = set()  # blocks of the present step

    @property
    def rank(self) -> Engine:
        assert self._rank is not None, "start() comes first"
        return self._rank

    def start(self) -> None:
        settings, config = self._wish.settings, self._wish.config
        blocks = self._blocks or startup.plan_of(self._options, self._wish).blocks
        if config.device == "cpu":
            threads = settings.threads or torch.get_num_threads()
            config = config.replace(threads=threads)
        else:
            budgets = startup.rank_budgets(self._options, self._wish, blocks)
            config = config.replace(
                device=torch.device("cuda", torch.cuda.current_device()),
                memory_budget=budgets.device,
                host_budget=budgets.host,
            )
        with _all_cores():
            self._rank = Engine(config)
            if settings.report_error:
                self._rank.tell_errors(self._options.widest)
            if flash.version_of(self._options) is not None:
                self._rank.open_pages(self._options.widest, self._options.longest)
            if self._options.on_gpu:
                budgets = sizes.Budgets(config.memory_budget, config.host_budget)
                self._take_memory(self._rank.cache, blocks, budgets)
        ranks.keep(self._config, ranks.Found(self._rank, self._layers))
        logger.info("The engine: %s", config)

    def _take_memory(self, cache: pk.Cache, blocks: int, budgets: sizes.Budgets) -> None:
        """No prompt waits for it later: the GPU's at once, as vLLM does, and host memory in the
        background."""
        begin, ready = time.monotonic(), int(budgets.device * _READY)
        try:
            cache.reserve_device(ready)
        except (pk.OutOfMemory, ValueError) as reason:
            logger.info("GPU memory is taken as requests need it: %s", reason)
        else:
            seconds = time.monotonic() - begin
            logger.info("%.1f GB of GPU memory are ready, after %.1f s.", ready / 1e9, seconds)
        ahead = startup.pinned_ahead(self._options, self._wish, blocks, budgets)
        if ahead > 0:
            cache.reserve_host(ahead, background=True)
            self._pins = True
            logger.info("%.1f GB of host memory are pinned in the background.", ahead / 1e9)

    def begin(self, orders: Orders, requests: Sequence[str], replayed: int | None) -> None:
        self._lost = set(orders.lost)
        self.rank.begin(orders, requests, replayed=replayed)

    def end(self) -> None:
        self.rank.end()

    def captured(self) -> None:
        self.rank.lanes.captured()

    def lost(self) -> set[int]:
        """Blocks whose rows are not there: asked for once after each pass."""
        lost, self._lost = self._lost, set()
        return lost

    def errors(self) -> dict[str, ErrorSum]:
        """Of searches, by request, since the last call."""
        told = None if self._rank is None else self._rank.errors
        return {} if told is None else told.take()

    def stats(self) -> EngineStats | None:
        now = time.monotonic()
        if self._rank is None or now < self._reported + _STATS_SECONDS:
            return None
        self._reported = now
        stats = self._rank.cache.stats(counted=True)
        if self._options.on_gpu:
            self._host_share.take(stats.host_memory.reserved)
            self._say_what_is_ready(stats.host_memory)
        return self._reporter.report(stats, len(self._rank.sequences))

    def _say_what_is_ready(self, host: pk.MemoryUse) -> None:
        if self._pins and host.coming == 0:
            self._pins = False
            logger.info("%.1f GB of host memory are ready.", host.reserved / 1e9)


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """Threads inherit the core that vLLM has bound this one to; the engine's need their own."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    bound = os.sched_getaffinity(0)
    cores = set[int]()
    for thread in os.listdir("/proc/self/task"):  # OpenMP's, one core each
        with contextlib.suppress(OSError):
            cores |= os.sched_getaffinity(int(thread))
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)
