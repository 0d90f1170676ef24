"""Facts that look alike, of the package hard-needle: six of one kind, and one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pariskv_core._failures import CannotRunError
from pariskv_core.evaluation.prompts import Template
from pariskv_core.evaluation.samples import Made, Wanted

_NEEDLES = 6
_ANSWER_TOKENS = 24
_BEGIN = "\nAnswer:"
_SEEDS = 100_003  # samples of neighbouring seeds have nothing in common
_NEAR = 64  # tokens below the length that a text may be


def make(wanted: Wanted, template: Template, advance: Callable[[int], None]) -> Made:
    budget = wanted.length - _ANSWER_TOKENS - template.extra
    samples = []
    for index in range(wanted.count):
        samples.append(_sample(budget, wanted.seed * _SEEDS + index, template))
        advance(1)
    return Made(samples, _ANSWER_TOKENS)


def _sample(budget: int, seed: int, template: Template) -> dict[str, Any]:
    """The longest text found with at most so many tokens: the package counts characters."""
    from hard_needle import generate_hard_example

    fits, too_long = 0, 0
    found: dict[str, Any] | None = None
    characters = 4 * budget
    for _ in range(12):
        made = generate_hard_example(num_needles=_NEEDLES, ctx_chars=characters, seed=seed)
        tokens = template.count(made["prompt"])
        if tokens <= budget:
            fits, found = characters, made
            if budget - tokens <= _NEAR:
                break
        else:
            too_long = characters
        guess = characters * (budget - _NEAR // 2) // tokens
        inside = fits < guess and (not too_long or guess < too_long)
        characters = guess if inside else (fits + (too_long or 2 * fits)) // 2
    if found is None:
        raise CannotRunError(
            f"hard_needle cannot be made at {budget:,} tokens: choose longer --lengths"
        )
    question, _, rest = found["prompt"].rpartition(_BEGIN)
    return {"question": question, "begin": _BEGIN + rest, "outputs": [found["target"]]}
