"""On a CPU vLLM has one backend, whatever is asked for. `Backend` here is ours or vLLM's own.

The registry has this module's name in place of the class of CPU_ATTN, and looks `Backend` up when a
model is made: ours where the connector is configured, else vLLM's.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import names, ranks

    config = names.get_current_vllm_config_or_none()
    if config is None or not ranks.asked_for(config):
        return names.CPUAttentionBackend
    from . import cpu_backend, options

    beside = options.Options(config).beside
    return cpu_backend.CpuBesideBackend if beside else cpu_backend.CpuBackend
