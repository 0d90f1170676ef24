"""Tasks after GraphWalks (OpenAI, 2025) and after texts that are to become JSON.

Walks: edges of many small graphs lie between paragraphs; which nodes are two edges away?
Records: fields of many places are told one by one; what is a place's record, as JSON?
Every token of such an answer has its own few rows somewhere in the text.
"""

from __future__ import annotations

import json

import numpy as np

from quality.pretrained.names import PLACES, WORDS, letters
from quality.pretrained.needles import Fact

_GRAPHS = 24
_PLACES = 24
# Of a graph's nodes: the first one has edges to the next two, each of these to two more.
_EDGES = ((0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6))


def walks(rng: np.random.Generator) -> tuple[list[str], list[Fact]]:
    """What is told, in order, and a question for each graph."""
    nodes = 1 + len(_EDGES)
    names = letters(rng, _GRAPHS * nodes)
    told, facts = [], []
    for first in range(0, len(names), nodes):
        own = names[first : first + nodes]
        told += [f"EDGE {own[a]} -> {own[b]}" for a, b in _EDGES]
        away = sorted(own[3:])
        asked = f"The {len(away)} nodes that are two edges from {own[0]}, sorted by name, are:"
        facts.append(Fact("walks", "", asked, " " + " ".join(away)))
    return [told[i] for i in rng.permutation(len(told))], facts


def records(rng: np.random.Generator) -> tuple[list[str], list[Fact]]:
    """Sentences, and a question for each place."""
    places = [str(place) for place in rng.permutation(PLACES)[:_PLACES]]
    symbols, rivers = (rng.permutation(WORDS)[:_PLACES] for _ in range(2))
    years, buses = rng.integers(1000, 2000, _PLACES), rng.integers(100, 1000, _PLACES)
    told, facts = [], []
    for place, symbol, river, year, count in zip(
        places, symbols, rivers, years, buses, strict=True
    ):
        told += [
            f"The symbol of {place} is the {symbol}.",
            f"The river of {place} is called {river}.",
            f"{place} was founded in {year}.",
            f"There are {count} buses in {place}.",
        ]
        record = {
            "symbol": str(symbol),
            "river": str(river),
            "founded": int(year),
            "buses": int(count),
        }
        asked = f"The record of {place} as JSON, with symbol, river, founded and buses:"
        facts.append(Fact("records", "", asked, " " + json.dumps(record)))
    return [told[i] for i in rng.permutation(len(told))], facts
