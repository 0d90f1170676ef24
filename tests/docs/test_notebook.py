"""The notebooks run from top to bottom, and print what they show."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_prints_what_it_shows(notebook: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="waits for matplotlib")
    pyplot.switch_backend("agg")
    names: dict[str, object] = {}
    shown = 0
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), notebook.name, "exec"), names)
        texts = [each["text"] for each in cell["outputs"] if each["output_type"] == "stream"]
        assert out.getvalue() == "".join("".join(text) for text in texts)
        pictures = [each for each in cell["outputs"] if "image/png" in each.get("data", {})]
        assert len(pictures) == len(pyplot.get_fignums())
        pyplot.close("all")
        shown += len(texts) + len(pictures)
    assert shown > 3


def test_there_is_one() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["where-a-step-looks"]
