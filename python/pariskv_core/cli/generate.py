"""Continues a text with a model whose cache is this engine, and says what the steps attended to.

The text goes to standard output as it comes, figures to standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from pariskv_core import PRKV, HardKV, ParisKV
from pariskv_core.cli import models
from pariskv_core.cli.failures import OK, CannotRunError
from pariskv_core.cli.screen import Screen
from pariskv_core.cli.text import count, seconds

if TYPE_CHECKING:
    from pariskv_core.cli.sparse_run import Run

HELP = "continue a text with a model folder or a GGUF file"


def arguments(parser: argparse.ArgumentParser) -> None:
    models.arguments(parser, new_tokens=200)


class Pieces:
    """Tokens into text, as far as it is whole: a character may take several tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._said = 0

    @property
    def text(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def add(self, token: int, *, last: bool = False) -> str:
        self._tokens.append(token)
        whole = self.text
        if whole.endswith("�") and not last:
            return ""
        new, self._said = whole[self._said :], len(whole)
        return new


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    text = models.prompt_text(arguments)
    if text is None:
        raise CannotRunError("expected a prompt, or --prompt-file")
    loaded = models.load(arguments)
    from pariskv_core.cli.sparse_run import Run

    ids = loaded.prompt_ids(text, raw=arguments.raw)
    loaded.check_length(ids.shape[1], arguments.max_new_tokens)
    run = Run.start(loaded, top_k=arguments.top_k, threads=arguments.threads)
    loaded.model.set_attn_implementation("pariskv")
    begin = time.perf_counter()
    logits = run.forward(ids)
    read = time.perf_counter() - begin

    pieces, tokens = Pieces(loaded.tokenizer), 0
    begin = time.perf_counter()
    for token, _ in run.greedy(logits, arguments.max_new_tokens):
        screen.write(pieces.add(token))
        tokens += 1
    taken = time.perf_counter() - begin
    screen.write("\n")
    attended = attended_to(run)
    found = {
        "text": pieces.text,
        "model": loaded.name,
        "prompt_tokens": ids.shape[1],
        "new_tokens": tokens,
        "prompt_seconds": read,
        "seconds": taken,
        # The first token comes with the prompt.
        "tokens_per_second": (tokens - 1) / taken if tokens > 1 else None,
        "attended": attended,
    }
    if not screen.as_json:
        _tell(found)
    screen.record(found)
    return OK


def attended_to(run: Run) -> dict[str, Any]:
    """What an average search looked at, per layer and kv head."""
    engine, sequence = run.engine, run.sequence
    stats, regions = engine.stats(), engine.regions(sequence)
    searches = stats.searched_tokens * engine.config.kv_heads
    return {
        "tokens": engine.length(sequence),
        "sink": regions.sink,
        "window": regions.local + regions.buffer,
        "zone": regions.retrieval,
        "dense_below": engine.config.searched_from,
        "searches": searches,
        "candidates": stats.candidates / searches if searches else 0.0,
        "selected": stats.fetched_rows / searches if searches else 0.0,
        "tail": _has_tail(engine.config.policy),
        "row_bytes": stats.row_bytes,
        "summary_bytes": stats.summary_bytes,
    }


def attended_sentence(attended: dict[str, Any]) -> str:
    if not attended["searches"]:
        return (
            "every step attended to all tokens: texts of fewer than "
            f"{attended['dense_below']:,} are not searched"
        )
    return (
        f"each step attended to {attended['sink']} first and {attended['window']} recent tokens, "
        f"and per layer and kv head to {attended['selected']:.0f} of {attended['zone']:,} between "
        f"them, from {attended['candidates']:,.0f} candidates"
        + ("; the rest was estimated" if attended["tail"] else "")
    )


def _has_tail(policy: ParisKV | HardKV | PRKV) -> bool:
    if not isinstance(policy, ParisKV):
        return False
    return policy.tail == "sample" or (policy.tail == "own" and policy.block > 0)


def _tell(found: dict[str, Any]) -> None:
    speed = found["tokens_per_second"]
    lines = [
        f"{count(found['prompt_tokens'], 'token')} read in {seconds(found['prompt_seconds'])}; "
        f"{count(found['new_tokens'], 'new token')}" + (f", {speed:.1f} tokens/s" if speed else "")
    ]
    lines.append(attended_sentence(found["attended"]))
    print("\n" + "\n".join(lines), file=sys.stderr)
