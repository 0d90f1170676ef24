"""The rank of this process in each of vLLM's engines, and whether one is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pariskv_core.serving import Engine

from .options import Options
from .versions import NAME, role


@dataclass
class Found:
    rank: Engine
    layers: dict[str, int]  # of vLLM's names: the engine's number


_ranks: dict[str, Found] = {}


def asked_for(config: Any) -> bool:
    """Whether vLLM's configuration has our connector."""
    return Options(config).connector == NAME


def check(config: Any) -> None:
    if not asked_for(config):
        wanted = role(multimodal=Options(config).multimodal)
        raise ValueError(
            f"[vllm] --attention-backend CUSTOM: expected the connector {NAME} beside it: "
            f'--kv-transfer-config \'{{"kv_connector": "{NAME}", "kv_role": "{wanted}"}}\''
        )


def of(config: Any) -> Found | None:
    if not asked_for(config):
        return None
    return _ranks.get(Options(config).engine)


def keep(config: Any, found: Found) -> None:
    _ranks[Options(config).engine] = found


def close(config: Any) -> None:
    found = _ranks.pop(Options(config).engine, None)
    if found is not None:
        found.rank.close()
