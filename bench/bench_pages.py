"""What does PRKV cost? Digests and the choice after a prompt, steps, and the steps that choose.

Seconds are of the processor, so that other work on the machine does not count. A dense step attends
to all tokens.

With `--gpu`: replayed steps on a GPU (gpu_pages.py).
"""

from __future__ import annotations

import argparse
from statistics import median

import gpu
import gpu_pages
import harness
import pariskv_core as pk
import torch

_KV_HEADS = 8
_QUERY_HEADS = 32
_HEAD_DIM = 128


def _rows(tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(tokens, heads, _HEAD_DIM).bfloat16()


def _measure(tokens: int, policy: pk.PRKV, dense: bool, steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    config = pk.Config(
        layers=1,
        query_heads=_QUERY_HEADS,
        kv_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        policy=policy,
        threads=1,
        dense_below=2 * tokens if dense else 0,
    )
    k, v, q = (_rows(tokens, heads) for heads in (_KV_HEADS, _KV_HEADS, _QUERY_HEADS))
    q *= 2
    new_k, new_v, new_q = (_rows(steps, heads) for heads in (_KV_HEADS, _KV_HEADS, _QUERY_HEADS))
    new_q *= 2
    with pk.Cache(config) as cache:
        for _ in range(2):  # memory that is new to the process takes longer
            s = cache.add()
            plain_prompt = harness.processor_seconds(cache.prefill, 0, [s], k, v)
            cache.remove(s)
        s = cache.add()
        prompt = harness.processor_seconds(cache.prefill, 0, [s], k, v, q=q)
        stats = cache.stats()
        plain, choosing = harness.steps_apart(
            cache, s, new_q, new_k, new_v, lambda stats: stats.flushes
        )
    return {
        "tokens": tokens,
        "policy": "dense" if dense else repr(policy),
        "prefill_seconds": plain_prompt,
        "choice_seconds": prompt - plain_prompt,
        "step_seconds": median(plain),
        "choosing_step_seconds": median(choosing),
        "summary_bytes": stats.summary_bytes,
        "kept_bytes": stats.kept_bytes,
    }


def _gpu(rounds: int) -> None:
    facts = gpu.facts()
    results = gpu_pages.measure_all(gpu.Timer(rounds))
    harness.show(
        f"PRKV on {facts['gpu']}, {_KV_HEADS} kv heads, bfloat16, {gpu_pages.BUDGET:,} rows",
        ["policy", "sequences", "tokens", "new rows", "4 of 5 again", "dense"],
        [
            [r["policy"], f"{r['batch']:,}", f"{r['tokens']:,}"]
            + [
                "" if r.get(name) is None else f"{r[name]:.3g}"
                for name in ("microseconds", "again_microseconds", "dense")
            ]
            for r in results
        ],
        "Microseconds of a step of one layer.",
    )
    harness.save("pages", results, on=facts["gpu"], facts=facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--gpu", action="store_true", help="measure on a GPU instead")
    parser.add_argument("--rounds", type=int, default=40, help="steps of a case on a GPU")
    arguments = parser.parse_args()
    if arguments.gpu:
        _gpu(arguments.rounds)
        return
    cases = [
        (pk.PRKV(), True),
        (pk.PRKV(), False),
        (pk.PRKV(static_share=0.0), False),
        (pk.PRKV(static_share=1.0), False),
        (pk.PRKV(page=16), False),
    ]
    results = [
        _measure(arguments.tokens, policy, dense, arguments.steps) for policy, dense in cases
    ]
    names = ("prefill_seconds", "choice_seconds", "step_seconds", "choosing_step_seconds")
    harness.show(
        f"PRKV, {arguments.tokens:,} tokens × {_KV_HEADS} kv heads, bfloat16, {pk.cpu_level()}",
        ["policy", "prefill\nms", "its choice\nms", "step\nms", "with choice\nms", "summaries\nMB"],
        [
            [r["policy"].replace("PRKV", "").replace("digest='mean'", "")]
            + [f"{1e3 * r[name]:.3g}" for name in names]
            + [f"{r['summary_bytes'] / 2**20:.3g}"]
            for r in results
        ],
        "Milliseconds of one processor. A step chooses when the update buffer is full: every 128.",
    )
    harness.save("pages", results)


if __name__ == "__main__":
    main()
