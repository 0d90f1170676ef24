"""The tutorial runs from top to bottom, and prints what it shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).resolve().parents[2] / "docs/tutorial.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def blocks() -> list[tuple[str, str]]:
    return BLOCK.findall(TUTORIAL.read_text(encoding="utf-8"))


def test_it_prints_what_it_shows(blocks: list[tuple[str, str]]) -> None:
    names: dict[str, object] = {}
    printed = ""
    shown = 0
    for language, text in blocks:
        if language == "text":
            assert printed == text
            printed = ""
            shown += 1
            continue
        assert printed == "", f"printed and not shown: {printed}"
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(text, TUTORIAL.name, "exec"), names)
        printed = out.getvalue()
    assert printed == ""
    assert shown >= 8
