"""Methods inside the model's forward pass: what the model loses when it sees their rows alone.

A prompt is read with full attention. The text after it is computed layer by layer, all its
positions at once and with the right text before each of them; a position attends to the resident
rows and those that the method fetches. What is resident moves as in the engine's regions, flushes
included, so that the engine can be compared with methods in torch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quality.device import precision
from quality.measures import Quality, Resident, measure
from quality.methods import Method, best_rows, group_worth, logits_of, step_chunks
from quality.model import Model, causal_attention
from quality.paris import Paris

_RECENT = 64  # last queries of a prompt that methods may look at


@dataclass(frozen=True)
class Residency:
    """What is attended to anyway; the defaults are the engine's."""

    sink: int = 4
    local: int = 256
    update: int = 512

    def zone_end(self, prompt: int, step: int) -> int:
        """Where the zone ends when token `step` after a prompt of this length attends."""
        return prompt - self.local + (step + 1) // self.update * self.update

    def blocks(self, prompt: int, steps: int) -> Iterator[tuple[int, slice]]:
        """Steps with one and the same zone, and where that ends."""
        begin = 0
        while begin < steps:
            zone_end = self.zone_end(prompt, begin)
            end = begin
            while end < steps and self.zone_end(prompt, end) == zone_end:
                end += 1
            yield zone_end, slice(begin, end)
            begin = end


@dataclass
class Prompt:
    """Text whose first `length` bytes the model has read with full attention."""

    name: str
    text: Tensor  # (bytes) int64, what comes after the prompt included
    length: int
    keys: list[Tensor]  # per layer (length, kv_heads, head_dim) bfloat16
    values: list[Tensor]
    recent: list[Tensor]  # per layer (window, query_heads, head_dim): the last queries


@dataclass
class Outcome:
    """Of one method on one prompt."""

    bits: Tensor  # (steps): what the text's next byte cost
    heads: list[Quality]  # per kv head, layer after layer; empty where nothing was measured


@torch.no_grad()
def read(model: Model, name: str, text: Tensor, length: int) -> Prompt:
    prompt = Prompt(name, text, length, [], [], [])
    cos, sin = model.rotary(0, length)
    x = model.embedding(text[None, :length])
    for layer in model.layers:
        with precision(str(text.device)):
            q, k, v = (part.bfloat16() for part in layer.project(x, cos, sin))
            attended = causal_attention(q, k, v)
            x = layer.finish(x, attended.float())
        prompt.keys.append(k[0].contiguous())
        prompt.values.append(v[0].contiguous())
        prompt.recent.append(q[0, -_RECENT:].clone())
    return prompt


# --- One kv head -------------------------------------------------------------------------------


def resident_of(
    queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, sink: int, zone_end: int
) -> Resident:
    """Attention over sinks and all from the zone's end on: queries (steps, group, head_dim).

    positions  (steps): where the queries are; keys and values (tokens, head_dim) from position 0 on
    """
    last = int(positions.max()) + 1
    places = torch.cat(
        [torch.arange(sink, device=keys.device), torch.arange(zone_end, last, device=keys.device)]
    )
    logits = logits_of(queries, keys[places])
    logits = logits.masked_fill(places > positions[:, None, None], -math.inf)
    return Resident(torch.logsumexp(logits, -1), torch.softmax(logits, -1) @ values[places])


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, chosen: Tensor, resident: Resident
) -> Tensor:
    """Attention over what is resident and the chosen rows (steps, rows), -1 for none."""
    parts = []
    for chunk in step_chunks(len(queries), chosen.shape[1] * keys.shape[1], queries.device):
        rows, lse = chosen[chunk], resident.lse[chunk]
        index = rows.clamp(min=0)
        logits = queries[chunk] @ keys[index].mT / math.sqrt(keys.shape[1])
        logits = logits.masked_fill((rows < 0)[:, None], -math.inf)
        everything = torch.logaddexp(lse, torch.logsumexp(logits, -1))[..., None]
        inside = torch.exp(lse[..., None] - everything) * resident.output[chunk]
        parts.append(inside + torch.exp(logits - everything) @ values[index])
    return torch.cat(parts)


