"""How fast does a prefill go, and is it the memory or the arithmetic that holds it up?

The same keys and values are stored twice: all in the local window, where only the rows are kept,
and in the retrieval zone, where keys are summarised as well. The difference is the encoder's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import harness
import pariskv_core as pk
import torch

_KV_HEADS = 8
_HEAD_DIM = 128
_KEY_BYTES = 2 * _HEAD_DIM
_ROW_BYTES = 2 * _KEY_BYTES
# Above this share of what memory can do, more arithmetic per second would change little.
_MEMORY_BOUND = 0.7


def _cache(threads: int, local: int) -> pk.Cache:
    return pk.Cache(
        pk.Config(
            layers=1,
            query_heads=4 * _KV_HEADS,
            kv_heads=_KV_HEADS,
            head_dim=_HEAD_DIM,
            local=local,
            threads=threads,
        )
    )


def _measure(tokens: int, threads: int, rounds: int) -> dict[str, Any]:
    k, v = (torch.randn(tokens, _KV_HEADS, _HEAD_DIM).bfloat16() for _ in "kv")
    with _cache(threads, pk.Config(layers=1, query_heads=1, kv_heads=1, head_dim=64).local) as full:
        with _cache(threads, tokens) as rows_only:

            def prefill(cache: pk.Cache) -> Callable[[], None]:
                sequence = cache.add()
                cache.prefill(0, [sequence], k, v)
                return partial(cache.remove, sequence)

            seconds = harness.in_turns(
                {"whole": lambda: prefill(full), "rows": lambda: prefill(rows_only)}, rounds
            )
        sequence = full.add()
        full.prefill(0, [sequence], k, v)
        summary = full.stats().summary_bytes / (tokens * _KV_HEADS)
    whole, rows = median(seconds["whole"]), median(seconds["rows"])
    encode = median(a - b for a, b in zip(seconds["whole"], seconds["rows"], strict=True))
    memory = harness.bandwidth(threads)
    keys = tokens * _KV_HEADS
    moved = keys * (_KEY_BYTES + summary)
    return {
        "tokens": tokens,
        "threads": threads,
        "rounds": rounds,
        "whole_seconds": whole,
        "rows_seconds": rows,
        "summary_bytes_per_key": summary,
        "prefill_keys_per_second": keys / whole,
        "encode_keys_per_second": keys / encode,
        "prefill_bytes_per_second": keys * (2 * _ROW_BYTES + summary) / whole,
        "rows_bytes_per_second": keys * 2 * _ROW_BYTES / rows,
        "encode_bytes_per_second": moved / encode,
        "read_bytes_per_second": memory["read"],
        "copy_bytes_per_second": memory["copy"],
        "bound_by": "memory" if moved / encode > _MEMORY_BOUND * memory["copy"] else "arithmetic",
    }


def _row(result: dict[str, Any]) -> list[str]:
    rate = result["encode_keys_per_second"] / 1e6
    return [
        str(result["threads"]),
        f"{result['prefill_keys_per_second'] / 1e6:.2f}",
        f"{result['prefill_bytes_per_second'] / 1e9:.1f}",
        f"{rate:.2f}",
        f"{rate / result['threads']:.2f}",
        f"{result['encode_bytes_per_second'] / 1e9:.2f}",
        f"{result['read_bytes_per_second'] / 1e9:.1f}",
        f"{result['copy_bytes_per_second'] / 1e9:.1f}",
        result["bound_by"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    results = [_measure(arguments.tokens, t, arguments.rounds) for t in arguments.threads]
    harness.show(
        f"Prefill of {arguments.tokens:,} tokens × {_KV_HEADS} kv heads, bfloat16, "
        f"{pk.cpu_level()}",
        [
            "threads",
            "prefill\nM/s",
            "\nGB/s",
            "encode\nM/s",
            "\nper thread",
            "\nGB/s",
            "read\nGB/s",
            "copy\nGB/s",
            "encode is\nbound by",
        ],
        [_row(result) for result in results],
        "M/s: millions of keys × kv heads a second. prefill stores K and V rows and encodes keys; "
        "encode alone reads keys and writes summaries. read, copy: this machine's memory.",
    )
    harness.save("encode", results)


if __name__ == "__main__":
    main()
