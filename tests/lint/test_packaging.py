"""packaging/wheels.py: a wheel for each Python that is here, and only for these."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packaging"))

import test_wheels as trials
import wheels


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
    monkeypatch.setattr(wheels, "build", lambda *arguments: tmp_path)
    monkeypatch.setattr(wheels, "publishable", publishable)
    monkeypatch.setattr(sys, "argv", ["wheels.py"])
    wheels.main()
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