def measured_steps(steps: int, stride: int) -> list[int]:
    return list(range(min(stride // 2, steps - 1), steps, stride))


# --- Methods in torch --------------------------------------------------------------------------


class Ceiling(Paris):
    """Ours without the coarse stage: the 4-bit estimates of all keys decide."""

    def __init__(self) -> None:
        super().__init__(name="4-bit estimates of all keys")

    def pick(self, queries: Tensor, rows: int, resident: Tensor) -> Tensor:
        return best_rows(group_worth(self.estimates(queries), resident), rows)


class Prepared:
    """A method that has read a prompt, one for each layer and kv head, to be used many times."""

    def __init__(self, make: Callable[[], Method], prompt: Prompt, residency: Residency) -> None:
        first, end = residency.sink, residency.zone_end(prompt.length, -1)
        self._methods = []
        for keys, recent in zip(prompt.keys, prompt.recent, strict=True):
            group = recent.shape[1] // keys.shape[1]
            for head in range(keys.shape[1]):
                method = make()
                queries = recent[:, head * group : (head + 1) * group].float()
                method.prefill(keys[first:end, head].float(), queries)
                self._methods.append(method)

    def method(self, index: int) -> Method:
        # Methods put new tensors in the place of old ones, so a shallow copy is one of its own.
        return copy.copy(self._methods[index])


@torch.no_grad()
def run(
    model: Model,
    prompt: Prompt,
    prepared: Prepared,
    rows: int,
    steps: int,
    residency: Residency,
    stride: int,
) -> Outcome:
    """The text after the prompt with a method in every layer, measured every `stride` steps."""
    device = prompt.text.device
    length, group = prompt.length, model.shape.group
    cos, sin = model.rotary(length, steps)
    positions = torch.arange(length, length + steps, device=device)
    wanted = torch.tensor(measured_steps(steps, stride), device=device)
    x = model.embedding(prompt.text[None, length : length + steps])
    heads_found = []
    for index, layer in enumerate(model.layers):
        with precision(str(device)):
            q, k, v = (part[0].bfloat16() for part in layer.project(x, cos, sin))
        keys = torch.cat([prompt.keys[index], k]).float()
        values = torch.cat([prompt.values[index], v]).float()
        out = torch.empty(q.shape, device=device)
        for head in range(keys.shape[1]):
            found = []
            method = prepared.method(index * keys.shape[1] + head)
            heads = slice(head * group, (head + 1) * group)
            at = residency.zone_end(length, -1)
            for zone_end, block in residency.blocks(length, steps):
                if zone_end > at:
                    method.append(keys[at:zone_end, head])
                    at = zone_end
                asked = q[block, heads].float()
                resident = resident_of(
                    asked,
                    positions[block],
                    keys[:, head],
                    values[:, head],
                    residency.sink,
                    zone_end,
                )
                chosen = method.select(asked, rows, resident.lse)
                zone = slice(residency.sink, zone_end)
                out[block, heads] = attend(
                    asked, keys[zone, head], values[zone, head], chosen, resident
                )
                inside = wanted[(wanted >= block.start) & (wanted < block.stop)] - block.start
                if len(inside) == 0 or chosen.shape[1] > rows:  # full attention has no quality
                    continue
                kept = Resident(resident.lse[inside], resident.output[inside])
                found.append(
                    measure(
                        asked[inside], keys[zone, head], chosen[inside], kept, values[zone, head]
                    )
                )
            if found:
                heads_found.append(Quality.joined(found))
        with precision(str(device)):
            x = layer.finish(x, out.bfloat16().float()[None])
    following = prompt.text[None, length + 1 : length + steps + 1]
    return Outcome(bits_of(model, x, following)[0], heads_found)


@torch.no_grad()
def bits_of(model: Model, x: Tensor, following: Tensor) -> Tensor:
    """What bytes (batch, steps) cost in bits, by the last layer's output (batch, steps, width)."""
    with precision(str(x.device)):
        logits = model.logits(x)
    return F.cross_entropy(logits.mT, following, reduction="none") / math.log(2)
