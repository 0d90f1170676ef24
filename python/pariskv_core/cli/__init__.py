"""The `pariskv` command: `demo` shows what the engine does, `doctor` what this machine offers."""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import pariskv_core
from pariskv_core.cli import machine

WRONG_INPUT = 2


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, and leaves the usage to --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_INPUT, f"{self.prog}: {message}\n")


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text.replace(",", "").replace("_", ""))
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} up, got {text}")
        return value

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pariskv", description="The KV cache that attends only to what matters.")
    parser.add_argument("--version", action="version", version=pariskv_core.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="demo | doctor")

    demo = commands.add_parser(
        "demo",
        help="plant facts in a long context, decode over it, show what was found and how fast",
    )
    add = demo.add_argument
    add("--tokens", type=_at_least(4096), help="length of the context (131072)")
    add("--steps", type=_at_least(80), default=600, help="decode steps (600)")
    add("--layers", type=_at_least(1), default=2, help="layers of the model (2)")
    add("--threads", type=_at_least(1), default=machine.usable_cores(), help="(the usable cores)")
    add("--top-k", type=_at_least(1), default=100, help="rows fetched per kv head (100)")
    add("--seed", type=_at_least(0), default=7, help="of the made-up keys and queries (7)")
    add("--json", metavar="FILE", help="write every figure to FILE as well")
    add("--quick", action="store_true", help="8,192 tokens unless --tokens says otherwise")

    commands.add_parser("doctor", help="versions, instruction sets and backends on this machine")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if importlib.util.find_spec("rich") is None:
        print(
            "pariskv draws its tables with rich: install it with pip install 'pariskv_core[cli]'",
            file=sys.stderr,
        )
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A frame or a × that an old encoding lacks is no reason to lose the table.
        sys.stdout.reconfigure(errors="replace")
    if arguments.command == "doctor":
        from pariskv_core.cli import doctor

        return doctor.run()

    # Read once, when NumPy is imported. The demo shares its own work out; a BLAS that also did
    # would spin on the cores that the engine is timed on.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from pariskv_core.cli import demo

    tokens = arguments.tokens or (8192 if arguments.quick else 131072)
    try:
        return demo.run(
            demo.Options(
                tokens=tokens,
                steps=arguments.steps,
                layers=arguments.layers,
                threads=arguments.threads,
                top_k=arguments.top_k,
                seed=arguments.seed,
                json_file=arguments.json,
            )
        )
    except demo.CannotRunError as reason:
        print(f"pariskv demo: {reason}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        print("pariskv demo: stopped", file=sys.stderr)
        return 130
