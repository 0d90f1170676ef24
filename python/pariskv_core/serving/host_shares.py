"""Host memory that other servers on this machine have promised to their rows, and not taken yet.

Rows come to host memory as requests grow, so a server that has just started leaves it free, and
another one would count it as its own. Each process of a server writes down what it may take and
what it has, in a file of its own that only this user can write to; files of processes that are
gone are removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
from pathlib import Path

_PREFIX = "pariskv-host-"


class HostShare:
    """Of one process.

    server  its name, the same in all of its processes
    part    of it: an engine that counts blocks, or one of its ranks
    """

    def __init__(self, server: str, part: str, folder: Path | None = None) -> None:
        self._server, self._part = server, part
        self._folder = folder or Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getuid()}"
        self._written: dict[str, int] = {}

    @property
    def _file(self) -> Path:
        part = re.sub(r"\W", "_", self._part)
        return self._folder / f"{os.getpid()}-{part}.json"

    def promise(self, size: int) -> None:
        """What the ranks of an engine may take."""
        self._write({"promised": size})

    def take(self, size: int) -> None:
        """What this rank has."""
        self._write({"taken": size})

    def _write(self, sizes: dict[str, int]) -> None:
        """A machine without such a folder has servers that do not know of each other."""
        if sizes == self._written:
            return
        self._written = sizes
        process = os.getpid()
        record = {"server": self._server, "process": process, "started": _started(process), **sizes}
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if _mine(self._folder):
                new = self._file.with_suffix(".new")
                new.write_text(json.dumps(record))
                new.replace(self._file)

    def of_others(self) -> int:
        """Bytes that other servers may still take."""
        left: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for path in sorted(self._folder.glob("*.json")) if _mine(self._folder) else ():
                server, size = _read(path)
                left[server] = left.get(server, 0) + size
        left.pop(self._server, None)
        return sum(max(size, 0) for size in left.values())


def _read(path: Path) -> tuple[str, int]:
    """A server, and what the file adds to the bytes that it may still take."""
    try:
        record = json.loads(path.read_text())
        if _started(int(record["process"])) != record["started"]:
            path.unlink(missing_ok=True)
            return "", 0
        return str(record["server"]), int(record.get("promised", 0)) - int(record.get("taken", 0))
    except (OSError, ValueError, KeyError, TypeError):
        return "", 0


def _mine(folder: Path) -> bool:
    """Whether it is a folder of this user's that nobody else can write to."""
    found = folder.lstat()
    private = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and private


def _started(process: int) -> str | None:
    """When a process began: its number may be another's by now."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
