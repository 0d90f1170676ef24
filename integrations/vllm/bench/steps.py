"""ms of a decode step inside vLLM, with and without the engine, of sequences that are filled.

    python integrations/vllm/bench/steps.py ours --model MODEL --cases 32000x1 130000x3
    python integrations/vllm/bench/steps.py stock --model MODEL --cases 32000x1

Nothing is prefilled, so weights may be dummies, which is the default: the connector says that all
of a prompt but its last token is there, as vLLM's DecodeBenchConnector does for stock vLLM. A
figure is the median of the steps in which all sequences decode.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from typing import Any

from engines import GRAPHS, asked_for

# The patches below are in this process, and in ranks that are forked from it.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "fork")

STOCK = {
    "kv_connector": "DecodeBenchConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"fill_std": 1.0, "startup_fill": True},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=["ours", "stock"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--cases", nargs="+", required=True, help="tokens x sequences")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--utilization", type=float, default=0.9)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--compiled", action="store_true", help="as vLLM compiles when not told")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--set", nargs="*", default=[], help="settings of the engine: name=value")
    return parser.parse_args()


def engine_of(chosen: argparse.Namespace) -> Any:
    cases = [tuple(map(int, case.split("x"))) for case in chosen.cases]
    own: dict[str, Any] = {"kv_transfer_config": STOCK}
    if chosen.engine == "ours":
        import filled

        filled.patch()
        settings = dict(item.split("=", 1) for item in chosen.set)
        numbers = {k: int(v) if v.lstrip("-").isdigit() else v for k, v in settings.items()}
        own = asked_for(numbers)
    from vllm import LLM

    return LLM(
        model=chosen.model,
        load_format=chosen.load_format,
        skip_tokenizer_init=True,
        max_model_len=max(tokens for tokens, _ in cases) + chosen.steps + 64,
        max_num_seqs=max(count for _, count in cases),
        enable_prefix_caching=False,
        gpu_memory_utilization=chosen.utilization,
        tensor_parallel_size=chosen.tensor_parallel,
        kv_cache_dtype=chosen.kv_cache_dtype,
        compilation_config={} if chosen.compiled else GRAPHS,
        **own,
    )


def step_of(engine: Any, tokens: int, count: int, steps: int) -> tuple[float, float]:
    """(ms of a step, seconds until all sequences decode)."""
    from vllm import SamplingParams

    chance = random.Random(tokens)
    params = SamplingParams(temperature=0, max_tokens=steps + 8, ignore_eos=True, detokenize=False)
    for i in range(count):
        prompt = [chance.randrange(3, 30000) for _ in range(tokens)]
        engine.add_request(f"{tokens}.{i}", {"prompt_token_ids": prompt}, params)
    begin, times, first = time.perf_counter(), [], None
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = engine.step()
        times.append((time.perf_counter() - start, len(outputs)))
        if first is None and len(outputs) == count:
            first = time.perf_counter() - begin
    decoding = [seconds for seconds, some in times if some == count]
    if len(decoding) < steps // 2:
        raise RuntimeError(
            f"{tokens} x {count} never decoded at once: raise the memory or lower it"
        )
    return 1e3 * statistics.median(decoding[4:-2]), first or 0.0


def main() -> None:
    chosen = arguments()
    llm = engine_of(chosen)
    for case in chosen.cases:
        tokens, count = map(int, case.split("x"))
        try:
            step, first = step_of(llm.llm_engine, tokens, count, chosen.steps)
        except RuntimeError as reason:
            print(f"{case}: {reason}", flush=True)
            continue
        print(f"{chosen.engine} {case}: {step:.2f} ms a step, {first:.1f} s to fill", flush=True)
        if chosen.engine == "ours":
            from pariskv_core.vllm import ranks

            # Of several ranks none is in this process.
            for found in ranks._ranks.values():
                stats = found.rank.cache.stats()
                device, host = stats.memory.live / 1e9, stats.host_memory.live / 1e9
                pinned = stats.host_memory.reserved / 1e9
                print(
                    f"  the engine has {device:.1f} GB on the GPU, {host:.1f} beside it, of "
                    f"{pinned:.1f} that are pinned",
                    flush=True,
                )


if __name__ == "__main__":
    main()
