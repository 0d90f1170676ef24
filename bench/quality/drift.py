"""Generated text: does a method find the right rows among keys that it did not start from?

The model writes thousands of bytes with the engine in every layer. Each method then follows the
keys that came and answers for the queries that were asked; the exact keys say what it missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pariskv_core as pk
import torch
from torch import Tensor

from quality.device import precision
from quality.engine import Choice, explained, prefilled
from quality.inside import Prompt, Residency, resident_of
from quality.measures import measure
from quality.methods import Method, oracle_rows
from quality.model import Model

INTERVAL = 256  # tokens that a point of the drift curve stands for
_ENDS = 512  # tokens at the start and at the end that are held against each other


@dataclass
class Writing:
    """What was generated after some prompts, and all that was asked on the way."""

    text: Tensor  # (prompts, tokens) int64
    bits: Tensor  # (prompts, tokens): what each byte would have cost, by the model's own opinion
    keys: list[Tensor]  # per layer (prompts, tokens, kv_heads, head_dim) bfloat16
    values: list[Tensor]
    steps: list[int]  # those that were measured
    queries: list[Tensor]  # per layer (prompts, steps, query_heads, head_dim) bfloat16
    choices: list[list[list[Choice]]]  # the engine's, by layer, prompt and step


@torch.no_grad()
def write(
    model: Model,
    prompts: list[Prompt],
    tokens: int,
    config: pk.Config,
    steps: list[int],
    temperature: float = 0.8,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Writing:
    """Samples so many bytes after each prompt; the first that is read is the text's own."""
    device = prompts[0].text.device
    length, count, shape = prompts[0].length, len(prompts), model.shape
    random = torch.Generator(device=device).manual_seed(seed)
    cos, sin = model.rotary(length, tokens)
    wanted = {step: i for i, step in enumerate(steps)}

    def room(places: int, heads: int) -> list[Tensor]:
        size = (count, places, heads, shape.head_dim)
        return [torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(shape.layers)]

    made = Writing(
        text=torch.zeros(count, tokens, dtype=torch.int64, device=device),
        bits=torch.zeros(count, tokens, device=device),
        keys=room(tokens, shape.kv_heads),
        values=room(tokens, shape.kv_heads),
        steps=steps,
        queries=room(len(steps), shape.query_heads),
        choices=[[[] for _ in prompts] for _ in range(shape.layers)],
    )
    current = torch.stack([prompt.text[length] for prompt in prompts])
    with pk.Cache(config) as cache:
        sequences = prefilled(cache, prompts)
        for step in range(tokens):
            x = model.embedding(current[:, None])
            place = slice(step, step + 1)
            for index, layer in enumerate(model.layers):
                with precision(str(device)):
                    q, k, v = (
                        part[:, 0].bfloat16() for part in layer.project(x, cos[place], sin[place])
                    )
                made.keys[index][:, step], made.values[index][:, step] = k, v
                out = cache.decode(index, sequences, q, k, v)
                if step in wanted:
                    made.queries[index][:, wanted[step]] = q
                    for i, sequence in enumerate(sequences):
                        choice = explained(cache, index, sequence, q[i], step)
                        made.choices[index][i].append(choice)
                with precision(str(device)):
                    x = layer.finish(x, out[:, None].float())
            with precision(str(device)):
                odds = torch.log_softmax(model.logits(x[:, 0]), dim=-1)
            chances = torch.softmax(odds / temperature, dim=-1)
            current = torch.multinomial(chances, 1, generator=random)[:, 0]
            made.text[:, step] = current
            made.bits[:, step] = -odds.gather(1, current[:, None])[:, 0] / math.log(2)
            if step % 512 == 511:
                say(f"{step + 1} bytes written, {made.bits[:, :step].mean():.3f} bits each")
    return made


