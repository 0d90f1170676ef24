"""What two papers say of attention, on a pretrained model: PRKV's and HARD-KV's claims.

Three regimes for PRKV's split: documentation that goes on, code that goes on, and questions about
facts in a long text, each chosen by queries that end with the question.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Any

import torch
from pariskv_core.cli.weights import Weights

from quality.pretrained import claims_hardkv, claims_prkv, prefix, ruler
from quality.pretrained.claims_prkv import Sums
from quality.pretrained.prefix import Pretrained
from quality.pretrained.shares import Track
from quality.pretrained.texts import TEXTS
from quality.pretrained.trail import LOCAL, Head, trail

READ, AFTER = 7168, 1024
QUESTIONS = 24


def heads_of(pretrained: Pretrained, text: str) -> list[list[Head]]:
    """By layer, of AFTER tokens after READ."""
    ids = pretrained.ids(TEXTS[text]())
    known = prefix.kept(pretrained, ids[:READ])
    return list(trail(pretrained, known, ids[READ : READ + AFTER]).values())


def questions(pretrained: Pretrained, track: Track) -> dict[str, float]:
    """Recall by S on the tokens of answers."""
    haystack = ruler.of_part("facts", pretrained, READ, 102)
    known = prefix.kept(pretrained, haystack.ids)
    found: Sums = defaultdict(list)
    facts = haystack.facts[:: len(haystack.facts) // QUESTIONS][:QUESTIONS]
    for fact in track(facts, f"{pretrained.weights.name}, questions"):
        asked, answer = pretrained.pieces(f"\n\n{fact.question}"), pretrained.pieces(fact.answer)
        layers = trail(pretrained, known, torch.cat([asked, answer]))
        for head in chain(*layers.values()):
            begin = len(asked)
            end = head.prompt + begin - LOCAL
            steps = torch.arange(begin, head.steps)
            claims_prkv.static_at(head, begin, end, steps, found)
    return {what: sum(of) / len(of) for what, of in found.items()}


def claims(weights: Weights, track: Track) -> dict[str, Any]:
    """Every experiment of both papers."""
    pretrained = prefix.load(weights)
    layers = heads_of(pretrained, "documentation")
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
    del layers, heads
    static: Sums = defaultdict(list)
    for head in chain(*heads_of(pretrained, "code")):
        claims_prkv.by_static(head, static)
    found["prkv"]["static, code"] = {what: sum(of) / len(of) for what, of in static.items()}
    found["prkv"]["static, questions"] = questions(pretrained, track)
    return found
