"""How long a decode step of one layer takes on this machine, against torch's dense attention.

Keys and queries are made up, as hard to search as a model's. `make bench` measures more.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import pariskv_core as pk
from pariskv_core import _machine as machine
from pariskv_core._array import DeviceName
from pariskv_core.cli import parsing
from pariskv_core.cli.failures import OK, CannotRunError
from pariskv_core.cli.screen import Screen
from pariskv_core.cli.text import seconds

HELP = "time a decode step against torch's dense attention, here"

_LEAST_TOKENS = 4096  # shorter sequences are attended to in full
_BUSY = 0.2  # cores of other programs that are worth a word


def arguments(parser: argparse.ArgumentParser) -> None:
    add, whole = parser.add_argument, parsing.whole
    tokens = whole(_LEAST_TOKENS)
    add("--tokens", type=tokens, nargs="+", default=[8192, 32768], help="lengths (8192 32768)")
    add("--batch", type=whole(1), default=1, help="sequences (1)")
    add("--query-heads", type=whole(1), default=32, help="(32)")
    add("--kv-heads", type=whole(1), default=8, help="(8)")
    add("--head-dim", type=whole(1), default=128, help="(128)")
    add("--top-k", type=parsing.top_k, default=100, help="rows fetched per kv head (100)")
    add("--threads", type=parsing.threads, default=machine.usable_cores(), help="(usable cores)")
    add("--device", choices=("cpu", "cuda"), help="(cuda where it is ready)")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    from pariskv_core.cli import steps

    device: DeviceName = arguments.device or ("cuda" if pk.is_available("cuda") else "cpu")
    if arguments.query_heads % arguments.kv_heads:
        raise CannotRunError(
            f"--query-heads: expected a multiple of {arguments.kv_heads} kv heads, "
            f"got {arguments.query_heads}"
        )
    cases = [
        steps.Case(
            tokens,
            arguments.batch,
            arguments.query_heads,
            arguments.kv_heads,
            arguments.head_dim,
            arguments.top_k,
            arguments.threads,
            device,
        )
        for tokens in arguments.tokens
    ]
    for case in cases:
        steps.check(case)
    where = ", ".join(machine.gpu_names()) if device == "cuda" else machine.cpu_name()
    how = "" if device == "cuda" else f", {pk.cpu_level()}, {arguments.threads} threads"
    screen.say(f"A decode step of one layer on {where or device}{how}", style="bold")
    screen.say(
        f"{arguments.query_heads} query heads, {arguments.kv_heads} kv heads of "
        f"{arguments.head_dim}, batch {arguments.batch}, top_k {arguments.top_k}\n"
    )
    found: list[dict[str, Any]] = []
    with screen.stages() as stages:
        for case in cases:
            total = 2 * case.batch * case.tokens
            with stages.stage(f"{case.tokens:,} tokens", total) as advance:
                timed = steps.measure(case, advance)
            found.append({**asdict(case), **asdict(timed)})
    screen.say()
    screen.table(
        [_row(result) for result in found],
        ["tokens", "pariskv", "slowest", "torch", ""],
        right=range(5),
    )
    busy = max(result["busy"] for result in found)
    if busy >= _BUSY:
        screen.say(
            f"Other programs kept {busy:.1f} of {machine.machine_cores()} cores busy: times are "
            "too long, and the ratios rough.",
            style="yellow",
        )
    same = "replayed as ours" if device == "cuda" else "same threads, in turns with ours"
    screen.say(
        f"Medians, and our slowest step. torch: its fastest dense attention, bfloat16, {same}. "
        "Shorter texts favour dense attention."
    )
    record = {"version": pk.__version__, "where": where, "cpu_level": pk.cpu_level()}
    screen.record({**record, "steps": found})
    return OK


def _row(result: dict[str, Any]) -> list[str]:
    dense = result["dense"]
    return [
        f"{result['tokens']:,}",
        seconds(result["ours"]),
        seconds(result["slowest"]),
        seconds(dense) if dense else "no torch",
        f"{dense / result['ours']:.1f} ×" if dense else "",
    ]
