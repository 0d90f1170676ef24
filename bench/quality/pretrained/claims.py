"""What two papers say of attention, on a pretrained model: PRKV's and HARD-KV's claims.

Three regimes for PRKV's split: documentation that goes on, a capture of code, and questions about
facts in a long text, each chosen by queries that end with the question.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Any

import torch
from pariskv_core.cli.weights import Weights

from quality.experiments import Track
from quality.pretrained import claims_hardkv, claims_prkv, lengths, prefix, ruler
from quality.pretrained.capture import LATE, Stretch, make_all
from quality.pretrained.claims_prkv import Sums
from quality.pretrained.prefix import Pretrained
from quality.pretrained.texts import TEXTS
from quality.pretrained.trail import LOCAL, UPDATE, Head, trail

READ, AFTER = 7168, 1024
FACTS, QUESTIONS = 102, 24  # in the text, and asked


def heads_of(pretrained: Pretrained) -> list[list[Head]]:
    """By layer, of AFTER tokens of documentation after READ."""
    ids = pretrained.ids(TEXTS["documentation"]())
    known = prefix.kept(pretrained, ids[:READ])
    return list(trail(pretrained, known, ids[READ : READ + AFTER]).values())


def questions(pretrained: Pretrained, track: Track) -> dict[str, float]:
    """Recall by S on the tokens of answers."""
    haystack = ruler.of_part("facts", pretrained, READ, FACTS)
    known = prefix.kept(pretrained, haystack.ids)
    found: Sums = defaultdict(list)
    facts = haystack.facts[:: max(FACTS // QUESTIONS, 1)][:QUESTIONS]
    for fact in track(facts, f"{pretrained.weights.name}, questions"):
        asked, answer = pretrained.pieces(f"\n\n{fact.question}"), pretrained.pieces(fact.answer)
        layers = trail(pretrained, known, torch.cat([asked, answer]))
        for head in chain(*layers.values()):
            begin = len(asked)
            end = head.prompt + begin - LOCAL
            steps = torch.arange(begin, head.steps)
            claims_prkv.static_at(head, begin, end, steps, found)
    return {what: sum(of) / len(of) for what, of in found.items()}


def code(weights: Weights) -> dict[str, float]:
    """Recall by S on a capture of code, up to UPDATE tokens after its recent queries."""
    layers = lengths.FEW_LAYERS[weights.name]
    (taken,) = make_all(weights, [Stretch("code", lengths.LENGTH, layers=layers)])
    begin = taken.manifest.tokens - LATE
    steps = torch.tensor([p - begin for p in taken.manifest.positions if p < begin + UPDATE])
    found: Sums = defaultdict(list)
    for _, layer in taken.layers():
        group = layer.queries.shape[1] // layer.keys.shape[1]
        for i in range(layer.keys.shape[1]):
            heads = slice(i * group, (i + 1) * group)
            after = torch.zeros(LATE, *layer.queries[:, heads].shape[1:])
            after[steps] = layer.queries[: len(steps), heads].float()
            queries = torch.cat([layer.recent[:, heads].float(), after])
            keys = layer.keys[:, i].float()
            head = Head(begin, queries, keys, keys)
            claims_prkv.static_at(head, 0, head.zone_end(0), steps, found)
    return {what: sum(of) / len(of) for what, of in found.items()}


def claims(weights: Weights, track: Track) -> dict[str, Any]:
    """Every experiment of both papers."""
    pretrained = prefix.load(weights)
    layers = heads_of(pretrained)
    automatic = claims_prkv.automatic(layers, (256, 512, 1024, 2048))
    heads = list(chain(*layers))
    found = {
        "model": weights.model,
        "tokens": READ,
        "after": AFTER,
        "heads": len(heads),
        "prkv": {**claims_prkv.of_heads(heads, track), "automatic": automatic},
        "hardkv": claims_hardkv.of_heads(heads, track),
    }
    found["prkv"]["static, questions"] = questions(pretrained, track)
    found["prkv"]["static, code"] = code(weights)
    return found
