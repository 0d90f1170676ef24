"""What is built: a wheel for each Python that is here, and code for the GPUs that are here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packaging"))

import test_wheels as trials
import wheels

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes the only Pythons that are found: names, and what each of them is to run."""

    def make(**programs: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, program in programs.items():
            (folder / name).write_text(f"#!/bin/sh\nexec {program}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.setenv("HOME", str(tmp_path))

    return make


def test_a_free_threaded_python_on_the_path_gets_its_wheel(only, tmp_path, monkeypatch, capsys):
    only(**{"python3.14t": f'{sys.executable} "$@"', "python3.10": "/bin/false"})
    built = []

    def environment(folder: Path, python: str, packages: tuple[str, ...]) -> Path:
        built.append((folder.name, python))
        return folder / "bin/python"

    def publishable(wheel: Path, tools: Path) -> Path:
        path = tmp_path / "x.whl"
        path.write_bytes(b"")
        return path

    monkeypatch.setattr(wheels, "ROOT", tmp_path)
    monkeypatch.setattr(wheels, "environment", environment)
    monkeypatch.setattr(wheels, "older_glibc", lambda tools: tmp_path)
    monkeypatch.setattr(wheels, "build_tools", lambda python: tmp_path)
    asked = []
    monkeypatch.setattr(wheels, "build", lambda *arguments: asked.append(arguments[-1]) or tmp_path)
    monkeypatch.setattr(wheels, "publishable", publishable)
    monkeypatch.setattr(sys, "argv", ["wheels.py"])
    wheels.main()
    assert [arguments.architectures for arguments in asked] == ["all-supported"]
    assert [name for name, _ in built] == ["tools", "env-cp314t"]
    assert Path(built[1][1]).samefile(sys.executable)
    said = capsys.readouterr().out
    assert "x.whl  0.0 MB" in said
    for kind in ("cp310, since python3.10", "cp311, since", "cp312-abi3, since"):
        assert f"left out: {kind}" in said  # python3.10 is a name that leads nowhere


def test_no_python_for_any_wheel_is_said(only, monkeypatch):
    only()
    monkeypatch.setattr(sys, "argv", ["wheels.py", "--only", "cp314t"])
    with pytest.raises(SystemExit, match="no Python for any of these wheels is here: cp314t"):
        wheels.main()


def test_every_kind_of_wheel_is_tried_on_the_python_that_builds_it():
    tried = {commands[0] for commands in trials.PYTHONS.values()}
    assert tried == {commands[0] for commands in wheels.PYTHONS.values()}


# Which GPUs `pip install .` compiles for, with an nvidia-smi of the test's own.

NVCC = "sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120"
ALL = ["80-real", "86-real", "89-real", "90-real", "100-real", "120-real", "120-virtual"]


def with_gpus(folder: Path, says: str | None) -> dict[str, str]:
    """An environment whose nvidia-smi says this; None: one that fails, as without a driver."""
    folder.mkdir()
    program = "exit 9" if says is None else f"printf '{says}'"
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
    (folder / "nvidia-smi").chmod(0o755)
    path = [folder, Path(sys.executable).parent, os.environ["PATH"]]
    return {**os.environ, "PATH": os.pathsep.join(map(str, path))}


def cmake(*options: object, env: dict[str, str]) -> str:
    program = shutil.which("cmake", path=env["PATH"])
    assert program is not None
    command = [program, *map(str, options)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def chosen(tmp_path: Path, says: str | None, value: str = "", nvcc: str = NVCC):
    """The architectures for a value of PARISKV_CUDA_ARCHITECTURES, and what is said about them."""
    script = tmp_path / "choose.cmake"
    script.write_text(f"""
        cmake_minimum_required(VERSION 3.21)
        include({ROOT}/cmake/cuda_architectures.cmake)
        pariskv_choose_architectures("{value}" "{nvcc} " architectures)
        message(STATUS "architectures: ${{architectures}}")
    """)
    *said, last = cmake("-P", script, env=with_gpus(tmp_path / "bin", says)).splitlines()
    return last.removeprefix("-- architectures: ").split(";"), "\n".join(said)


@pytest.mark.parametrize(
    ("says", "expected", "names"),
    [
        ("9.0\\n", ["90-real"], "9.0"),
        ("8.6\\n", ["86-real"], "8.6"),
        ("10.3\\n9.0\\n9.0\\n", ["90-real", "103-real"], "9.0 and 10.3"),
        ("7.5\\n8.9\\n", ["89-real"], "8.9"),
    ],
)
def test_an_install_is_for_the_gpus_of_this_machine_alone(tmp_path, says, expected, names):
    architectures, said = chosen(tmp_path, says)
    assert architectures == expected
    assert f"for the GPU of this machine alone, compute capability {names};" in said
    assert "PARISKV_CUDA_ARCHITECTURES=all-supported" in said


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (None, "since no GPU was found here"),
        ("", "since no GPU was found here"),
        ('Field "compute_cap" is not a valid field to query.\\n', "since no GPU was found here"),
        ("7.5\\n", "since the GPU of this machine, 7.5, is too old"),
        ("9.0\\n13.0\\n", "since nvcc does not know the GPU of this machine, 13.0"),
    ],
)
def test_without_a_gpu_that_is_known_an_install_is_for_all_and_says_how_long(tmp_path, says, why):
    architectures, said = chosen(tmp_path, says)
    assert architectures == ALL
    assert f"for every GPU since 8.0, {why}" in said
    assert "ten minutes on two cores" in said


def test_what_is_asked_for_is_compiled_whatever_is_here(tmp_path):
    for i, (value, expected) in enumerate(
        [("all-supported", ALL), ("80", ["80"]), ("native", ["native"]), ("80;90", ["80", "90"])]
    ):
        folder = tmp_path / str(i)
        folder.mkdir()
        assert chosen(folder, "9.0\\n", value)[0] == expected


def test_an_older_nvcc_compiles_for_what_it_knows(tmp_path):
    architectures, said = chosen(tmp_path, None, nvcc="sm_80 sm_86 sm_89 sm_90 sm_90a")
    assert architectures == ["80-real", "86-real", "89-real", "90-real", "90-virtual"]
    assert "does not know sm_100" in said and "does not know sm_120" in said
