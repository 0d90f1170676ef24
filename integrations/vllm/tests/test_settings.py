"""Rows in 8 bits and the other policies, inside vLLM: whole prompts stay exact, steps search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Job, asked_for, run, small_engine

# Of `ragged`: prompts that come in one chunk.
WHOLE = [0, 1, 2, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("options", "settings", "made"),
    [
        ({"kv_cache_dtype": "int8_per_token_head"}, {}, ("int8", "ParisKV")),
        ({"kv_cache_dtype": "fp8"}, {}, ("int8", "ParisKV")),
        ({}, {"policy": {"name": "hardkv", "most": 64}}, ("auto", "HardKV")),
        ({}, {"policy": {"name": "prkv", "budget": 128}}, ("auto", "PRKV")),
    ],
    ids=["int8", "fp8", "hardkv", "prkv"],
)
def test_an_engine_with_other_settings_serves(
    engine: Job,
    tiny: Path,
    tmp_path: Path,
    options: dict[str, Any],
    settings: dict[str, Any],
    made: tuple[str, str],
) -> None:
    chosen = asked_for({"dense_below": 300, "local": 64, "update": 64, **settings})
    job = {"engine": {**small_engine(tiny), **chosen, **options}, "work": ["ragged", "reset"]}
    found = run(job, tmp_path)
    [end] = found["end"]
    assert (end["kv_dtype"], end["policy"]) == made
    assert end["decode_tokens"] > 0
    assert end["searched_tokens"] > 0 or made[1] == "HardKV", "it keeps rows, and never searches"
    assert end["sequences"] == 0
    stock = engine(plugin=False)
    first = [tokens[0][0] for tokens in found["ragged"]]
    exact = [tokens[0][0] for tokens in stock["ragged"]]
    assert [first[i] for i in WHOLE] == [exact[i] for i in WHOLE]
    assert found["ragged"] != stock["ragged"], "nothing was left out"
