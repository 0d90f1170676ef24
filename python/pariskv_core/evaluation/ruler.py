"""Samples of RULER's tasks, made by its own generators in a child process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from pariskv_core._failures import CannotRunError
from pariskv_core.evaluation.samples import Made, Wanted

_PATIENCE = 60  # seconds; the largest text of all takes a few


class Generators:
    """One child for all jobs, since it takes seconds to load a tokenizer."""

    def __init__(self, tokenizer: Path, extra: int, patience: int = _PATIENCE) -> None:
        """
        extra     tokens of a prompt that are not its text's
        patience  seconds of work in which a generator may count no tokens
        """
        spec = importlib.util.find_spec("long_context_eval")
        assert spec is not None and spec.submodule_search_locations is not None
        self._package = Path(next(iter(spec.submodule_search_locations)))
        self._tokenizer = tokenizer
        self._extra = extra
        self._patience = patience
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Generators:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()

    def make(self, wanted: Wanted, advance: Callable[[int], None]) -> Made:
        child = self._started()
        with tempfile.TemporaryDirectory() as folder:
            job = {
                "task": wanted.task,
                "length": wanted.length,
                "count": wanted.count,
                "seed": wanted.seed,
                "extra": self._extra,
                "folder": folder,
            }
            self._tell(job)
            found = self._answer(_of(child.stdout), advance)
            if "made" in found:
                samples = json.loads(Path(found["made"]).read_text(encoding="utf-8"))
                return Made(samples, found["answer_tokens"])
        said = found.get("failed", "RULER's generator finds no text that is so short")
        raise CannotRunError(
            f"{wanted.task} cannot be made at {wanted.length:,} tokens: {said}; leave it out with "
            "--tasks, or choose other --lengths"
        )

    def _started(self) -> subprocess.Popen[str]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "pariskv_core.evaluation.ruler_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
            )
            given = {"tokenizer": str(self._tokenizer), "package": str(self._package)}
            self._tell({**given, "patience": self._patience})
        return self._child

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._child is not None
        pipe = _of(self._child.stdin)
        try:
            pipe.write(json.dumps(what) + "\n")
            pipe.flush()
        except BrokenPipeError:  # its last words say why
            pass

    @staticmethod
    def _answer(lines: IO[str], advance: Callable[[int], None]) -> dict[str, Any]:
        """Empty: the child has ended, as it does where it would try for ever."""
        for line in lines:
            said: dict[str, Any] = json.loads(line)
            if "sample" not in said:
                return said
            advance(1)
        return {}


def _of(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
