"""Models with layers of several kinds: those of full attention are the plugin's, windows and states
the host's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, compared, run
from tiny import KINDS

TOKENS = 24  # of an answer: steps are one less


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def mixed(kind: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    program = Path(__file__).with_name("tiny.py")
    made = [sys.executable, program, kind, folder, model, ROOT / "build/llama.cpp"]
    done = subprocess.run(list(map(str, made)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "model.gguf"


def arguments(mixed: Path, text: str) -> list[object]:
    asked: list[object] = ["-m", mixed, "-t", 2, "-c", 4096, "-fa", "on", "--temp", 0, "-no-cnv"]
    return [*asked, "-n", TOKENS, "--no-display-prompt", "-p", text[:7000]]


def test_text_below_the_gate_is_the_hosts(mixed: Path, plugin: Path, text: str) -> None:
    asked = arguments(mixed, text)
    alone = run("llama-completion", *asked, plugin=None, with_log=False)
    assert len(alone) > TOKENS
    assert run("llama-completion", *asked, plugin=plugin, with_log=False) == alone


def test_layers_of_full_attention_are_served(
    kind: str, mixed: Path, plugin: Path, text: str
) -> None:
    """In full, so that errors are of kernels: random weights attend to everything alike."""
    settings = "from=512,dense_below=1000000,check=1"
    asked = arguments(mixed, text)
    log = run("llama-completion", *asked, "-v", plugin=plugin, settings=settings)
    caches = re.findall(r"pariskv: (\d+) layers' steps, (\d+) left to the host", log)
    full = KINDS[kind][2] * (TOKENS - 1)
    assert (str(full), "0") in caches, caches
    steps, mean, worst = compared(log)
    assert steps >= full
    assert mean < 6e-3
    assert worst < 3e-2
