"""Which versions of vLLM are served. Its interfaces change from one to the next."""

from __future__ import annotations

import re
from typing import Any

OLDEST = (0, 32)
BEYOND = (0, 34)


def refusal(version: str) -> str | None:
    """Why this version is not served; None: it is."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and OLDEST <= (int(found[1]), int(found[2])) < BEYOND:
        return None
    oldest, beyond = (".".join(map(str, bound)) for bound in (OLDEST, BEYOND))
    return (
        f"[vllm] version: expected vllm>={oldest},<{beyond}, got {version}; install such "
        f"a version, or leave the connector {NAME} out"
    )


def engine_of(config: Any) -> str:
    """The name of one engine of vLLM, in all of its processes.

    `instance_id` is none: vLLM sets it anew when its engine core is there.
    """
    return str(config.kv_transfer_config.engine_id)


NAME = "ParisKV"  # of the connector: --kv-transfer-config '{"kv_connector": "ParisKV", ...}'
