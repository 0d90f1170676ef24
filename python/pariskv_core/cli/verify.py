"""Compares the engine with full attention on your model and your text, step by step.

First with top_k as large as the text, where every step has to give the same token; then with the
given top_k, where the distance from full attention is told, and the error that steps predict for
their outputs beside the true one. Exit code 1: a token differs in the
first part (ties within rounding aside), or the second is farther away than --kl-at-most.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pariskv_core.cli import models, parsing
from pariskv_core.cli.failures import DOES_NOT_HOLD, OK, CannotRunError
from pariskv_core.cli.screen import Screen
from pariskv_core.cli.text import count

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pariskv_core.cli.errors import Errors
    from pariskv_core.cli.models import Loaded

HELP = "compare with full attention on your model: exact, and at top_k"

_TOKENS = 4096


def arguments(parser: argparse.ArgumentParser) -> None:
    models.arguments(parser, new_tokens=32)
    parser.add_argument(
        "--tokens",
        type=parsing.whole(8),
        default=_TOKENS,
        help=f"without a prompt: so many of Python's own documentation ({_TOKENS:,})",
    )
    parser.add_argument(
        "--kl-at-most", type=float, metavar="NATS", help="fail where the mean KL is larger"
    )


@dataclass(frozen=True)
class Compared:
    """One way to attend, against full attention, over all steps."""

    steps: int
    same: int  # steps with the same likeliest token
    ties: int  # of the others, those where full attention is as sure of either, within rounding
    first_other: int | None  # the first step that differs and is no tie
    kl_mean: float
    kl_worst: float
    largest_difference: float  # of a logit
    searches: int

    @property
    def equal(self) -> bool:
        return self.same + self.ties == self.steps


def compare(
    dense: list[torch.Tensor], ours: list[torch.Tensor], rounding: float, searches: int
) -> Compared:
    """Logits (vocabulary) of each step; `rounding`: of the model's numbers, relative."""
    same = ties = 0
    first, divergences, difference = None, [], 0.0
    for step, (a, b) in enumerate(zip(dense, ours, strict=True)):
        logs = a.log_softmax(-1), b.log_softmax(-1)
        # Rounding may leave less than nothing.
        divergences.append(max(float((logs[0].exp() * (logs[0] - logs[1])).sum()), 0.0))
        difference = max(difference, float((a - b).abs().max()))
        if a.argmax() == b.argmax():
            same += 1
        elif a.max() - a[b.argmax()] <= 4 * rounding * a.abs().max():
            ties += 1
        elif first is None:
            first = step
    mean = sum(divergences) / len(divergences)
    return Compared(len(dense), same, ties, first, mean, max(divergences), difference, searches)


def _ids(loaded: Loaded, arguments: argparse.Namespace, text: str | None) -> torch.Tensor:
    new = arguments.max_new_tokens
    if text is not None:
        ids = loaded.prompt_ids(text, raw=arguments.raw)
        loaded.check_length(ids.shape[1], new)
        return ids
    from pariskv_core.cli.document import documentation

    most = arguments.tokens
    if loaded.context:
        most = min(most, loaded.context - new)
    if most < 1:
        raise CannotRunError(
            f"{loaded.name} was made for {loaded.context:,} tokens, fewer than "
            f"--max-new-tokens {new:,}"
        )
    # A token is rarely shorter than one character.
    return loaded.ids(documentation()[: 16 * most])[:, :most]


def _along(
    step: Callable[[torch.Tensor], torch.Tensor],
    ids: torch.Tensor,
    steps: int,
    tokens: list[int] | None,
    advance: Callable[[int], None],
) -> list[torch.Tensor]:
    """Logits of every step: after the prompt, then after each of `tokens`, or the likeliest."""
    logits = [step(ids)]
    advance(1)
    for i in range(steps - 1):
        token = int(logits[-1].argmax()) if tokens is None else tokens[i]
        logits.append(step(ids.new_tensor([[token]])))
        advance(1)
    return logits


