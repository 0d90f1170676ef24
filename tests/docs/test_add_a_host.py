"""The host of docs/add-a-host.md runs, and its answers are those of full attention."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs/add-a-host.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def host() -> Any:
    torch.manual_seed(5)
    names: dict[str, Any] = {}
    for text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        exec(compile(text, PAGE.name, "exec"), names)
    return names


def answer(host: Any, prompt: list[int], count: int) -> list[int]:
    """What the page's model says without a cache: all tokens again for each new one."""
    tokens = list(prompt)
    parts = [host["HEADS"], host["KV_HEADS"], host["KV_HEADS"]]
    for _ in range(count):
        x = host["embed"][tokens]
        for project in host["project"]:
            heads = (x @ project).view(len(tokens), sum(parts), host["DIM"]).transpose(0, 1)
            out = torch.nn.functional.scaled_dot_product_attention(
                *heads[None].split(parts, dim=1), is_causal=True, enable_gqa=True
            )
            x = out[0].transpose(0, 1).flatten(1)
        tokens.append(int((x[-1] @ host["embed"].T).argmax()))
    return tokens[len(prompt) :]


def test_its_answers_are_those_of_full_attention(host: Any) -> None:
    document = torch.randint(100, (300,)).tolist()
    prompts = {"first": document, "longer": [*document, 7], "shorter": document[:200], "other": [5]}
    requests = [host["Request"](name, prompt, 30) for name, prompt in prompts.items()]
    host["serve"](requests[:1])
    host["serve"](requests[1:])
    said = [one.tokens[len(prompts[one.name]) :] for one in requests]
    assert said == [answer(host, prompt, 30) for prompt in prompts.values()]
    assert min(len(set(tokens)) for tokens in said) > 5, "else it says little"
    assert host["books"].counts.hits == 2, "of the document's blocks"
    assert host["engine"].sequences.forks == 2
    assert host["books"].running == 0


def test_it_is_short() -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 80
