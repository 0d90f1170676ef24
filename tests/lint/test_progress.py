"""What `make demo` and `make test` do on a machine with a GPU and without, and what they say."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packaging"))

import fetch_torch

ROOT = Path(__file__).resolve().parents[2]
PROGRESS = [sys.executable, str(ROOT / "packaging/progress.py")]
PIP = """\
Collecting torch
  Downloading torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)
  Downloading torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl (190.5 MB)
Progress 0 of 190500000
Progress 95000000 of 190500000
Progress 190500000 of 190500000
  Downloading six-1.17.0-py3-none-any.whl (500 kB)
Installing collected packages: torch, six
Successfully installed six-1.17.0 torch-2.13.0
"""
NINJA = """\
[0/2] Re-checking globbed directories...
[1/2] Re-running CMake...
-- Configuring done
[1/3] Building CXX object a.o
a.cpp:1: warning: unused
[2/3] Building CXX object b.o
[3/3] Linking CXX static library lib.a
"""


def says(text: str, code: int = 0) -> list[str]:
    """A command that prints this."""
    return [sys.executable, "-c", f"import sys; sys.stdout.write({text!r}); sys.exit({code})"]


def said(*arguments: object, code: int = 0) -> list[str]:
    """The lines in a file."""
    command = [*PROGRESS, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()


def in_a_terminal(*arguments: str) -> str:
    ours, its = pty.openpty()
    child = subprocess.Popen([*PROGRESS, *arguments], stdout=its, stderr=its)
    os.close(its)
    text = b""
    try:
        while piece := os.read(ours, 4096):
            text += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert child.wait() == 0
    return text.decode()


def seconds_cut(line: str) -> str:
    return line.rsplit(",", 1)[0]


def test_bytes_and_packages_are_counted():
    title, end = said("Fetching torch", *says(PIP))
    assert title == "Fetching torch ..."
    assert seconds_cut(end) == "  191 MB fetched, 2 packages"


def test_what_lies_on_the_disk_is_not_called_fetched():
    text = "Processing /x/six-1.17.0.whl\nSuccessfully installed six-1.17.0\n"
    assert seconds_cut(said("Fetching six", *says(text))[-1]) == "  1 package"
    again = "Requirement already satisfied: six\n"
    assert seconds_cut(said("Fetching six", *says(again))[-1]) == "  nothing to do"


def test_files_are_counted_and_a_compiler_is_heard():
    title, warning, end = said("--show", "Building", *says(NINJA))
    assert title == "Building ..."
    assert warning == "a.cpp:1: warning: unused"
    assert seconds_cut(end) == "  3 files"


def test_a_terminal_has_one_line_that_changes():
    slow = "import time\nfor i in range(1, 4):\n  print(f'[{i}/3] x', flush=True); time.sleep(.15)"
    text = in_a_terminal("Building", sys.executable, "-c", slow)
    assert "\rBuilding ... 2 of 3 files, 0 s" in text
    assert text.count("\n") == 1
    assert "\rBuilding: 3 files, " in text


def test_a_failure_shows_what_was_said_and_keeps_the_code(tmp_path):
    log = tmp_path / "log"
    text = "Collecting x\n[1/9] a\nERROR: no such package\n"
    lines = said("--log", log, "Fetching x", *says(text, 3), code=3)
    assert "ERROR: no such package" in lines
    assert seconds_cut(lines[-1]) == f"  failed, see {log}"
    assert log.read_text() == text


def planned(tmp_path: Path, gpu: bool, *goals: str) -> str:
    """The commands that make would run, all of them."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nexit {0 if gpu else 9}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFL"))
    }
    env["PATH"] = os.pathsep.join([str(tmp_path), env["PATH"]])
    command = ["make", "--always-make", "--dry-run", "-C", str(ROOT), *goals]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("goal", [".venv/.model", ".venv/.test", "test-cpp"])
def test_without_a_gpu_nothing_of_cuda_is_built_or_fetched(tmp_path, goal):
    commands = planned(tmp_path, False, goal)
    assert "PARISKV_CUDA=OFF" in commands
    assert "PARISKV_CUDA=AUTO" not in commands
    if goal != "test-cpp":
        assert "fetch_torch.py --cpu\n" in commands
    assert "PARISKV_CUDA=ON" in planned(tmp_path, False, goal, "CUDA=ON"), "what CI asks for"


@pytest.mark.parametrize("goal", [".venv/.model", ".venv/.models", ".venv/.test"])
def test_with_a_gpu_its_backend_is_built_and_torch_has_cuda(tmp_path, goal):
    commands = planned(tmp_path, True, goal)
    assert "PARISKV_CUDA=AUTO" in commands
    assert "PARISKV_CUDA_ARCHITECTURES='native'" in commands
    assert "fetch_torch.py --cpu" not in commands


def test_the_demos_model_has_what_reads_its_file(tmp_path):
    """transformers asks for both to read a GGUF file, and its own requirements name neither."""
    commands = planned(tmp_path, False, ".venv/.model").split()
    assert {"accelerate", "gguf"} <= set(commands)


def test_what_others_get_has_cuda_wherever_nvcc_is(tmp_path):
    for gpu in (True, False):
        assert "--cuda AUTO" in planned(tmp_path, gpu, "wheel")
        assert "PARISKV_CUDA=AUTO" in planned(tmp_path, gpu, "package")
    assert "--cuda OFF" in planned(tmp_path, True, "wheel", "CUDA=OFF")


def test_torch_is_the_pinned_one_and_without_cuda_where_no_gpu_is():
    with_gpu, without = fetch_torch.command(False), fetch_torch.command(True)
    assert "--extra-index-url" not in with_gpu
    assert without[without.index("--extra-index-url") + 1].endswith("/cpu")
    for command in (with_gpu, without):
        assert command[command.index("-c", 3) + 1] == str(ROOT / "constraints.txt")
        assert "--no-deps" in command, "the other index is asked for torch alone"


@pytest.mark.parametrize(
    ("needs", "cuda"),
    [
        (["filelock", 'nvidia-cudnn-cu13==9.20; platform_system == "Linux"'], True),
        (["cuda-bindings<14", "filelock"], True),
        (["filelock", "sympy"], False),
        (None, False),
    ],
)
def test_a_torch_that_brings_cuda_is_noticed(monkeypatch, needs, cuda):
    monkeypatch.setattr(fetch_torch.importlib.metadata, "requires", lambda name: needs)
    assert fetch_torch.with_cuda() == cuda