class Curves:
    """Shares of the oracle's mass by step, for each layer, kv head and prompt."""

    def __init__(self, steps: list[int], layers: int) -> None:
        self._steps = torch.tensor(steps)
        self._layers = layers
        self._shares: list[list[Tensor]] = [[] for _ in range(layers)]
        self._recalls: list[Tensor] = []

    def add(self, layer: int, shares: Tensor, recalls: Tensor) -> None:
        """(steps) each."""
        self._shares[layer].append(shares.cpu())
        self._recalls.append(recalls.cpu())

    def summary(self) -> dict[str, Any]:
        layers = [torch.stack(shares).mean(0) for shares in self._shares]
        mean = torch.stack(layers).mean(0)
        recall = torch.stack(self._recalls).mean(0)
        interval = self._steps // INTERVAL
        last = int(self._steps.max()) + 1
        first, end = self._steps < _ENDS, self._steps >= last - _ENDS
        begins = interval.unique().tolist()
        return {
            "tokens": [(i + 1) * INTERVAL for i in begins],
            "share": [mean[interval == i].mean().item() for i in begins],
            "recall": [recall[interval == i].mean().item() for i in begins],
            "share_first": mean[first].mean().item(),
            "share_last": mean[end].mean().item(),
            "lost": (mean[first].mean() - mean[end].mean()).item(),
            "lost_by_layer": [(s[first].mean() - s[end].mean()).item() for s in layers],
        }


@torch.no_grad()
def drift(
    model: Model,
    prompts: list[Prompt],
    made: Writing,
    makers: dict[str, Callable[[], Method]],
    rows: int,
    residency: Residency,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """The curve of every method, and of the engine, which chose while the text was written."""
    shape = model.shape
    curves = {name: Curves(made.steps, shape.layers) for name in ["pariskv_core", *makers]}
    device = made.text.device
    for layer in range(shape.layers):
        for i, prompt in enumerate(prompts):
            keys = torch.cat([prompt.keys[layer], made.keys[layer][i]])
            choices = made.choices[layer][i]
            picked = torch.stack([choice.rows for choice in choices], dim=1).to(device)
            ends = torch.tensor([choice.zone_end for choice in choices])
            for head in range(shape.kv_heads):
                heads = slice(head * shape.group, (head + 1) * shape.group)
                found = _follow(
                    keys[:, head].float(),
                    made.queries[layer][i][:, heads].float(),
                    prompt.length + torch.tensor(made.steps, device=device),
                    ends,
                    {"pariskv_core": picked[head]},
                    {name: make() for name, make in makers.items()},
                    prompt.recent[layer][:, heads].float(),
                    rows,
                    residency.sink,
                    residency.zone_end(prompt.length, -1),
                )
                for name, (shares, recalls) in found.items():
                    curves[name].add(layer, shares, recalls)
        say(f"drift in layer {layer + 1}: done")
    return {name: curve.summary() for name, curve in curves.items()}


def _follow(
    keys: Tensor,
    queries: Tensor,
    positions: Tensor,
    ends: Tensor,
    picked: dict[str, Tensor],
    methods: dict[str, Method],
    recent: Tensor,
    rows: int,
    sink: int,
    at: int,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Shares and recalls (steps) of one kv head, for rows that were picked and methods that pick.

    ends  (steps): where the zone ends at each step; at: where it ended after the prompt
    """
    for method in methods.values():
        method.prefill(keys[sink:at], recent)
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in [*picked, *methods]}
    for end in sorted(set(ends.tolist())):
        if end > at:
            for method in methods.values():
                method.append(keys[at:end])
            at = end
        here = (ends == end).to(queries.device)
        asked, zone = queries[here], keys[sink:end]
        # Values do not decide what is chosen; the keys stand in for them.
        lse = resident_of(asked, positions[here], keys, keys, sink, end).lse
        best = oracle_rows(asked, zone, rows, lse)
        chosen = {name: found[here] for name, found in picked.items()}
        chosen |= {name: method.select(asked, rows, lse) for name, method in methods.items()}
        for name, found in chosen.items():
            quality = measure(asked, zone, found, lse, best=best)
            parts[name].append((quality.share(), quality.recall))
    return {
        name: (torch.cat([s for s, _ in found]), torch.cat([r for _, r in found]))
        for name, found in parts.items()
    }
