"""A short form of `make soak-vllm`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GRACE, HERE, environment


@pytest.mark.parametrize("kind", ["plain", "mixed"])
def test_a_load_leaves_nothing_and_answers_as_each_prompt_alone(kind: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "soak.py"), "20", str(tmp_path / "model"), kind],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=GRACE,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
