"""What does HardKV cost? The choice after a prompt, steps, and the steps that choose.

The same prompt is stored with its queries and without them: the difference is the choice from all
of the zone. Seconds are of the processor, so that other work on the machine does not count.

With `--gpu`: replayed steps and the choices between them, on a GPU (gpu_keep.py).
"""

from __future__ import annotations

import argparse
from statistics import median

import gpu
import gpu_keep
import harness
import pariskv_core as pk
import torch

_KV_HEADS = 8
_QUERY_HEADS = 32
_HEAD_DIM = 128


def _measure(tokens: int, policy: pk.HardKV, steps: int, rounds: int) -> dict[str, float]:
    torch.manual_seed(0)
    config = pk.Config(
        layers=1,
        query_heads=_QUERY_HEADS,
        kv_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        policy=policy,
        threads=1,
    )
    k, v, new_k, new_v = (
        torch.randn(count, _KV_HEADS, _HEAD_DIM).bfloat16()
        for count in (tokens, tokens, steps, steps)
    )
    q, new_q = (
        2 * torch.randn(count, _QUERY_HEADS, _HEAD_DIM).bfloat16() for count in (tokens, steps)
    )
    prompts: dict[bool, list[float]] = {False: [], True: []}
    with pk.Cache(config) as cache:
        for _ in range(rounds):
            for asks, found in prompts.items():
                s = cache.add()
                asked = q if asks else None
                found.append(harness.processor_seconds(cache.prefill, 0, [s], k, v, q=asked))
                if len(prompts[True]) < rounds:
                    cache.remove(s)
        kept = cache.stats().kept_rows
        plain, choosing = harness.steps_apart(
            cache, s, new_q, new_k, new_v, lambda stats: stats.keeps
        )
    return {
        "tokens": tokens,
        "most": policy.most,
        "p": policy.p,
        "kept_rows": kept,
        "prefill_seconds": median(prompts[False]),
        "choice_seconds": median(prompts[True]) - median(prompts[False]),
        "step_seconds": median(plain),
        "choosing_step_seconds": median(choosing),
    }


def _gpu(rounds: int) -> None:
    facts = gpu.facts()
    results = [gpu_keep.measure(*case, rounds=rounds) for case in gpu_keep.CASES]
    harness.show(
        f"HardKV on {facts['gpu']}, {_KV_HEADS} kv heads, bfloat16",
        ["layers", "sequences", "tokens", "most", "rows kept", "step", "advance", "that chooses"],
        [
            [f"{r[name]:,}" for name in ("layers", "batch", "tokens", "most")]
            + [f"{r['kept_rows_per_head']:,.0f}"]
            + [
                f"{r[name]:.3g}"
                for name in (
                    "step_microseconds",
                    "advance_microseconds",
                    "choosing_advance_microseconds",
                )
            ]
            for r in results
        ],
        "Microseconds: of a step per layer, of advance per layer and sequence.",
    )
    harness.save("keep", results, on=facts["gpu"], facts=facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu", action="store_true", help="measure on a GPU instead")
    arguments = parser.parse_args()
    if arguments.gpu:
        _gpu(arguments.rounds)
        return
    policies = [pk.HardKV(), pk.HardKV(most=1024, p=1.0, metric="attention")]
    results = [
        _measure(arguments.tokens, policy, arguments.steps, arguments.rounds) for policy in policies
    ]
    names = ("prefill_seconds", "choice_seconds", "step_seconds", "choosing_step_seconds")
    harness.show(
        f"HardKV, {arguments.tokens:,} tokens × {_KV_HEADS} kv heads, bfloat16, {pk.cpu_level()}",
        ["most", "p", "rows kept", "prefill\nms", "its choice\nms", "step\nms", "with choice\nms"],
        [
            [str(r["most"]), str(r["p"]), str(r["kept_rows"])]
            + [f"{1e3 * r[name]:.3g}" for name in names]
            for r in results
        ],
        "Milliseconds of one processor. A step chooses when the update buffer is full: every 128.",
    )
    harness.save("keep", results)


if __name__ == "__main__":
    main()
