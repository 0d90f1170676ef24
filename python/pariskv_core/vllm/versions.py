"""Which versions of vLLM are served. Its interfaces change from one to the next."""

from __future__ import annotations

import re

OLDEST = (0, 32)
BEYOND = (0, 34)
NAME = "ParisKV"  # of the connector: --kv-transfer-config '{"kv_connector": "ParisKV", ...}'


def role(*, multimodal: bool) -> str:
    """The kv_role of --kv-transfer-config. multimodal: prompts may have more than text.

    vLLM takes "kv_both" for a server that gets pictures as embeddings, from another one: it would
    accept a request that has none, and end by it.
    """
    return "kv_producer" if multimodal else "kv_both"


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


def installed() -> str:
    """The version of the vLLM of this process, of which nothing else is looked at."""
    import vllm

    return str(vllm.__version__)


def check() -> None:
    wrong = refusal(installed())
    if wrong:
        raise RuntimeError(wrong)
