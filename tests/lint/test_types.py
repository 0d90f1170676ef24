"""What a type checker finds and what it lets pass: the stub is as narrow as the calls are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "layers=1, query_heads=1, kv_heads=1, head_dim=64"
BEGIN = """\
from typing import Any
import numpy as np
import torch
import pariskv_core as pk
import pariskv_core.transformers as pkt
model: Any = None
cache = pk.Cache(pk.Config(layers=1, query_heads=1, kv_heads=1, head_dim=64))
"""
WRONG = {
    f'pk.Config({SHAPE}, device="gpu")': "device",
    f'pk.Config({SHAPE}, dtype="fp16")': "dtype",
    f'pk.Config({SHAPE}, placement="hosts")': "placement",
    f'pk.Config({SHAPE}, kv_dtype="int4")': "kv_dtype",
    f"pk.Config({SHAPE}, memory_budget=4.5)": "memory_budget",
    f"pk.Config({SHAPE}, topk=3)": "topk",
    'pk.ParisKV(scorer="signnorm")': "scorer",
    'pk.ParisKV().replace(tail="samples")': "tail",
    "pk.ParisKV().replace(topk=3)": "topk",
    "cache.config.replace(placment='host')": "placment",
    'pk.PRKV(static_share="own")': "static_share",
    "pkt.attach(model, polcy=3)": "polcy",
    'pkt.attach(model, kv_dtype="int4")': "kv_dtype",
    "pkt.PariskvCache(model.config, topk=3)": "topk",
    'cache.attend(0, [0], np.zeros(3), precision="quick")': "precision",
}
RIGHT = [
    f'pk.Config({SHAPE}, device="cuda:1", dtype="float16", memory_budget="4GB")',
    f'pk.Config({SHAPE}, device=torch.device("cuda", 1), dtype=torch.bfloat16)',
    f"pk.Config({SHAPE}, dtype=np.float16)",
    f'pk.Config({SHAPE}, dtype=np.dtype("float32"), memory_budget=1 << 30)',
    "cache.config.replace(device=cache.config.device, dtype=cache.config.dtype)",
    "cache.config.replace(placement=cache.config.placement, kv_dtype=cache.config.kv_dtype)",
    "pk.ParisKV(scorer=pk.ParisKV().scorer, tail=pk.ParisKV().tail)",
    'pk.PRKV(static_share="auto").replace(static_share=.5)',
    'pkt.attach(model, top_k=3, policy=None, memory_budget="4GB", graph=True)',
    "cache.batch([0, pk.IDLE])",
]


# Of torch, `make lint` checks that its devices and dtypes are taken: to read its types takes long.
MYPY = """\
[mypy]
strict = True
[mypy-torch.*,transformers.*]
follow_imports = skip
[mypy-pariskv_core.transformers.*]
disallow_subclassing_any = False
"""


def test_slips_are_found_and_right_calls_pass(tmp_path):
    (tmp_path / "mypy.ini").write_text(MYPY)
    (tmp_path / "calls.py").write_text(BEGIN + "\n".join([*RIGHT, *WRONG]) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", ROOT / ".mypy_cache/calls", "calls.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    said: dict[int, str] = {}
    for line in done.stdout.splitlines():
        found = re.fullmatch(r"calls\.py:(\d+): error: (.*)", line)
        if found:
            said[int(found[1])] = said.get(int(found[1]), "") + found[2]
    first = BEGIN.count("\n") + 1
    refused = {call: said[first + i] for i, call in enumerate(RIGHT) if first + i in said}
    assert refused == {}, done.stdout
    first += len(RIGHT)
    passed = [
        call for i, (call, name) in enumerate(WRONG.items()) if name not in said.get(first + i, "")
    ]
    assert passed == [], done.stdout + done.stderr
