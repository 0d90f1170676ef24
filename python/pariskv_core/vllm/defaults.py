"""vLLM's options where none are set, and what to change where memory lacks. vLLM is not loaded."""

from __future__ import annotations

from pariskv_core.serving.memory import Limits

UTILIZATION = 0.92  # --gpu-memory-utilization
_MOST_CAPTURED = 512  # tokens of a step
_GIB = 1 << 30


def captures(sequences: int) -> int:
    """Sizes of a step that vLLM captures where none are set: up to twice as many tokens as there
    may be requests, in steps of 8 and then of 16, and one token for each request."""
    most = min(2 * sequences, _MOST_CAPTURED)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, _MOST_CAPTURED + 1, 16), sequences}
    return sum(size <= most for size in sizes)


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


def lacking(reason: ValueError) -> str:
    """What `plan` of sizes says, and the options that change it."""
    said = str(reason).removeprefix("[plan] memory: ")
    rest = "raise memory_budget or host_budget in --additional-config, or lower --max-model-len"
    return f"{said}; {rest}"
