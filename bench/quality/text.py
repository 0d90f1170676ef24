"""Source text that any Python installation carries, to train on and to be asked about.

Everything is bytes in a fixed order: files sorted by path, each behind one zero byte. Some packages
of the standard library are held out, with the tests that are about them.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HELD_OUT = ("asyncio", "email", "unittest", "json")
SEPARATOR = b"\0"

# Tables and copies rather than source; simplejson is what json was made from.
_SKIPPED = {
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "simplejson",
}
_LARGEST_FILE = 400_000  # what is larger has been generated
_LARGEST_PACKAGE = 3_000_000  # of an installed one, so that no single one is most of the text


@dataclass(frozen=True)
class Zone:
    """Neighbouring text of one held-out package."""

    name: str
    text: np.ndarray  # (bytes) uint8


def _walk(root: Path) -> Iterator[Path]:
    """Source files below a folder, by path, whatever order the file system has them in."""
    for entry in sorted(root.iterdir(), key=lambda path: path.name):
        if entry.name in _SKIPPED or entry.is_symlink():
            continue
        if entry.is_dir():
            yield from _walk(entry)
        elif entry.suffix == ".py" and 0 < entry.stat().st_size <= _LARGEST_FILE:
            yield entry


def _joined(files: list[Path]) -> np.ndarray:
    return np.frombuffer(b"".join(SEPARATOR + file.read_bytes() for file in files), dtype=np.uint8)


def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _is_held_out(file: Path, root: Path) -> bool:
    parts = {
        part.removesuffix(".py").removeprefix("test_") for part in file.relative_to(root).parts
    }
    return not parts.isdisjoint(HELD_OUT)


def _installed(limit: int) -> list[Path]:
    """Files of installed packages, about `limit` bytes: whole packages, in the order of a hash."""
    root = Path(sysconfig.get_paths()["purelib"])
    packages = [entry for entry in root.iterdir() if entry.is_dir() and entry.name not in _SKIPPED]
    packages.sort(key=lambda path: hashlib.sha256(path.name.encode()).digest())
    files: list[Path] = []
    taken = 0
    for package in packages:
        of_package = 0
        for file in _walk(package):
            size = file.stat().st_size
            if of_package + size > min(_LARGEST_PACKAGE, limit - taken):
                break
            files.append(file)
            of_package += size
        taken += of_package
    return files


def training_text(installed_bytes: int = 0) -> np.ndarray:
    """(bytes) uint8: the standard library less what is held out, and more of what is installed."""
    root = _stdlib()
    files = [file for file in _walk(root) if not _is_held_out(file, root)]
    if installed_bytes > 0:
        files += _installed(installed_bytes)
    return _joined(files)


def held_out_zones(length: int) -> list[Zone]:
    """All zones of this many bytes in the held-out packages, the packages in their order.

    A zone is cut from whole files that lie side by side in one package.
    """
    root = _stdlib()
    zones = []
    for name in HELD_OUT:
        text = _joined(list(_walk(root / name)))
        zones += [
            Zone(f"{name}:{begin}", text[begin : begin + length])
            for begin in range(0, len(text) - length + 1, length)
        ]
    return zones
