"""Fetches llama.cpp's sources, ggml among them, as the package llama-cpp-python publishes them.

python integrations/ggml/sources.py [--into build/llama.cpp] [--release 0.3.36]

They are for building and testing the plugin; nothing of them goes into it but declarations. Prints
the folder. What is there already is not fetched again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RELEASE = "0.3.36"  # has ggml 0.25.3
INSIDE = "vendor/llama.cpp"


def fetch(folder: Path, release: str) -> None:
    with tempfile.TemporaryDirectory() as download:
        subprocess.run(
            # Of this package alone: with :all: pip compiles CMake, which its build needs, as well.
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
            + ["--no-binary", "llama-cpp-python", "-d", download, f"llama-cpp-python=={release}"],
            check=True,
        )
        (archive,) = Path(download).glob("*.tar.gz")
        unpacked = Path(download) / "unpacked"
        with tarfile.open(archive) as tar:
            top = tar.getnames()[0].split("/")[0]
            wanted = f"{top}/{INSIDE}/"
            members = [member for member in tar if member.name.startswith(wanted)]
            tar.extractall(unpacked, members, filter="data")
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.move(unpacked / top / INSIDE, folder)
        (folder / ".release").write_text(release)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT / "build/llama.cpp")
    parser.add_argument("--release", default=RELEASE)
    arguments = parser.parse_args()
    stamp = arguments.into / ".release"
    if not stamp.exists() or stamp.read_text() != arguments.release:
        fetch(arguments.into, arguments.release)
    print(arguments.into)


if __name__ == "__main__":
    main()
