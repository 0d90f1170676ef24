"""Serve a model with vLLM and the engine: `vllm serve` with the two options that it needs.

pariskv vllm --set top_k=100 --set memory_budget=60GB MODEL --max-model-len 131072 --port 8000

Options behind MODEL are those of `vllm serve`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from typing import Any, NoReturn

from pariskv_core import _shapes as shapes
from pariskv_core.cli.failures import OK, CannotRunError
from pariskv_core.cli.parsing import Parser
from pariskv_core.cli.screen import Screen

HELP = "serve a model with vLLM and the engine"

_OWN = ("--set", "--print", "--json")


def arguments(parser: Parser) -> None:
    parser.strange_option = (
        "{}: expected it behind MODEL if it is an option of `vllm serve`, as in: "
        "pariskv vllm MODEL --max-model-len 131072"
    )
    setting = "of the engine, as name=value; may be repeated (docs/vllm.md)"
    parser.add_argument("--set", action="append", default=[], metavar="SETTING", help=setting)
    parser.add_argument("--print", action="store_true", help="the command, instead of running it")
    parser.add_argument("model", metavar="MODEL", help="as `vllm serve` takes it")
    rest = argparse.REMAINDER
    options = parser.add_argument("options", nargs=rest, metavar="OPTIONS", help="of `vllm serve`")
    options.required = False


def _settings(pairs: list[str]) -> dict[str, Any]:
    from pariskv_core.vllm.settings import parse

    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise CannotRunError(f"--set: expected name=value, got {pair}")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value  # a word
    try:
        parse(found)
    except ValueError as reason:
        raise CannotRunError(str(reason)) from None
    return found


def command(model: str, settings: dict[str, Any], options: list[str]) -> list[str]:
    from pariskv_core.vllm import NAME
    from pariskv_core.vllm.versions import role

    shape = _shape(model)
    connector = {"kv_connector": NAME, "kv_role": role(multimodal=bool(shape and shape.multimodal))}
    made = ["vllm", "serve", model, *_attention(shape)]
    made += ["--kv-transfer-config", json.dumps(connector)]
    if settings:
        made += ["--additional-config", json.dumps({"pariskv": settings})]
    _refuse(made, options)
    return made + options


def _shape(model: str) -> shapes.ModelShape | None:
    """None: it is not here, or not known. vLLM's plugin then says what to set where it is not of
    text and layers of full attention alone."""
    try:
        return shapes.read(model)
    except CannotRunError:
        return None


def _attention(shape: shapes.ModelShape | None) -> list[str]:
    """Of which layers the engine is: of full attention alone, where a model has others."""
    if shape is None or shape.other_layers == 0:
        return ["--attention-backend", "CUSTOM"]
    return ["--attention-config", json.dumps({"backend_per_kind": {"full_attention": "CUSTOM"}})]


def _refuse(made: list[str], options: list[str]) -> None:
    for option in options:
        name = option.partition("=")[0]
        if name in _OWN:
            raise CannotRunError(
                f"{name}: expected it before MODEL; options behind MODEL are those of `vllm serve`"
            )
        if name.startswith("--") and name in made:
            raise CannotRunError(
                f"{name}: expected it once; this command sets it, so use --set before MODEL for "
                "settings of the engine, or run `vllm serve` with all options (docs/vllm.md)"
            )


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    if arguments.json and not arguments.print:
        raise CannotRunError(
            "--json: expected --print beside it, for the command as JSON; a server that runs "
            "writes its own log"
        )
    made = command(arguments.model, _settings(arguments.set), arguments.options)
    if arguments.print:
        screen.write(shlex.join(made) + "\n")
        screen.record({"command": made})
        return OK
    return _become(made)


def _become(made: list[str]) -> NoReturn:
    if shutil.which(made[0]) is None:
        raise CannotRunError(
            "there is no program vllm here; install it beside this package: "
            'pip install "vllm>=0.32,<0.34"'
        )
    os.execvp(made[0], made)
