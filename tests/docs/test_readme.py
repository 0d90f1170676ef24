"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys

import pariskv_core as pk
import pytest
import support_table

TEXT = support_table.README.read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    assert len(found) == 1
    return found[0]


def test_the_support_table_is_up_to_date() -> None:
    assert support_table.present() == support_table.table(), (
        "run: python tests/docs/support_table.py --write"
    )


def test_the_python_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", block("python")], capture_output=True, text=True, check=True
    )
    assert "(1, 8, 64)" in done.stdout
    assert "attends to" in done.stdout


def test_the_error_shown_is_the_error_raised() -> None:
    import numpy as np

    cache = pk.Cache(
        pk.Config(layers=1, query_heads=8, kv_heads=2, head_dim=64, dtype="float16", threads=1)
    )
    with pytest.raises(ValueError, match="q: expected") as raised:
        cache.decode(
            0,
            [cache.add()],
            np.zeros((1, 4, 64), np.float16),
            np.zeros((1, 2, 64), np.float16),
            np.zeros((1, 2, 64), np.float16),
        )
    assert f"ValueError: {raised.value}" in TEXT
