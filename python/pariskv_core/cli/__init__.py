"""The `pariskv` command: what fits, what it costs, whether it is right, and where a model looks.

Exit codes: 0 it is so, 1 what was asked about does not hold, 2 wrong input or something missing,
130 stopped by Ctrl-C. Every command has --json. Nothing here is needed to use the library.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence

import pariskv_core
from pariskv_core.cli import (
    bench,
    demo,
    doctor,
    evaluate,
    explain,
    generate,
    ggml,
    plan,
    verify,
    vllm,
)
from pariskv_core.cli.failures import STOPPED, WRONG_INPUT, CannotRunError, lacking
from pariskv_core.cli.parsing import Parser
from pariskv_core.cli.screen import Screen

_COMMANDS = {
    "doctor": doctor,
    "plan": plan,
    "generate": generate,
    "verify": verify,
    "explain": explain,
    "eval": evaluate,
    "bench": bench,
    "demo": demo,
    "ggml": ggml,
    "vllm": vllm,
}


def _parser() -> Parser:
    parser = Parser(
        prog="pariskv",
        description="The KV cache that attends only to what matters.",
        epilog="Exit codes: 0 it is so, 1 what was asked about does not hold, 2 wrong input or "
        "something is missing, 130 stopped.",
    )
    parser.add_argument("--version", action="version", version=pariskv_core.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        sub = commands.add_parser(name, help=command.HELP, description=command.__doc__)
        command.arguments(sub)
        sub.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser


def _fail(command: str, sentence: str) -> int:
    print(f"pariskv {command}: {' '.join(sentence.split())}", file=sys.stderr)
    return WRONG_INPUT


def _give_up_output() -> None:
    """Python flushes stdout once more as it ends: to where nothing can fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def main(argv: Sequence[str] | None = None) -> int:
    # Read once, when NumPy is imported. Commands share their own work out; a BLAS that also did
    # would spin on the cores that the engine is timed on.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A frame or a × that an old encoding lacks is no reason to lose the table.
        sys.stdout.reconfigure(errors="replace")
    command = "?"
    try:
        arguments = _parser().parse_args(argv)
        command = arguments.command
        code: int = _COMMANDS[command].run(arguments, Screen(as_json=arguments.json))
        sys.stdout.flush()
    except CannotRunError as reason:
        return _fail(command, str(reason))
    except ModuleNotFoundError as reason:
        sentence = lacking((reason.name or "").partition(".")[0])
        if not sentence:
            raise
        return _fail(command, sentence)
    except MemoryError as reason:
        return _fail(command, f"there is not enough memory: {reason}")
    except RuntimeError as reason:
        # Torch's, on a GPU and on the CPU; torch itself may not be here to name them.
        out_of_memory = type(reason).__name__ == "OutOfMemoryError"
        if not out_of_memory and "can't allocate memory" not in str(reason):
            raise
        return _fail(command, f"there is not enough memory: {str(reason).partition('. ')[0]}")
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        _give_up_output()
        return WRONG_INPUT
    except OSError as reason:
        if reason.errno != errno.ENOSPC:
            raise
        _give_up_output()
        return _fail(command, "the output cannot be written: there is no space left")
    except KeyboardInterrupt:
        print(f"\npariskv {command}: stopped", file=sys.stderr)
        return STOPPED
    return code
