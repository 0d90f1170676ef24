"""Answers as they come, a line of JSON each: a run that was killed goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from pariskv_core._failures import CannotRunError

_ANSWERS, _RUN = "answers.jsonl", "run.json"


@dataclass(frozen=True)
class Answer:
    setting: str
    task: str
    length: int
    index: int
    prompt: str  # its digest
    answer: str
    expected: list[str]
    score: float
    tokens: int  # of the answer
    seconds: float
    searched: bool | None = None  # whether any step did; None: not known
    mean_error: float | None = None  # as the engine reports it; None: it does not
    worst_error: float | None = None

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.setting, self.task, self.length, self.index


_NAMES = {field.name for field in fields(Answer)}


def check(folder: Path, run: Mapping[str, Any]) -> None:
    """Raises if the folder has answers of another run."""
    place = folder / _RUN
    if not place.exists():
        return
    try:
        before = dict(json.loads(place.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise CannotRunError(f"{place} is not JSON; remove it or name another --out") from None
    for name, value in run.items():
        if before.get(name) != value:
            raise CannotRunError(
                f"{folder} has a run with another {name} ({before.get(name)}, now {value}); name "
                "another --out, or remove that folder"
            )


class Journal:
    """A folder with what is being run, and its answers."""

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        """run: what has to be the same for answers to be of one run."""
        self._file: IO[str] | None = None
        self.folder = folder
        self.answers: dict[tuple[str, str, int, int], Answer] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            check(folder, run)
            if not (folder / _RUN).exists():
                scratch = folder / f"{_RUN}.part"
                scratch.write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
                scratch.replace(folder / _RUN)
            self._read()
        except OSError as reason:
            raise CannotRunError(f"cannot write {folder}: {reason.strerror}") from reason

    def _read(self) -> None:
        path = self.folder / _ANSWERS
        whole = 0
        if path.exists():
            with path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):  # its writer was killed
                        break
                    whole += len(line)
                    self._keep(line, path)
            os.truncate(path, whole)

    def _keep(self, line: bytes, path: Path) -> None:
        try:
            found = json.loads(line)
            answer = Answer(**{name: found[name] for name in _NAMES if name in found})
        except (ValueError, TypeError):
            raise CannotRunError(
                f"{path} has a line that is no answer; remove it or name another --out"
            ) from None
        self.answers[answer.key] = answer

    def has(self, setting: str, task: str, length: int, index: int, prompt: str) -> bool:
        found = self.answers.get((setting, task, length, index))
        return found is not None and found.prompt == prompt

    def add(self, answer: Answer) -> None:
        """On the disk at once."""
        if self._file is None:
            self._file = (self.folder / _ANSWERS).open("a", encoding="utf-8")
        self._file.write(json.dumps(asdict(answer)) + "\n")
        self._file.flush()
        self.answers[answer.key] = answer

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
