"""One rank of a model in tensor parallel: generates with the engine, and tells what it saw.

Run by test_tensor_parallel.py under torch's launcher: rank.py MODEL RESULTS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pariskv_core.transformers as pkt
import tiny
import torch
import transformers

BUDGET = 64 << 20  # host memory of each rank


def parallel() -> dict:
    if hasattr(transformers, "DistributedConfig") and tiny.VERSION >= (5, 17):
        return {"distributed_config": transformers.DistributedConfig(tp_plan="auto")}
    return {"tp_plan": "auto"}


def main() -> None:
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", **parallel()
    )
    told = {}
    for name, settings in tiny.SETTINGS.items():
        cache = pkt.PariskvCache(model.config, **settings, host_budget=BUDGET)
        inputs = tiny.ragged()
        ours = tiny.generated(model, inputs, cache)
        stats = cache.engine.stats()
        told[name] = {
            "equal": torch.equal(ours, tiny.generated(model, inputs)),
            "tokens": ours.tolist(),
            "kv_heads": cache.engine.config.kv_heads,
            "query_heads": cache.engine.config.query_heads,
            "searched": stats.searched_tokens,
            "host_budget": cache.engine.config.host_budget,
        }
    (results / f"{os.environ['RANK']}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
