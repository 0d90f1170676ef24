"""Facts in a long text, and questions about them: does a method find what full attention finds?

A haystack is read once and holds many facts. Each question goes on from its end with the same
words that the fact was told in; the answer is given token by token. It counts as found if every
token of it was the likeliest one, and its log-probability says how sure the model was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quality.pretrained.forced import DEFAULT, METHODS, Say
from quality.pretrained.names import PLACES, WORDS
from quality.pretrained.prefix import Attention, Prefix, Pretrained, go_on, kept
from quality.pretrained.texts import TEXTS

_AFTER = 640  # tokens of plain text after the last fact, at least: more than the window
_SEED = 7
ASKED = (
    "full attention",
    "sinks and window",
    "best 100",
    "best 400",
    "published",
    "block 64",
    DEFAULT,
)
Pieces = Callable[[str], Tensor]  # a text's tokens


@dataclass(frozen=True)
class Fact:
    kind: str
    told: str  # as it stands in the text
    question: str
    answer: str


@dataclass
class Haystack:
    ids: Tensor  # (tokens)
    facts: list[Fact]
    places: list[int] = field(default_factory=list)  # where each fact begins


# --- Facts ---------------------------------------------------------------------------------------


def _sentence(kind: str, said: str, answer: str) -> Fact:
    return Fact(kind, f"{said} {answer}.", said, f" {answer}")


def words(count: int, rng: np.random.Generator) -> list[Fact]:
    places, found = rng.permutation(PLACES)[:count], rng.permutation(WORDS)[:count]
    return [
        _sentence("words", f"The secret word of {place} is", word)
        for place, word in zip(places, found, strict=True)
    ]


def numbers(count: int, rng: np.random.Generator) -> list[Fact]:
    places, found = rng.permutation(PLACES)[:count], rng.integers(100_000, 1_000_000, count)
    return [
        _sentence("numbers", f"The magic number of {place} is", str(number))
        for place, number in zip(places, found, strict=True)
    ]


def settings(count: int, rng: np.random.Generator) -> list[Fact]:
    """Keys of a dictionary, one by one."""
    keys, found = rng.permutation(WORDS)[:count], rng.integers(1000, 10_000, count)
    values = rng.permutation(WORDS)[:count]
    facts = []
    for key, word, number in zip(keys, values, found, strict=True):
        said = f'>>> settings["{key}"]\n'
        value = f"'{word}-{number}'"
        facts.append(Fact("keys", said + value, said, value))
    return facts


def pairs(count: int, rng: np.random.Generator) -> list[Fact]:
    """Keys and values of one large dictionary: random numbers, so that nothing can be guessed."""
    keys = rng.choice(np.arange(10_000_000, 100_000_000), count, replace=False)
    values = rng.integers(10_000_000, 100_000_000, count)
    facts = []
    for key, value in zip(keys, values, strict=True):
        said = f'"{key}": '
        facts.append(Fact("pairs", f'{said}"{value}",\n', said, f'"{value}"'))
    return facts


# --- Haystacks -----------------------------------------------------------------------------------


def among_text(pieces: Pieces, begin: Tensor, tokens: int, count: int, text: str) -> Haystack:
    """`count` facts of three kinds, evenly spaced between paragraphs; exactly `tokens` tokens."""
    rng = np.random.default_rng(_SEED)
    kinds = (words, numbers, settings)
    facts = [f for i, kind in enumerate(kinds) for f in kind((count + i) // len(kinds), rng)]
    facts = [facts[i] for i in rng.permutation(len(facts))]
    told = [pieces(f"\n\n{fact.told}\n\n") for fact in facts]
    ids, places = between_paragraphs(pieces, begin, tokens, told, text)
    return Haystack(ids, facts, places)


def between_paragraphs(
    pieces: Pieces, begin: Tensor, tokens: int, told: Sequence[Tensor], text: str
) -> tuple[Tensor, list[int]]:
    """Exactly `tokens` tokens of text, with what is told evenly spaced in it, and where it is."""
    # Documentation has its own ">>>" now and then; a fact is told between paragraphs.
    plain = tokens - len(begin) - sum(map(len, told)) - _AFTER
    if plain < len(told):
        raise ValueError(f"{tokens:,} tokens are too few for {len(told)} facts.")
    paragraphs = TEXTS[text]().split("\n\n")
    places: list[int] = []
    ids, filler, at = [begin], 0, len(begin)
    for paragraph in paragraphs:
        while len(places) < len(told) and filler * len(told) >= plain * len(places):
            places.append(at)
            ids.append(told[len(places) - 1])
            at += len(ids[-1])
        ids.append(pieces(paragraph + "\n\n"))
        at += len(ids[-1])
        filler += len(ids[-1])
        if at >= tokens and len(places) == len(told):
            return torch.cat(ids)[:tokens], places
    raise ValueError(f"The text {text} is too short for {tokens:,} tokens.")


def one_dictionary(pieces: Pieces, begin: Tensor, tokens: int, text: str) -> Haystack:
    """As many pairs as fit, with some text around them."""
    rng = np.random.default_rng(_SEED)
    opening = pieces("A dictionary of numbers:\n\n{\n")
    closing = pieces("}\n\n" + TEXTS[text]()[: 8 * _AFTER])[:_AFTER]
    facts = pairs(tokens // 16, rng)
    ids, at = [begin, opening], len(begin) + len(opening)
    found = Haystack(begin, [])
    for fact in facts:
        told = pieces(fact.told)
        if at + len(told) > tokens - _AFTER:
            break
        found.facts.append(fact)
        found.places.append(at)
        ids.append(told)
        at += len(told)
    closing = torch.cat([closing, pieces(TEXTS[text]()[: 8 * _AFTER])])[: tokens - at]
    found.ids = torch.cat([*ids, closing])
    return found


# --- Questions -----------------------------------------------------------------------------------


@torch.no_grad()
def asked(
    pretrained: Pretrained, prefix: Prefix, facts: Iterable[Fact], attention: Attention
) -> list[dict[str, float]]:
    """For every fact: whether the answer was found, and its log-probability."""
    results = []
    for fact in facts:
        question, answer = pretrained.pieces(f"\n\n{fact.question}"), pretrained.pieces(fact.answer)
        ids = torch.cat([question, answer])
        logits = go_on(pretrained.model, prefix, ids[:-1], attention)[len(question) - 1 :]
        chances = logits.log_softmax(-1).gather(1, answer[:, None])
        found = bool((logits.argmax(-1) == answer).all())
        results.append({"found": float(found), "log_probability": chances.sum().item()})
    return results


def measured(
    pretrained: Pretrained, haystack: Haystack, count: int, names: Sequence[str], say: Say
) -> dict[str, dict[str, dict[str, float]]]:
    """Each method by its name: `summary` of `count` facts, evenly spaced."""
    prefix = kept(pretrained, haystack.ids)
    stride = max(len(haystack.facts) // count, 1)
    facts, found = haystack.facts[::stride][:count], {}
    for name in names:
        begin = time.perf_counter()
        found[name] = summary(facts, asked(pretrained, prefix, facts, METHODS[name]()))
        of_all, taken = found[name]["all"], time.perf_counter() - begin
        chance = of_all["log_probability"]
        say(f"{name}: {of_all['found']:.0f} of {of_all['asked']}, {chance:.2f} ({taken:.0f} s)")
    return found


def summary(facts: list[Fact], results: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """By kind of fact, and of all."""
    kinds = {fact.kind for fact in facts}
    of = {
        kind: [r for f, r in zip(facts, results, strict=True) if f.kind == kind] for kind in kinds
    }
    of["all"] = results
    return {
        kind: {
            "asked": len(some),
            "found": sum(r["found"] for r in some),
            "log_probability": sum(r["log_probability"] for r in some) / len(some),
            "worst": min(r["log_probability"] for r in some),
        }
        for kind, some in sorted(of.items())
    }
