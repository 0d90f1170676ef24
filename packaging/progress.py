"""Runs a long command and says how far it is: files compiled, bytes fetched, packages installed.

    python packaging/progress.py [--show] [--log FILE] TITLE COMMAND ...

A terminal has one line that changes, a file one line in twenty seconds and one in the end. What the
command says is shown if it fails; with --show, which is for compilers, at once. Needs no package.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from contextlib import nullcontext
from pathlib import Path

_EVERY = 20.0  # seconds between lines in a file
_DRAWN = 0.1  # and between changes in a terminal
_LAST_LINES = 200  # shown of a command that failed
_UNIT = {"kB": 1e3, "MB": 1e6, "GB": 1e9}

_NINJA = re.compile(r"\s*\[(\d+)/(\d+)\] (.*)")
_ABOUT_ITSELF = re.compile(r"-- |ninja: no work to do|\s*\[\d+/\d+\] Re-")  # CMake
_FETCHING = re.compile(r"\s*Downloading (\S+)(?: \(([\d.]+) (kB|MB|GB)\))?")
_BYTES = re.compile(r"Progress (\d+) of (\d+)")
_INSTALLING = re.compile(r"Installing collected packages: (.*)")
_INSTALLED = re.compile(r"Successfully installed (.*)")


def counted(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def megabytes(size: float) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"


class Reader:
    """Follows the output of ninja and of pip (--progress-bar raw)."""

    def __init__(self) -> None:
        self.steps = self.all_steps = 0
        self.fetched = 0.0  # bytes that are here
        self.small = 0.0  # bytes of a file that pip has no progress for, until the next line
        self.present = self.expected = 0  # bytes of the one that is coming
        self.name = ""
        self.packages = 0
        self.installing = False

    def takes(self, line: str) -> bool:
        """Whether the line says no more than how far the command is."""
        if _ABOUT_ITSELF.match(line):
            return True
        if found := _NINJA.match(line):
            self.steps, self.all_steps = int(found[1]), int(found[2])
        elif found := _BYTES.match(line):
            self.present, self.expected = int(found[1]), int(found[2])
            self.small = 0.0
            if self.present == self.expected:
                self.fetched += self.expected
                self.present = self.expected = 0
        elif found := _FETCHING.match(line):
            self._add_small()
            self.small = float(found[2]) * _UNIT[found[3]] if found[2] else 0.0
            file = found[1].rsplit("/", 1)[-1]
            # A wheel's name and version; metadata that pip reads ahead is no package yet.
            self.name = "" if file.endswith(".metadata") else " ".join(file.split("-")[:2])
        elif found := _INSTALLING.match(line):
            self._add_small()
            self.packages, self.installing = len(found[1].split(", ")), True
        elif found := _INSTALLED.match(line):
            self.packages, self.installing = len(found[1].split()), False
        else:
            return False
        return True

    def _add_small(self) -> None:
        self.fetched += self.small
        self.small = 0.0

    def now(self) -> str:
        if self.all_steps:
            return f"{self.steps} of {self.all_steps} files"
        said = []
        if self.fetched + self.present:  # else all of it is on the disk
            said.append(f"{megabytes(self.fetched + self.present)} fetched")
        if self.installing:
            said.append(f"installing {counted(self.packages, 'package')}")
        elif self.expected:
            said.append(f"{self.name}: {megabytes(self.present)} of {megabytes(self.expected)}")
        return ", ".join(said)

    def in_all(self) -> str:
        if self.all_steps:
            return counted(self.steps, "file")
        if self.packages:
            fetched = f"{megabytes(self.fetched)} fetched, " if self.fetched else ""
            return f"{fetched}{counted(self.packages, 'package')}"
        return "nothing to do"


class Line:
    """Where it is said: drawn over in a terminal, a line now and then in a file."""

    def __init__(self, title: str) -> None:
        self.live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.title = title
        self.begun = self.said = time.monotonic()
        self.write(f"{title} ..." + ("" if self.live else "\n"))

    @property
    def seconds(self) -> int:
        return round(time.monotonic() - self.begun)

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def draw(self, how_far: str) -> None:
        if not how_far or time.monotonic() - self.said < (_DRAWN if self.live else _EVERY):
            return
        self.said = time.monotonic()
        if self.live:
            text = f"{self.title} ... {how_far}, {self.seconds} s"
            self.write("\r" + text[: shutil.get_terminal_size().columns - 1] + "\x1b[K")
        else:
            self.write(f"  {how_far}, {self.seconds} s\n")

    def show(self, line: str) -> None:
        self.write(("\r\x1b[K" if self.live else "") + line)

    def end(self, text: str) -> None:
        if self.live:
            self.write(f"\r{self.title}: {text}, {self.seconds} s\x1b[K\n")
        else:
            self.write(f"  {text}, {self.seconds} s\n")


def run(title: str, command: list[str], *, show: bool = False, log: Path | None = None) -> int:
    """The command's exit code."""
    reader, line = Reader(), Line(title)
    said: deque[str] = deque(maxlen=_LAST_LINES)
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert child.stdout is not None
    with child, log.open("w") if log else nullcontext() as file:
        for text in child.stdout:
            said.append(text)
            if file:
                file.write(text)
            if reader.takes(text):
                line.draw(reader.now())
            elif show:
                line.show(text)
    if child.returncode == 0:
        line.end(reader.in_all())
        return 0
    if not show:
        line.show("".join(said))
    line.end("failed" + (f", see {log}" if log else ""))
    return child.returncode if child.returncode > 0 else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--log", type=Path)
    parser.add_argument("title")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    try:
        code = run(given.title, given.command, show=given.show, log=given.log)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
