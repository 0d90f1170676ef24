"""How long does a decode step of one layer take, against torch's dense attention?

bfloat16, 32 query heads, 8 kv heads, head_dim 128, default settings, one sequence. The engine and
torch take turns, so that both see the same machine; each reads keys and values from RAM.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from statistics import median
from typing import Any

import harness
import pariskv_core as pk
import torch
from pariskv_core.cli.workload import CHUNK_TOKENS, Shape, Workload
from torch.nn.functional import scaled_dot_product_attention

# A step must not find its key summaries in the processor's cache because it was the last to read
# them: in a model the other layers come in between.
_LAYERS = 2


def _measure(tokens: int, threads: int, rounds: int) -> dict[str, Any]:
    shape = Shape(tokens, rounds + harness.WARM_UP, _LAYERS)
    config = pk.Config(
        layers=_LAYERS,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        threads=threads,
    )
    work = Workload(shape, facts=0, update=config.update, local=config.local, seed=1)
    k, v = (
        torch.empty(1, shape.kv_heads, tokens, shape.head_dim, dtype=torch.bfloat16) for _ in "kv"
    )
    with pk.Cache(config) as cache:
        sequence = cache.add()
        for layer in range(_LAYERS):
            for begin in range(0, tokens, CHUNK_TOKENS):
                rows = [torch.from_numpy(row).bfloat16() for row in work.chunk(layer, begin)]
                rows = [row[: tokens - begin] for row in rows]
                cache.prefill(layer, [sequence], rows[0], rows[1])
                if layer == 0:
                    for whole, part in zip((k, v), rows, strict=True):
                        whole[0, :, begin : begin + len(part)] = part.transpose(0, 1)

        queries = [torch.from_numpy(work.queries(layer)).bfloat16() for layer in range(_LAYERS)]
        new = [
            [torch.from_numpy(row).bfloat16() for row in work.decode_rows(layer)]
            for layer in range(_LAYERS)
        ]
        numbers = {layer: itertools.count() for layer in range(_LAYERS)}

        def decode(layer: int) -> None:
            step = next(numbers[layer])
            step_k, step_v = (row[step : step + 1] for row in new[layer])
            cache.decode(layer, [sequence], queries[layer][step : step + 1], step_k, step_v)

        heads = (1, shape.kv_heads, shape.group, shape.head_dim)
        folded = queries[0][0].reshape(heads)
        plain = queries[0][0].reshape(1, shape.query_heads, 1, shape.head_dim)
        seconds = harness.in_turns(
            {
                "folded": partial(scaled_dot_product_attention, folded, k, v),
                "layer 0": partial(decode, 0),
                "enable_gqa": partial(scaled_dot_product_attention, plain, k, v, enable_gqa=True),
                "layer 1": partial(decode, 1),
            },
            rounds,
        )
        stats = cache.stats()
    ours = seconds["layer 0"] + seconds["layer 1"]
    return {
        "tokens": tokens,
        "threads": threads,
        "rounds": rounds,
        "pariskv_seconds": median(ours),
        "pariskv_slowest_seconds": max(ours),
        "torch_folded_seconds": median(seconds["folded"]),
        "torch_enable_gqa_seconds": median(seconds["enable_gqa"]),
        "candidates_per_head": stats.candidates / (stats.searched_tokens * shape.kv_heads),
    }


def _row(result: dict[str, Any]) -> list[str]:
    ours, slowest, folded, gqa = (
        result[f"{name}_seconds"]
        for name in ("pariskv", "pariskv_slowest", "torch_folded", "torch_enable_gqa")
    )
    return [
        f"{result['tokens']:,}",
        f"{1e3 * ours:.2f}",
        f"{1e3 * slowest:.2f}",
        f"{1e3 * folded:.2f}",
        f"{1e3 * gqa:.2f}",
        f"{folded / ours:.1f} ×",
        f"{gqa / ours:.1f} ×",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = [_measure(n, arguments.threads, arguments.rounds) for n in arguments.tokens]
    harness.show(
        f"A decode step of one layer, {arguments.threads} threads, {pk.cpu_level()}",
        ["tokens", "ParisKV ms", "slowest", "torch ms", "enable_gqa ms", "torch /", "enable_gqa /"],
        [_row(result) for result in results],
        "Medians. torch: dense attention in bfloat16 with the group folded into the query.",
    )
    harness.save("decode", results)


if __name__ == "__main__":
    main()
