"""Tasks after RULER (Hsieh et al., 2024) that need no download, many questions to a haystack.

Variables: chains of assignments lie between paragraphs; which names have a chain's value?
Frequent: lists of words with a name each; which word is the most frequent one of a list?
Several: one name has several numbers, each told elsewhere; which are they?
As with needles, each question goes on from the haystack's end and the right answer is given.
Tasks of walks.py are asked in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from quality.pretrained.names import PLACES, WORDS, letters
from quality.pretrained.needles import (
    Fact,
    Haystack,
    Pieces,
    among_text,
    between_paragraphs,
    one_dictionary,
)
from quality.pretrained.prefix import Pretrained
from quality.pretrained.walks import records, walks

_SEED = 11
_HOPS = 4  # names of a chain
_CHAINS = 24
_NUMBERS = 4  # of a name, where it has several
_LISTS = 24
_WORDS = 60  # of a list; one of them makes up a third, and four others a tenth each


def variables(rng: np.random.Generator) -> tuple[list[str], list[Fact]]:
    """What is told, in order, and a question for each chain."""
    names = letters(rng, _CHAINS * _HOPS)
    values = rng.choice(np.arange(10_000, 100_000), _CHAINS, replace=False)
    chains = [names[i * _HOPS : (i + 1) * _HOPS] for i in range(_CHAINS)]
    told, facts = [], []
    for chain, value in zip(chains, values, strict=True):
        lines = [f"VAR {chain[0]} = {value}"]
        lines += [f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(chain)]
        told.append(lines)
        asked = f"The {_HOPS} variables that are assigned the value {value} are:"
        facts.append(Fact("variables", "", asked, " " + " ".join(chain)))
    # The chains lie among one another, each in its own order.
    left = [list(lines) for lines in told]
    order = rng.permutation(np.repeat(np.arange(_CHAINS), _HOPS))
    return [left[i].pop(0) for i in order], facts


def several(rng: np.random.Generator) -> tuple[list[str], list[Fact]]:
    """Several numbers of each of a few places."""
    places = [str(place) for place in rng.permutation(PLACES)[:_CHAINS]]
    numbers = rng.choice(np.arange(1000, 10_000), (_CHAINS, _NUMBERS), replace=False)
    left = {place: list(map(int, row)) for place, row in zip(places, numbers, strict=True)}
    facts = [
        Fact(
            "several",
            "",
            f"All {_NUMBERS} lucky numbers of {place}, in the order of the text:",
            " " + ", ".join(map(str, row)),
        )
        for place, row in left.items()
    ]
    order = rng.permutation(np.repeat(places, _NUMBERS))
    return [f"A lucky number of {place} is {left[str(place)].pop(0)}." for place in order], facts


def frequent(rng: np.random.Generator) -> tuple[list[str], list[Fact]]:
    """Lists of words."""
    told, facts = [], []
    for place in rng.permutation(PLACES)[:_LISTS]:
        words = [str(word) for word in rng.permutation(WORDS)]
        often = [words[0]] * (_WORDS // 3)
        often += [word for word in words[1:5] for _ in range(_WORDS // 10)]
        often += words[5 : 5 + _WORDS - len(often)]
        said = " ".join(rng.permutation(often))
        told.append(f"The list of {place}: {said}.")
        asked = f"The most frequent word of the list of {place} is"
        facts.append(Fact("frequent", "", asked, f" {words[0]}"))
    return told, facts


TASKS: dict[str, Callable[[np.random.Generator], tuple[list[str], list[Fact]]]] = {
    "variables": variables,
    "several": several,
    "frequent": frequent,
    "walks": walks,
    "records": records,
}


def haystack(name: str, pieces: Pieces, begin: Tensor, tokens: int, text: str) -> Haystack:
    """A task's haystack of exactly `tokens` tokens."""
    told, facts = TASKS[name](np.random.default_rng(_SEED))
    rows: Sequence[Tensor] = [pieces(f"\n\n{line}\n\n") for line in told]
    ids, places = between_paragraphs(pieces, begin, tokens, rows, text)
    return Haystack(ids, facts, places)


PARTS = ("facts", "dictionary", *TASKS)


def of_part(part: str, pretrained: Pretrained, tokens: int, count: int) -> Haystack:
    """By its name; a model's own first token, if it has one, comes first."""
    pieces, begin, text = pretrained.pieces, pretrained.ids(""), "documentation"
    if part == "facts":
        return among_text(pieces, begin, tokens, count, text)
    if part == "dictionary":
        return one_dictionary(pieces, begin, tokens, text)
    return haystack(part, pieces, begin, tokens, text)
