"""The error that steps predict for their outputs, beside the true one.

On keys with a structure, and in all layers of a pretrained model that is given a text. Both are
shares of the spread of values: root mean squares over steps, layers and kv heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pariskv_core as pk
import torch
from pariskv_core.cli.errors import Errors, Tally
from torch import Tensor

from quality import structured
from quality.engine import reranked
from quality.experiments import Size, Track
from quality.pretrained import forced
from quality.pretrained.attentions import Engine
from quality.pretrained.prefix import Pretrained, Step, full, go_on

STEPS = 128  # inside a model
WAYS: dict[str, dict[str, Any]] = {
    "100 rows": {"tail_rows": 1024},
    "100 rows, tail_rows=2048": {"tail_rows": 2048},
    "error .01, at most 400 rows": {"tail_rows": 1024, "top_k": 400, "error": 0.01},
}


def short(errors: Errors) -> dict[str, float]:
    assert errors.ratio is not None, "nothing was estimated"
    named = {"predicted": errors.predicted, "true": errors.true, "ratio": errors.ratio}
    return {name: float(f"{value:.3g}") for name, value in named.items()}


def together(tallies: list[Tally]) -> dict[str, float]:
    every = Tally()
    for tally in tallies:
        every.join(tally)
    found = every.together()
    assert found is not None, "nothing was estimated"
    return short(found)


def on_structured_keys(size: Size, track: Track) -> dict[str, Any]:
    """By kind of keys and way."""
    table = {}
    for kind in track(list(structured.KINDS), "structured keys"):
        tallies = {way: Tally() for way in WAYS}
        for seed in range(size.seeds):
            of = structured.drawn(kind, 100 * seed, size.steps)
            for way, changes in WAYS.items():
                structured.predictions(of, structured.config_of(**changes), tallies[way])
        table[kind] = {way: together([tally]) for way, tally in tallies.items()}
    return table


class Judged(Engine):
    """The engine's own output; each step is held against full attention, with the same queries."""

    def __init__(self, policy: pk.ParisKV) -> None:
        super().__init__(policy)
        self.tallies: dict[int, Tally] = {}  # by layer

    def __call__(self, step: Step) -> Tensor:
        out, exact = torch.empty(step.queries.shape), full(step)
        values = step.prefix.values[step.layer].float()
        spread = (values - values.mean(dim=0)).square().mean(dim=(0, 2)).sqrt()
        tally = self.tallies.setdefault(step.layer, Tally())
        for t, cache, sequence in self._each(step, out):
            why = cache.explain(0, sequence, step.queries[t].contiguous())
            tally.add(why.details.error, out[t], exact[t], spread)
        return out


def inside(
    pretrained: Pretrained, text: str, tokens: int, say: Callable[[str], None], steps: int = STEPS
) -> dict[str, Any]:
    """By way: all layers, and the least and the largest ratio of one."""
    before, ids = forced.text_of(pretrained, text, tokens)
    found = {}
    for way, changes in WAYS.items():
        attention = Judged(pk.ParisKV(**{"tail": "sample", **reranked(0.05), **changes}))
        go_on(pretrained.model, before, ids[:steps], attention)
        tallies = list(attention.tallies.values())
        ratios = [together([tally])["ratio"] for tally in tallies]
        found[way] = {**together(tallies), "least": min(ratios), "largest": max(ratios)}
        say(f"{way}: {found[way]}")
        attention.close()
    return found
