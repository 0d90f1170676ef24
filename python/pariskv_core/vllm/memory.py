"""How much memory a rank's engine may have where no budget is set."""

from __future__ import annotations

import torch

from pariskv_core import _machine as machine
from pariskv_core.serving import HostShare, memory

from .options import Options

_MOST_HOST = 0.9  # that is ever taken: it is pinned, and no other process can have it


def available(options: Options) -> memory.Available:
    host = _free_host_memory(options)
    if not options.on_gpu:
        return memory.on_cpu(host, options.ranks_here)
    free, total = gpu_memory(options)
    limits = memory.Limits(options.sequences, options.chunk)
    working = memory.activations(memory.Width(*options.width), limits, options.ranks)
    working += memory.graphs(options.captured, options.layers)
    return memory.on_gpu(free, total, options.utilization, working, host, _own_gpu_memory())


def of_others(options: Options, block: int, device: int) -> memory.Others:
    """What layers that remain vLLM's take of so many bytes of a rank's GPU."""
    counts = options.layer_counts
    linear = counts.get("linear_attention", 0)
    sliding = sum(counts[kind] for kind in options.other_kinds) - linear
    layers = memory.Layers(
        options.layers, sliding, options.window, options.token_bytes, linear, options.states
    )
    limits = memory.Limits(options.sequences, options.chunk)
    return memory.others(layers, limits, block, device, options.blocks)


def most_host_memory(options: Options) -> int:
    """Where nobody set host_budget, of all ranks of this machine."""
    return int(_free_host_memory(options) * _MOST_HOST)


def _free_host_memory(options: Options) -> int:
    """Without what other servers have counted for their blocks, and not taken yet."""
    free = machine.available_memory()
    if not options.on_gpu:
        return free
    return max(free - HostShare(options.server, options.engine).of_others(), 0)


def _own_gpu_memory() -> int | None:
    """Of this server's tensors, where this process has them: ranks are processes of their own."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.memory_reserved()


def gpu_memory(options: Options) -> tuple[int, int]:
    """Free and total bytes of the ranks' GPU that has least, once the model is loaded."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # one process for all
        return torch.cuda.mem_get_info()
    found = machine.gpus()
    # Ranks are processes of their own, on some of a machine's GPUs.
    numbers = [number for number in options.gpus() if number < len(found)]
    if not numbers:
        raise RuntimeError(
            "[vllm] memory: expected nvidia-smi to say how much the GPUs have left, got nothing; "
            "set memory_budget and host_budget in --additional-config"
        )
    least = min((found[number] for number in numbers), key=lambda gpu: gpu.free)
    return least.free, least.total
