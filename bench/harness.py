"""What the bench programs share: turns, bandwidth, where it was measured, table and JSON file."""

from __future__ import annotations

import os

# Read once, when NumPy is imported: bandwidth is measured with threads of our own.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pariskv_core as pk
from pariskv_core import _machine as machine
from rich import box
from rich.console import Console
from rich.table import Table

_HERE = Path(__file__).resolve().parent
RESULTS = _HERE / "results"
_DIGITS = 7  # of a number in a results file: as many as a float32 has
_LINE = 100  # what fits in so many characters is not spread over lines
WARM_UP = 2  # rounds that do not count
# OpenMP threads go on spinning for some milliseconds after their work is done.
_REST_SECONDS = 0.02
PIPED_WIDTH = 100


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_HERE, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _commit() -> dict[str, Any]:
    """Of this checkout, or what PARISKV_COMMIT says where the files have come without git."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return {"commit": os.environ.get("PARISKV_COMMIT", ""), "uncommitted_changes": None}
    return {"commit": commit, "uncommitted_changes": bool(_git("status", "--porcelain"))}


def environment() -> dict[str, Any]:
    versions: dict[str, str | None] = {}
    for name in ("torch", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "cpu": machine.cpu_name(),
        "cpu_level": pk.cpu_level(),
        "cores": machine.usable_cores(),
        "python": platform.python_version(),
        "pariskv_core": pk.__version__,
        **versions,
        **_commit(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", os.path.relpath(sys.argv[0], _HERE.parent), *sys.argv[1:]]),
    }


def in_turns(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every case in every round, one case after the other within a round.

    A case may return a function to be called afterwards, untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(WARM_UP + rounds):
        for name, case in cases.items():
            time.sleep(_REST_SECONDS)
            begin = time.perf_counter()
            clean_up = case()
            taken = time.perf_counter() - begin
            if callable(clean_up):
                clean_up()
            if turn >= WARM_UP:
                seconds[name].append(taken)
    return seconds


def processor_seconds(call: Callable[..., object], *arguments: Any, **named: Any) -> float:
    begin = time.process_time()
    call(*arguments, **named)
    return time.process_time() - begin


def steps_apart(
    cache: pk.Cache, s: int, q: Any, k: Any, v: Any, chosen: Callable[[pk.Stats], int]
) -> tuple[list[float], list[float]]:
    """Processor seconds of decode steps: those that choose nothing, and those that choose.

    q, k, v  (steps, heads, head_dim)
    chosen   a counter that goes up with each choice
    """
    plain: list[float] = []
    choosing: list[float] = []
    for t in range(len(q)):
        row = slice(t, t + 1)
        before = chosen(cache.stats())
        took = processor_seconds(cache.decode, 0, [s], q[row], k[row], v[row])
        (choosing if chosen(cache.stats()) > before else plain).append(took)
    return plain, choosing


def bandwidth(threads: int, megabytes: int = 256) -> dict[str, float]:
    """Bytes per second of this machine: reading, and copying, which counts both ways."""
    words = megabytes * 2**20 // 4 // threads
    arrays = [(np.ones(words, np.float32), np.ones(words, np.float32)) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        seconds = in_turns(
            {
                "read": lambda: list(pool.map(lambda pair: np.dot(pair[0], pair[0]), arrays)),
                "copy": lambda: list(pool.map(lambda pair: np.copyto(*pair), arrays)),
            },
            rounds=5,
        )
    size = 4 * words * threads
    return {"read": size / median(seconds["read"]), "copy": 2 * size / median(seconds["copy"])}


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: str) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    table = Table(title=title, title_justify="left", caption=notes, caption_justify="left")
    table.box = box.SIMPLE_HEAD
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _rounded(value: Any) -> Any:
    """The same with every float in it cut to a few digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, (list, tuple)) else value


def _lines(value: Any, indent: str = "") -> str:
    """JSON in which a dict or list of plain values, such as a measurement, is one line."""
    line = json.dumps(value, ensure_ascii=False)
    parts = list(value.values()) if isinstance(value, dict) else value
    nested = isinstance(parts, list) and any(isinstance(part, (dict, list)) for part in parts)
    if not nested or len(indent) + len(line) <= _LINE:
        return line
    deeper = indent + "  "
    inner = [_lines(part, deeper) for part in parts]
    if isinstance(value, dict):
        names = [json.dumps(name, ensure_ascii=False) for name in value]
        inner = [f"{name}: {text}" for name, text in zip(names, inner, strict=True)]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([begin, ",\n".join(deeper + one for one in inner), indent + end])


def as_text(record: Any) -> str:
    """A results file: numbers of a few digits, a line for each measurement."""
    return _lines(_rounded(record)) + "\n"


def save(
    name: str, results: Any, on: str | None = None, facts: dict[str, Any] | None = None
) -> None:
    """Into results/<name>-<cpu>.json, in place of what an earlier run on this CPU left.

    `on` is what it ran on if not the CPU, and `facts` what there is to say of that.
    """
    record = {"environment": {**environment(), **(facts or {})}, "results": results}
    place = re.sub(r"[^a-z0-9]+", "-", (on or machine.cpu_name()).lower()).strip("-")
    path = RESULTS / f"{name}-{place}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(as_text(record), encoding="utf-8")
    print(f"Written to {os.path.relpath(path)}")
