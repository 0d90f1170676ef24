"""The rank of this process in each of vLLM's engines, and whether one is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .names import engine_of
from .rank import Rank
from .versions import NAME


@dataclass
class Found:
    rank: Rank
    layers: dict[str, int]  # of vLLM's names: the engine's number


_ranks: dict[str, Found] = {}


def asked_for(config: Any) -> bool:
    """Whether vLLM's configuration has our connector."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == NAME


def check(config: Any) -> None:
    if not asked_for(config):
        raise ValueError(
            f"[vllm] --attention-backend CUSTOM: expected the connector {NAME} beside it: "
            f'--kv-transfer-config \'{{"kv_connector": "{NAME}", "kv_role": "kv_both"}}\''
        )


def of(config: Any) -> Found | None:
    if not asked_for(config):
        return None
    return _ranks.get(engine_of(config))


def keep(config: Any, found: Found) -> None:
    _ranks[engine_of(config)] = found


def close(config: Any) -> None:
    found = _ranks.pop(engine_of(config), None)
    if found is not None:
        found.rank.close()
