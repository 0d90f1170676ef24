"""The text that commands bring along: Python's own documentation, which every Python carries.

It is what help() shows of the language reference. It differs a little between versions of Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def documentation() -> str:
    from pydoc_data import topics

    return "\n\n".join(chapter for _, chapter in sorted(topics.topics.items()))


@dataclass(frozen=True)
class Fact:
    """Stands in the document as `begin answer.`; nothing else there is about it."""

    question: str
    begin: str
    answer: str


FACTS = (
    Fact("What is the secret word of Paris?", "The secret word of Paris is", "ribbon"),
    Fact("What is the secret word of Oslo?", "The secret word of Oslo is", "candle"),
    Fact(
        "Who is the gardener of the museum?",
        "The gardener of the museum is called",
        "Helen Brandt",
    ),
    Fact(
        "What is the captain's favourite fruit?",
        "The favourite fruit of the captain is",
        "the apricot",
    ),
    Fact("When does the chess club meet?", "The meeting of the chess club is on", "Thursday"),
    Fact(
        "What colour is the door of the old mill?",
        "The colour of the door of the old mill is",
        "turquoise",
    ),
)


def with_facts(tokens: int, length: Callable[[str], int]) -> str:
    """About so many tokens of documentation, with the facts at even depths between paragraphs.

    length  the tokens of a text
    """
    parts: list[str] = []
    told = have = 0
    for paragraph in documentation().split("\n\n"):
        parts.append(paragraph)
        have += length(paragraph + "\n\n")
        if told < len(FACTS) and have >= tokens * (told + 0.5) / len(FACTS):
            parts.append(f"{FACTS[told].begin} {FACTS[told].answer}.")
            told += 1
        if have >= tokens:
            break
    return "\n\n".join(parts)
