"""Continues a text by a few tokens and shows where the last step looked, over the whole context.

With --html as a page of its own: layers against positions, the passages, and the text by its heat.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pariskv_core as pk
from pariskv_core.cli import models
from pariskv_core.cli.failures import OK, CannotRunError
from pariskv_core.cli.screen import Screen
from pariskv_core.cli.strip import strip
from pariskv_core.cli.text import count

if TYPE_CHECKING:
    import torch

    from pariskv_core.cli.look import Look
    from pariskv_core.cli.models import Loaded

HELP = "where the last step looked: a strip in the terminal, an HTML page"

_PASSAGES = 6
_INDENT = "  "


def arguments(parser: argparse.ArgumentParser) -> None:
    models.arguments(parser, new_tokens=16)
    parser.add_argument("--html", metavar="FILE", help="write a page, too")


def _check_writable(file: str | None) -> None:
    """Before the model is loaded, and without leaving a file behind."""
    if file is None:
        return
    existed = Path(file).exists()
    try:
        Path(file).open("a").close()
    except OSError as reason:
        raise CannotRunError(f"cannot write {file}: {reason.strerror}") from reason
    if not existed:
        Path(file).unlink()


def _check_searched(loaded: Loaded, prompt: int, new: int, top_k: int) -> None:
    """Before minutes of reading. On a GPU texts that are somewhat longer may not be searched."""
    config = pk.Config(
        layers=1, query_heads=1, kv_heads=1, head_dim=64, policy=pk.ParisKV(top_k=top_k)
    )
    # The last token is chosen and not stored.
    if prompt + new - 1 < config.searched_from:
        raise CannotRunError(
            f"the text has {count(prompt, 'token')} and {new:,} more are asked for, but a step "
            f"over fewer than {config.searched_from:,} attends to all of them, so there is no "
            "search to explain: give a longer text"
        )


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    text = models.prompt_text(arguments)
    if text is None:
        raise CannotRunError("expected a prompt, or --prompt-file")
    _check_writable(arguments.html)
    loaded = models.load(arguments)
    import torch

    from pariskv_core.cli.look import look
    from pariskv_core.cli.sparse_run import Run

    ids = loaded.prompt_ids(text, raw=arguments.raw)
    loaded.check_length(ids.shape[1], arguments.max_new_tokens)
    _check_searched(loaded, ids.shape[1], arguments.max_new_tokens, arguments.top_k)
    run = Run.start(loaded, top_k=arguments.top_k, threads=arguments.threads)
    run.watch()
    with screen.stages() as stages:
        with stages.stage("Reading the text", 1):
            # The last token alone, so that there is a step even where one token is asked for.
            if ids.shape[1] > 1:
                run.forward(ids[:, :-1])
            logits = run.forward(ids[:, -1:])
        with stages.stage("Decoding", arguments.max_new_tokens) as advance:
            new = []
            for token, _ in run.greedy(logits, arguments.max_new_tokens):
                new.append(token)
                advance(1)
        with stages.stage("Looking", 1):
            seen = look(run)
    ids = torch.cat([ids[0].cpu(), torch.tensor(new)])
    found = record(seen, loaded, ids, asked=len(ids) - len(new))
    _show(screen, found, seen)
    if arguments.html is not None:
        from pariskv_core.cli.page import page

        write(arguments.html, page(found, seen, [piece(loaded, int(i)) for i in ids[:-1]]))
        screen.say(f"Written: {arguments.html}")
    screen.record(found)
    return OK


def write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as reason:
        raise CannotRunError(f"cannot write {file}: {reason.strerror}") from reason


def piece(loaded: Loaded, token: int) -> str:
    return str(loaded.tokenizer.decode([token]))


def record(seen: Look, loaded: Loaded, ids: torch.Tensor, asked: int) -> dict[str, Any]:
    """For programs, the terminal and the page. `ids`: of the text and what was made, `asked` of
    them the text's. The step that chose the last one is the one that is shown."""
    passages = []
    for passage in seen.passages(_PASSAGES):
        parts = (
            ids[passage.begin : passage.hottest],
            ids[passage.hottest : passage.hottest + 1],
            ids[passage.hottest + 1 : passage.end],
        )
        before, hottest, after = (str(loaded.tokenizer.decode(part)) for part in parts)
        passages.append({**vars(passage), "before": before, "token": hottest, "after": after})
    begin, end = seen.zone
    return {
        "model": loaded.name,
        "tokens": seen.tokens,
        "prompt_tokens": asked,
        "continued": str(loaded.tokenizer.decode(ids[asked:], skip_special_tokens=True)),
        "chose": piece(loaded, int(ids[-1])),
        "searched": seen.searched,
        "zone_begin": begin,
        "zone_end": end,
        "searches": seen.searches,
        "shares": seen.shares(),
        "errors": None if seen.errors is None else seen.errors.record(),
        "passages": passages,
        "layers": [
            {"layer": layer.layer, "searched": layer.searched, "selected": layer.selected.tolist()}
            for layer in seen.layers
        ],
    }


def one_line(text: str) -> str:
    return " ".join(text.split())


def strips(screen: Screen, seen: Look) -> None:
    """Selected rows, and full attention's mass of the zone, from the first token to the last."""
    encoding = sys.stdout.encoding or "ascii"
    width = max(screen.width - len(_INDENT) - 1, 10)
    begin, end = seen.zone
    mass = seen.mass.copy()
    mass[:begin] = mass[end:] = 0  # always attended to, and far more than the rest
    screen.say("Selected rows, by their attention:")
    screen.say(_INDENT + strip(list(seen.bins(seen.heat, width)), encoding), "cyan")
    screen.say("Full attention, between the first tokens and the window:")
    screen.say(_INDENT + strip(list(seen.bins(mass, width)), encoding), "magenta")
    marks = f"0{seen.tokens:>{min(width, seen.tokens) - 1},}"
    screen.say(_INDENT + marks, "dim")


def shares_sentence(shares: dict[str, float]) -> str:
    return (
        f"Of full attention's mass {shares['resident']:.1%} lies on the first tokens and the "
        f"window, {shares['selected']:.1%} on selected rows, {shares['elsewhere']:.1%} elsewhere"
    )


def _show(screen: Screen, found: dict[str, Any], seen: Look) -> None:
    if screen.as_json:
        return
    screen.say()
    screen.say(f"… {one_line(found['continued'])}", style="bold")
    tokens = count(found["tokens"], "token")
    screen.say(f"The step that chose “{one_line(found['chose'])}”, over {tokens}.\n")
    if not found["searched"]:
        screen.say(
            "It attended to all of them: so short a text is not searched. Give a longer one.",
            style="yellow",
        )
        return
    strips(screen, seen)
    screen.say(f"\n{shares_sentence(found['shares'])}.")
    if seen.errors is not None:
        from pariskv_core.cli.errors import sentence

        screen.say(sentence(seen.errors, "The step"))
    if not found["passages"]:
        return
    from rich.text import Text

    rows = []
    for passage in found["passages"]:
        shown = Text(one_line(passage["before"]) + " ")
        shown.append("«" + one_line(passage["token"]) + "»", style="bold cyan")
        shown.append(" " + one_line(passage["after"]))
        selected = f"{passage['selected']} of {found['searches']}"
        rows.append([f"{passage['hottest']:,}", selected, f"{passage['mass']:.1%}", shown])
    screen.say()
    screen.table(rows, ["position", "selected by", "mass", "text"], right=(0, 1, 2))
