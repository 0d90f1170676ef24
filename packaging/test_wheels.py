"""Installs each wheel of dist/ where no compiler is, on every Python here, and runs a small demo.

    python packaging/test_wheels.py [--sdist]

With --sdist also the source archive: it becomes a wheel with what PyPI has, which is then tried.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from wheels import DIST, ROOT, WORK, interpreter, run

# Which Pythons a wheel is for, by its name.
PYTHONS = {
    "cp310-cp310": ["python3.10"],
    "cp311-cp311": ["python3.11"],
    "cp312-abi3": ["python3.12", "python3.13", "python3.14", "python3.15"],
    "cp314-cp314t": ["python3.14t"],
}
DEMO = ROOT / "packaging/demo.py"


def tried(wheel: Path, python: str) -> str:
    """What the demo says in an environment that has this wheel, and no compiler on its path."""
    folder = WORK / "clean"
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    inside = folder / "bin/python"
    bare = {"HOME": os.environ.get("HOME", "/"), "PATH": str(folder / "bin"), "CC": "/none"}
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    install = [inside, "-m", "pip", "install", "-q", "--only-binary", ":all:", wheel]
    run(*install, env=kept | bare, cwd=folder)
    return run(inside, "-I", DEMO, env=bare, cwd=folder).strip()


def from_source() -> Path:
    """A wheel that is built of the source archive, by PyPI's tools."""
    folder = WORK / "sdist"
    shutil.rmtree(folder, ignore_errors=True)
    tools = WORK / "tools/bin/python"
    run(tools, "-m", "pip", "install", "-qq", "build")
    run(tools, "-m", "build", "--sdist", "-o", folder, ROOT)
    [archive] = folder.glob("*.tar.gz")
    shutil.copy(archive, DIST)
    options = ["--no-deps", "-Ccmake.define.PARISKV_CUDA=OFF", "-w", folder]
    run(sys.executable, "-m", "pip", "wheel", "-q", *options, archive)
    [wheel] = folder.glob("*.whl")
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sdist", action="store_true")
    arguments = parser.parse_args()
    count = 0
    for wheel in sorted(DIST.glob("*.whl")):
        for kind, commands in PYTHONS.items():
            if f"-{kind}-" not in wheel.name:
                continue
            for command in commands:
                python = interpreter(command)
                if python is None:
                    print(f"not tried: {wheel.name} on {command}, which is not here", flush=True)
                    continue
                print(f"{wheel.name} on {command}: {tried(wheel, python)}", flush=True)
                count += 1
    if arguments.sdist:
        wheel = from_source()
        print(f"{wheel.name} from source: {tried(wheel, sys.executable)}", flush=True)
        count += 1
    if count == 0:
        sys.exit(f"there is no wheel in {DIST} that a Python here could try: make wheel")


if __name__ == "__main__":
    if shutil.which("ldd"):
        libc = subprocess.run(["ldd", "--version"], capture_output=True, text=True, check=False)
        print(libc.stdout.splitlines()[0] if libc.stdout else "")
    main()