def _attended(
    loaded: Loaded,
    top_k: int,
    threads: int,
    ids: torch.Tensor,
    tokens: list[int],
    advance: Callable[[int], None],
) -> tuple[list[torch.Tensor], int, Errors | None]:
    """By the engine: logits of every step, searches, and the errors of the steps of one token."""
    from pariskv_core.cli.errors import Watched
    from pariskv_core.cli.sparse_run import Run

    run, watched = Run.start(loaded, top_k=top_k, threads=threads), Watched()
    run.watch()

    def step(ids: torch.Tensor) -> torch.Tensor:
        logits = run.forward(ids)
        watched.add(run)
        return logits

    logits = _along(step, ids, len(tokens), tokens, advance)
    return logits, run.engine.stats().searched_tokens, watched.tally.together()


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    text = models.prompt_text(arguments)
    loaded = models.load(arguments)
    import torch
    from transformers import DynamicCache

    from pariskv_core.cli.sparse_run import forward

    ids, model = _ids(loaded, arguments, text), loaded.model
    if ids.shape[1] < 2:
        raise CannotRunError("expected a prompt of two tokens or more")
    said = f"{loaded.name}, {count(ids.shape[1], 'token')}"
    if text is None:
        said += " of Python's own documentation"
    screen.say(f"{said}, then {count(arguments.max_new_tokens, 'step')}", style="bold")
    steps = arguments.max_new_tokens
    found = {}
    with screen.stages() as stages:
        with stages.stage("Full attention", steps) as advance:
            cache = DynamicCache(config=model.config)
            dense = _along(partial(forward, model, cache=cache), ids, steps, None, advance)
            del cache
        tokens = [int(logits.argmax()) for logits in dense]
        whole = ids.shape[1] + steps
        for name, top_k in (("exact", max(whole, arguments.top_k)), ("sparse", arguments.top_k)):
            with stages.stage(f"The engine, top_k {top_k:,}", steps) as advance:
                ours, searches, errors = _attended(
                    loaded, top_k, arguments.threads, ids, tokens, advance
                )
            found[name] = compare(dense, ours, torch.finfo(model.dtype).eps, searches)

    # `errors`: of the second run, for the first one has nothing to estimate.
    problems = _problems(found, arguments.kl_at_most)
    _show(screen, found, arguments.top_k, errors, problems)
    screen.record(
        {
            "model": loaded.name,
            "prompt_tokens": ids.shape[1],
            "steps": steps,
            "top_k": arguments.top_k,
            "dtype": str(model.dtype).removeprefix("torch."),
            **{name: asdict(compared) for name, compared in found.items()},
            "errors": None if errors is None else errors.record(),
            "problems": problems,
        }
    )
    return DOES_NOT_HOLD if problems else OK


def _problems(found: dict[str, Compared], kl_at_most: float | None) -> list[str]:
    problems = []
    exact, sparse = found["exact"], found["sparse"]
    if not exact.equal:
        problems.append(
            f"With top_k as large as the text, step {exact.first_other} gives another token than "
            "full attention"
        )
    if kl_at_most is not None and not sparse.kl_mean <= kl_at_most:
        problems.append(f"The mean KL is {sparse.kl_mean:.4f}, more than {kl_at_most}")
    return problems


def _show(
    screen: Screen,
    found: dict[str, Compared],
    top_k: int,
    errors: Errors | None,
    problems: list[str],
) -> None:
    def row(name: str, value: Callable[[Compared], str]) -> list[str]:
        return [name, *(value(found[kind]) for kind in ("exact", "sparse"))]

    def same(compared: Compared) -> str:
        ties = f" + {compared.ties} tied" if compared.ties else ""
        return f"{compared.same}{ties} of {compared.steps}"

    rows: list[list[Any]] = [
        row("same likeliest token", same),
        row("KL from full attention, mean", lambda c: f"{c.kl_mean:.2g}"),
        row("KL, worst step", lambda c: f"{c.kl_worst:.2g}"),
        row("largest difference of a logit", lambda c: f"{c.largest_difference:.2g}"),
    ]
    screen.say()
    screen.table(rows, ["", "exact", f"top_k {top_k}"], right=(1, 2))
    if errors is not None:
        from pariskv_core.cli.errors import sentence

        screen.say(sentence(errors, f"A step at top_k {top_k}"))
    if not found["sparse"].searches:
        screen.say(
            "Nothing was searched: texts of fewer tokens than dense_below are attended to in full. "
            "Give a longer one.",
            style="yellow",
        )
    for problem in problems:
        screen.say(f"{problem}.", style="red")
    if not problems:
        screen.say("It holds.", style="green")
