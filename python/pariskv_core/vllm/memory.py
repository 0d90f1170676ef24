"""How much memory a rank's engine may have where no budget is set."""

from __future__ import annotations

from typing import Any

import torch

from pariskv_core.cli import machine

from .available import Available, Limits, Width, activations, graphs, on_cpu, on_gpu
from .names import current_platform

_MOST_HOST = 0.9  # that is ever taken: it is pinned, and no other process can have it


def ranks_here(config: Any) -> int:
    """Ranks that share this machine's memory."""
    parallel = config.parallel_config
    return int(parallel.world_size * max(parallel.data_parallel_size_local, 1))


def available(config: Any, *, gpu: bool) -> Available:
    host = machine.available_memory()
    if not gpu:
        return on_cpu(host, ranks_here(config))
    free, total = _gpu_memory(config)
    share = config.cache_config.gpu_memory_utilization
    return on_gpu(free, total, share, _activations(config) + _graphs(config), host)


def most_host_memory() -> int:
    """Where nobody set host_budget, of all ranks of this machine."""
    return int(machine.available_memory() * _MOST_HOST)


def _gpu_memory(config: Any) -> tuple[int, int]:
    """Free and total bytes of the ranks' GPU that has least, once the model is loaded."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # one process for all
        return torch.cuda.mem_get_info()
    found = machine.gpus()
    numbers = [number for number in _gpus_of_ranks(config) if number < len(found)]
    if not numbers:
        raise RuntimeError(
            "[vllm] memory: expected nvidia-smi to say how much the GPUs have left, got nothing; "
            "set memory_budget and host_budget in --additional-config"
        )
    least = min((found[number] for number in numbers), key=lambda gpu: gpu.free)
    return least.free, least.total


def _gpus_of_ranks(config: Any) -> list[int]:
    """As nvidia-smi counts them: ranks are processes of their own, on some of a machine's GPUs."""
    parallel = config.parallel_config
    places = [parallel.get_local_gpu_index(rank) for rank in range(parallel.world_size)]
    assigned = parallel.assigned_physical_gpu_ids
    if assigned is not None:
        return [assigned[place] for place in places if place < len(assigned)]
    return [current_platform.device_id_to_physical_device_id(place) for place in places]


def _activations(config: Any) -> int:
    model, scheduler = config.model_config, config.scheduler_config
    width = Width(
        model.get_hidden_size(),
        getattr(model.hf_text_config, "intermediate_size", 0),
        model.get_vocab_size(),
    )
    limits = Limits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    return activations(width, limits, config.parallel_config.world_size)


def _graphs(config: Any) -> int:
    captured = config.compilation_config.cudagraph_capture_sizes or ()
    layers = config.model_config.get_num_layers(config.parallel_config)
    return graphs(len(captured), layers)
