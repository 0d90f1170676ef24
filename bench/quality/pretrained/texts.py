"""Long texts that every Python installation carries, and some that are made of their words.

They differ a little between versions of Python, so a capture names its text by the SHA-256 of what
was read.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from pariskv_core.cli.document import documentation

_CODE_BYTES = 300_000
_LEAST = 300_000  # characters of a text that is made
_NAMES = "Ada Grace Alan Edsger Barbara Donald Niklaus Tony Leslie Frances Ken Dennis".split()
_LICENCE = (
    "Whoever has a copy of this work may use it, change it, and give it away, as it is or changed, "
    "alone or as a part of another work, as long as this notice is in all copies, and as long as "
    "nobody is told that the work does what it was made for. "
)


def code() -> str:
    """The sources of asyncio, file after file."""
    files = sorted(Path(asyncio.__file__).parent.glob("*.py"))
    sources = b"".join(b"\n" + file.read_bytes() for file in files if file.stat().st_size > 0)
    return sources[:_CODE_BYTES].decode("utf-8", "replace")


Line = Callable[[random.Random, int], str]


def _log(chance: random.Random, number: int) -> str:
    level, part = chance.choice(["INFO", "WARN", "ERROR"]), chance.choice(["db", "http", "cache"])
    time = f"{number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}"
    asked, taken = chance.randrange(10**6), chance.randrange(900)
    return f"{time}Z {level} [{part}] request {asked} took {taken} ms"


def _row(chance: random.Random, number: int) -> str:
    price, stock = chance.uniform(1, 500), chance.randrange(1000)
    return (
        f"{number},{chance.choice(_NAMES)},{price:.2f},{stock},{chance.choice(['DE', 'FR', 'US'])}"
    )


def _record(chance: random.Random, number: int) -> str:
    names = " ".join(chance.sample(_NAMES, 2))
    score, tags = round(chance.random(), 3), chance.sample(["a1", "b2", "c3", "d4"], 2)
    return json.dumps({"id": number, "name": names, "score": score, "tags": tags}) + ","


def _section(chance: random.Random, number: int) -> str:
    return f"Section {number}, of {chance.choice(_NAMES)}. {_LICENCE}"


def _turn(chance: random.Random, number: int) -> str:
    """Of a talk in which no word follows from those before."""
    said = " ".join(chance.sample(_words(), chance.randrange(8, 40)))
    return f"{('User', 'Assistant')[number % 2]}: {said}."


@cache
def _words() -> list[str]:
    return documentation()[:200_000].split()


def _made(line: Line) -> str:
    """Line after line, always the same."""
    chance, lines, length = random.Random(7), [], 0
    while length < _LEAST:
        lines.append(line(chance, len(lines)))
        length += len(lines[-1]) + 1
    return "\n".join(lines)


_LINES: dict[str, Line] = {
    "log": _log,
    "table": _row,
    "json": _record,
    "licence": _section,
    "talk": _turn,
}
# Any of them can be read by `--text`. What text of another structure does to a method is seen here.
TEXTS: dict[str, Callable[[], str]] = {
    "documentation": documentation,
    "code": code,
    **{name: partial(_made, line) for name, line in _LINES.items()},
}
