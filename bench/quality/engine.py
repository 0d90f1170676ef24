"""The engine inside the model's forward pass: every layer's tokens decoded one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import configs
import pariskv_core as pk
import torch
from torch import Tensor

from quality.device import precision
from quality.inside import Outcome, Prompt, Residency, bits_of, measured_steps, resident_of
from quality.measures import Quality, measure
from quality.model import Model


def make_config(model: Model, residency: Residency, device: str, **changes: Any) -> pk.Config:
    shape = model.shape
    fields: dict[str, Any] = {
        "layers": shape.layers,
        "query_heads": shape.query_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "sink": residency.sink,
        "local": residency.local,
        "update": residency.update,
        "dense_below": 0,
        "device": device,
        **configs.WHOLE_KEYS,
    }
    if device.startswith("cuda"):
        fields["placement"] = "device"  # the same rows, sooner
    return configs.make(**{**fields, **changes})


def prefilled(cache: pk.Cache, prompts: list[Prompt]) -> list[int]:
    """A sequence for each prompt."""
    sequences = [cache.add() for _ in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        for index, (keys, values) in enumerate(zip(prompt.keys, prompt.values, strict=True)):
            cache.prefill(index, [sequence], keys, values)
    return sequences


@dataclass
class Choice:
    """What the engine chose for one layer, sequence and step."""

    step: int
    zone_end: int
    rows: Tensor  # (kv_heads, rows) int64, indices into the zone


def explained(cache: pk.Cache, layer: int, sequence: int, q: Tensor, step: int) -> Choice:
    """By the query (query_heads, head_dim); right after the step's decode it is what that chose."""
    why = cache.explain(layer, sequence, q)
    rows = torch.from_numpy(why.positions.copy())
    rows = torch.where(rows >= 0, rows - why.zone_begin, -1)
    return Choice(step, why.zone_begin + why.zone_tokens, rows)


def quality_of(
    choices: list[Choice], q: Tensor, keys: Tensor, values: Tensor, prompt: int, sink: int
) -> list[Quality]:
    """Of a layer's choices on one sequence, for each kv head.

    q (steps, query_heads, head_dim), all steps; keys and values (tokens, kv_heads, head_dim)
    """
    group = q.shape[1] // keys.shape[1]
    heads = []
    for head in range(keys.shape[1]):
        found = []
        k, v = keys[:, head].float(), values[:, head].float()
        for zone_end in sorted({choice.zone_end for choice in choices}):
            here = [choice for choice in choices if choice.zone_end == zone_end]
            steps = torch.tensor([choice.step for choice in here], device=q.device)
            asked = q[steps, head * group : (head + 1) * group].float()
            rows = torch.stack([choice.rows[head] for choice in here]).to(q.device)
            resident = resident_of(asked, prompt + steps, k, v, sink, zone_end)
            found.append(measure(asked, k[sink:zone_end], rows, resident, v[sink:zone_end]))
        heads.append(Quality.joined(found))
    return heads


@torch.no_grad()
def run(
    model: Model,
    prompts: list[Prompt],
    steps: int,
    config: pk.Config,
    stride: int,
    explain: int,
) -> tuple[list[Outcome], float]:
    """The engine in every layer, all prompts in one batch, each layer's tokens decoded one by one.

    explain  so many prompts have their choices measured
    Returns an outcome for each prompt, and the mean number of candidates per kv head.
    """
    device = prompts[0].text.device
    length = prompts[0].length
    wanted = set(measured_steps(steps, stride))
    text = torch.stack([prompt.text for prompt in prompts])
    cos, sin = model.rotary(length, steps)
    x = model.embedding(text[:, length : length + steps])
    qualities: list[list[Quality]] = [[] for _ in prompts]
    with pk.Cache(config) as cache:
        sequences = prefilled(cache, prompts)
        for index, layer in enumerate(model.layers):
            with precision(str(device)):
                q, k, v = (
                    part.bfloat16().transpose(0, 1).contiguous()
                    for part in layer.project(x, cos, sin)
                )
            out = torch.empty_like(q)
            choices: list[list[Choice]] = [[] for _ in prompts]
            for step in range(steps):
                cache.decode(index, sequences, q[step], k[step], v[step], out=out[step])
                for i in range(explain if step in wanted else 0):
                    choices[i].append(explained(cache, index, sequences[i], q[step, i], step))
            # With room for the whole zone nothing is searched, and there is nothing to measure.
            for i in range(explain if choices[0] and choices[0][0].rows.numel() else 0):
                keys = torch.cat([prompts[i].keys[index], k[:, i]])
                values = torch.cat([prompts[i].values[index], v[:, i]])
                qualities[i].extend(
                    quality_of(choices[i], q[:, i], keys, values, length, config.sink)
                )
            with precision(str(device)):
                x = layer.finish(x, out.transpose(0, 1).float())
        stats = cache.stats()
        searched = max(stats.searched_tokens * config.kv_heads, 1)
    bits = bits_of(model, x, text[:, length + 1 : length + steps + 1])
    outcomes = [Outcome(b, found) for b, found in zip(bits, qualities, strict=True)]
    return outcomes, stats.candidates / searched
