"""Two ranks under transformers' own tensor parallelism: each has the engine for its own heads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import COMMON, SETTINGS, distinct, generated, model, ragged

HERE = Path(__file__).resolve().parent
RANKS = 2


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[dict]:
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    folder = tmp_path_factory.mktemp("model")
    results = tmp_path_factory.mktemp("results")
    model("llama").save_pretrained(folder)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        + [str(RANKS), str(HERE / "rank.py"), str(folder), str(results)],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(RANKS)]


# One test, so that no two workers start ranks.
def test_ranks_have_the_tokens_of_one_process_and_their_own_heads_within_their_budget(told):
    inputs = ragged()
    expected = generated(model("llama"), inputs)
    assert distinct(expected, inputs["input_ids"].shape[1]) >= 20
    for name in SETTINGS:
        for rank in told:
            assert rank[name]["equal"]
            assert rank[name]["tokens"] == expected.tolist()
            assert rank[name]["kv_heads"] == COMMON["num_key_value_heads"] // RANKS
            assert rank[name]["query_heads"] == COMMON["num_attention_heads"] // RANKS
            assert rank[name]["host_budget"] == 64 << 20
            assert (rank[name]["searched"] > 0) == (name == "searching")
