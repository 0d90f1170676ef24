"""What docs/transformers.md shows runs."""

from __future__ import annotations

import copy
import re
from pathlib import Path

from tiny import CACHE, model, prompt

PAGE = Path(__file__).resolve().parents[2] / "docs/transformers.md"


def test_the_examples_of_the_page_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    longer = prompt(1, 70)
    longer["input_ids"][:, :60] = prompt()["input_ids"]
    scope = {"model": copy.deepcopy(model("llama")), "inputs": prompt(), "questions": [longer]}
    for block in blocks:
        # The page has the name of 5.24, and says which one older versions have.
        exec(block.replace("cache=", f"{CACHE}="), scope)
    assert scope["first"].shape == (1, 80)
    assert scope["answer"].shape == (1, 90)
    assert scope["prefix"].get_seq_length() == 60
