"""A pretrained model over 7,000 tokens, searching in every step, beside stock vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import asked_for, run

ROOT = Path(__file__).resolve().parents[3]
LAYERS = 30


@pytest.fixture(scope="module")
def found(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("quality")
    pages = sorted((ROOT / "docs").glob("*.md")) + [ROOT / "DESIGN.md", ROOT / "README.md"]
    (folder / "text").write_text("\n\n".join(page.read_text() for page in pages)[:60_000])
    made = {}
    for name in ("stock", "ours"):
        arguments: dict[str, Any] = {
            "model": str(smollm),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 8192,
            "kv_cache_memory_bytes": 3 << 30,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 8,
            "max_logprobs": -1,
        }
        if name == "ours":
            arguments.update(asked_for({}))
        own = folder / name
        own.mkdir()
        job = {
            "engine": arguments,
            "work": ["facts", "distributions"],
            "text": str(folder / "text"),
            "distributions": str(own / "distributions.npy"),
        }
        made[name] = run(job, own)
        made[name]["logprobs"] = np.load(own / "distributions.npy")
    return made


def test_every_step_searches(found: dict[str, dict[str, Any]]) -> None:
    [rank] = found["ours"]["end"]
    assert rank["searched_tokens"] == rank["decode_tokens"] > 24 * LAYERS
    assert rank["forks"] > 20


def test_facts_are_found_as_often_as_by_stock_vllm(found: dict[str, dict[str, Any]]) -> None:
    ours, stock = found["ours"]["facts"], found["stock"]["facts"]
    print(f"facts that were found: ours {ours}, stock {stock}")
    assert sum(ours) >= sum(stock) >= 4


def test_distributions_are_nearly_those_of_stock_vllm(found: dict[str, dict[str, Any]]) -> None:
    assert found["ours"]["distributions"] == found["stock"]["distributions"], "exact prompts"
    ours, stock = (found[name]["logprobs"].astype(np.float64) for name in ("ours", "stock"))
    divergence = (np.exp(stock) * (stock - ours)).sum(axis=1)
    print(f"KL: mean {divergence.mean():.5f}, worst {divergence.max():.5f}")
    assert divergence.mean() < 0.005
    assert divergence.max() < 0.05
