"""Fixtures: a tiny model on the disk, a long text, and the command as a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_model

# For everything that is run here, too: few threads, and no network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("COLUMNS", None)
# A shell starts jobs in its background with Ctrl-C ignored, and so would they their own.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")  # of the libraries


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


Pariskv = Callable[..., Done]


def plain(text: str) -> bool:
    """No colours, no frames, no spaces at the end of a line."""
    return not re.search(r"\x1b|[─-╿]|[ \t]\n", text)


@pytest.fixture(scope="session")
def pariskv() -> Pariskv:
    """Runs the command in a pipe."""

    def run(*arguments: object, env: dict[str, str] | None = None, text: str = "") -> Done:
        command = [sys.executable, "-m", "pariskv_core", *map(str, arguments)]
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONIOENCODING": "utf-8", **(env or {})},
            input=text,
            timeout=300,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def long_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5,000 characters, which are 5,000 tokens of the tiny model: it is searched."""
    from pariskv_core.cli.document import documentation

    file = tmp_path_factory.mktemp("text") / "long.txt"
    plain = documentation().encode("ascii", "ignore").decode()
    file.write_text(plain[:5000], encoding="utf-8")
    return file
