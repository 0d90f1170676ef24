"""The engine under vLLM, versions 0.32 and 0.33. vLLM is not edited.

vLLM finds the plugin by itself once this package is installed beside it. It does nothing until it
is asked for:

vllm serve MODEL --attention-backend CUSTOM \\
    --kv-transfer-config '{"kv_connector": "ParisKV", "kv_role": "kv_both"}'
"""

from __future__ import annotations

import logging

from .versions import NAME

__all__ = ["NAME", "register"]


def register() -> None:
    """What vLLM calls in each of its processes, as often as it likes: names, and nothing else."""
    from . import names, versions

    wrong = versions.refusal(versions.installed())
    if wrong:  # a server that does not ask for the plugin is none of our business
        logging.getLogger("vllm.pariskv").warning(wrong)
        return
    try:
        names.KVConnectorFactory.register_connector(
            NAME, f"{__name__}.connector", "PariskvConnector"
        )
    except ValueError:  # registered before
        return
    backends = names.AttentionBackendEnum
    names.register_backend(backends.CUSTOM, f"{__name__}.backend.Backend")
    # The platform of CPUs takes no other backend than this one; `on_cpu` hands vLLM's own out
    # unless the connector is asked for.
    names.register_backend(backends.CPU_ATTN, f"{__name__}.on_cpu.Backend")
