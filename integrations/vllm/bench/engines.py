"""What the programs of this folder ask of vLLM, with the engine and without."""

from __future__ import annotations

from typing import Any

CONNECTOR = {"kv_connector": "ParisKV", "kv_role": "kv_both"}
# Full decode graphs and nothing compiled: a server is up in a minute.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def asked_for(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vllm.LLM for the engine with these settings."""
    return {
        "attention_backend": "CUSTOM",
        "kv_transfer_config": CONNECTOR,
        "additional_config": {"pariskv": settings},
    }
