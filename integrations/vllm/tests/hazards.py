"""Calls that could end an engine core, or make it answer otherwise than stock vLLM.

python hazards.py JOB DONE: one engine of vLLM in a process of its own, as engine.py. A job has
"work", the name of a function here.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

# The scheduler is then at hand, in this process.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

TEXT = [3 + i * 31 % 1900 for i in range(2000)]


class Engine:
    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.done: dict[str, Any] = {}

    @property
    def books(self) -> Any:
        return self.scheduler.connector.scheduling.books

    def add(
        self, name: str, prompt: list[int], tokens: int, priority: int = 0, **more: Any
    ) -> None:
        from vllm import SamplingParams

        settings = {"temperature": 0, "ignore_eos": True, "detokenize": False, **more}
        self.engine.add_request(
            name,
            {"prompt_token_ids": prompt},
            SamplingParams(max_tokens=tokens, **settings),
            priority=priority,
        )

    def steps(self, count: int = 1000) -> None:
        for _ in range(count):
            if not self.engine.has_unfinished_requests():
                return
            for output in self.engine.step():
                if output.finished:
                    tokens = [list(one.token_ids) for one in output.outputs]
                    reasons = [one.finish_reason for one in output.outputs]
                    self.done[output.request_id] = tokens
                    if "error" in reasons:
                        self.done[output.request_id] = "error"

    def errors(self) -> dict[str, int]:
        counts, scheduling = self.books.counts, self.scheduler.connector.scheduling
        return {
            "lost": counts.lost,
            "restarts": counts.restarts,
            "forgotten": scheduling.forgotten,
        }


def resets(engine: Engine) -> Any:
    """reset_prefix_cache in all its forms, while a request runs and with a prefix to be found."""
    reset = engine.llm.reset_prefix_cache
    answers = []
    for case, asked in enumerate(((True,), (True, True), (), (False, True))):
        engine.add(f"{case}-first", [*TEXT[:400], 7], 3)
        engine.steps(100)
        engine.add(f"{case}-runs", [9, *TEXT[100:300]], 40)
        engine.steps(5)
        answers.append(bool(reset(*asked)))
        engine.add(f"{case}-again", [*TEXT[:400], 8, 9], 6)
        engine.add(f"{case}-too", [*TEXT[:400], 9, 9], 6)
        engine.steps()
    return answers


def put_off(engine: Engine) -> Any:
    """Requests that are scheduled and preempted in the same step, and then read their prefix.

    Stock vLLM finds blocks then that nobody has computed: each answer is compared with that of the
    same prompt alone.
    """
    engine.add("alone", TEXT, 12)
    engine.add("aside", [4, 5, 6], 1)  # the threshold holds for no request that is alone
    engine.steps()
    assert engine.llm.reset_prefix_cache()
    for begin in range(52, 64):  # tokens of B: one of them needs a block in A's last chunk
        engine.add(f"A{begin}", TEXT, 12, priority=5)
        engine.add(f"C{begin}", [4, 5, 6], 1, priority=9)
        engine.steps(1)
        engine.add(f"B{begin}", [9, *TEXT[100 : 100 + begin - 1]], 20)
        engine.steps()
        assert engine.llm.reset_prefix_cache()
    right = [engine.done[f"A{begin}"] == engine.done["alone"] for begin in range(52, 64)]
    return sum(right)


def samples(engine: Engine) -> Any:
    """The most rows that 16 samples of one prompt take, and those that blocks pay for then."""
    from pariskv_core.vllm import ranks

    found = ranks.of(engine.engine.vllm_config)
    assert found is not None
    config, pool = found.rank.cache.config, engine.scheduler.kv_cache_manager.block_pool
    token = 2 * config.layers * config.kv_heads * config.head_dim * 4
    engine.add("many", TEXT[:1000], 8, n=16, temperature=0.9, seed=3)
    most = (0, 0)
    while engine.engine.has_unfinished_requests():
        engine.steps(1)
        rows = found.rank.cache.stats().row_bytes // token
        most = max(most, (rows, (pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()) * 64))
    return most


def bypass(engine: Engine) -> Any:
    """How many requests run at once where there is room for few, with and without logprobs of
    prompts, whose prefix vLLM does not look up."""
    at_once = {}
    for label, fields in {"plain": {}, "logprobs": {"prompt_logprobs": 1}}.items():
        for number in range(16):
            engine.add(f"{label}{number}", [3 + number, *range(4, 40)], 30, **fields)
        at_once[label] = 0
        while engine.engine.has_unfinished_requests():
            engine.steps(1)
            at_once[label] = max(at_once[label], engine.books.running)
    return at_once


def waiting(engine: Engine) -> Any:
    """Prefixes that vLLM looks up in ten steps, in which many requests wait for room."""
    manager = engine.scheduler.kv_cache_manager
    look_up, asked = manager.get_computed_blocks, []

    def counted(*arguments: Any) -> Any:
        asked.append(1)
        return look_up(*arguments)

    for number in range(100):
        engine.add(f"r{number}", [*TEXT[:300], 3 + number], 60)
    engine.steps(20)
    manager.get_computed_blocks = counted
    running = engine.books.running
    engine.steps(10)
    left = len(engine.scheduler.waiting)
    manager.get_computed_blocks = look_up
    engine.engine.abort_request([f"r{number}" for number in range(4, 100)])
    engine.steps()
    return {"running": running, "waiting": left, "lookups": len(asked), "done": len(engine.done)}


def lose(engine: Engine) -> Any:
    """Errors in the books, made by hand: rows of requests that run are gone, others are fine."""
    for name, begin in {"a": 0, "b": 300, "c": 0}.items():
        engine.add(name, TEXT[begin : begin + 300], 20)
    engine.steps(8)
    plugin = engine.scheduler.connector is not None
    if plugin:
        holders = engine.books._holders
        holders[next(name for name in holders if name.startswith("b"))].right = 100
    engine.steps(8)
    engine.add("d", TEXT[300:600], 20)
    engine.steps(3)
    if plugin:
        engine.books._owners = None  # whatever happens next is an exception
    engine.add("e", TEXT[:350], 20)
    engine.steps()
    return engine.errors() if plugin else {}


async def _session(arguments: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    delta = RequestOutputKind.DELTA
    settings = SamplingParams(
        max_tokens=5, temperature=0, ignore_eos=True, detokenize=False, output_kind=delta
    )

    async def chunks(seed: int) -> Any:
        chance = random.Random(seed)
        for _ in range(3):
            tokens = [chance.randrange(3, 1900) for _ in range(50 + seed)]
            yield StreamingInput(prompt={"prompt_token_ids": tokens})
            await asyncio.sleep(1)

    async def tokens_of(prompt: Any, name: str) -> list[int]:
        found: list[int] = []
        async for output in engine.generate(prompt, settings, request_id=name):
            found += output.outputs[0].token_ids
        return found

    try:
        sessions = [tokens_of(chunks(seed), f"session{seed}") for seed in (0, 14, 37)]
        found = list(await asyncio.gather(*sessions))
        return [*found, await tokens_of({"prompt_token_ids": [5, 6, 7]}, "after")]
    finally:
        engine.shutdown()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    if job.get("asynchronous"):
        from engine import schedule_asynchronously

        schedule_asynchronously()
    if job["work"] == "session":
        found = {"session": asyncio.run(_session(job["engine"]))}
    else:
        engine = Engine(job["engine"])
        found = {job["work"]: globals()[job["work"]](engine), "done": engine.done}
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
