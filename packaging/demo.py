"""What a wheel is tried with: a fact planted among 20,000 made-up tokens has to be found."""

import sys
from pathlib import Path

import numpy as np
import pariskv_core as pk

config = pk.Config(layers=1, query_heads=8, kv_heads=2, head_dim=64, dtype="float16")
rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, 20_000, 2, 64)).astype(np.float16)
fact = 7_000
with pk.Cache(config) as cache:
    text = cache.add()
    cache.prefill(0, [text], k, v)
    query = np.repeat(k[fact], 4, axis=0)
    out = cache.decode(0, [text], query[None] * np.float16(4))
    found = cache.explain(0, text, query).positions
if not (found == fact).any(axis=1).all():
    sys.exit("the planted fact was not found")
if abs(out[0] - np.repeat(v[fact], 4, axis=0)).max() > 0.05:
    sys.exit("the attention is not the planted row")
if not Path(pk.__file__).with_name("_core.pyi").is_file():
    sys.exit("the type stub of the extension is missing")
built = "with" if pk.is_built("cuda") else "without"
print(f"{pk.__version__} ({pk.cpu_level()}, {built} CUDA) found the planted fact")
