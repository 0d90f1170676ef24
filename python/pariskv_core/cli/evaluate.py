"""RULER's thirteen tasks and needles that look alike, by length: a score for each setting, and how
often it agrees with full attention, sample by sample.

The model runs here with and without the engine (--settings), or a server answers that is already
running (--server). A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pariskv_core as pk
from pariskv_core import _machine as machine
from pariskv_core.cli import parsing
from pariskv_core.cli.failures import OK, CannotRunError, need
from pariskv_core.cli.screen import Screen

if TYPE_CHECKING:
    from pariskv_core.cli.evaluate_prompts import Prompts
    from pariskv_core.evaluation.record import Result

HELP = "RULER's tasks by length, beside full attention: a model here, or a server"

_LEAST_TOKENS = 1024  # RULER's own texts around a question take hundreds
_RESULT, _PICTURE = "result.json", "score.png"


def arguments(parser: argparse.ArgumentParser) -> None:
    add, whole = parser.add_argument, parsing.whole
    add("model", nargs="?", help="a model folder or a GGUF file; with --server its tokenizer alone")
    add("--tasks", nargs="+", metavar="TASK", help="all, ruler, or names (ruler)")
    add(
        "--lengths",
        nargs="+",
        type=whole(_LEAST_TOKENS),
        metavar="TOKENS",
        help="of prompts with their answers (4096, twice as much, ... what the model was made for)",
    )
    add("--samples", type=whole(1), metavar="N", help="of each task and length (100)")
    add("--seed", type=whole(0), help="of the samples (42)")
    add(
        "--settings",
        nargs="+",
        metavar="SETTING",
        help="of the engine: full, default, int8, published, error=.01, ... (full default)",
    )
    add("--template", choices=("base", "chat"), help="(chat where the tokenizer has a template)")
    add("--prompts", metavar="FOLDER", help="where samples are, or go (~/.cache/pariskv/prompts)")
    add("--make-only", action="store_true", help="make the samples, and answer none")
    add("--server", metavar="URL", help="a running server with /v1/completions answers")
    add("--served-model", metavar="NAME", help="of the server's models (the only one)")
    add("--name", help="what the server's setting is called beside others, as full or default")
    add("--requests", type=whole(1, 256), default=4, metavar="N", help="to the server at once (4)")
    add("--patience", type=whole(1), default=1800, metavar="S", help="seconds an answer may take")
    add("--out", metavar="FOLDER", help="answers, result and picture (pariskv-eval/MODEL)")
    add("--compare", nargs="+", metavar="RESULT", help="join results of several runs, run nothing")
    add("--device", choices=("cpu", "cuda"), help="(cuda where it is ready)")
    add("--threads", type=parsing.threads, default=machine.usable_cores(), help="(usable cores)")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    if not screen.as_json:
        need("rich")
    _check(arguments)
    if arguments.compare:
        from pariskv_core.evaluation.record import joined

        result = joined(arguments.compare)
        _tell(result, Path(arguments.out) if arguments.out else None, screen)
        return OK
    from pariskv_core.cli import evaluate_prompts, evaluate_settings

    for name in arguments.settings or ():
        evaluate_settings.parse(name)  # refuses now what it would refuse later
    prompts = evaluate_prompts.prepare(arguments, screen)
    if arguments.make_only:
        screen.say(f"Samples: {prompts.folder}")
        screen.record({"prompts": str(prompts.folder), "files": prompts.described()})
        return OK
    result = _answered(arguments, prompts, screen)
    _tell(result, evaluate_prompts.out_of(arguments, prompts.name), screen)
    return OK


def _check(arguments: argparse.Namespace) -> None:
    """What does not go together, before anything is read."""
    if arguments.compare:
        if arguments.model or arguments.server or arguments.make_only:
            raise CannotRunError("--compare: expected results alone, without a model or a server")
        return
    if arguments.server:
        if arguments.settings:
            raise CannotRunError(
                "--settings are of a model that runs here: a server has its own, which --name names"
            )
        if not arguments.name and not arguments.make_only:
            raise CannotRunError(
                "--server: expected --name beside it, what its setting is called: full for a "
                "server without the engine, any other name for one with it"
            )
        if not arguments.model and not arguments.prompts:
            raise CannotRunError(
                "--server: expected a model, whose tokenizer makes the samples, or --prompts with "
                "samples that were made before"
            )
        return
    for option in ("name", "served_model"):
        if getattr(arguments, option):
            said = option.replace("_", "-")
            raise CannotRunError(f"--{said} is of a server: expected --server beside it")
    if not arguments.model:
        raise CannotRunError(
            "expected a model, before options that take several words; or --server with --prompts, "
            "or --compare with results of earlier runs"
        )


def _answered(arguments: argparse.Namespace, prompts: Prompts, screen: Screen) -> Result:
    from pariskv_core.cli import evaluate_run
    from pariskv_core.cli.evaluate_prompts import out_of
    from pariskv_core.evaluation.answers import Journal
    from pariskv_core.evaluation.record import Result

    answering = evaluate_run.Here if not arguments.server else evaluate_run.AtServer
    run = {**prompts.identity(), "by": answering.BY}
    answerer = answering(arguments, prompts)
    journal = Journal(out_of(arguments, prompts.name), run)
    try:
        more = evaluate_run.run(answerer, prompts, journal, screen)
    finally:
        journal.close()
    details = {"version": pk.__version__, "makers": prompts.makers(), **more}
    return Result({**run, **details}, evaluate_run.in_order(journal))


def _tell(result: Result, folder: Path | None, screen: Screen) -> None:
    from pariskv_core.cli import evaluate_table
    from pariskv_core.evaluation.picture import draw

    evaluate_table.show(screen, result)
    record = result.record()
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(record, indent=1) + "\n"
            (folder / _RESULT).write_text(text, encoding="utf-8")
            drawn = draw(result.cells(), folder / _PICTURE, _title(result))
        except OSError as reason:
            raise CannotRunError(f"cannot write {folder}: {reason.strerror}") from reason
        screen.say(f"Written: {folder / _RESULT}")
        if drawn:
            screen.say(f"         {folder / _PICTURE}")
        else:
            screen.say("No picture: matplotlib is not installed; pip install matplotlib", "yellow")
    screen.record(record)


def _title(result: Result) -> str:
    tasks = f"{len(result.tasks)} tasks" if len(result.tasks) > 1 else result.tasks[0]
    run: dict[str, Any] = result.run
    name = f"{run['model']}: " if "model" in run else ""
    return f"{name}{tasks}, {run['samples']} samples each"
