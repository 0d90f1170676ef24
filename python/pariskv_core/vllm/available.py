"""How much memory an engine may have where no budget is set, from numbers alone.

The plugin has the numbers from vLLM's configuration, `pariskv plan` from a model's files: both
count alike. Nothing of vLLM is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

_GRAPH = 1 << 20  # of one layer in one captured graph: .74 to .86 MiB were measured
_RUNTIME = 1 << 28  # of a GPU, whatever is captured
_MOST_CAPTURED = 512  # tokens of a step that vLLM captures by default
_HOST_SHARE = 0.8  # of what is free beside a GPU, that blocks are counted for
CPU_SHARE = 0.5  # of what is free once the model is loaded: vLLM works in the rest
_LIVE = 3  # tensors as wide as the widest of a layer that are alive at once

UTILIZATION = 0.92  # vLLM's default of --gpu-memory-utilization
_GIB = 1 << 30


@dataclass(frozen=True)
class Available:
    device: int  # of one rank
    host: int = 0  # of all ranks of this machine


@dataclass(frozen=True)
class Width:
    """Of a model, in numbers: hidden_size, intermediate_size and vocab_size of its config."""

    hidden: int
    intermediate: int
    vocabulary: int


@dataclass(frozen=True)
class Limits:
    """Of a step of vLLM.

    sequences  requests: max_num_seqs
    chunk      new tokens: max_num_batched_tokens
    """

    sequences: int
    chunk: int


def activations(width: Width, limits: Limits, ranks: int = 1) -> int:
    """Bytes that a forward pass takes, generously: vLLM measures them only later."""
    widest = max(width.intermediate * 2 // ranks, width.hidden)
    rows = limits.chunk * widest * 2
    logits = limits.sequences * width.vocabulary * 4
    return (rows + logits) * _LIVE


def captures(sequences: int) -> int:
    """Sizes of a step that vLLM captures where none are set: up to twice as many tokens as there
    may be requests, in steps of 8 and then of 16, and one token for each request."""
    most = min(2 * sequences, _MOST_CAPTURED)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, _MOST_CAPTURED + 1, 16), sequences}
    return sum(size <= most for size in sizes)


def graphs(captured: int, layers: int) -> int:
    """Bytes of a GPU that captured graphs take, and the runtime beside them."""
    return captured * layers * _GRAPH + _RUNTIME


def on_gpu(free: int, total: int, utilization: float, working: int, host: int) -> Available:
    """
    free, total  bytes of the GPU, once the model is loaded
    working      of activations and graphs
    host         bytes of host memory that are free
    """
    room = int(total * utilization) - (total - free) - working
    return Available(max(room, 0), int(host * _HOST_SHARE))


def on_cpu(free: int, ranks: int = 1) -> Available:
    return Available(int(max(free, 0) * CPU_SHARE) // ranks)


def default_limits(
    memory: int, name: str, *, gpu: bool, longest: int, sequences: int | None = None
) -> Limits:
    """Those of `vllm serve` where only `sequences` may be set.

    memory, name  of the GPU
    longest       tokens of a request: max_model_len
    """
    if not gpu:
        limits = Limits(128, 2048)
    elif memory >= 160 * _GIB:
        limits = Limits(1024, 16384)
    elif memory >= 70 * _GIB and "a100" not in name.lower():
        limits = Limits(1024, 8192)
    else:
        limits = Limits(256, 2048)
    chunk = min(limits.chunk, (sequences or limits.sequences) * longest)
    return Limits(sequences or min(limits.sequences, chunk), chunk)
