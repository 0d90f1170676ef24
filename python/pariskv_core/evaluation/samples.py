"""Samples on the disk: made once for a tokenizer, then the same for every setting and server."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pariskv_core._failures import CannotRunError
from pariskv_core.evaluation.prompts import Template

_ENDING = ".jsonl.gz"
BYTES = 4  # of a token on the disk, packed: its number and its text


@dataclass(frozen=True)
class Wanted:
    task: str
    length: int  # tokens of a prompt and its answer, at most
    count: int
    seed: int


class Made(NamedTuple):
    samples: list[dict[str, Any]]  # each with question, begin, outputs
    answer_tokens: int


@dataclass(frozen=True)
class Sample:
    index: int
    prompt: str
    ids: Sequence[int]
    outputs: list[str]


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Samples:
    """One file: a line that says what it has, then a line for each sample."""

    path: Path
    task: str
    length: int
    count: int
    seed: int
    answer_tokens: int
    longest: int  # tokens of the longest prompt with its answer
    tokenizer: str  # digest of the tokenizer and the template
    template: str
    maker: str  # the package that made them
    digests: list[str]  # of each prompt: what an answer is an answer to

    def read(self, wanted: Callable[[int], bool] = lambda index: True) -> Iterator[Sample]:
        """Those whose index is wanted. To parse long prompts takes longer than to skip them."""
        if not any(map(wanted, range(self.count))):
            return
        with gzip.open(self.path, "rt", encoding="utf-8") as file:
            next(file)
            for index, line in enumerate(file):
                if wanted(index):
                    yield Sample(**json.loads(line))


def default_folder() -> Path:
    return Path.home() / ".cache" / "pariskv" / "prompts"


def folder_of(root: Path, name: str, template: Template) -> Path:
    plain = re.sub(r"[^\w.-]+", "-", name)
    return root / f"{plain}-{template.kind}-{template.digest}"


def place(folder: Path, wanted: Wanted) -> Path:
    name = f"{wanted.task}-{wanted.length}-{wanted.count}-seed{wanted.seed}"
    return folder / f"{name}{_ENDING}"


def write(path: Path, wanted: Wanted, made: Made, template: Template, maker: str) -> Samples:
    """Whole or not at all: a file of a run that was killed does not have its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    prompts = [template.prompt(each["question"], each["begin"]) for each in made.samples]
    longest = max(len(prompt.ids) for prompt in prompts) + made.answer_tokens
    header = {
        **asdict(wanted),
        "answer_tokens": made.answer_tokens,
        "longest": longest,
        "tokenizer": template.digest,
        "template": template.kind,
        "maker": maker,
        "digests": [_digest(prompt.ids) for prompt in prompts],
    }
    scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with gzip.open(scratch, "wt", encoding="utf-8", compresslevel=6) as file:
            file.write(json.dumps(header) + "\n")
            for index, (prompt, each) in enumerate(zip(prompts, made.samples, strict=True)):
                sample = Sample(index, prompt.text, prompt.ids, [str(o) for o in each["outputs"]])
                file.write(json.dumps(asdict(sample), separators=(",", ":")) + "\n")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return _described(path, header)


def _described(path: Path, header: dict[str, Any]) -> Samples:
    return Samples(path=path, **header)


def opened(path: Path) -> Samples:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return _described(path, json.loads(next(file)))
    except (OSError, EOFError, StopIteration, ValueError, TypeError, zlib.error):
        raise CannotRunError(
            f"{path} is no file of samples that can be read; remove it, and it is made again"
        ) from None


def found(folder: Path, fits: Callable[[Samples], bool]) -> list[Samples]:
    """Samples that were made before, by the order of their names."""
    if not folder.is_dir():
        raise CannotRunError(f"--prompts: there is no folder {folder}")
    return [each for each in map(opened, sorted(folder.rglob(f"*{_ENDING}"))) if fits(each)]
