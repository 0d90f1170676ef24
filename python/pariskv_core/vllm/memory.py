"""How much memory a rank's engine may have where no budget is set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.platforms import current_platform

from pariskv_core.cli import machine

_CPU_SHARE = 0.5  # of what is available once the model is loaded: vLLM works in the rest
_HOST_SHARE = 0.8  # beside a GPU, that blocks are counted for
_MOST_HOST = 0.9  # that is ever taken: it is pinned, and no other process can have it
_GRAPHS = 1 << 30  # of a GPU: captured graphs, and what the runtime takes
_LIVE = 3  # tensors as wide as the widest of a layer that are alive at once


@dataclass(frozen=True)
class Available:
    device: int  # of one rank
    host: int  # of all ranks of this machine


def ranks_here(config: Any) -> int:
    """Ranks that share this machine's memory."""
    parallel = config.parallel_config
    return int(parallel.world_size * max(parallel.data_parallel_size_local, 1))


def available(config: Any, *, gpu: bool) -> Available:
    host = machine.available_memory()
    if not gpu:
        return Available(int(host * _CPU_SHARE) // ranks_here(config), 0)
    free, total = _gpu_memory(config)
    share = config.cache_config.gpu_memory_utilization
    room = int(total * share) - (total - free) - _activations(config) - _GRAPHS
    return Available(max(room, 0), int(host * _HOST_SHARE))


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
    """Bytes that a forward pass takes, generously: vLLM measures them only later."""
    model, scheduler = config.model_config, config.scheduler_config
    text = model.hf_text_config
    widest = max(
        getattr(text, "intermediate_size", 0) * 2 // config.parallel_config.world_size,
        model.get_hidden_size(),
    )
    rows = scheduler.max_num_batched_tokens * widest * 2
    logits = scheduler.max_num_seqs * model.get_vocab_size() * 4
    return int((rows + logits) * _LIVE)
