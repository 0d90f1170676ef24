"""Packs the plugin as a tarball: the library, its license and how to use it.

python integrations/ggml/pack.py build/llama/plugin/libggml-pariskv.so [--into dist]
"""

from __future__ import annotations

import argparse
import platform
import re
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    header = (ROOT / "cpp/include/pariskv/version.h").read_text()
    version = re.search(r'PARISKV_VERSION_STRING "([^"]+)"', header)[1]
    name = f"pariskv-ggml-{version}-Linux-{platform.machine()}"
    arguments.into.mkdir(parents=True, exist_ok=True)
    packed = arguments.into / f"{name}.tar.gz"
    with tarfile.open(packed, "w:gz") as tar:
        for path in (arguments.library, ROOT / "LICENSE", ROOT / "docs/llama-cpp.md"):
            tar.add(path, f"{name}/{path.name}")
    print(packed)


if __name__ == "__main__":
    main()
