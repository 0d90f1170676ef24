"""From which length on is a search worth it, for the heads of today's models?

A decode step of one layer, bfloat16, default settings, random keys: with a search, in full by the
engine, and by torch's dense attention, which take turns. On a GPU all rows lie there, and a step is
a replayed graph in cold caches; on a CPU sequences are alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import gpu
import harness
import pariskv_core as pk
import torch
from torch.nn.functional import scaled_dot_product_attention

_CHUNK = 8192  # tokens of a prompt at once


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    dim: int
    sinks: bool = False


SHAPES = {
    "Llama-3.1-8B": Heads(32, 8, 128),
    "Qwen3.6-27B": Heads(24, 4, 256),
    "Qwen3.6-35B-A3B": Heads(16, 2, 256),
    "Gemma-4": Heads(16, 2, 512),
    "Gemma-3-270M": Heads(4, 1, 256),
    "Nemotron-3-Nano": Heads(32, 2, 128),
    "gpt-oss-20b": Heads(64, 8, 64, sinks=True),
}
_TOKENS = {"cpu": [2048, 4096, 8192, 32_768], "cuda": [8192, 16_384, 32_768, 131_072]}


class Layer:
    """Some sequences of one length, with their rows in two caches and in torch's own."""

    def __init__(self, heads: Heads, tokens: int, batch: int, device: str, threads: int) -> None:
        self.heads, self.batch = heads, batch
        chance = torch.Generator(device).manual_seed(tokens)
        own: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "generator": chance}
        kv = (batch, heads.kv, tokens, heads.dim)
        self.k, self.v = (torch.randn(kv, **own) for _ in "kv")
        self.q = torch.randn(batch, heads.query, heads.dim, **own)
        self.new = [torch.randn(batch, heads.kv, heads.dim, **own) for _ in "kv"]
        self.sinks = torch.zeros(heads.query, device=device) if heads.sinks else None
        self.out = torch.empty_like(self.q)
        self.caches = {
            name: self._filled(dense_below, device, threads)
            for name, dense_below in (("searched", 0), ("full", 1 << 22))
        }

    def _filled(self, dense_below: int, device: str, threads: int) -> tuple[pk.Cache, list[int]]:
        config = pk.Config(
            layers=1,
            query_heads=self.heads.query,
            kv_heads=self.heads.kv,
            head_dim=self.heads.dim,
            dtype="bfloat16",
            device=torch.device(device),
            dense_below=dense_below,
            threads=threads,
        )
        cache = pk.Cache(config)
        sequences = [cache.add() for _ in range(self.batch)]
        for number, sequence in enumerate(sequences):
            rows = [x[number].transpose(0, 1) for x in (self.k, self.v)]
            for begin in range(0, len(rows[0]), _CHUNK):
                k, v = (row[begin : begin + _CHUNK].contiguous() for row in rows)
                cache.prefill(0, [sequence], k, v)
        return cache, sequences

    def decode(self, name: str) -> None:
        cache, sequences = self.caches[name]
        cache.decode(0, sequences, self.q, *self.new, out=self.out, sink_bias=self.sinks)

    def folded(self) -> torch.Tensor:
        q = self.q.reshape(self.batch, self.heads.kv, -1, self.heads.dim)
        return scaled_dot_product_attention(q, self.k, self.v)

    def dense(self) -> torch.Tensor:
        q = self.q[:, :, None]
        return scaled_dot_product_attention(q, self.k, self.v, enable_gqa=True)


def _on_cpu(layer: Layer, rounds: int) -> dict[str, float]:
    cases: dict[str, Callable[[], object]] = {
        "folded": layer.folded,
        "searched": partial(layer.decode, "searched"),
        "enable_gqa": layer.dense,
        "full": partial(layer.decode, "full"),
    }
    seconds = harness.in_turns(cases, rounds)
    return {name: 1e6 * median(taken) for name, taken in seconds.items()}


def _on_gpu(layer: Layer, rounds: int) -> dict[str, float]:
    timer = gpu.Timer(rounds)
    found = {}
    for name, (cache, sequences) in layer.caches.items():
        graph = gpu.graphed(partial(layer.decode, name))
        found[name] = median(timer.cold(graph.replay, partial(cache.advance, sequences)))
    heads, tokens = layer.heads, layer.k.shape[2]
    torchs = gpu.dense(timer, layer.batch, tokens, heads.query, heads.kv, heads.dim)
    return found | ({torchs["dense_by"]: torchs["dense"]} if torchs else {})


def _measure(name: str, tokens: int, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    heads = SHAPES[name]
    layer = Layer(heads, tokens, batch, arguments.device, arguments.threads)
    measure = _on_gpu if arguments.device == "cuda" else _on_cpu
    found = measure(layer, arguments.rounds)
    searched, full = found.pop("searched"), found.pop("full")
    fastest = min(found, key=lambda case: found[case], default="")
    for cache, _ in layer.caches.values():
        cache.close()
    return {
        "model": name,
        **asdict(heads),
        "tokens": tokens,
        "batch": batch,
        "searched": searched,
        "full": full,
        "torch": found.get(fastest),
        "torch_by": fastest,
    }


def _row(result: dict[str, Any]) -> list[str]:
    searched, full, torchs = (result[name] for name in ("searched", "full", "torch"))
    shape = f"{result['query']} / {result['kv']} of {result['dim']}"
    return [
        result["model"],
        shape + (", sinks" if result["sinks"] else ""),
        f"{result['batch']} × {result['tokens']:,}",
        *("–" if taken is None else f"{taken:,.0f}" for taken in (searched, full, torchs)),
        f"{min(full, torchs or full) / searched:.2f} ×",
    ]


def main() -> None:
    here = "cuda" if pk.is_available("cuda") else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default=here)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    batches = arguments.batches or ([1, 8] if arguments.device == "cuda" else [1])
    results = [
        _measure(name, tokens, batch, arguments)
        for name in arguments.models
        for batch in batches
        for tokens in arguments.tokens or _TOKENS[arguments.device]
    ]
    harness.show(
        f"A decode step of one layer on {arguments.device}, µs",
        ["model", "heads", "tokens", "searched", "in full", "torch", "gain"],
        [_row(result) for result in results],
        "Medians. torch: the fastest of its ways, without sinks. Gain: over the faster of both.",
    )
    if arguments.device == "cpu":
        harness.save("shapes", results)
        return
    facts = gpu.facts()
    harness.save("shapes", results, on=facts["gpu"], facts=facts)


if __name__ == "__main__":
    main()
