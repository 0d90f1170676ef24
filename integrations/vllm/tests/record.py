"""Writes what vLLM's scheduler decides to a file, for tests/python/test_vllm_books.py.

python integrations/vllm/tests/record.py tests/python/vllm_steps_0.32.json

in the environment of `make test-vllm`. The connector of this module is the plugin's own, and notes
what it is told.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

FILE = "PARISKV_RECORDED"  # a variable: where to write
BLOCK = 64


def connector() -> type:
    from pariskv_core.vllm.connector import PariskvConnector

    class Recorder(PariskvConnector):
        steps: list[dict[str, Any]]

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            if not hasattr(self, "steps"):
                self.steps = []
            cached = scheduler_output.scheduled_cached_reqs
            names = ("req_ids", "num_computed_tokens", "new_block_ids")
            self.steps.append(
                {
                    "scheduled_new_reqs": [
                        {
                            "req_id": new.req_id,
                            "prefill_token_ids": len(new.prefill_token_ids),
                            "num_computed_tokens": new.num_computed_tokens,
                            "block_ids": new.block_ids,
                        }
                        for new in scheduler_output.scheduled_new_reqs
                    ],
                    "scheduled_cached_reqs": {name: getattr(cached, name) for name in names},
                    "num_scheduled_tokens": dict(scheduler_output.num_scheduled_tokens),
                    "finished_req_ids": sorted(scheduler_output.finished_req_ids),
                    "preempted_req_ids": sorted(scheduler_output.preempted_req_ids or ()),
                }
            )
            made = super().build_connector_meta(scheduler_output)
            counts = self.scheduling.books.counts
            preempted = sum(len(step["preempted_req_ids"]) for step in self.steps)
            recorded = {
                "block_size": BLOCK,
                "hits": counts.hits,
                "preempted": preempted,
                "steps": self.steps,
            }
            Path(os.environ[FILE]).write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
            return made

    return Recorder


def __getattr__(name: str) -> Any:
    if name == "ParisKV":  # vLLM looks for the connector by its name in this module
        return connector()
    raise AttributeError(name)


def work(model: str) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
        block_size=BLOCK,
        num_gpu_blocks_override=20,
        max_num_seqs=6,
        max_num_batched_tokens=256,
        kv_transfer_config={
            "kv_connector": "ParisKV",
            "kv_connector_module_path": "record",
            "kv_role": "kv_both",
        },
    )
    chance = random.Random(5)
    document = [chance.randrange(3, 1900) for _ in range(418)]
    prompts = [document + [chance.randrange(3, 1900) for _ in range(n)] for n in (1, 40, 90, 3)]
    prompts += [[chance.randrange(3, 1900) for _ in range(n)] for n in (5, 300, 250, 64, 65)]
    settings = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, detokenize=False)
    for _ in range(2):
        engine.generate([{"prompt_token_ids": one} for one in prompts], settings, use_tqdm=False)
    # One step more, in which the scheduler says that all of these have ended.
    engine.generate([{"prompt_token_ids": [3]}], SamplingParams(max_tokens=1, detokenize=False))


def main() -> None:
    from conftest import environment
    from tiny_models import make_tiny

    if len(sys.argv) == 2:
        target = Path(sys.argv[1]).resolve()
        model = make_tiny(target.parent / "tiny_model")
        own = {**environment(), FILE: str(target)}
        subprocess.run([sys.executable, __file__, str(target), str(model)], env=own, check=True)
    else:
        work(sys.argv[2])


if __name__ == "__main__":
    main()
