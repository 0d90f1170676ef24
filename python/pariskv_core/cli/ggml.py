"""Where the plugin for llama.cpp is: the path for GGML_BACKEND_PATH.

GGML_BACKEND_PATH=$(pariskv ggml) llama-server -m model.gguf -c 32768 -fa on
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pariskv_core as pk
from pariskv_core.cli.failures import OK, CannotRunError
from pariskv_core.cli.screen import Screen

HELP = "where the plugin for llama.cpp is"


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # none


def library() -> Path:
    path = Path(pk.__file__).parent / "ggml/libggml-pariskv.so"
    if not path.exists():
        raise CannotRunError(
            "this installation has no plugin for llama.cpp; published wheels have it, and in the "
            "sources `make plugin` builds it"
        )
    return path


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    del arguments
    path = str(library())
    screen.write(path + "\n")
    screen.record({"path": path})
    return OK
