"""What does a token cost from generate()? A model of Llama-3.1-8B's shape with random weights.

Hugging Face's own loop with its dense cache, with this engine step by step, with captured steps,
and with captured steps of compiled layers. Beside it what these are made of: a replay without the
loop, and one of the model without any attention. Needs a GPU and transformers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import pariskv_core.transformers as pkt
import torch
from pariskv_core.transformers.versions import CACHE
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM

_TOKENS = 96  # timed, after as many that are not


def _model(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=1 << 20,
        rope_theta=500_000.0,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def _milliseconds(model, ids, cache) -> float:
    """Of a token, by two calls of generate that go on from the same cache."""
    seen = cache.get_seq_length()
    times = []
    for tokens in (_TOKENS, _TOKENS, 2 * _TOKENS):  # the first one captures, and warms up
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **{CACHE: cache},
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        cache.crop(seen - cache.get_seq_length())
    return (times[2] - times[1]) / _TOKENS * 1e3


def _replay_alone(cache) -> float:
    """Of the graph that the last call has captured, with the engine's advance."""
    store, seen = cache._store, cache.get_seq_length()
    *_, captured = store.graphs.of.values()

    def step() -> None:
        store.engine.advance(store.sequences)
        captured.graph.replay()
        store.stepped()

    took = _per_step(step)
    cache.crop(seen - cache.get_seq_length())
    return took


def _without_attention(model, ids) -> float:
    """Of a graph of the model's own work."""
    AttentionInterface.register("nothing", lambda module, q, *_, **__: (q.transpose(1, 2), None))
    model.set_attn_implementation("nothing")
    one = ids[:, :1].clone()
    place = torch.zeros_like(one)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        model(one, position_ids=place, use_cache=False)
        with torch.cuda.graph(graph):
            model(one, position_ids=place, use_cache=False)
    return _per_step(graph.replay)


def _per_step(step: Callable[[], None]) -> float:
    for steps in (10, _TOKENS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        took = (time.perf_counter() - begin) / steps
    return took * 1e3


def _measure(model, rows: int, tokens: int, *, dense: bool) -> dict[str, float]:
    ids = torch.randint(3, 128_000, (1, tokens + 1), device="cuda").expand(rows, -1).contiguous()
    found: dict[str, float] = {"rows": rows, "tokens": tokens}
    if dense:
        pkt.detach(pkt.attach(model))
        model.set_attn_implementation("sdpa")
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :-1], **{CACHE: cache}, logits_to_keep=1)
        found["dense_ms"] = _milliseconds(model, ids, cache)
        del cache
        torch.cuda.empty_cache()
    pkt.attach(model)
    cache = pkt.PariskvCache(model.config)
    with torch.no_grad():
        model(ids[:, :-1], **{CACHE: cache}, logits_to_keep=1)
    found["eager_ms"] = _milliseconds(model, ids, cache)
    for name, compiled in (("graph", False), ("compiled", True)):
        replays = cache.replays
        pkt.attach(model, graph=True, compiled=compiled)
        found[f"{name}_ms"] = _milliseconds(model, ids, cache)
        assert cache.replays > replays + 3 * _TOKENS
        found[f"{name}_replay_ms"] = _replay_alone(cache)
    found["no_attention_ms"] = _without_attention(model, ids)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--shapes", nargs="+", default=["1x32768", "1x131072"], help="ROWSxTOKENS")
    parser.add_argument("--no-dense", action="store_true")
    arguments = parser.parse_args()
    model = _model(arguments.layers)
    for shape in arguments.shapes:
        rows, tokens = (int(part) for part in shape.split("x"))
        print(json.dumps(_measure(model, rows, tokens, dense=not arguments.no_dense)), flush=True)


if __name__ == "__main__":
    main()
