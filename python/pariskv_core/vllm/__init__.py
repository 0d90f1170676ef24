"""The engine under vLLM, versions 0.32 and 0.33. vLLM is not edited.

vLLM finds the plugin by itself once this package is installed beside it. It does nothing until it
is asked for:

vllm serve MODEL --attention-backend CUSTOM \\
    --kv-transfer-config '{"kv_connector": "ParisKV", "kv_role": "kv_both"}'
"""

from __future__ import annotations

from .versions import NAME

__all__ = ["NAME", "register"]


def register() -> None:
    """What vLLM calls in each of its processes, as often as it likes: names, and nothing else."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    try:
        KVConnectorFactory.register_connector(NAME, f"{__name__}.connector", "PariskvConnector")
    except ValueError:  # registered before
        return
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.backend.Backend")
    # The platform of CPUs takes no other backend than this one; `on_cpu` hands vLLM's own out
    # unless the connector is asked for.
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.on_cpu.Backend")
