"""Ten thousand requests beside the engine, without a model."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "tests/python"))

from test_vllm_memory import short_requests


def test_10000_short_requests_stay_within_what_blocks_promise() -> None:
    short_requests(10_000)
